"""Checks of chapter 24: late testers, percentiles of merged histograms; fleets, buying, probes. Built in chapter 24.

The references are in `ch24_oracle`. `ch24_plans` has the fleet, the purchase and the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch24_oracle import Histogram, bounds, waits
from minillm.book.checks.ch24_plans import check_cheapest_fleet, check_find_saturation, check_stays_cheaper

__all__ = [
    "check_cheapest_fleet",
    "check_find_saturation",
    "check_percentile_bounds",
    "check_stays_cheaper",
    "check_waits",
]

check_waits = Checker("waits", hint="Latency counts from the due time; a request that fails is a late one, not none.")
check_percentile_bounds = Checker(
    "percentile_bounds", hint="Put every value as low as its bucket allows, then as high.",
    forbid=("minillm.bench.load.intervals.Histogram",))  # fmt: skip


@check_waits.part("example")
def _waits_example(case: Case) -> None:
    _wait(case, [0.0, 1.0, 2.0], [0.5, 0.5, 0.5], 1, 9.0, 0.0, "nothing overlaps")
    _wait(case, [0.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 1.0], 2, 9.0, 0.0, "two connections, and two requests wait")


@check_waits.part("edges")
def _waits_edges(case: Case) -> None:
    _wait(case, [0.0, 1.0], [3.0, 1.0], 1, 3.0, 0.0, "an answer that takes exactly the timeout is complete")
    _wait(case, [0.0, 1.0], [3.5, 1.0], 1, 3.0, 0.0, "the first is cut off after 3 s, and its connection is free then")
    _wait(case, [0.0, 1.0], [5.0, 1.0], 1, 9.0, 0.5, "the first is of the warm-up: sent, and not reported")
    _wait(case, [0.0, 0.5, 1.0], [5.0, 1.0, 1.0], 1, 9.0, 0.5, "due exactly at the end of the warm-up is reported")
    _wait(case, [0.0, 1.0, 1.0], [8.0, 1.0, 1.0], 1, 2.0, 1.0, "a request of the warm-up is cut off too")
    _wait(case, [0.0, 0.0, 2.0], [4.0, 1.0, 1.0], 2, 9.0, 0.0, "the connection that is free first is used, not in turn")
    _wait(case, [5.0], [1.0], 4, 9.0, 0.0, "more connections than requests")
    _wait(case, [], [], 2, 9.0, 0.0, "no request at all")
    _wait(case, [1.0, 2.0], [1.0, 1.0], 1, 9.0, 10.0, "all of them are of the warm-up")
    case.raises(ValueError, case.student, [0.0], [1.0], 0, 1.0, 0.0, hint="Without a connection nothing is sent.")
    case.raises(ValueError, case.student, [0.0], [1.0, 2.0], 1, 1.0, 0.0, hint="One due time for each request.")


@check_waits.part("random")
def _waits_random(case: Case) -> None:
    for _ in range(60):
        count = case.randint(1, 20)
        due = sorted(case.randint(0, 60) / 8 for _ in range(count))
        work = [case.randint(1, 40) / 8 for _ in range(count)]
        _wait(case, due, work, case.randint(1, 5), case.randint(8, 48) / 8, case.randint(0, 16) / 8, "random requests")


def _wait(case: Case, due: list, work: list, connections: int, timeout: float, warmup: float, told: str) -> None:
    got, expected = case.call(due, work, connections, timeout, warmup), waits(due, work, connections, timeout, warmup)
    case.true(
        isinstance(got, list) and len(got) == len(expected),
        f"the result has {len(got) if hasattr(got, '__len__') else repr(got)} latencies; expected a list of "
        f"{len(expected)}, one for each request that is due from {warmup:g} s on",
        hint=f"Here {told}.",
    )
    for latency, (moment, sent, right) in zip(got, expected):
        what = f"the latency of the request that is due at {moment:g} s"
        cut = f"is cut off {timeout:g} s later" if math.isinf(right) else f"is answered at {moment + right:g} s"
        hint = f"Here {told}. It is sent at {sent:g} s and {cut}."
        case.close(latency, right, what, atol=1e-9, rtol=0, hint=hint)


@check_percentile_bounds.part("example")
def _bounds_example(case: Case) -> None:
    one = ([0.1, 0.5, 1.0], [50, 40, 9, 1])
    for q in (50, 90, 95, 99, 100):
        _bound(case, [one], q, "one server with 100 requests")
    _bound(case, [one, ([0.1, 0.5, 1.0], [0, 0, 10, 90])], 50, "a second server is slow; counts are added up")


@check_percentile_bounds.part("edges")
def _bounds_edges(case: Case) -> None:
    fine, coarse = ([0.1, 0.2, 0.3, 0.4], [5, 5, 5, 5, 0]), ([0.2, 0.4], [10, 10, 0])
    for q in (1, 25, 26, 50, 75, 76, 100):
        _bound(case, [fine, coarse], q, "the same 40 values in buckets of 0.1 s and of 0.2 s")
    for q in (49, 50, 51):
        _bound(case, [([1.0], [1, 1])], q, "two values: one up to 1 s, one above")
    _bound(case, [([1.0], [0, 3])], 50, "all values lie above the last end: nothing bounds them from above")
    _bound(case, [([1.0], [3, 0])], 50, "all values lie in the first bucket: it begins at 0")
    _bound(case, [([], [4])], 90, "one bucket for everything")
    _bound(case, [([0.5], [0, 0]), ([0.25, 0.75], [0, 2, 0])], 99, "a server without a request")
    _bound(case, [([0.3], [1, 0]), ([0.7], [1, 0])], 50, "the second value may lie below the end of the first")
    _bound(case, [([0.5, 1.0], [0, 0, 0])], 50, "no request at all")
    _bound(case, [], 50, "no server at all")
    for q in (7, 14, 28, 29, 55, 56, 57):
        _bound(
            case, [([i / 100 for i in range(1, 101)], [1] * 100 + [0])], q, f"100 buckets with a value each: rank {q}"
        )
    for wrong in (0, 101):
        case.raises(ValueError, case.student, [fine], wrong, hint="A percentile from 1 to 100.")


@check_percentile_bounds.part("random")
def _bounds_random(case: Case) -> None:
    for _ in range(80):
        histograms = []
        for _ in range(case.randint(1, 5)):
            ends = sorted(case.rng.sample(range(1, 40), case.randint(0, 6)))
            histograms.append(([end / 8 for end in ends], [case.randint(0, 6) for _ in range(len(ends) + 1)]))
        _bound(case, histograms, case.randint(1, 101), "random buckets, ends in eighths of a second")


def _bound(case: Case, histograms: list[Histogram], q: int, told: str) -> None:
    got, expected = case.call(histograms, q), bounds(histograms, q)
    count = sum(sum(counts) for _, counts in histograms)
    hint = f"Here {told}. P{q} is rank {-(-q * count // 100)} of {count}. Upper ends: {_short(histograms)}."
    if expected is None or got is None:
        case.true(got is expected, f"the bounds are {got!r}; expected {expected!r}", hint=hint)
        return
    case.true(isinstance(got, tuple) and len(got) == 2, f"the result is {got!r}, not a pair", hint="(low, high)")
    for what, value, right in zip(("lower", "upper"), got, expected):
        case.close(value, right, f"the {what} bound of P{q} (s)", atol=1e-12, rtol=0, hint=hint)


def _short(histograms: Sequence[Histogram]) -> str:
    told = [f"{list(ends)} with counts {list(counts)}" for ends, counts in histograms]
    return "; ".join(told if len(told) < 3 else [*told[:2], "..."])
