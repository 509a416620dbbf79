"""The check of chapter 09's key that ages. Built in chapter 09.

Any key that sorts as the statement asks is right, so a case has several requests, and their order by key is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Raised
from minillm.book.checks.compare import kind_of

Request = tuple[int, int, float, int]  # prompt_tokens, max_tokens, arrival, priority


def aged(
    prompt_tokens: int, max_tokens: int, arrival: float, priority: int, ageing: float, grace: float, cheapest: float, *,
    sign: int = 1, weight: int = 4, delayed: bool = True, safe_of: str = "priority", above: bool = True,
    without: Callable[[bool], float] = lambda dear: math.inf if dear else 0.0,
) -> tuple[float, float]:  # fmt: skip
    """(key, safe). The keywords are mistakes."""
    if ageing < 0 or grace < 0:
        raise ValueError(f"ageing={ageing} and grace={grace} must be at least 0")
    cost, delay = prompt_tokens + weight * max_tokens, priority * grace
    key = cost + sign * (ageing * (arrival + delay) if delayed else ageing * arrival + delay)
    if not ageing:
        return float(key), without(cost > cheapest)
    added = {"priority": delay, "": 0.0, "arrival": delay + arrival}[safe_of]
    return float(key), (cost - cheapest * above) / ageing + added


def _of_all(answer: Callable) -> Callable:
    def pairs(requests: list[Request], *knobs: float) -> list[tuple[float, float]]:
        return [answer(*request, *knobs) for request in requests]

    return pairs


def _are_pairs(case: Case, got: list, *given: Any) -> None:
    for pair in got:
        case.true(type(pair) is tuple and len(pair) == 2, f"the result is {pair!r}, not a pair", hint="(key, safe)")
        for name, value in zip(("key", "safe"), pair):
            case.true(type(value) in (int, float), f"{name} must be a float; got {kind_of(value)}")


def _again(case: Case, got: list, requests: list[Request], *knobs: float) -> None:
    """The key of a request is the same whenever it is computed."""
    hint = "The key must not depend on the time at which it is computed, nor on earlier calls."
    again = case.run(case.student, *requests[0], *knobs)
    case.equal(again, got[0], "the pair (key, safe) of the first request, computed once more,", hint=hint)


def _places(got: list[tuple[float, float]], *given: Any) -> tuple[list[int], list[float]]:
    """Of each request how many keys are smaller, and its safe seconds."""
    keys = [key for key, _ in got]
    smaller = [sum(key - one > 1e-6 * max(1.0, abs(key)) for one in keys) for key in keys]
    return smaller, [float(safe) for _, safe in got]


def _why(got: Any, expected: Any, requests: list[Request], ageing: float, grace: float, cheapest: float) -> str:
    knobs = f"ageing={ageing:g}, grace={grace:g}, cheapest={cheapest:g}"
    if isinstance(expected, Raised):
        return f"{knobs}: ageing and grace have to be at least 0."
    costs = [prompt + 4 * most for prompt, most, _, _ in requests]
    told = [f"(cost {cost}, came at {r[2]:g} s, priority {r[3]})" for cost, r in zip(costs, requests)]
    if isinstance(got, Raised):
        return f"{knobs}, request {told[0]}."
    value = [cost + ageing * (r[2] + r[3] * grace) for cost, r in zip(costs, requests)]  # at time 0
    for one, other in combinations(range(len(requests)), 2):
        (mine, right) = ((p[one] > p[other]) - (p[one] < p[other]) for p in (got[0], expected[0]))
        if mine != right:
            by = abs(value[one] - value[other])
            first, second = (one, other) if value[one] <= value[other] else (other, one)
            more = f"is smaller by {by:g} than that of" if right else "is the same as that of"
            return f"{knobs}. At any time the value of {told[first]} {more} {told[second]}; so must its key."
    place = next(i for i, pair in enumerate(zip(got[1], expected[1])) if not math.isclose(*pair, abs_tol=1e-5))
    if not ageing:
        return f"{knobs}, request {told[place]}: waiting earns nothing, so only its cost decides."
    return (
        f"{knobs}. After request {told[place]} one of cost {cheapest:g} and priority 0 has the same key "
        f"if it arrives {expected[1][place]:g} s later."
    )


def _random(draw: Draw) -> tuple:
    requests = [
        (draw.randint(20, 200), draw.randint(1, 60), draw.randint(0, 800) / 8, draw.randint(0, 4)) for _ in range(12)
    ]
    return requests, draw.randint(1, 40) / 4, draw.randint(0, 20) / 4, draw.randint(5, 20)


_KNOBS = (10.0, 2.0, 20)
check_ageing_key = FunctionChecker(
    "ageing_key",
    aged,
    adapt=_of_all,
    form=_are_pairs,
    also=_again,
    observe=_places,
    returns=("the list of how many keys are smaller, for each request,", "the list of safe seconds of the requests"),
    examples=[
        ([(40, 15, 0.0, 0), (100, 25, 0.0, 0)], *_KNOBS),  # costs of 100 and 200
        ([(40, 15, 9.0, 0), (100, 25, 0.0, 0), (40, 15, 11.0, 0)], *_KNOBS),
    ],
    edges={
        "three requests have the same value": ([(40, 15, 4.0, 0), (40, 15, 2.0, 1), (40, 15, 0.0, 2)], *_KNOBS),
        "the values differ by 0.004": ([(40, 15, 4.0, 0), (40, 15, 4.0004, 0)], *_KNOBS),
        "both requests are the cheapest": ([(12, 2, 5.0, 0), (12, 2, 5.0, 3)], *_KNOBS),
        "ageing is 0: waiting earns nothing, so neither arrival nor priority counts": (
            [(12, 2, 50.0, 4), (40, 15, 0.0, 0)], 0.0, 2.0, 20,
        ),
        "grace is 0": ([(40, 15, 1.0, 3), (40, 15, 1.0, 0)], 10.0, 0.0, 20),
        "ageing is negative": ([(40, 15, 0.0, 0)], -1.0, 2.0, 20),
        "grace is negative": ([(40, 15, 0.0, 0)], 10.0, -2.0, 20),
    },
    random=_random,
    trials=25,
    raises=(ValueError,),
    atol=1e-5,
    rtol=1e-5,
    explain=_why,
    hint="Expand the expression: which term is the same for all waiting requests?",
    misconceptions={
        "Who came earlier has waited longer, and goes first: an early arrival makes the key smaller.": dict(sign=-1),
        "A request costs prompt_tokens + 4 * max_tokens.": dict(weight=1),
        "A priority is a delay in seconds: ageing turns it into cost like the arrival.": dict(delayed=False),
        "A priority delays its request, so `safe` is p * grace longer.": dict(safe_of=""),
        "`safe` counts from the request's own arrival: it is a duration, not a moment.": dict(safe_of="arrival"),
        "A new request has a cost, too, at least `cheapest`: only the difference has to be waited for.":
            dict(above=False),
        "Without ageing a cheapest request is safe at once: a request with an equal key does not overtake.":
            dict(without=lambda dear: math.inf),
        "Without ageing waiting never helps a request that costs more than the cheapest: it is never safe.":
            dict(without=lambda dear: 0.0),
    },
)  # fmt: skip
