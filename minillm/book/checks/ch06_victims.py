"""References of chapter 06's last exercise: victims by trying all of them, or all of each group.
Built in chapter 06."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

from minillm.book.checks import Case


class Running(NamedTuple):
    """A running request: its table, and what it costs to compute it again. Only requests of one group share blocks."""

    name: str
    group: str
    blocks: list[int]
    cost: int

    def __repr__(self) -> str:
        return f"Running{tuple(self)}"


def random_running(case: Case, count: int) -> list[Running]:
    """Requests in groups of one to four, in no order; some share the head of their tables with their group."""
    running, fresh = [], iter(range(1, 10_000))
    while len(running) < count:
        group, shared = f"g{len(running)}", [next(fresh) for _ in range(case.randint(0, 4))]
        for index in range(min(case.rng.choice((1, 1, 2, 3, 4)), count - len(running))):
            # One that has copied its last block.
            kept = shared[: case.rng.choice((len(shared), case.randint(0, len(shared) + 1)))]
            blocks = kept + [next(fresh) for _ in range(case.randint(0, 4))]
            running.append(Running(f"{group}.{index}", group, blocks, case.randint(1, 12)))
    case.rng.shuffle(running)
    return running


def freed_by(running: list[Running], victims: Iterable[int]) -> set[int]:
    """The blocks that become free when the requests at these places go: those that no other table holds."""
    victims = set(victims)
    kept = {block for index, one in enumerate(running) if index not in victims for block in one.blocks}
    return {block for index in victims for block in running[index].blocks} - kept - {0}


def rank(running: list[Running], victims: Iterable[int]) -> tuple:
    """Cheaper first, then fewer, then the later arrivals."""
    victims = tuple(victims)
    return sum(running[i].cost for i in victims), len(victims), [-i for i in sorted(victims, reverse=True)]


def best_of_all(running: list[Running], k: int) -> list[int] | None:
    """Every subset tried."""
    places = range(len(running))
    enough = [
        s for size in range(len(running) + 1) for s in combinations(places, size) if len(freed_by(running, s)) >= k
    ]
    return sorted(min(enough, key=lambda s: rank(running, s))) if enough else None


def best_by_groups(running: list[Running], k: int) -> list[int] | None:
    """Every subset of each group tried, and the best for each number of blocks kept."""
    groups: dict[str, list[int]] = {}
    for index, one in enumerate(running):
        groups.setdefault(one.group, []).append(index)
    best: dict[int, tuple[int, ...]] = {0: ()}
    for members in groups.values():
        options = [s for size in range(len(members) + 1) for s in combinations(members, size)]
        grown: dict[int, tuple[int, ...]] = {}
        for freed, chosen in best.items():
            for option in options:
                now, both = min(k, freed + len(freed_by(running, option))), chosen + option
                if now not in grown or rank(running, both) < rank(running, grown[now]):
                    grown[now] = both
        best = grown
    return sorted(best[k]) if k in best else None
