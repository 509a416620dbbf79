"""Checks of chapter 04: a plan of batches of prompts, compared with every way to cut them. Built in chapter 04."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise

from minillm.book.checks import Draw, FunctionChecker, Timed


def cuts(lengths, max_prompts, bend) -> list[list[int]]:
    """The plan that the statement asks for, from all ways to cut the sorted prompts."""
    order, plans = sorted(range(len(lengths)), key=lambda i: (lengths[i], i)), []
    for count in range(len(order)):
        for places in combinations(range(1, len(order)), count):
            batches = [order[a:b] for a, b in pairwise((0, *places, len(order)))]
            if max(map(len, batches)) <= max_prompts:
                cost = sum(max(bend, len(batch) * lengths[batch[-1]]) for batch in batches)
                plans.append((cost, len(batches), [len(batch) for batch in batches], batches))
    return min(plans)[3] if plans else []


def planned(
    lengths, max_prompts, bend, *, cost=lambda own, bend: max(bend, len(own) * own[-1]),
    rank=lambda cost, count, sizes: (cost, count, sizes), order=lambda lengths, i: (lengths[i], i), most=0,
) -> list[list[int]]:  # fmt: skip
    """The same from the end to the beginning, for many prompts; with switches for mistakes."""
    order = sorted(range(len(lengths)), key=partial(order, lengths))
    best = [(0, 0, [])]  # of the last 0, 1, 2, ... prompts: cost, batches, sizes
    for left in range(1, len(order) + 1):
        tail, plans = order[len(order) - left :], []
        for size in range(1, min(max_prompts + most, left) + 1):
            rest, count, sizes = best[left - size]
            plans.append((rest + cost([lengths[i] for i in tail[:size]], bend), count + 1, [size, *sizes]))
        best.append(min(plans, key=lambda plan: rank(*plan)))
    places = iter(order)
    return [[next(places) for _ in range(size)] for size in best[-1][2]]


def _random_prompts(draw: Draw) -> tuple:
    longest = draw.rng.choice((4, 30, 300))
    lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 10))]
    return lengths, draw.randint(1, 6), draw.rng.choice((0, 0, draw.randint(1, 40), draw.randint(1, 900)))


_EACH_ONCE = "Every prompt is in exactly one batch."
_TOO_SLOW = "Store the best plan for the last prompts, for every number of them, and build on it."

check_plan_batches = FunctionChecker(
    "plan_batches",
    cuts,
    hint=(
        "Least sum of max(bend, prompts · longest); then fewest batches; "
        "then the smallest list of sizes, shortest prompts first."
    ),
    # The first plan is another one under each mistake in the cost.
    examples=[([6, 2, 9, 3], 3, 6), *(([10, 100, 11, 12], 4, bend) for bend in (0, 40, 500))],
    edges=[
        ([], 3, 10),
        ([5], 1, 0),
        ([7, 7, 7, 7], 3, 0),  # every plan costs 28, and two batches can be [1, 3], [2, 2] or [3, 1]
        ([7, 7, 7, 7], 4, 0),
        ([3, 1, 3, 1, 3], 5, 0),
        ([9, 2, 4], 1, 5),
        ([1, 1, 1, 50], 2, 10),
        ([2, 5, 6, 6, 20, 21], 3, 13),
        ([6, 7, 8, 9], 3, 24),
    ],
    random=_random_prompts,
    returns="the plan",
    misconceptions={
        "A batch costs at least as much as one at the ridge point.": partial(
            planned, cost=lambda own, bend: len(own) * own[-1]
        ),
        "A batch costs its padding, too: every prompt counts as long as the longest.": partial(
            planned, cost=lambda own, bend: max(bend, sum(own))
        ),
        "The longest prompt of a batch is its last in the sorted order.": partial(
            planned, cost=lambda own, bend: max(bend, len(own) * own[0])
        ),
        "Sort the prompts by length first.": partial(planned, order=lambda lengths, i: i),
        "Prompts of equal length stand in the order of their indices.": partial(
            planned, order=lambda lengths, i: (lengths[i], -i)
        ),
        "The sum of the costs comes first, the number of batches second.": partial(
            planned, rank=lambda cost, count, sizes: (count, cost, sizes)
        ),
        "Of plans with equal cost take the one with the fewest batches.": partial(
            planned, rank=lambda cost, count, sizes: (cost, -count, sizes)
        ),
        "At equal cost and with equally many batches the smallest list of sizes wins: [1, 3] before [2, 2].": partial(
            planned, rank=lambda cost, count, sizes: (cost, count, [-size for size in sizes])
        ),
        "A batch has at most max_prompts prompts.": partial(planned, most=1),
        _TOO_SLOW: cuts,
    },
    explain=lambda got, expected, lengths, *_: (
        None if sorted(i for batch in got for i in batch) == list(range(len(lengths))) else _EACH_ONCE
    ),
    timed=(
        Timed(
            "a plan for 300 prompts",
            lambda draw: (
                [draw.randint(1, 400) for _ in range(300)],
                draw.randint(70, 120),
                draw.randint(15_000, 30_000),
            ),
            hint=_TOO_SLOW,
            expected=planned,
            seconds=2,
        ),
    ),
)
