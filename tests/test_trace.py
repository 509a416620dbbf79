"""A trace records spans and counts by step, costs nothing when off, and writes what Perfetto reads."""

from __future__ import annotations

import json

import pytest

from minillm.trace import Trace


def clock_of(*times: float):
    return iter(times).__next__


def test_spans_and_counts_belong_to_their_step():
    trace = Trace(clock=clock_of(0.0, 1.0, 2.0, 5.0, 7.0, 8.0))
    with trace.span("load"):
        pass
    trace.begin_step()
    with trace.span("schedule", running=3):
        trace.count("tokens", 4)
    trace.begin_step()
    trace.count("tokens", 6)
    assert [(span.step, span.name, span.start, span.duration) for span in trace.spans] == [
        (-1, "load", 0.0, 1.0),
        (0, "schedule", 2.0, 5.0),
    ]
    assert trace.spans[1].args == {"running": 3}
    assert trace.totals("tokens") == {0: 4, 1: 6}
    assert trace.seconds("schedule") == {0: 5.0}


def test_a_span_is_recorded_when_its_block_raises():
    trace = Trace()
    with pytest.raises(RuntimeError), trace.span("forward"):
        raise RuntimeError
    assert [span.name for span in trace.spans] == ["forward"]


def test_off_records_nothing_and_never_asks_the_clock():
    trace = Trace(enabled=False, clock=clock_of())
    trace.begin_step()
    with trace.span("schedule"):
        trace.count("tokens")
    assert trace.spans == [] and trace.events == [] and trace.totals("tokens") == {}


def test_perfetto_file_is_in_microseconds_and_in_order(tmp_path):
    trace = Trace(clock=clock_of(1.0, 1.25, 1.5))
    trace.begin_step()
    with trace.span("forward", tokens=2):
        trace.count("blocks", 7)
    records = json.loads(trace.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(r["ph"], r["name"], r["ts"]) for r in records] == [("X", "forward", 1e6), ("C", "blocks", 1.25e6)]
    assert records[0]["dur"] == 0.5e6 and records[0]["args"] == {"step": 0, "tokens": 2}
    assert records[1]["args"] == {"blocks": 7}
