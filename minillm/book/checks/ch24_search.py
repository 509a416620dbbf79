"""Checks of chapter 24: the cheapest probes for a saturation rate. Built in chapter 24."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Timed


class Probe:
    """A server that holds its promise up to `answer`; notes which rates are probed."""

    def __init__(self, answer: int) -> None:
        self.answer, self.probed = answer, []

    def __call__(self, rate: int) -> bool:
        self.probed.append(rate)
        return rate <= self.answer

    def __repr__(self) -> str:
        return f"a probe that holds up to {self.answer}"


@functools.cache
def plan(most: int, passing: int, failing: int) -> tuple[tuple[int, int], ...]:
    """For 0 to `most` possible answers: the least that the worst case of telling them apart can cost, and how many of
    the answers lie below the first probe."""
    found = [(0, 0), (0, 0)]
    for answers in range(2, most + 1):
        found.append(min((max(failing + found[n][0], passing + found[answers - n][0]), n) for n in range(1, answers)))
    return tuple(found)


def saturation(
    probe: Callable[[int], bool],
    num_rates: int,
    passing: int,
    failing: int,
    *,
    below=None,
    more: int = 0,
    least: int = 0,
) -> int:
    """below: from the number of answers to how many lie below the next probe. least: a rate that is taken for sure."""
    below = below or (lambda answers: plan(num_rates + 1, passing, failing)[answers][1])
    low, answers = min(least, num_rates), num_rates + 1 - min(least, num_rates)
    while answers > 1:
        count = below(answers)
        low, answers = (low + count, answers - count) if probe(low + count + more) else (low, count)
    return low


def _again_and_again(probe: Callable[[int], bool], num_rates: int, passing: int, failing: int) -> int:
    def cost(answers: int) -> tuple[int, int]:
        if answers == 1:
            return 0, 0
        options = range(1, answers)
        return min((max(failing + cost(n)[0], passing + cost(answers - n)[0]), n) for n in options)

    return saturation(probe, num_rates, passing, failing, below=lambda answers: cost(answers)[1])


def _costs(case: Case, got: Any, probe: Probe, num_rates: int, passing: int, failing: int) -> None:
    least = plan(num_rates + 1, passing, failing)[-1][0] if num_rates else 0
    spent = sum(passing if rate <= probe.answer else failing for rate in probe.probed)
    for rate in probe.probed:
        case.true(
            type(rate) is int and 1 <= rate <= num_rates,
            f"probe({rate!r}) was called; the rates are whole numbers from 1 to {num_rates}",
            hint="With the answers low, low + 1, ... possible, the probe at rate low + n has n of them below it.",
        )
    case.true(
        spent <= least,
        f"the probes {probe.probed} cost {spent}; {least} is enough whatever the answer is",
        hint=_NEARER,
    )


_NEARER = "A probe that fails costs more, so probe nearer to the rate that is known to hold: as the least cost has it."


def _all_answers(*searches: tuple[int, int, int]) -> list[tuple]:
    return [(Probe(answer), *search) for search in searches for answer in range(search[0] + 1)]


def _random_search(draw: Draw) -> tuple:
    num_rates = draw.randint(0, 50)
    return Probe(draw.randint(0, num_rates + 1)), num_rates, draw.randint(1, 8), draw.randint(1, 20)


check_find_saturation = FunctionChecker(
    "find_saturation",
    saturation,
    hint=_NEARER,
    examples=_all_answers((7, 1, 1), (7, 1, 3)),
    edges=_all_answers(
        (0, 1, 1),
        (1, 1, 5),
        (2, 1, 10),
        (8, 1, 1),
        (15, 1, 1),
        (16, 1, 1),
        (12, 1, 100),  # one failure costs more than all passes: from below, one by one
        (12, 7, 1),  # a pass may be the more expensive one
    ),
    random=_random_search,
    trials=150,
    returns="the saturation rate",
    seconds=3,
    misconceptions={
        "There may be no rate at which the promise holds: the answer is 0 then.": dict(least=1),
        "The answer is the last rate that holds, not the first that fails.": lambda *given: saturation(*given) + 1,
        "Work out the least cost of each number of candidates once, not again and again.": _again_and_again,
    },
    also=_costs,
    timed=(
        Timed(
            "150 rates",
            lambda draw: (Probe(draw.randint(0, 151)), 150, 2, 5),
            hint="Work out the least cost of each number of candidates once, not again and again.",
        ),
    ),
    forbid=("minillm.bench.load.search.find_rate",),
)
