"""Checks of chapter 14: a trace explained. Built in chapter 14."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch14_oracle import (
    Bar,
    Reading,
    made_up_trace,
    one_ahead,
    read_trace,
)
from minillm.book.checks.patience import bounded

check_explain_trace = Checker(
    "explain_trace", hint="Cut the time at every start and end: between two cuts nothing changes."
)


@check_explain_trace.part("example")
def _trace_example(case: Case) -> None:
    _explains(case,
              [Bar("host", "schedule", 0, 0, 4), Bar("host", "launch", 0, 4, 7), Bar("device", "kernel", 0, 6, 10),
               Bar("host", "wait", 0, 7, 12), Bar("host", "update", 0, 12, 15),
                     Bar("host", "schedule", 1, 15, 18), Bar("host", "launch", 1, 18, 20),
                     Bar("device", "kernel", 1, 19, 25), Bar("host", "wait", 1, 20, 26)])  # fmt: skip
    _explains(case, made_up_trace(2, 3, 4, 6, 5, 2))


@check_explain_trace.part("edges")
def _trace_edges(case: Case) -> None:
    _explains(case, [Bar("device", "kernel", 3, 10, 20)])
    _explains(
        case,
        [
            Bar("device", "a", 0, 0, 10),
            Bar("device", "b", 0, 4, 6),
            Bar("device", "c", 1, 8, 15),
            Bar("device", "d", 2, 30, 31),
        ],
    )  # two streams
    _explains(case,
              [Bar("host", "step", 0, 0, 30), Bar("host", "launch", 0, 2, 5), Bar("device", "k", 0, 4, 8),
               Bar("host", "wait", 0, 10, 25), Bar("host", "update", 0, 12, 20),
                     Bar("device", "k", 1, 28, 29), Bar("host", "schedule", 1, 40, 44)])  # fmt: skip
    _explains(
        case,
        [
            Bar("host", "launch", 0, 0, 6),
            Bar("device", "k", 0, 6, 7),
            Bar("host", "build batch", 0, 7, 9),
            Bar("host", "print", 0, 9, 12),
            Bar("device", "k", 0, 15, 16),
        ],
    )
    _explains(
        case,
        [
            Bar("host", "schedule", 0, 0, 50),
            Bar("host", "launch", 0, 0, 10),
            Bar("device", "k", 0, 5, 7),
            Bar("device", "k", 0, 60, 61),
            Bar("host", "wait", 0, 0, 61),
        ],
    )  # one moment, three bars
    _explains(case, made_up_trace(4, 1, 10**9, 10**8, 3 * 10**8, 7), large=True)
    _explains(case, made_up_trace(3, 5, 2, 2, 9)[::-1])  # bars come in any order
    _explains(
        case,
        [
            Bar("host", "schedule", 2, 0, 3),
            Bar("device", "k", 2, 3, 5),
            Bar("host", "schedule", 5, 5, 9),
            Bar("host", "launch", 7, 9, 10),
            # Numbers are left out, steps 5 and 9 have nothing on the device.
            Bar("device", "k", 7, 10, 14),
            Bar("host", "update", 9, 14, 20),
        ],
    )
    # Step 1 has nothing on the host.
    _explains(case, [Bar("device", "k", 1, 0, 5), Bar("host", "launch", 4, 1, 4), Bar("device", "k", 4, 5, 9)])


@check_explain_trace.part("random")
def _trace_random(case: Case) -> None:
    for _ in range(25):
        numbers = (case.randint(0, 12) for _ in range(2))
        bars = made_up_trace(
            case.randint(1, 5),
            case.randint(1, 6),
            case.randint(1, 10),
            case.randint(1, 10),
            *numbers,
            graph=case.rng.random() < 0.4,
        )
        for bar in case.rng.sample(bars, len(bars) // 4):  # something else inside, and a second stream
            left = case.randint(bar.start, bar.end)
            what = (
                "kernel"
                if bar.lane == "device"
                else case.rng.choice(("launch", "wait", "schedule", "build batch", "read mail"))
            )
            inside = bar._replace(what=what, start=left, end=case.randint(left + 1, bar.end + 1))
            if all((inside.lane, inside.start, inside.end) != (other.lane, other.start, other.end) for other in bars):
                bars.append(inside)
        case.rng.shuffle(bars)
        _explains(case, bars)


def _explains(case: Case, bars: list[Bar], large: bool = False) -> None:
    if large:
        got = bounded(
            case,
            100_000,
            "Microseconds cannot be counted one by one here. Cut the time at the bars' starts and ends.",
            case.student,
            bars,
        )
    else:
        got = case.call(bars)
    right = read_trace(bars)
    first = ", ".join(f"{b.lane} {b.what} {b.step} [{b.start}, {b.end})" for b in bars[:7])
    told = f"for {len(bars)} bars of {right.elapsed:,} µs: {first}{', ...' if len(bars) > 7 else ''}"
    case.true(isinstance(got, tuple) and len(got) == 3, f"the result is {got!r}, not (busy, gaps, speedup)")
    busy, gaps, speedup = got
    case.close(busy, right.busy / right.span, f"busy {told}\n  busy", hint=_why_busy(bars, right, busy))
    gap_hint = (
        f"Of {right.span} µs between the device's first start and its last end it is idle for "
        f"{right.span - right.busy}. Each counts for what the host does then: "
        "the bar that began last of those that are open; and for 'other' where there is none."
    )
    case.equal(gaps, right.gaps, f"gaps {told}\n  gaps", hint=gap_hint)
    case.close(
        speedup,
        right.elapsed / right.ahead,
        f"speedup {told}\n  speedup",
        hint=_why_speedup(sorted({bar.step for bar in bars}), right, speedup),
    )


def _why_busy(bars: list[Bar], right: Reading, busy: object) -> str:
    near = lambda value: isinstance(busy, (int, float)) and abs(busy - value) < 1e-6
    total = sum(bar.end - bar.start for bar in bars if bar.lane == "device")
    if near(total / right.span):
        return f"Two streams at the same time are no more than busy: {right.busy} µs, not {total}."
    if near(right.busy / right.elapsed):
        return (
            f"The share is of the time between the device's first start and its last end, {right.span} µs, "
            f"not of all {right.elapsed}."
        )
    return f"The device is busy for {right.busy} of {right.span} µs."


def _why_speedup(steps: list[int], right: Reading, speedup: object) -> str:
    facts = (
        f"Host work of the steps {', '.join(map(str, steps))}: {right.host}; the device's: {right.device}. "
        f"That makes {right.ahead} µs ahead, {right.elapsed} now."
    )
    near = lambda ahead: isinstance(speedup, (int, float)) and ahead > 0 and abs(speedup - right.elapsed / ahead) < 1e-6
    if near(sum(max(host, device) for host, device in zip(right.host, right.device))):
        return f"While the device computes a step, the host works on the next one, not on the same. {facts}"
    if near(right.ahead - right.host[0]):
        return f"Nothing can hide the first step's host work. {facts}"
    if near(one_ahead(right.awake, right.device)):
        return f"Waiting is no work. {facts}"
    if near(right.ahead - right.device[-1]):
        return f"Behind the last step's kernels there is nothing to do, but they take their time too. {facts}"
    if isinstance(speedup, (int, float)) and abs(speedup - right.span / right.ahead) < 1e-6:
        return (
            "It is all of the trace that would take less time, from the first start of any bar on: "
            f"{right.elapsed} µs, not {right.span}. {facts}"
        )
    return facts
