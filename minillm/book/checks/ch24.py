"""Checks of chapter 24: late testers, percentiles of merged histograms; fleets, buying, probes. Built in chapter 24.

`ch24_plans` has the fleet and the purchase, `ch24_search` the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch24_plans import check_cheapest_fleet, check_stays_cheaper
from minillm.book.checks.ch24_search import check_find_saturation

__all__ = [
    "check_cheapest_fleet",
    "check_find_saturation",
    "check_percentile_bounds",
    "check_stays_cheaper",
    "check_waits",
]

Histogram = tuple[Sequence[float], Sequence[int]]  # upper ends of the buckets; counts, one more than ends


# 1 · waiting


def requests(due: list[float], work: list[float], connections: int, timeout: float, *, wrong: str = "") -> list[tuple]:
    """(due, sent, latency) of every request; infinite where it was cut off. wrong: a mistake by its name."""
    if connections < 1 and wrong != "any connections":
        raise ValueError("no connection")
    if len(due) != len(work):
        raise ValueError("two lengths")
    busy_until, found = [0.0] * max(connections, 1), []
    for index, (moment, seconds) in enumerate(zip(due, work)):
        place = min(range(len(busy_until)), key=busy_until.__getitem__)
        place = index % len(busy_until) if wrong == "in turn" else place
        sent = max(moment, busy_until[place])
        busy_until[place] = sent + (seconds if wrong == "never cut off" else min(seconds, timeout))
        failed = seconds >= timeout if wrong == "exactly the timeout" else seconds > timeout
        late = sent + seconds - (sent if wrong == "from sending" else moment)
        cut = sent + timeout - moment if wrong == "the timeout" else math.inf
        found.append((moment, sent, cut if failed else late))
    return found


def waits(
    due: list[float], work: list[float], connections: int, timeout: float, warmup: float, *, wrong: str = ""
) -> list[float]:
    """The latencies from `warmup` on."""
    if wrong == "not sent":
        pairs = [pair for pair in zip(due, work, strict=False) if pair[0] >= warmup]
        due, work = [moment for moment, _ in pairs], [seconds for _, seconds in pairs]
    found = requests(due, work, connections, timeout, wrong=wrong)
    if wrong == "left out":
        found = [one for one in found if one[2] < math.inf]
    if wrong == "after":
        return [latency for moment, _, latency in found if moment > warmup]
    return [latency for moment, sent, latency in found if (sent if wrong == "by sending" else moment) >= warmup]


def _explain_waits(got: Any, expected: Any, due, work, connections, timeout, warmup) -> str:
    if len(got) != len(expected):
        return f"One latency for each of the {len(expected)} requests that are due from {warmup:g} s on, failed or not."
    reported = [one for one in requests(due, work, connections, timeout) if one[0] >= warmup]
    moment, sent, right = next(one for one, mine in zip(reported, got) if abs(one[2] - mine) > 1e-9 or mine != mine)
    cut = f"is cut off {timeout:g} s later" if math.isinf(right) else f"is answered at {moment + right:g} s"
    return f"The request that is due at {moment:g} s is sent at {sent:g} s and {cut}."


def _random_waits(draw: Draw) -> tuple:
    count = draw.randint(1, 20)
    due = sorted(draw.randint(0, 60) / 8 for _ in range(count))
    work = [draw.randint(1, 40) / 8 for _ in range(count)]
    return due, work, draw.randint(1, 5), draw.randint(8, 48) / 8, draw.randint(0, 16) / 8


check_waits = FunctionChecker(
    "waits",
    waits,
    hint="Latency counts from the due time; a request that fails is a late one, not none.",
    examples={
        "nothing overlaps": ([0.0, 1.0, 2.0], [0.5, 0.5, 0.5], 1, 9.0, 0.0),
        "there are two connections, and two requests wait": ([0.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 1.0], 2, 9.0, 0.0),
    },
    edges={
        "an answer that takes exactly the timeout is complete": ([0.0, 1.0], [3.0, 1.0], 1, 3.0, 0.0),
        "the first is cut off after 3 s, and its connection is free then": ([0.0, 1.0], [3.5, 1.0], 1, 3.0, 0.0),
        "the first is of the warm-up: sent, and not reported": ([0.0, 1.0], [5.0, 1.0], 1, 9.0, 0.5),
        "due exactly at the end of the warm-up is reported": ([0.0, 0.5, 1.0], [5.0, 1.0, 1.0], 1, 9.0, 0.5),
        "a request of the warm-up is cut off too": ([0.0, 1.0, 1.0], [8.0, 1.0, 1.0], 1, 2.0, 1.0),
        "the connection that is free first is used, not in turn": ([0.0, 0.0, 2.0], [4.0, 1.0, 1.0], 2, 9.0, 0.0),
        "more connections than requests": ([5.0], [1.0], 4, 9.0, 0.0),
        "no request at all": ([], [], 2, 9.0, 0.0),
        "all of them are of the warm-up": ([1.0, 2.0], [1.0, 1.0], 1, 9.0, 10.0),
        "without a connection nothing is sent": ([0.0], [1.0], 0, 1.0, 0.0),
        "a due time is missing": ([0.0], [1.0, 2.0], 1, 1.0, 0.0),
    },
    random=_random_waits,
    trials=60,
    raises=(ValueError,),
    returns="the list of latencies",
    atol=1e-9,
    misconceptions={
        "Latency counts from the due time, not from sending: waiting for a connection is part of it.": dict(
            wrong="from sending"
        ),
        "A failed request is not missing from the list: its latency is math.inf.": dict(wrong="left out"),
        "The latency of a failed request is math.inf, not the timeout.": dict(wrong="the timeout"),
        "A request that is cut off frees its connection then, not when it would have ended.": dict(
            wrong="never cut off"
        ),
        "An answer that takes exactly the timeout is complete.": dict(wrong="exactly the timeout"),
        "Requests of the warm-up are sent and keep connections busy; they are only left out of the list.": dict(
            wrong="not sent"
        ),
        "The due time decides whether a request belongs to the warm-up, not the time of sending.": dict(
            wrong="by sending"
        ),
        "A request that is due exactly at the end of the warm-up is reported.": dict(wrong="after"),
        "The connection that is free first is used, not one after the other.": dict(wrong="in turn"),
        "With fewer than one connection raise ValueError.": dict(wrong="any connections"),
    },
    explain=_explain_waits,
)


# 2 · percentiles of histograms


def bounds(histograms: Sequence[Histogram], q: int, *, wrong: str = "") -> tuple[float, float] | None:
    """Every value at the lower end of its bucket, then every value at the upper end: the value of the rank."""
    if not 1 <= q <= 100:
        raise ValueError(f"q={q}")
    lower, upper = [], []
    for ends, counts in histograms:
        last = ends[-1] if wrong == "closed" and ends else math.inf
        limits, before = [0.0, *ends, last], 0
        for place, count in enumerate(counts[: len(ends)] if wrong == "no last" else counts):
            count, before = max(0, count - before) if wrong == "cumulative" else count, count
            lower += [limits[place]] * count
            upper += [limits[place + 1]] * count
    if not upper:
        return (0.0, math.inf) if wrong == "zeros" else None
    rank = -(-q * len(upper) // 100)
    rank = {"float": math.ceil(q / 100 * len(upper)), "down": max(1, q * len(upper) // 100)}.get(wrong, rank)
    if wrong == "unsorted":
        return lower[rank - 1], upper[rank - 1]
    return sorted(lower)[rank - 1], sorted(upper)[rank - 1]


def _mean_of_servers(histograms: Sequence[Histogram], q: int) -> tuple[float, float] | None:
    found = [pair for pair in (bounds([one], q) for one in histograms) if pair]
    return tuple(sum(side) / len(found) for side in zip(*found)) if found else None


def _bucket_of_the_upper(histograms: Sequence[Histogram], q: int) -> tuple[float, float] | None:
    found = bounds(histograms, q)
    starts = [
        start
        for ends, counts in histograms
        for start, end, count in zip([0.0, *ends], [*ends, math.inf], counts)
        if found and count and end >= found[1]
    ]
    return (max(starts), found[1]) if found else None


def _explain_bounds(got: Any, expected: Any, histograms: list[Histogram], q: int) -> str:
    count = sum(sum(counts) for _, counts in histograms)
    told = [f"{list(ends)} with counts {list(counts)}" for ends, counts in histograms]
    told = told if len(told) < 3 else [*told[:2], "..."]
    return f"P{q} is rank {-(-q * count // 100)} of {count}. Upper ends: {'; '.join(told)}."


_ONE, _TWO = ([0.1, 0.5, 1.0], [50, 40, 9, 1]), ([0.1, 0.5, 1.0], [0, 0, 10, 90])
_FINE, _COARSE = ([0.1, 0.2, 0.3, 0.4], [5, 5, 5, 5, 0]), ([0.2, 0.4], [10, 10, 0])
_HUNDRED = ([i / 100 for i in range(1, 101)], [1] * 100 + [0])


def _random_histograms(draw: Draw) -> tuple:
    histograms = []
    for _ in range(draw.randint(1, 5)):
        ends = sorted(draw.rng.sample(range(1, 40), draw.randint(0, 6)))
        histograms.append(([end / 8 for end in ends], [draw.randint(0, 6) for _ in range(len(ends) + 1)]))
    return histograms, draw.randint(1, 101)


check_percentile_bounds = FunctionChecker(
    "percentile_bounds",
    bounds,
    hint="For low, replace every value by the lower end of its bucket; for high, by the upper end.",
    examples={
        **{f"one server has 100 requests, P{q}": ([_ONE], q) for q in (50, 90, 95, 99, 100)},
        "a second server is slow; counts are added up": ([_ONE, _TWO], 50),
    },
    edges={
        **{
            f"the same 40 values lie in buckets of 0.1 s and of 0.2 s, P{q}": ([_FINE, _COARSE], q)
            for q in (1, 25, 26, 50, 75, 76, 100)
        },
        **{f"one value is up to 1 s, one above, P{q}": ([([1.0], [1, 1])], q) for q in (49, 50, 51)},
        "all values lie above the last end: nothing bounds them from above": ([([1.0], [0, 3])], 50),
        "all values lie in the first bucket: it begins at 0": ([([1.0], [3, 0])], 50),
        "one bucket holds everything": ([([], [4])], 90),
        "a server has no request": ([([0.5], [0, 0]), ([0.25, 0.75], [0, 2, 0])], 99),
        "the second value may lie below the end of the first": ([([0.3], [1, 0]), ([0.7], [1, 0])], 50),
        "there is no request at all": ([([0.5, 1.0], [0, 0, 0])], 50),
        "there is no server at all": ([], 50),
        **{f"each of 100 buckets has a value, P{q}": ([_HUNDRED], q) for q in (7, 14, 28, 29, 55, 56, 57)},
        **{f"a percentile is from 1 to 100, not {q}": ([_FINE], q) for q in (0, 101)},
    },
    random=_random_histograms,
    trials=80,
    raises=(ValueError,),
    returns="the pair (low, high)",
    atol=1e-12,
    misconceptions={
        "The lower bound has a rank of its own: the value may lie in a bucket that begins lower.": _bucket_of_the_upper,
        "Compute the rank with ints, -(-q * count // 100): in floating point 7 % of 100 is more than 7.": dict(
            wrong="float"
        ),
        "The rank is rounded up.": dict(wrong="down"),
        "The percentile of all values is no mean of the servers' percentiles: use the counts of all.": _mean_of_servers,
        "The last bucket holds values, too: those above the last end.": dict(wrong="no last"),
        "Nothing bounds the last bucket from above: math.inf.": dict(wrong="closed"),
        "counts are those of each bucket, not cumulative.": dict(wrong="cumulative"),
        "Sort the buckets of all servers together.": dict(wrong="unsorted"),
        "If there is no value, return None.": dict(wrong="zeros"),
        "A percentile is from 1 to 100; another is a ValueError.": lambda histograms, q: bounds(
            histograms, min(max(q, 1), 100)
        ),
    },
    explain=_explain_bounds,
    forbid=("minillm.bench.load.intervals.Histogram",),
)
