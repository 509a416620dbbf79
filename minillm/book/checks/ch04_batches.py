"""Checks of chapter 04: a plan of batches of prompts. Built in chapter 04."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from minillm.book.checks import Case, Checker

check_plan_batches = Checker(
    "plan_batches",
    hint=(
        "Least sum of max(bend, prompts · longest); then fewest batches; "
        "then the smallest list of sizes, shortest prompts first."
    ),
)


@check_plan_batches.part("example")
def _plan_example(case: Case) -> None:
    _planned(
        case, [10, 100, 11, 12], 4, 0, [[0], [2], [3], [1]], "Without a bend every prompt of its own length goes alone."
    )
    _planned(
        case,
        [10, 100, 11, 12],
        4,
        40,
        [[0, 2, 3], [1]],
        "Three short ones together: max(40, 3 · 12) = 40, and 100 alone.",
    )
    _planned(
        case, [10, 100, 11, 12], 4, 500, [[0, 2, 3, 1]], "All of them together stay below the bend: 4 · 100 = 400."
    )


@check_plan_batches.part("edges")
def _plan_edges(case: Case) -> None:
    _planned(case, [], 3, 10, [], "No prompts, no batches.")
    _planned(case, [5], 1, 0, [[0]])
    _planned(
        case,
        [7, 7, 7, 7],
        3,
        0,
        [[0], [1, 2, 3]],
        "Every plan costs 28; two batches are the fewest, and sizes [1, 3] come before [2, 2].",
    )
    _planned(case, [7, 7, 7, 7], 4, 0, [[0, 1, 2, 3]], "Every plan costs 28: the fewest batches win.")
    _planned(case, [3, 1, 3, 1, 3], 5, 0, [[1, 3], [0, 2, 4]], "Equal lengths stand by their index.")
    _planned(case, [9, 2, 4], 1, 5, [[1], [2], [0]], "max_prompts = 1")
    _planned(case, [1, 1, 1, 50], 2, 10, _cuts([1, 1, 1, 50], 2, 10), "At most two prompts to a batch.")
    _planned(case, [2, 5, 6, 6, 20, 21], 3, 13, _cuts([2, 5, 6, 6, 20, 21], 3, 13))
    lengths = [1 + (i * i * 7919) % 997 for i in range(300)]
    batches = case.call(lengths, 32, 1500)
    case.equal(
        sorted(i for batch in batches for i in batch),
        list(range(300)),
        "the list of all indices of a plan for 300 prompts",
    )
    case.equal(_cost(lengths, batches, 1500), _least(lengths, 32, 1500), "the cost of the plan for 300 prompts")


@check_plan_batches.part("random")
def _plan_random(case: Case) -> None:
    for trial in range(40):
        lengths = [case.randint(1, case.rng.choice((4, 30, 300))) for _ in range(case.randint(1, 10))]
        most, bend = case.randint(1, 6), case.rng.choice((0, 0, case.randint(1, 40), case.randint(1, 900)))
        expected = _cuts(lengths, most, bend)
        if trial < 8 and len(lengths) <= 7 and _any_grouping(lengths, most, bend) != _cost(lengths, expected, bend):
            raise RuntimeError(f"no plan of neighbours is the cheapest for {lengths}: the exercise would be wrong")
        _planned(case, lengths, most, bend, expected)


def _cost(lengths: list[int], batches: list[list[int]], bend: int) -> int:
    return sum(max(bend, len(batch) * max(lengths[i] for i in batch)) for batch in batches)


def _cuts(lengths: list[int], most: int, bend: int) -> list[list[int]]:
    """The plan that the statement wants, by trying all ways to cut the sorted prompts."""
    order, plans = sorted(range(len(lengths)), key=lambda i: (lengths[i], i)), []
    for count in range(len(order)):
        for cuts in combinations(range(1, len(order)), count):
            batches = [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)))]
            if max(map(len, batches)) <= most:
                plans.append((_cost(lengths, batches, bend), len(batches), [len(batch) for batch in batches], batches))
    return min(plans)[3]


def _any_grouping(lengths: list[int], most: int, bend: int) -> int:
    """The least cost over all groupings, neighbours or not."""

    @cache
    def least(rest: tuple[int, ...]) -> int:
        if not rest:
            return 0
        first, others = rest[0], rest[1:]
        return min(
            max(bend, (count + 1) * max(first, *mates, 0)) + least(_without(others, mates))
            for count in range(min(most, len(rest)))
            for mates in combinations(others, count)
        )

    return least(tuple(sorted(lengths)))


def _without(lengths: tuple[int, ...], taken: tuple[int, ...]) -> tuple[int, ...]:
    left = list(lengths)
    for length in taken:
        left.remove(length)
    return tuple(left)


def _least(lengths: list[int], most: int, bend: int) -> int:
    ordered, best = sorted(lengths), [0]
    for end in range(1, len(ordered) + 1):
        best.append(min(best[end - size] + max(bend, size * ordered[end - 1]) for size in range(1, min(most, end) + 1)))
    return best[-1]


def _planned(
    case: Case, lengths: list[int], most: int, bend: int, expected: list[list[int]], hint: str | None = None
) -> None:
    got = case.call(lengths, most, bend)
    told = f"lengths {lengths}, max_prompts {most}, bend {bend}"
    case.true(
        isinstance(got, list) and all(isinstance(batch, list) and batch for batch in got),
        f"returned {got!r}, not a list of lists; {told}",
    )
    case.equal(
        sorted(i for batch in got for i in batch),
        list(range(len(lengths))),
        f"the list of all indices in the plan ({told})",
        hint="Every prompt is in exactly one batch.",
    )
    case.true(all(len(batch) <= most for batch in got), f"a batch has more than {most} prompts: {got}; {told}")
    case.equal(
        _cost(lengths, got, bend), _cost(lengths, expected, bend), f"the cost of the plan {got} ({told})", hint=hint
    )
    case.equal(got, expected, f"the plan, among those of equal cost ({told})", hint=hint)
