"""The load of a placement, and the best one of all, for chapter 21. Built in chapter 21."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations


def largest_load(load: Sequence[float], ranks: Sequence[Sequence[int]]) -> float:
    """Of a rank, where the copies of an expert share its load."""
    copies = [sum(expert in held for held in ranks) for expert in range(len(load))]
    return max(sum(load[expert] / copies[expert] for expert in held) for held in ranks)


def best_largest_load(load: tuple[float, ...], num_ranks: int, each: int) -> float:
    """The smallest of all placements, each tried; for small cases."""
    sets = list(combinations(range(len(load)), min(each, len(load))))

    @cache
    def search(left: int, first: int, chosen: tuple[int, ...]) -> float:
        if not left:
            held = [sets[index] for index in chosen]
            covered = {expert for one in held for expert in one}
            return largest_load(load, held) if len(covered) == len(load) else float("inf")
        return min(search(left - 1, index, (*chosen, index)) for index in range(first, len(sets)))

    return search(num_ranks, 0, ())
