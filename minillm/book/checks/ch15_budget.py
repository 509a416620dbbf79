"""The check of chapter 15's options under a budget of bytes: any choice that nothing beats is right.
Built in chapter 15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Raised, Timed
from minillm.book.checks.ch15_oracle import Option

Matrices = list[list[Option]]


def best_choice(
    matrices: Matrices, budget: int, *, better: Callable[[Option], tuple] = lambda sums: (sums.error, sums.num_bytes)
) -> list[int]:
    """A place for each matrix: of all that fit, what is least in the sums of errors, then of bytes."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # bytes -> (smallest error, choice)
    for options in matrices:
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for spent, (error, chosen) in best.items():
            for place, option in enumerate(options):
                key, value = spent + option.num_bytes, error + option.error
                if key <= budget and (key not in after or value < after[key][0]):
                    after[key] = (value, (*chosen, place))
        best = after
    if not best or budget < 0:
        raise ValueError("not even the smallest options fit")
    spent = min(best, key=lambda size: better(Option(size, best[size][0])))
    return list(best[spent][1])


def _greedy(matrices: Matrices, budget: int) -> list[int]:
    """The best gain a byte goes first."""
    chosen = [min(range(len(options)), key=lambda i: options[i].num_bytes) for options in matrices]
    while True:
        steps = []
        for number, options in enumerate(matrices):
            now = options[chosen[number]]
            for place, option in enumerate(options):
                room = budget - _sums(chosen, matrices, budget)[1]
                cost, gain = option.num_bytes - now.num_bytes, now.error - option.error
                if gain > 0 and cost <= room:
                    steps.append((-gain / max(cost, 1e-9), number, place))
        if not steps:
            return chosen
        _, number, place = min(steps)
        chosen[number] = place


def _sums(choice: list[int], matrices: Matrices, budget: int) -> tuple[int, int]:
    """(error, bytes) of a choice."""
    picked = [options[place] for options, place in zip(matrices, choice)]
    return sum(one.error for one in picked), sum(one.num_bytes for one in picked)


def _is_choice(case: Case, got: Any, matrices: Matrices, budget: int) -> None:
    case.true(
        type(got) is list and len(got) == len(matrices),
        f"the result is {got!r}, not a list with a place for each matrix",
    )
    for place, options in zip(got, matrices):
        case.true(
            type(place) is int and 0 <= place < len(options),
            f"the result holds {place!r}, which is not a place in a list of {len(options)} options",
        )
    size = _sums(got, matrices, budget)[1]
    case.true(size <= budget, f"the choice {got} takes {size} bytes", hint="All matrices together must fit.")


def _explain(got: Any, expected: Any, matrices: Matrices, budget: int) -> str:
    if isinstance(expected, Raised):
        return "Not even the smallest options fit."
    example = best_choice(matrices, budget)
    error, size = expected
    if isinstance(got, tuple) and got[0] == error:
        return f"Ties go to fewer bytes: {example} loses as little, {error}, with {size}."
    return (
        f"Here a better choice exists: {example} loses {error}. Remember the smallest error for every number of bytes."
    )


def _random(draw: Draw) -> tuple:
    matrices = [_some_options(draw, draw.randint(1, 5)) for _ in range(draw.randint(1, 6))]
    least, most = (sum(kind(o.num_bytes for o in options) for options in matrices) for kind in (min, max))
    return matrices, draw.randint(least, most + 3)


def _some_options(draw: Draw, count: int) -> list[Option]:
    return [Option(draw.randint(0, 9), draw.randint(0, 12)) for _ in range(count)]


def _many(draw: Draw) -> tuple:
    matrices = [[Option(draw.randint(1, 41), draw.randint(0, 1000)) for _ in range(6)] for _ in range(24)]
    return matrices, 24 * draw.randint(15, 25)


def _cases(*cases: tuple[list[list[tuple[int, int]]], int]) -> list[tuple]:
    return [([[Option(*one) for one in options] for options in matrices], budget) for matrices, budget in cases]


_SLOW = Timed(
    "a choice for 24 matrices with 6 options each",
    _many,
    "6^24 combinations are too many: of all choices that have spent the same bytes, keep one.",
    part="random",
)
check_choose_options = FunctionChecker(
    "choose_options",
    best_choice,
    observe=_sums,
    returns=("the error of the choice", "the bytes of the choice"),
    form=_is_choice,
    raises=(ValueError,),
    examples=_cases(([[(10, 0), (0, 60)], [(6, 10), (0, 50)]], 10)),  # the best gain a byte first is wrong
    edges=_cases(
        ([[(5, 7)]], 5),
        ([[(5, 7), (3, 7), (4, 7)]], 9),  # the same error for fewer bytes
        ([[(4, 1), (2, 3)], [(4, 1), (2, 3)]], 100),  # more budget than anyone needs
        ([[(0, 9), (3, 2)], [(0, 4)]], 0),
        ([[(2, 5), (7, 8)], [(1, 9), (9, 0)]], 3),  # exactly the smallest
        ([[(3, 8), (1, 1)], [(2, 2), (6, 6)]], 7),  # more bytes can be worse
        ([[(6, 4), (5, 5), (1, 9)], [(6, 4), (5, 5), (1, 9)]], 11),
        ([[(5, 0)], [(4, 0), (3, 9)]], 7),
        ([[(1, 0)]], 0),
        ([[(0, 0)]], -1),
    ),
    random=_random,
    trials=60,
    timed=(_SLOW, _SLOW, _SLOW),
    explain=_explain,
    hint="For every number of bytes that can be spent on the matrices so far, remember the smallest error.",
    misconceptions={
        "The best gain a byte first is not the best in sum.": _greedy,
        "Ties go to fewer bytes where the errors are equal.": dict(better=lambda sums: (sums.error, -sums.num_bytes)),
    },
)
