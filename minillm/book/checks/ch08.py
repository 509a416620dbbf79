"""Checks of chapter 08: goodput, percentiles of a trace, planners of chunks. Built in chapter 08.

The planners are in `ch08_steps` and `ch08_chunks`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch08_chunks import check_even_chunks
from minillm.book.checks.ch08_steps import budget_trace, check_plan_step, check_repair_budget

__all__ = [
    "budget_trace",
    "check_even_chunks",
    "check_goodput_window",
    "check_itl_percentile",
    "check_plan_step",
    "check_repair_budget",
]

# 1 · goodput in a window

_TARGETS = {"ttft", "tpot", "itl", "e2e"}


def numbers_of(arrival: float, times: Sequence[float], itl: Callable = max) -> dict[str, float]:
    gaps = [later - sooner for sooner, later in pairwise(times)] or [0.0]
    mean = sum(gaps) / len(gaps)
    return {"ttft": times[0] - arrival, "e2e": times[-1] - arrival, "tpot": mean, "itl": itl(gaps)}


def goodput(
    requests, targets, start, end, *, ended=lambda arrival, times: (times or [arrival])[-1],
    inside=lambda start, ended, end: start <= ended < end, meets=operator.le, every=all, itl=max, failed=True,
    empty=False, known=_TARGETS, none=None, zero=True,
) -> tuple[float, float | None]:  # fmt: skip
    if end <= start or set(targets) - known:
        raise ValueError("no such window, or no such target")
    window = [(arrival, times) for arrival, times in requests if inside(start, ended(arrival, times), end)]
    window = [(arrival, times) for arrival, times in window if times or failed]
    good = 0
    for arrival, times in window:
        numbers = numbers_of(arrival, times, itl) if times else {}
        asked = {name: most for name, most in targets.items() if most or zero}
        good += every(meets(numbers[name], most) for name, most in asked.items()) if times else empty and not targets
    return good / (end - start), good / len(window) if window else none


def _explain_goodput(got, expected, requests, targets, start, end) -> str:
    if not isinstance(expected, tuple):
        return "ValueError if `end` is not after `start`, and for a target with another name."
    told = []
    for index, (arrival, times) in enumerate(requests):
        if start <= (times or [arrival])[-1] < end:
            numbers = numbers_of(arrival, times) if times else {}
            missed = [f"{name} ({numbers[name]:.3g})" for name in targets if times and numbers[name] > targets[name]]
            verdict = f"misses {' and '.join(missed)}" if missed else "meets all targets" if times else "failed"
            told.append(f"request {index} {verdict}")
    return f"In the window: {', '.join(told) or 'no request'}."


def _random_window(draw: Draw) -> tuple:
    requests = []
    for _ in range(draw.randint(0, 12)):
        arrival = time = draw.randint(0, 40) / 8  # eighths of a second: sums are exact
        times = [time := time + draw.randint(0, 9) / 8 for _ in range(draw.rng.choice((0, 1, 1, 2, 5)))]
        requests.append((arrival, times))
    names = draw.rng.sample(sorted(_TARGETS), draw.randint(0, 4))
    targets = {name: draw.randint(0, 24 if name == "e2e" else 9) / 8 for name in names}
    start = draw.randint(0, 40) / 8
    return requests, targets, start, start + draw.randint(1, 30) / 8


_ONE = [(0.0, [1.0, 1.25, 2.0])]
_FOUR = [(0.0, [0.3, 0.4, 0.5]), (0.2, [1.4, 1.5]), (0.5, [0.8, 0.9, 1.9]), (1.0, [1.2, 1.3, 1.4])]

check_goodput_window = FunctionChecker(
    "goodput_window",
    goodput,
    hint="A request belongs to the window in which it ended; it is good if it meets every target, and equal meets it.",
    examples=[(_FOUR, targets, 0.0, 2.0) for targets in ({}, {"ttft": 1.0}, {"ttft": 1.0, "itl": 0.5})],
    edges=[
        ([(0.0, [1.5, 5.0])], {}, 1.0, 4.0),  # only its first token is in the window
        ([(0.0, [2.0])], {}, 1.0, 2.0),
        ([(2.0, [2.0])], {}, 2.0, 4.0),
        (_ONE, {"itl": 0.9}, 0.0, 4.0),
        (_ONE, {"tpot": 0.6}, 0.0, 4.0),
        *((_ONE, targets, 0.0, 4.0) for targets in ({"ttft": 1.0}, {"itl": 0.75}, {"tpot": 0.5}, {"e2e": 2.0})),
        *((_ONE, targets, 0.0, 4.0) for targets in ({"ttft": 0.75}, {"itl": 0.5}, {"tpot": 0.25}, {"e2e": 1.75})),
        (_ONE, {"tpot": 0.4}, 0.0, 4.0),
        *((_ONE, {name: 0.0}, 0.0, 4.0) for name in ("ttft", "itl", "tpot", "e2e")),
        (_ONE, {"ttft": 1.0 - 2**-20}, 0.0, 4.0),  # nearly is not met
        (_ONE, {"itl": 0.5, "ttft": 5.0}, 0.0, 4.0),
        (_ONE, {}, 2.0, 4.0),  # its last token came when the window begins
        (_ONE, {}, 0.0, 2.0),  # and when it ends
        ([(0.0, [3.0]), (3.0, [5.0])], {}, 2.0, 4.0),
        ([(1.0, [1.5])], {"itl": 0.25, "tpot": 0.25}, 1.0, 2.0),
        ([(1.0, [1.5])], {"itl": 0.0, "tpot": 0.0, "ttft": 0.5}, 1.0, 2.0),  # a single token
        ([(1.0, [1.5])], {"e2e": 0.25}, 1.0, 2.0),
        ([(1.25, []), (1.0, [1.5])], {}, 1.0, 2.0),
        ([(0.5, []), (2.0, [])], {}, 1.0, 2.0),  # both failed outside the window
        ([], {"ttft": 1.0}, 0.0, 1.0),
        ([(0.0, [0.5, 0.5, 0.5])], {"itl": 0.0}, 0.0, 1.0),
        (_ONE, {}, 2.0, 2.0),
        (_ONE, {}, 3.0, 2.0),
        (_ONE, {"ITL": 1.0}, 0.0, 1.0),
        ([], {"speed": 1.0}, 0.0, 1.0),
    ],
    random=_random_window,
    trials=60,
    raises=(ValueError,),
    returns=("the goodput (requests/s)", "the attainment"),
    rtol=1e-9,
    misconceptions={
        "A request belongs to the window in which it ended, whenever it arrived.": dict(
            ended=lambda arrival, times: arrival
        ),
        "A request ends with its last token, not with its first.": dict(
            ended=lambda arrival, times: (times or [arrival])[0]
        ),
        "start <= t < end: a request that ends exactly at `end` belongs to the next window.": dict(
            inside=lambda start, ended, end: start <= ended <= end
        ),
        "start <= t < end: a request that ends exactly at `start` belongs to this window.": dict(
            inside=lambda start, ended, end: start < ended < end
        ),
        "A target of 0 is a target: ask whether the name is there, not whether its value is true.": dict(zero=False),
        "A value equal to the target meets it.": dict(meets=operator.lt),
        "A good request meets every target.": dict(every=lambda met: any([*met] or [True])),
        '"itl" is the longest gap, "tpot" the mean.': dict(itl=lambda gaps: sum(gaps) / len(gaps)),
        "A failed request counts among the requests of its window.": dict(failed=False),
        "A failed request is never good, not even without targets.": dict(empty=True),
        "A target with another name raises ValueError, even if the window has no requests.": dict(
            known=_TARGETS | {"ITL", "speed"}, meets=lambda value, most: value <= most
        ),
        "The attainment of a window without requests is None.": dict(none=0.0),
    },
    explain=_explain_goodput,
    forbid=("minillm.engine.metrics.goodput", "minillm.engine.metrics.Targets"),
)

# 2 · P99 from a trace


def gaps_of(trace, zero=False, spread=False, zeros=True, first=True, steps=False) -> list[float]:
    gaps, last = [], {}
    for time, delivered in trace:
        for name, count in delivered.items():
            if not count and not zero:
                continue
            own = ([time - last[name]] if name in last else []) + [0.0] * (count - 1)
            if spread and name in last:
                own = [(time - last[name]) / count] * count
            gaps += own[:1] if not zeros and name in last else own if first or name in last else []
            last[name] = time
        if steps:
            last = dict.fromkeys(last, time)
    return gaps


def percentile(trace, q, *, rank=lambda q, n: -(-q * n // 100), arranged=sorted, none=None, **how) -> float | None:
    gaps = arranged(gaps_of(trace, **how))
    return gaps[max(1, min(len(gaps), rank(q, len(gaps)))) - 1] if gaps else none


def _interpolated(trace, q) -> float | None:
    gaps = sorted(gaps_of(trace))
    place = q / 100 * (len(gaps) - 1)
    low = int(place)
    return gaps[low] + (place - low) * (gaps[min(low + 1, len(gaps) - 1)] - gaps[low]) if gaps else None


def _explain_percentile(got, expected, trace, q) -> str | None:
    gaps = sorted(gaps_of(trace))
    rank = max(1, -(-q * len(gaps) // 100))
    hint = f"P{q} is rank {rank} of {len(gaps)} gaps: {_few(gaps)}."
    places = [place for place, gap in enumerate(gaps, 1) if abs(gap - got) < 1e-9]
    return f"You returned rank {places[0]} of {len(gaps)} for P{q}. {hint}" if places and rank not in places else hint


def _few(gaps: Sequence[float]) -> str:
    shown = [f"{gap:.4g}" for gap in gaps]
    return ", ".join(shown) if len(shown) <= 10 else ", ".join([*shown[:3], "...", *shown[-4:]])


def _random_trace(draw: Draw) -> tuple:
    trace, time = [], 0.0
    for _ in range(draw.randint(0, 40)):
        time += draw.randint(1, 65) / 64
        names = draw.rng.sample("ABCDE", draw.randint(0, 6))
        trace.append((time, {name: draw.rng.choice((0, 1, 1, 1, 2, 4)) for name in names}))
    return trace, draw.randint(1, 101)


_TWO = [(1.0, {"A": 1}), (1.1, {"A": 1, "B": 1}), (1.2, {"A": 1, "B": 1}), (2.0, {"A": 1, "B": 1}), (2.1, {"B": 2})]
_HUNDRED = [(i * (i + 1) / 256, {"A": 1}) for i in range(101)]  # 100 gaps, each 1/128 s longer than the one before
_LATE = [(0.0, {"A": 1, "B": 1}), (1.0, {"B": 1}), (4.0, {"B": 1, "A": 1}), (6.0, {"A": 1})]

check_itl_percentile = FunctionChecker(
    "itl_percentile",
    percentile,
    hint="Sort all gaps of all requests; the first that at least q percent do not exceed.",
    examples=[(_TWO, q) for q in (50, 1, 70, 99, 100)],
    edges=[
        ([], 99),
        ([(1.0, {"A": 1}), (2.0, {"B": 1})], 50),  # two requests with one token each have no gap
        ([(1.0, {"A": 1}), (2.0, {"B": 1}), (3.0, {"A": 1})], 100),
        ([(1.0, {"A": 1}), (2.0, {"A": 0}), (3.5, {"A": 1})], 100),
        ([(1.0, {"A": 0}), (2.0, {"A": 1}), (3.0, {"A": 1})], 1),
        ([(1.0, {"A": 3})], 100),
        *((_HUNDRED, q) for q in (1, 7, 14, 28, 29, 50, 55, 56, 57, 58, 99, 100)),
        *(([(1.0, {"A": 1}), (2.0, {"A": 4})], q) for q in (1, 75, 76, 100)),
        *(([(0.0, {"A": 1}), (1.0, {"A": 1}), (3.0, {"A": 1})], q) for q in (49, 50, 51)),
        *((_LATE, q) for q in (25, 50, 75, 100)),
        ([(0.0, {"A": 1}), (2.0, {"A": 1}), (12.0, {"A": 1})], 50),  # as text, 10.0 comes before 2.0
    ],
    random=_random_trace,
    trials=60,
    returns=lambda trace, q: f"P{q} of the gaps (s)",
    atol=1e-9,
    misconceptions={
        "Nothing is interpolated: the percentile is one of the gaps.": _interpolated,
        "A delivery of k tokens makes one gap and then k - 1 gaps of 0: it is not spread evenly.": dict(spread=True),
        "A delivery of k tokens makes k - 1 gaps of 0, too.": dict(zeros=False),
        "Also a first delivery of k tokens makes k - 1 gaps of 0.": dict(first=False),
        "A count of 0 is no delivery.": dict(zero=True),
        "A gap is the time since the request's own previous delivery, however many steps lie between.": dict(
            steps=True
        ),
        "Sort the gaps first.": dict(arranged=list),
        "Without any gap the result is None.": dict(none=0.0),
    },
    explain=_explain_percentile,
    forbid=("minillm.engine.metrics.percentile", "minillm.engine.metrics.Percentiles"),
)
