"""The check of chapter 14's recorded sizes. Built in chapter 14."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Timed


def bill(counts: dict[int, int], sizes: Sequence[int]) -> tuple[int, int, int]:
    """(padded rows, graphs, steps without a graph) of these recorded sizes."""
    padded = alone = 0
    for rows, steps in counts.items():
        fitting = [size for size in sizes if size >= rows]
        if fitting:
            padded += steps * (min(fitting) - rows)
        else:
            alone += steps
    return padded, len(sizes), alone


def _cost(counts: dict[int, int], sizes: Sequence[int], graph: int, eager: int) -> int:
    padded, graphs, alone = bill(counts, sizes)
    return padded + graphs * graph + alone * eager


def best_buckets(counts: dict[int, int], graph: int, eager: int, *, more_graphs: bool = False) -> tuple[list[int], int]:
    """(sizes, cost), from the best way to come to each size, the smallest first. The keyword is a mistake."""
    sign = -1 if more_graphs else 1
    ways: dict[int, tuple] = {0: (0, 0, [])}  # last size -> (cost, graphs, sizes)
    for size in sorted(counts):
        ways[size] = min(
            (cost + graph + _padding(counts, last, size), graphs + sign, [*sizes, size])
            for last, (cost, graphs, sizes) in ways.items()
        )
    cost, _, sizes = min(
        (cost + eager * sum(steps for rows, steps in counts.items() if rows > last), graphs, sizes)
        for last, (cost, graphs, sizes) in ways.items()
    )
    return sizes, cost


def _padding(counts: dict[int, int], last: int, size: int) -> int:
    """The padded rows of the steps that are larger than `last` and fit into `size`."""
    return sum(steps * (size - rows) for rows, steps in counts.items() if last < rows <= size)


def _well_priced(case: Case, got: Any, counts: dict[int, int], graph: int, eager: int) -> None:
    """The form of the result, the cost of the sizes that it names, and whether others cost less."""
    case.true(
        isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], list),
        f"the result is {got!r}, not (sizes, cost) with a list of sizes",
    )
    sizes, cost = got
    case.is_a(sizes, list, "sizes", of=int)
    case.true(
        sizes == sorted(set(sizes)) and all(size > 0 for size in sizes),
        f"sizes are {sizes}; expected rising numbers from 1 on, none twice",
    )
    right, best = best_buckets(counts, graph, eager)
    mine, facts = _cost(counts, sizes, graph, eager), _facts(counts, sizes)
    case.equal(
        cost,
        mine,
        f"cost, of the sizes {sizes}\n  cost",
        hint=f"{facts} A step takes the smallest graph that holds it; only those larger than all have none.",
    )
    told = f"sizes are {sizes}, which cost {mine}; expected {right}, which cost {best}"
    case.true(mine == best, told, hint=f"{facts} {_facts(counts, right)}")


def _facts(counts: dict[int, int], sizes: list[int]) -> str:
    padded, graphs, alone = bill(counts, sizes)
    shown = sizes if len(sizes) < 20 else f"{len(sizes)} sizes"
    return f"{shown}: {padded} padded rows, {graphs} graphs, {alone} steps without one."


def _random(draw: Draw) -> tuple:
    counts = {draw.randint(1, 11): draw.randint(1, draw.rng.choice((3, 30))) for _ in range(draw.randint(1, 8))}
    return counts, draw.randint(0, draw.rng.choice((4, 40))), draw.randint(0, draw.rng.choice((6, 60)))


check_choose_buckets = FunctionChecker(
    "choose_buckets",
    best_buckets,
    returns=("sizes", "cost"),
    form=_well_priced,
    examples=[({1: 40, 3: 10, 4: 30, 7: 5, 8: 20}, 12, 50), ({2: 100, 9: 1}, 10, 4)],
    edges=[
        ({}, 3, 5),
        ({5: 1}, 3, 5),
        ({5: 1}, 5, 3),
        ({5: 1}, 4, 4),
        ({1: 2, 2: 2, 3: 2}, 0, 9),
        ({1: 1, 2: 1, 3: 1, 4: 1}, 10**6, 10**6),
        ({1: 4, 2: 4, 3: 4}, 4, 100),
        ({2: 3, 5: 1, 8: 1}, 3, 7),
        ({8: 2, 3: 5, 6: 2}, 6, 30),
        ({1: 1, 3: 2, 5: 1}, 4, 9),
        ({4: 5, 9: 1}, 2, 1),
        ({4: 5, 9: 1}, 2, 3),
        ({7: 10}, 0, 0),
        ({1: 1, 8: 1}, 7, 100),
        ({5: 1, 2: 1, 1: 3}, 4, 4),
        ({5: 4, 4: 3, 6: 1, 3: 2}, 6, 5),
        ({1: 6, 2: 3, 4: 3, 8: 1}, 6, 6),
    ],
    timed=(
        Timed(
            "133 sizes",
            lambda draw: ({size: draw.randint(1, 60) for size in range(1, 400, 3)}, 500, 800),
            "With so many sizes it cannot be every set of them. "
            "What is best up to a size does not depend on what follows.",
            lines=4_000_000,
        ),
    ),
    random=_random,
    trials=60,
    hint="The best sizes up to each size, from the smallest up; each builds on a smaller one.",
    explain=lambda got, expected, *given: (
        f"Both cost {expected[1]}. Fewer graphs first, then the smaller list as Python compares lists."
    ),
    misconceptions={
        "Both cost the same. Fewer graphs first, then the smaller list as Python compares lists.": dict(
            more_graphs=True
        ),
    },
    forbid=("minillm.engine.graphs.bucket_sizes",),
)
