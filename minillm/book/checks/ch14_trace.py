"""The check of chapter 14's trace. Built in chapter 14."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from minillm.book.checks import Draw, FunctionChecker, Raised, Timed

_CAUSES = {
    "launch": "launch",
    "wait": "wait",
    "schedule": "schedule",
    "build batch": "schedule",
    "update": "schedule",
}


class Bar(NamedTuple):
    """What the host or the device does, from `start` to `end`, in microseconds."""

    lane: str  # "host" | "device"
    what: str
    step: int
    start: int
    end: int


class Reading(NamedTuple):
    """A trace, taken to pieces."""

    busy: int  # microseconds of the device
    overlapping: int  # the same, a microsecond of two streams counted twice
    span: int  # from the device's first start to its last end
    elapsed: int
    gaps: dict[str, int]
    host: list[int]  # for each step, without waiting
    device: list[int]
    awake: list[int]  # `host`, with waiting


def read_trace(bars: Sequence[Bar]) -> Reading:
    """Between two neighbouring edges nothing changes, so one look at each piece is enough."""
    device = [bar for bar in bars if bar.lane == "device"]
    first, last = min(bar.start for bar in device), max(bar.end for bar in device)
    steps = sorted({bar.step for bar in bars})
    gaps = dict.fromkeys(("launch", "wait", "schedule", "other"), 0)
    host, work, awake = (dict.fromkeys(steps, 0) for _ in range(3))
    busy = 0
    edges = sorted({edge for bar in bars for edge in (bar.start, bar.end)})
    for left, right in pairwise(edges):
        running = {bar.step for bar in device if bar.start <= left < bar.end}
        open_bar, length = _innermost(bars, left), right - left
        busy += length * bool(running)
        for step in running:
            work[step] += length
        if open_bar is not None:
            awake[open_bar.step] += length
            host[open_bar.step] += length * (open_bar.what != "wait")
        if not running and first <= left < last:
            gaps[_CAUSES.get(open_bar.what if open_bar else "", "other")] += length
    overlapping = sum(bar.end - bar.start for bar in device)
    by_step = (list(one.values()) for one in (host, work, awake))
    return Reading(busy, overlapping, last - first, edges[-1] - edges[0], gaps, *by_step)


def _innermost(bars: Iterable[Bar], moment: int) -> Bar | None:
    """What the host does in the microsecond from `moment` on: of all that are open, the one that began last."""
    return max(
        (bar for bar in bars if bar.lane == "host" and bar.start <= moment < bar.end),
        key=lambda bar: (bar.start, -bar.end),
        default=None,
    )


def _one_ahead(host: Sequence[int], device: Sequence[int]) -> int:
    """How long it takes with the next step's host work behind the device's."""
    return host[0] + sum(max(computing, working) for computing, working in zip(device, [*host[1:], 0]))


def explained(bars: Sequence[Bar], *, mistake: str = "") -> tuple[float, dict[str, int], float]:
    """(busy share of the device, gaps by cause, speed-up of working one step ahead)."""
    read = read_trace(bars)
    busy = read.overlapping if mistake == "adds streams" else read.busy
    share = busy / (read.elapsed if mistake == "share of all" else read.span)
    ahead = _one_ahead(read.awake if mistake == "waiting is work" else read.host, read.device)
    if mistake == "same step":
        ahead = sum(max(host, device) for host, device in zip(read.host, read.device))
    ahead -= read.host[0] * (mistake == "hides the first") + read.device[-1] * (mistake == "forgets the last")
    elapsed = read.span if mistake == "span" else read.elapsed
    return share, read.gaps, elapsed / max(ahead, 1)


def _explain(got: Any, expected: tuple, bars: Sequence[Bar]) -> str | None:
    if isinstance(got, Raised):
        return None
    read = read_trace(bars)
    if abs(got[0] - expected[0]) > 1e-5:
        return f"The device is busy for {read.busy} of {read.span} µs."
    if got[1] != expected[1]:
        return (
            f"Of {read.span} µs between the device's first start and its last end it is idle for "
            f"{read.span - read.busy}. Each counts for what the host does then: the bar that began last of those "
            "that are open; and for 'other' where there is none."
        )
    steps = ", ".join(map(str, sorted({bar.step for bar in bars})))
    ahead = _one_ahead(read.host, read.device)
    return (
        f"Host work of the steps {steps}: {read.host}; the device's: {read.device}. "
        f"That makes {ahead} µs ahead, {read.elapsed} now."
    )


def _names(bars: Sequence[Bar]) -> tuple[str, ...]:
    first = ", ".join(f"{b.lane} {b.what} {b.step} [{b.start}, {b.end})" for b in bars[:7])
    told = f"for {len(bars)} bars: {first}{', ...' if len(bars) > 7 else ''}"
    return tuple(f"{name} {told}\n  {name}" for name in ("busy", "gaps", "speedup"))


def made_up_trace(
    steps: int, kernels: int, kernel: int, ask: int, schedule: int, update: int = 0, graph: bool = False
) -> list[Bar]:
    """The bars of a loop that does one thing after the other.
    A kernel begins when it was asked for and the one before has ended."""
    bars, now, free = [], 0, 0
    for step in range(steps):
        begin = now
        bars.append(Bar("host", "schedule", step, now, now := now + schedule))
        for index in range(kernels):
            if not graph or not index:
                bars.append(Bar("host", "launch", step, now, now := now + ask))
            free = max(now, free) + kernel
            bars.append(Bar("device", "kernel", step, free - kernel, free))
        bars.append(Bar("host", "wait", step, now, now := max(now, free)))
        bars.append(Bar("host", "update", step, now, now := now + update))
        bars.append(Bar("host", "step", step, begin, now))
    return [bar for bar in bars if bar.end > bar.start]


def _bars(text: str) -> tuple[list[Bar]]:
    """ "host schedule 0 0-4, ...": lane, what, step, start and end of each."""
    found = []
    for one in text.split(", "):
        lane, *what, step, times = one.split()
        found.append(Bar(lane, " ".join(what), int(step), *map(int, times.split("-"))))
    return (found,)


def _random(draw: Draw) -> tuple:
    schedule, update = draw.randint(0, 12), draw.randint(0, 12)
    sizes = draw.randint(1, 5), draw.randint(1, 6), draw.randint(1, 10), draw.randint(1, 10)
    bars = made_up_trace(*sizes, schedule, update, graph=draw.rng.random() < 0.4)
    for bar in draw.rng.sample(bars, len(bars) // 4):  # something else inside, and a second stream
        left = draw.randint(bar.start, bar.end)
        what = "kernel"
        if bar.lane == "host":
            what = draw.rng.choice(("launch", "wait", "schedule", "build batch", "read mail"))
        inside = bar._replace(what=what, start=left, end=draw.randint(left + 1, bar.end + 1))
        if all((inside.lane, inside.start, inside.end) != (other.lane, other.start, other.end) for other in bars):
            bars.append(inside)
    draw.rng.shuffle(bars)
    return (bars,)


check_explain_trace = FunctionChecker(
    "explain_trace",
    explained,
    returns=_names,
    atol=1e-5,
    rtol=1e-5,
    examples=[
        _bars(
            "host schedule 0 0-4, host launch 0 4-7, device kernel 0 6-10, host wait 0 7-12, host update 0 12-15, "
            "host schedule 1 15-18, host launch 1 18-20, device kernel 1 19-25, host wait 1 20-26"
        ),
        (made_up_trace(2, 3, 4, 6, 5, 2),),
    ],
    edges={
        "there is one bar": _bars("device kernel 3 10-20"),
        "the device has two streams": _bars("device a 0 0-10, device b 0 4-6, device c 1 8-15, device d 2 30-31"),
        "bars lie in bars": _bars(
            "host step 0 0-30, host launch 0 2-5, device k 0 4-8, host wait 0 10-25, host update 0 12-20, "
            "device k 1 28-29, host schedule 1 40-44"
        ),
        "the host does other things": _bars(
            "host launch 0 0-6, device k 0 6-7, host build batch 0 7-9, host print 0 9-12, device k 0 15-16"
        ),
        "three bars begin at one moment": _bars(
            "host schedule 0 0-50, host launch 0 0-10, device k 0 5-7, device k 0 60-61, host wait 0 0-61"
        ),
        "bars come in any order": (made_up_trace(3, 5, 2, 2, 9)[::-1],),
        "numbers are left out, and steps 5 and 9 have nothing on the device": _bars(
            "host schedule 2 0-3, device k 2 3-5, host schedule 5 5-9, host launch 7 9-10, device k 7 10-14, "
            "host update 9 14-20"
        ),
        "step 1 has nothing on the host": _bars("device k 1 0-5, host launch 4 1-4, device k 4 5-9"),
    },
    timed=(
        Timed(
            "a trace of many seconds",
            lambda draw: (made_up_trace(4, 1, 10**9, 10**8, 3 * 10**8, 7),),
            "Microseconds cannot be counted one by one here. Cut the time at the bars' starts and ends.",
            lines=100_000,
        ),
    ),
    random=_random,
    trials=25,
    explain=_explain,
    hint="Cut the time at every start and end: between two cuts nothing changes.",
    misconceptions={
        "Two streams at the same time are no more than busy: a microsecond counts once.": dict(mistake="adds streams"),
        "The share is of the time between the device's first start and its last end, not of all.": dict(
            mistake="share of all"
        ),
        "While the device computes a step, the host works on the next one, not on the same.": dict(mistake="same step"),
        "Nothing can hide the first step's host work.": dict(mistake="hides the first"),
        "Waiting is no work.": dict(mistake="waiting is work"),
        "Behind the last step's kernels there is nothing to do, but they take their time too.": dict(
            mistake="forgets the last"
        ),
        "It is all of the trace that would take less time, from the first start of any bar on.": dict(mistake="span"),
    },
)
