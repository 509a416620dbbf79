"""The drawings of chapter 08 say what they show."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minillm.book.latency_figures import timeline, whole_and_chunked


def test_a_chunked_prompt_stops_its_neighbours_less():
    alt = whole_and_chunked([60, 60, 30], streams=4, seconds=lambda tokens: 0.01 + 0.001 * tokens).alt
    assert "A prompt of 150 tokens beside 4 decoding streams" in alt
    assert "for 164 ms" in alt and "In 3 chunks of at most 60 tokens the longest gap is 74 ms" in alt


@pytest.mark.parametrize("pause", [0.3, 0.7])
def test_the_longest_gap_is_told(pause):
    streams = [
        SimpleNamespace(request_id=f"stream {i}", arrival_time=0.0, token_times=[0.1, 0.2, 0.2 + pause])
        for i in range(4)
    ]
    document = SimpleNamespace(request_id="document", arrival_time=0.2, token_times=[0.2 + pause, 1.0])
    steps = [(0.0, 0.1, 4, 0), (0.1, 0.2, 4, 0), (0.2, 0.2 + pause, 4, 100)]
    drawn = timeline(SimpleNamespace(requests=[*streams, document], steps=steps), "A document", until=1.0)
    assert f"longest gap in a stream is {1e3 * pause:.0f} ms" in drawn.alt
