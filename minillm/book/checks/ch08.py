"""Checks of chapter 08: goodput, percentiles of a trace, chunk planners. Built in chapter 08.

The references are in `ch08_oracle`. `ch08_steps` has the chunk planners.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch08_oracle import (
    budget_trace,
    gaps_of,
    judged,
)
from minillm.book.checks.ch08_steps import check_even_chunks, check_plan_step, check_repair_budget

__all__ = [
    "budget_trace",
    "check_even_chunks",
    "check_goodput_window",
    "check_itl_percentile",
    "check_plan_step",
    "check_repair_budget",
]

check_goodput_window = Checker(
    "goodput_window", hint="A request belongs to the window in which it ended; every promise counts, equal keeps it.",
    forbid=("minillm.engine.metrics.goodput", "minillm.engine.metrics.Targets"))  # fmt: skip
check_itl_percentile = Checker(
    "itl_percentile", hint="All gaps of all requests, sorted; the first that at least q percent do not exceed.",
    forbid=("minillm.engine.metrics.percentile", "minillm.engine.metrics.Percentiles"))  # fmt: skip


@check_goodput_window.part("example")
def _goodput_example(case: Case) -> None:
    requests = [(0.0, [0.3, 0.4, 0.5]), (0.2, [1.4, 1.5]), (0.5, [0.8, 0.9, 1.9]), (1.0, [1.2, 1.3, 1.4])]
    _good(case, requests, {}, 0.0, 2.0, "four requests, nothing promised")
    _good(case, requests, {"ttft": 1.0}, 0.0, 2.0, "the second came late")
    _good(case, requests, {"ttft": 1.0, "itl": 0.5}, 0.0, 2.0, "the second came late, the third stopped for a second")


@check_goodput_window.part("edges")
def _goodput_edges(case: Case) -> None:
    one = [(0.0, [1.0, 1.25, 2.0])]
    for targets in ({"ttft": 1.0}, {"itl": 0.75}, {"tpot": 0.5}, {"e2e": 2.0}):
        _good(case, one, targets, 0.0, 4.0, "exactly what was promised keeps it")
    for targets in ({"ttft": 0.75}, {"itl": 0.5}, {"tpot": 0.25}, {"e2e": 1.75}):
        _good(case, one, targets, 0.0, 4.0, "a little more than was promised")
    _good(case, one, {"itl": 0.5, "ttft": 5.0}, 0.0, 4.0, "one promise kept and one broken is not kept")
    _good(case, one, {}, 2.0, 4.0, "its last token came at 2.0, the window begins there")
    _good(case, one, {}, 0.0, 2.0, "its last token came at 2.0, the window ends just before")
    _good(case, [(0.0, [3.0]), (3.0, [5.0])], {}, 2.0, 4.0, "one arrived long before the window, one ended after it")
    _good(case, [(1.0, [1.5])], {"itl": 0.0, "tpot": 0.0, "ttft": 0.5}, 1.0, 2.0, "a single token has no gaps")
    _good(case, [(1.0, [1.5])], {"e2e": 0.25}, 1.0, 2.0, "a single token, and it came too late")
    _good(case, [(1.0, []), (1.0, [1.5])], {}, 1.0, 2.0, "a failed request counts, and keeps nothing")
    _good(case, [(0.5, []), (2.0, [])], {}, 1.0, 2.0, "both failed when they arrived, outside the window")
    _good(case, [], {"ttft": 1.0}, 0.0, 1.0, "no request at all")
    _good(case, [(0.0, [0.5, 0.5, 0.5])], {"itl": 0.0}, 0.0, 1.0, "three tokens at once")
    case.raises(ValueError, case.student, one, {}, 2.0, 2.0, hint="A window without length.")
    case.raises(ValueError, case.student, one, {}, 3.0, 2.0, hint="A window that ends before it starts.")
    case.raises(
        ValueError,
        case.student,
        one,
        {"ITL": 1.0},
        0.0,
        1.0,
        hint="Known are ttft, tpot, itl and e2e; a misspelt promise is no promise.",
    )


@check_goodput_window.part("random")
def _goodput_random(case: Case) -> None:
    for _ in range(60):
        requests = []
        for _ in range(case.randint(0, 12)):
            arrival = time = case.randint(0, 40) / 8
            times = [time := time + case.randint(0, 9) / 8 for _ in range(case.rng.choice((0, 1, 1, 2, 5)))]
            requests.append((arrival, times))
        names = case.rng.sample(("ttft", "tpot", "itl", "e2e"), case.randint(0, 4))
        targets = {name: case.randint(1, 24 if name == "e2e" else 9) / 8 for name in names}
        start = case.randint(0, 40) / 8
        _good(
            case,
            requests,
            targets,
            start,
            start + case.randint(1, 30) / 8,
            "random requests, times in eighths of a second",
        )


def _good(case: Case, requests: list, targets: dict, start: float, end: float, told: str) -> None:
    got = case.call(requests, targets, start, end)
    rate, share, verdicts = judged(requests, targets, start, end)
    hint = f"Here {told}. In the window: {', '.join(verdicts) or 'nobody'}."
    case.true(
        isinstance(got, tuple) and len(got) == 2, f"the result is {got!r}, not a pair", hint="(goodput, attainment)"
    )
    where = f"with targets={targets}, window {start} to {end}"
    case.close(got[0], rate, f"the goodput (requests/s) {where}", hint=hint)
    case.true(
        (got[1] is None) == (share is None), f"the attainment is {got[1]!r} {where}; expected {share!r}", hint=hint
    )
    if share is not None:
        case.close(got[1], share, f"the attainment {where}", hint=hint)


@check_itl_percentile.part("example")
def _itl_example(case: Case) -> None:
    trace = [
        (1.0, {"A": 1}),
        (1.1, {"A": 1, "B": 1}),
        (1.2, {"A": 1, "B": 1}),
        (2.0, {"A": 1, "B": 1}),
        (2.1, {"B": 2}),
    ]
    for q in (1, 50, 70, 99, 100):
        _itl(case, trace, q, "two requests; the last step gives B two tokens at once")


@check_itl_percentile.part("edges")
def _itl_edges(case: Case) -> None:
    _itl(case, [], 99, "an empty trace")
    _itl(case, [(1.0, {"A": 1}), (2.0, {"B": 1})], 50, "two requests with one token each have no gap")
    _itl(
        case,
        [(1.0, {"A": 1}), (2.0, {"B": 1}), (3.0, {"A": 1})],
        100,
        "a step without A lies between A's tokens: its gap is 2 s",
    )
    _itl(
        case, [(1.0, {"A": 1}), (2.0, {"A": 0}), (3.5, {"A": 1})], 100, "a count of 0 is no delivery: the gap is 2.5 s"
    )
    _itl(
        case,
        [(1.0, {"A": 0}), (2.0, {"A": 1}), (3.0, {"A": 1})],
        1,
        "a count of 0 before the first token is no delivery",
    )
    _itl(case, [(1.0, {"A": 3})], 100, "three tokens in the first delivery: two gaps of 0")
    grouped = [(1.0, {"A": 1}), (2.0, {"A": 4})]
    for q in (1, 75, 76, 100):
        _itl(case, grouped, q, "one delivery of four tokens: a gap of 1 s and three of 0, not four of 0.25 s")
    hundred = [(0.0, {"A": 1})]
    for i in range(100):
        hundred.append((hundred[-1][0] + (i + 1) / 128, {"A": 1}))
    for q in (1, 7, 14, 28, 29, 50, 55, 56, 57, 58, 99, 100):
        _itl(case, hundred, q, f"100 different gaps: P{q} is the {q}th of them in order")
    for q in (49, 50, 51):
        _itl(
            case,
            [(0.0, {"A": 1}), (1.0, {"A": 1}), (3.0, {"A": 1})],
            q,
            "two gaps, 1 s and 2 s: half of them are at most 1 s",
        )
    late = [(0.0, {"A": 1, "B": 1}), (1.0, {"B": 1}), (4.0, {"B": 1, "A": 1}), (6.0, {"A": 1})]
    for q in (25, 50, 75, 100):
        _itl(case, late, q, "A was left out of one step, B of the last")


@check_itl_percentile.part("random")
def _itl_random(case: Case) -> None:
    for _ in range(60):
        trace, time = [], 0.0
        for _ in range(case.randint(0, 40)):
            time += case.randint(1, 65) / 64
            names = case.rng.sample("ABCDE", case.randint(0, 6))
            trace.append((time, {name: case.rng.choice((0, 1, 1, 1, 2, 4)) for name in names}))
        _itl(case, trace, case.randint(1, 101), "a random trace, times in 64ths of a second")


def _itl(case: Case, trace: list, q: int, told: str) -> None:
    got, gaps = case.call(trace, q), sorted(gaps_of(trace))
    rank = next((rank for rank in range(1, len(gaps) + 1) if 100 * rank >= q * len(gaps)), 0)
    expected = gaps[rank - 1] if gaps else None
    hint = f"Here {told}. P{q} is rank {rank} of {len(gaps)} gaps: {_few(gaps)}."
    if expected is None or got is None:
        case.true(got is expected, f"P{q} is {got!r}; expected {expected!r}", hint=hint)
        return
    places = [i + 1 for i, gap in enumerate(gaps) if abs(gap - got) < 1e-9]
    if places and rank not in places:
        hint = f"You returned rank {places[0]} of {len(gaps)} for P{q}. {hint}"
    case.close(got, expected, f"P{q} of the gaps (s)", atol=1e-9, rtol=0, hint=hint)


def _few(gaps: Sequence[float]) -> str:
    shown = [f"{gap:.4g}" for gap in gaps]
    return ", ".join(shown) if len(shown) <= 10 else ", ".join([*shown[:3], "...", *shown[-4:]])
