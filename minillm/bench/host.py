"""The host's work of a step: deciding it, building its tensors, taking its tokens in. Built in chapter 14.

The spans that the engine opens for its trace are timed, but the trace stays switched off: it would count events for
every row. A small model really runs, so that scheduler, cache manager, batch building and update are those that serve;
its forward passes and its sampling are left out of the figures. One thread does everything. The garbage collector runs
on what has been made since the run began (all older objects are frozen); its time is inside the parts,
and shown beside them.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device
from . import measure
from .record import Record

GOAL_SECONDS, GOAL_BATCH = 1e-3, 256  # for the parts in SPANS together
SPANS = {"schedule": "schedule", "build": "build batch", "update": "update"}  # part -> the trace's name of it
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
PARTS = (*SPANS, "together", "deltas", "total", "add")
BUDGET = 8192  # tokens of a step
BLOCK_SIZE = 16
WARM_STEPS = 8  # of each run, between its prompts and its measured steps
LONGEST = 4  # times the mean length of an output


@dataclass(frozen=True)
class Workload:
    model: str = "tinyworld-draft"
    batches: tuple[int, ...] = (1, 16, 64, 256)  # requests that decode, none joins or leaves
    arrivals: tuple[int, ...] = (64, 256)  # requests that run, and for each that leaves another joins
    prompt_tokens: int = 64  # and up to a block more, so that in each step some requests need a new block
    mean_output: int = 64  # tokens of a request that joins and leaves; lengths are exponential
    steps: int = 128  # measured in each run
    clock: str = "wall"  # or "cpu", which stands still while another process has the core
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def num_runs(workload: Workload) -> int:
    """How often `run` says that something is done."""
    return (len(workload.batches) + len(workload.arrivals)) * (workload.repeats + 1)


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench host",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` and return a result (see `measure.result`).

    A part's figure is the median over the repeats of its median over the steps of a run. Raises ValueError for less
    than one step, token or request, RuntimeError where the parts of a step cannot be told apart.
    """
    if min(workload.steps, workload.mean_output, workload.prompt_tokens, *workload.batches, *workload.arrivals) < 1:
        raise ValueError(f"{workload} is not allowed: steps, tokens and requests are 1 at least")
    if workload.clock not in CLOCKS:
        raise ValueError(f"clock={workload.clock!r} is unknown; choose one of {', '.join(CLOCKS)}")
    where = resolve_device(device)
    with one_thread():
        record = Record(f"host-{Path(workload.model).name}", command, where, asdict(workload), keep)
        host = Host(workload, where)
        for kind, sizes in (("decode", workload.batches), ("arrivals", workload.arrivals)):
            with record.case(kind):
                _measure(host, kind, sizes, record, on_run)
        return record.finish()


def _measure(host: Host, kind: str, sizes: tuple[int, ...], record: Record, on_run: Callable[[str], None]) -> None:
    runs: dict[str, list[list[Step]]] = {f"{kind} {size}": [] for size in sizes}

    def timed(name: str, size: int) -> float:
        runs[name].append(host.run(size, joining=kind == "arrivals"))
        return median_of(runs[name][-1], "together")

    record.interleave(
        {name: partial(timed, name, size) for name, size in zip(runs, sizes)}, host.workload.repeats, on_run=on_run
    )
    for name, taken in runs.items():
        record.figures[name], samples = figures_of(taken[1:])  # the first one warmed up
        del record.samples[name]
        record.samples |= {f"{name}/{part}": one for part, one in samples.items()}


@dataclass
class Step:
    """What was seen of one step; all times in seconds."""

    spans: dict[str, float]  # by their names
    covered: float  # in any span
    total: float
    collector: float  # in passes of the garbage collector
    add: float  # in adding the requests that joined right after it
    tokens: int
    joined: int

    @cached_property
    def parts(self) -> dict[str, float]:
        """Each of PARTS: `deltas` is what lies in no span, `total` all that the host does in the step."""
        parts = {part: self.spans.get(name, 0.0) for part, name in SPANS.items()}
        together, deltas = sum(parts.values()), self.total - self.covered
        return parts | {"together": together, "deltas": deltas, "total": together + deltas, "add": self.add}


class Host:
    """An engine with room for the largest batch, and what times its steps."""

    def __init__(self, workload: Workload, device: torch.device):
        self.workload, self.rng = workload, random.Random(workload.seed)
        self.clock = CLOCKS[workload.clock]
        self.spans, self.collector = SpanTimes(self.clock), CollectorTime(self.clock)
        most, longest_prompt = max(*workload.batches, *workload.arrivals, 1), workload.prompt_tokens + BLOCK_SIZE - 1
        # Until the last request has its first token, which the host may hear of a step late.
        self.unmeasured = -(-most * longest_prompt // BUDGET) + 1 + WARM_STEPS
        self.enough = self.unmeasured + workload.steps + 1  # tokens of a request that does not end
        room = measure.room_for(most, longest_prompt + max(self.enough, LONGEST * workload.mean_output))
        self.llm = LLM(workload.model, device=str(device), max_num_batched_tokens=BUDGET, block_size=BLOCK_SIZE, **room)

    def run(self, running: int, joining: bool) -> list[Step]:
        """The measured steps of `running` requests, in which none ends or, with `joining`,
        each is followed by another."""
        engine = self.llm.engine

        def join(count: int) -> float:
            new = [self._request(self._length() if joining else self.enough) for _ in range(count)]
            started = self.clock()
            for request in new:
                engine.add_request(request)
            return self.clock() - started

        def step() -> Step:
            self.spans.clear()
            before, started = self.collector.seconds, self.clock()
            deltas = engine.step()
            total = self.clock() - started
            collector = self.collector.seconds - before
            ended = sum(delta.finish_reason is not None for delta in deltas)
            return Step(self.spans.seconds, self.spans.covered, total, collector, join(ended), len(deltas), ended)

        with mock.patch.object(self.llm.trace, "span", self.spans.span), self.collector.watching():
            join(running)
            steps = [step() for _ in range(self.unmeasured + self.workload.steps)][self.unmeasured :]
        while engine.has_unfinished:
            engine.step()
        opened = {name for one in steps for name in one.spans}
        if missing := [name for name in SPANS.values() if name not in opened]:
            raise RuntimeError(
                f"no step has opened the span {missing[0]!r}, only {sorted(opened)}: "
                "the parts of a step cannot be told apart"
            )
        if not joining and any(one.tokens != running for one in steps):
            raise RuntimeError(
                f"measured steps made {sorted({one.tokens for one in steps})} tokens for {running} requests "
                "that decode; each has to make one token for each of them"
            )
        return steps

    def _request(self, num_tokens: int):
        length = self.workload.prompt_tokens + self.rng.randrange(BLOCK_SIZE)
        prompt = [self.rng.randrange(4, self.llm.model.config.vocab_size) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        [request] = self.llm.inputs.requests({"prompt_token_ids": prompt}, params)
        return request

    def _length(self) -> int:
        """Exponential, so that the first requests leave as often as later ones."""
        mean = self.workload.mean_output
        return min(LONGEST * mean, 1 + math.floor(self.rng.expovariate(1 / mean)))


class SpanTimes:
    """What stands in for `Trace.span`: the seconds in spans of each name, and those in any span at all."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = {}
        self.covered = 0.0
        self.depth = 0  # spans that are open

    def span(self, name: str, **args) -> _Span:
        return _Span(self, name)


class _Span:
    __slots__ = ("name", "start", "times")

    def __init__(self, times: SpanTimes, name: str):
        self.times, self.name = times, name

    def __enter__(self) -> None:
        self.times.depth += 1
        self.start = self.times.clock()

    def __exit__(self, *_) -> None:
        times = self.times
        took = times.clock() - self.start
        times.seconds[self.name] = times.seconds.get(self.name, 0.0) + took
        times.depth -= 1
        if not times.depth:
            times.covered += took


class CollectorTime:
    """The garbage collector's seconds while it is watched, with everything that is older left out of its passes."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.seconds, self.start = clock, 0.0, 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._hear)
        try:
            yield
        finally:
            gc.callbacks.remove(self._hear)
            gc.unfreeze()

    def _hear(self, phase: str, info: dict) -> None:
        if phase == "start":
            self.start = self.clock()
        else:
            self.seconds += self.clock() - self.start


def median_of(steps: list[Step], part: str) -> float:
    return statistics.median(step.parts[part] for step in steps)


def figures_of(runs: list[list[Step]]) -> tuple[dict, dict[str, measure.Samples]]:
    """Of the runs of one batch size: what is worth reading, and each run's median of every part."""
    samples = {part: measure.Samples(tuple(median_of(steps, part) for steps in runs)) for part in PARTS}
    every = [step for steps in runs for step in steps]
    p90 = sorted(step.parts["together"] for step in every)[9 * len(every) // 10]
    figures = {f"{part}_seconds": taken.median for part, taken in samples.items()} | {
        "spread": samples["together"].spread,
        "total_spread": samples["total"].spread,
        "p90_seconds": p90,
        "collector_seconds": statistics.fmean(step.collector for step in every),
        "tokens_per_step": statistics.fmean(step.tokens for step in every),
        "joined_per_step": statistics.fmean(step.joined for step in every),
        "steps": len(every),
    }
    return figures, samples


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread, so that the host's work has a core of its own and no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tables(measured: dict) -> list:
    """Requests that decode, and the goal for them; then requests that come and go (rich renderables)."""
    from rich.table import Table

    f, w = measured["figures"], measured["workload"]
    parts = (*SPANS, "together", "± half range", "p90", "deltas", "total", "collector")
    decoding = Table(
        "decode", *parts, title=f"The host's work of a step, µs of {w['clock']} time, {measured['hardware']['name']}"
    )
    decoding.add_row(f"goal at {GOAL_BATCH}", *[""] * 3, _micro(GOAL_SECONDS), *[""] * 5, style="dim")
    for size in w["batches"]:
        decoding.add_row(str(size), *_cells(f[f"decode {size}"]))
    joining = Table(
        "run",
        "join a step",
        *parts,
        "add_request",
        title=f"Requests that join and leave, {w['mean_output']} tokens of output on average",
    )
    for size in w["arrivals"]:
        one = f[f"arrivals {size}"]
        joining.add_row(str(size), f"{one['joined_per_step']:.1f}", *_cells(one), _micro(one["add_seconds"]))
    return [decoding, joining]


def _cells(f: dict) -> list[str]:
    return [
        *(_micro(f[f"{part}_seconds"]) for part in (*SPANS, "together")),
        f"{f['spread'] / 2:.0%}",
        *(_micro(f[name]) for name in ("p90_seconds", "deltas_seconds", "total_seconds", "collector_seconds")),
    ]


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"
