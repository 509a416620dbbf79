"""`bench host` at toy size: what it counts, tells apart and leaves as it was; never how long anything takes."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from minillm.bench import host
from minillm.device import LIKE_A_GPU
from minillm.engine.engine import Engine
from minillm.trace import Trace

TOY = host.Workload(batches=(1, 3), arrivals=(4,), prompt_tokens=20, mean_output=3, steps=12)


@pytest.mark.parametrize("defaults", ["", "ahead"], ids=["a step at a time", "a step ahead"])
def test_every_size_has_its_parts_and_arrivals_their_joins(defaults, monkeypatch):
    monkeypatch.setenv(LIKE_A_GPU, defaults)
    done = []
    measured = host.run(TOY, "cpu", on_run=done.append)
    assert len(done) == host.num_runs(TOY) == 18
    assert json.loads(json.dumps(measured)).keys() == measured.keys() and measured["name"] == "host-tinyworld-draft"
    figures, samples = measured["figures"], measured["samples_seconds"]
    names = ["decode 1", "decode 3", "arrivals 4"]
    assert list(figures) == names
    assert samples.keys() == {f"{name}/{part}" for name in names for part in host.PARTS}
    assert {len(taken) for taken in samples.values()} == {5}
    for f in figures.values():
        assert f["steps"] == 5 * 12
        assert all(f[f"{part}_seconds"] > 0 for part in ("schedule", "build", "update", "together", "deltas", "total"))
        assert f["together_seconds"] < f["total_seconds"] and f["together_seconds"] <= f["p90_seconds"]
    assert [figures[name]["joined_per_step"] for name in names[:2]] == [0, 0]
    assert [figures[name]["tokens_per_step"] for name in names[:2]] == [1, 3]
    assert 0.3 < figures["arrivals 4"]["joined_per_step"] < 4 and 2 < figures["arrivals 4"]["tokens_per_step"] <= 4
    decoding, joining = host.tables(measured)
    assert [
        column.header for column in joining.columns if column.header not in {c.header for c in decoding.columns}
    ] == ["run", "join a step", "add_request"]
    assert list(decoding.columns[0].cells) == ["goal at 256", "1", "3"] and list(joining.columns[0].cells) == ["4"]
    assert next(decoding.columns[4].cells) == "1,000" and decoding.columns[4].header == "together"
    Console(quiet=True).print(decoding, joining)


def test_parts_are_the_spans_and_what_is_in_none():
    now = [0.0]
    times = host.SpanTimes(clock=lambda: now[0])

    def work(seconds):
        now[0] += seconds

    with times.span("schedule"):
        work(1)
    with times.span("build batch", rows=3):
        work(2)
        with times.span("copies"):  # inside another one: counted once among all spans
            work(4)
    work(8)
    with pytest.raises(KeyError), times.span("sample"):
        work(16)
        raise KeyError
    for _ in range(2):
        with times.span("update"):
            work(32)
    assert (
        times.seconds == {"schedule": 1, "copies": 4, "build batch": 6, "sample": 16, "update": 64}
        and times.covered == 87
    )
    parts = host.Step(times.seconds, times.covered, now[0], collector=0.0, add=0.5, tokens=1, joined=0).parts
    assert parts == {"schedule": 1, "build": 6, "update": 64, "together": 71, "deltas": 8, "total": 79, "add": 0.5}


def test_spans_that_are_not_there_are_not_guessed_at(monkeypatch):
    kept = Trace.span
    monkeypatch.setattr(host, "SPANS", host.SPANS | {"update": "take tokens in"})
    with pytest.raises(RuntimeError, match=r"opened the span 'take tokens in', only .*'update'"):
        host.run(TOY, "cpu")
    assert Trace.span is kept and not gc.get_freeze_count()


def test_steps_that_are_not_alike_are_refused(monkeypatch):
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: step(self)[1:])
    with pytest.raises(RuntimeError, match=r"made \[0\] tokens for 1 requests"):
        host.run(TOY, "cpu")


def test_nothing_that_counts_rows_is_measured_and_all_is_put_back():
    callbacks = len(gc.callbacks)
    machine = host.Host(TOY, torch.device("cpu"))
    trace = machine.llm.trace
    steps = machine.run(3, joining=False)
    assert len(steps) == 12 and {one.tokens for one in steps} == {3}
    assert not trace.enabled and not trace.events and not trace.spans and "span" not in vars(trace)
    assert not machine.llm.engine.has_unfinished and len(gc.callbacks) == callbacks and not gc.get_freeze_count()
    machine.llm.engine.scheduler.check_integrity()


def test_one_thread_computes_and_all_of_them_afterwards(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    with pytest.raises(KeyError), host.one_thread():
        assert chosen == [1]
        raise KeyError
    assert chosen == [1, 7]


def test_the_collector_is_timed_while_it_is_watched():
    collector = host.CollectorTime(time.perf_counter)
    with collector.watching():
        gc.collect()
    assert (heard := collector.seconds) > 0
    gc.collect()
    assert collector.seconds == heard


@pytest.mark.parametrize(
    "wrong", [dict(batches=(0,)), dict(arrivals=(-1,)), dict(steps=0), dict(prompt_tokens=0), dict(mean_output=0)]
)
def test_less_than_one_is_refused(wrong):
    with pytest.raises(ValueError, match="1 at least"):
        host.run(host.Workload(**wrong), "cpu")


def test_another_clock_is_read_everywhere(monkeypatch):
    """A second a reading: each span and each adding takes one."""
    ticks = iter(range(10**9))
    monkeypatch.setitem(host.CLOCKS, "cpu", lambda: float(next(ticks)))
    steps = host.Host(replace(TOY, clock="cpu"), torch.device("cpu")).run(4, joining=True)
    for one in steps:
        assert set(one.spans.values()) == {1.0} and one.covered == len(one.spans) and one.add == 1.0
        assert one.total >= 1 + 2 * len(one.spans)
    with pytest.raises(ValueError, match="clock='sun' is unknown; choose one of wall, cpu"):
        host.run(replace(TOY, clock="sun"), "cpu")


def test_too_few_repeats_are_refused():
    with pytest.raises(ValueError, match="repeats=2 is too few"):
        host.run(host.Workload(batches=(1,), arrivals=(), repeats=2), "cpu")


def test_requests_of_one_seed_are_the_same():
    first, again = (host.Host(TOY, torch.device("cpu")) for _ in range(2))
    drawn = [
        [(machine._request(5).prompt_token_ids, machine._length()) for _ in range(200)] for machine in (first, again)
    ]
    assert drawn[0] == drawn[1]
    lengths = [length for _, length in drawn[0]]
    assert 1 <= min(lengths) and max(lengths) <= host.LONGEST * TOY.mean_output and 2 < sum(lengths) / 200 < 4
    assert {len(prompt) for prompt, _ in drawn[0]} == set(range(20, 36))
