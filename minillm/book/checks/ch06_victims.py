"""Checks of chapter 06: victims, by trying all subsets, or all of each group. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from minillm.book.checks import Draw, FunctionChecker, Timed


class Running(NamedTuple):
    """A running request: its table, and what it costs to compute it again. Only requests of one group share blocks."""

    name: str
    group: str
    blocks: list[int]
    cost: int

    def __repr__(self) -> str:
        return f"Running{tuple(self)}"


def random_running(draw: Draw, count: int) -> list[Running]:
    """Requests in groups of one to four, in no order; some share the head of their tables with their group.

    Half of the time a request costs what it holds, so that many sets cost the same.
    """
    running, fresh, even = [], iter(range(1, 10_000)), draw.rng.random() < 0.5
    while len(running) < count:
        group, shared = f"g{len(running)}", [next(fresh) for _ in range(draw.randint(0, 4))]
        for index in range(min(draw.rng.choice((1, 1, 2, 3, 4)), count - len(running))):
            # One that has copied its last block.
            kept = shared[: draw.rng.choice((len(shared), draw.randint(0, len(shared) + 1)))]
            blocks = kept + [next(fresh) for _ in range(draw.randint(0, 4))]
            running.append(Running(f"{group}.{index}", group, blocks, len(blocks) if even else draw.randint(1, 12)))
    draw.rng.shuffle(running)
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


def best_of_all(
    running: list[Running],
    k: int,
    *,
    freed: Callable[[list[Running], Iterable[int]], int] = lambda running, victims: len(freed_by(running, victims)),
    enough: Callable[[int, int], bool] = lambda freed, k: freed >= k,
    rank: Callable[[list[Running], Iterable[int]], tuple] = rank,
    none: list | None = None,
) -> list[str] | None:
    """The names of the best subset of all, with switches for known mistakes."""
    places = range(len(running))
    subsets = (s for size in range(len(running) + 1) for s in combinations(places, size))
    best = min((s for s in subsets if enough(freed(running, s), k)), key=lambda s: rank(running, s), default=None)
    return none if best is None else [running[i].name for i in sorted(best)]


def best_by_groups(running: list[Running], k: int) -> list[str] | None:
    """The same: every subset of each group tried, and the best for each number of blocks kept."""
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
    return [running[i].name for i in sorted(best[k])] if k in best else None


def greedy(running: list[Running], k: int) -> list[str] | None:
    """The cheapest for each block goes, until there is room."""
    gone: list[int] = []
    while len(freed_by(running, gone)) < k:
        left = [place for place in range(len(running)) if place not in gone]
        if not left:
            return None
        gone.append(min(left, key=lambda i: running[i].cost / (len(set(running[i].blocks) - {0}) or 0.1)))
    return [running[i].name for i in sorted(gone)]


def from_the_back(running: list[Running], k: int) -> list[str] | None:
    """The latest arrivals go, as the scheduler has it."""
    sets = (range(start, len(running)) for start in range(len(running), -1, -1))
    return next(([running[i].name for i in s] for s in sets if len(freed_by(running, s)) >= k), None)


def _victims(running: list[Running], k: int) -> list[str] | None:
    return best_of_all(running, k) if len(running) < 10 else best_by_groups(running, k)


def _cases(*cases: tuple) -> list[tuple]:
    return [([Running(*request) for request in requests], k) for *requests, k in cases]


_A, _B = ("a", "a", [1, 2], 10), ("b", "b", [3, 4], 10)
_FOUR = ("a", "a", [1, 2, 3], 3), ("b", "b", [4, 5], 2), ("c", "c", [6, 7], 2), ("d", "d", [8], 1)
_FORKS = ("a", "a", [1, 2, 3], 44), ("b0", "b", [4, 5, 6], 40), ("b1", "b", [4, 5, 7], 41), ("c", "c", [8], 9)


def _explain_victims(got: Any, expected: Any, running: list[Running], k: int) -> str | None:
    names = [one.name for one in running]
    if expected is None:
        return f"All of them together free {len(freed_by(running, range(len(running))))} blocks, {k} are wanted: None."
    if got is None or not set(got) <= set(names):
        return None
    places, right = (sorted({names.index(name) for name in one}) for one in (got, expected))
    freed, cost, least = len(freed_by(running, places)), *(sum(running[i].cost for i in s) for s in (places, right))
    if freed < k:
        return (
            f"{got} free {freed} blocks. One that another request holds stays, one with several owners counts once, "
            "0 is no block."
        )
    if cost > least:
        return f"{got} cost {cost} and free {freed}; {expected} cost {least} and free {len(freed_by(running, right))}."
    if len(places) > len(right):
        return f"Both cost {cost}: the smaller number of victims wins."
    return f"Both cost {cost}, and both are {len(places)}: the later arrivals go. Compare from the last one on."


def _random_victims(draw: Draw) -> tuple:
    running = random_running(draw, draw.randint(1, 9))
    return running, draw.randint(0, len(freed_by(running, range(len(running)))) + 2)


def _owners(running: list[Running], victims: Iterable[int]) -> int:
    return sum(block in freed_by(running, victims) for i in victims for block in set(running[i].blocks))


check_choose_victims = FunctionChecker(
    "choose_victims",
    _victims,
    hint="A block is free when all its owners are preempted. Lowest cost, then the fewest, then the latest.",
    examples=_cases(*((*_FORKS, k) for k in range(1, 10))),
    edges=_cases(
        (0,),
        (1,),
        (_A, _B, 0),
        (_A, _B, 5),
        (_A, _B, 2),  # the same cost, the same number: the later one
        (*_FOUR, 4),  # a and d, or b and c: d is the latest of all
        (*_FOUR[:2], ("c", "c", [6, 7], 2), 4),
        (*_FOUR[::-1], 4),
        (_A, ("b", "b", [3], 5), ("c", "c", [4], 5), 2),  # the same cost: one rather than two
        (("a", "a", [1], 3), ("b", "b", [2], 3), ("c", "c", [3], 3), ("d", "d", [4, 5], 9), 2),
        (("a", "a", [0, 0, 1], 4), ("b", "b", [2, 3, 0], 5), 2),  # the null block has no owner
        (("a0", "a", [1, 2, 3, 4], 5), ("a1", "a", [1, 2, 3, 5], 5), ("b", "b", [6, 7], 12), 2),
        (("a0", "a", [1, 2], 5), ("a1", "a", [1, 2], 5), ("b", "b", [6], 11), 1),  # alone, neither frees anything
        (("a", "a", [1, 2, 3, 4, 5], 8), ("b", "b", [6], 5), ("c", "c", [7], 5), 2),  # more than asked, and cheaper
        (("a", "a", [1], 0), ("b", "b", [2], 0), 1),
        (("b1", "b", [1, 4], 6), ("a", "a", [2, 3], 7), ("b0", "b", [1, 5], 1), 3),  # a group need not stand together
    ),
    random=_random_victims,
    returns="the list of victims",
    misconceptions={
        "A block stays while another request has it: it is free when all its owners are preempted.": partial(
            best_of_all, freed=lambda running, s: len({b for i in s for b in running[i].blocks} - {0})
        ),
        "The null block, 0, cannot be freed.": partial(
            best_of_all,
            freed=lambda running, s: len(freed_by(running, s)) + any(0 in running[i].blocks for i in s),
        ),
        "A block counts once, however many requests held it.": partial(best_of_all, freed=_owners),
        "At least k blocks become free; more are as good.": partial(best_of_all, enough=lambda freed, k: freed == k),
        "Of equal costs, the smaller number of victims wins.": partial(
            best_of_all, rank=lambda running, s: (rank(running, s)[0], -len(s), rank(running, s)[2])
        ),
        "Of equal costs and numbers, the later arrivals are preempted, not the earlier.": partial(
            best_of_all, rank=lambda running, s: (*rank(running, s)[:2], sorted(s))
        ),
        "Of equal costs and numbers: compare the indices from the largest down, not from the smallest up.": partial(
            best_of_all, rank=lambda running, s: (*rank(running, s)[:2], [-i for i in sorted(s)])
        ),
        "If all of them do not free k blocks, the answer is None.": partial(best_of_all, none=[]),
        "The names come in the order of `running`.": lambda running, k: (
            (best_of_all(running, k) or [])[::-1] or (best_of_all(running, k))
        ),
        "The lowest cost per block is not enough: two free blocks do not help if three are needed.": greedy,
        "The scheduler preempts from the back; here the lowest total cost decides.": from_the_back,
        "Trying every subset takes forever here. Only requests of one group share blocks: solve each group, then put "
        "the groups together.": best_of_all,
    },
    explain=_explain_victims,
    timed=tuple(
        Timed(
            f"a choice among {count} requests",
            lambda draw, count=count: (random_running(draw, count), draw.randint(20, 40)),
            part="random",
            seconds=2,
            hint="Trying every subset takes forever here. Only requests of one group share blocks: solve each group, "
            "then put the groups together.",
        )
        for count in (36, 40)
    ),
)
