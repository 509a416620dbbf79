"""The drawings of chapter 08 say what they show."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from minillm.book.latency_figures import gaps_and_waits, step_costs, timeline, whole_and_chunked
from minillm.book.stalls import watch


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


def test_costs_gaps_and_waits_are_drawn_over_their_predictions():
    line, roofline = lambda n: 0.008 + 0.0002 * n, lambda n: np.maximum(0.008, 0.0001 * n)
    alt = step_costs({4: [0.009, 0.01], 64: [0.02]}, line, "a line", roofline, "title").alt
    assert "a fitted straight line and the roofline" in alt
    assert "over predicted" in gaps_and_waits([64, 1028], [0.03, 0.3], [0.4, 0.3], line, lambda b: 1 / b, 0.009).alt


class ToyEngine:
    """Its clock ticks once a step; a request of n tokens ends after n steps."""

    def __init__(self):
        self.num_steps, self.left, self.trace = 0, {}, SimpleNamespace(events=[])
        self.trace.clear = self.trace.events.clear

    def clock(self):
        return 10.0 + self.num_steps

    def add_request(self, request):
        self.left[request] = request.tokens

    @property
    def has_unfinished(self):
        return any(self.left.values())

    def step(self):
        self.num_steps += 1
        for request in [one for one, left in self.left.items() if left]:
            self.left[request] -= 1
            request.token_times.append(self.clock())
            args = {"request": request.request_id}
            self.trace.events.append(SimpleNamespace(name="tokens", value=1.0, args=args))


class ToyRequest(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_late_request_arrives_after_some_steps_and_times_count_from_the_start():
    one, late = (ToyRequest(request_id=name, tokens=4, token_times=[], arrival_time=10.0) for name in ("a", "late"))
    run = watch(ToyEngine(), [one], late, after=2)
    assert run.requests == [one, late] and late.arrival_time == 2.0 and late.token_times == [3.0, 4.0, 5.0, 6.0]
    assert run.steps[0] == (0.0, 1.0, 1, 0) and run.steps[2] == (2.0, 3.0, 1, 1) and run.steps[5] == (5.0, 6.0, 0, 1)
