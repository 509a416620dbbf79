"""Where experts are placed: which ranks hold which, and copies of those that most tokens go to. Built in chapter 21.

    load of 4 experts    [ 70 10 10 10 ]     two ranks with room for 3 experts each
    copies               [  3  1  1  1 ]     each more copy goes to the expert whose copies have the most load
    ranks                [ 0 1 2 ] [ 0 0 3 ] is not allowed: two copies on a rank share nothing. So:
                         [ 0 1 2 ] [ 0 3 1 ]

A rank waits for the slowest one, so what counts is the largest load of a rank over the mean: the imbalance. Copies are
placed by load, the largest first, each on the rank with the least load so far (as in EPLB, DeepSeek-AI 2025,
https://github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """`ranks[r]` are the experts that rank r holds, each once. Every expert is on at least one rank."""

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        held = [expert for rank in self.ranks for expert in rank]
        if not held or set(held) != set(range(max(held) + 1)):
            raise ValueError(f"ranks={self.ranks} leave out an expert; every one from 0 on must be on some rank")
        if any(len(set(rank)) < len(rank) for rank in self.ranks):
            raise ValueError(f"ranks={self.ranks} have an expert twice on one rank; copies belong on different ranks")

    @property
    def num_experts(self) -> int:
        return 1 + max(expert for held in self.ranks for expert in held)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each expert."""
        return tuple(
            tuple(rank for rank, held in enumerate(self.ranks) if expert in held) for expert in range(self.num_experts)
        )

    def loads(self, load: Sequence[float]) -> list[float]:
        """The load of each rank, where the copies of an expert share its load evenly."""
        return [sum(load[expert] / len(self.hosts[expert]) for expert in held) for held in self.ranks]

    def imbalance(self, load: Sequence[float]) -> float:
        """The largest load of a rank over the mean: 1 is perfect, the number of ranks the worst there can be."""
        loads = self.loads(load)
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def even_placement(num_experts: int, num_ranks: int) -> Placement:
    """Consecutive experts, without copies. Raises ValueError where they do not divide evenly."""
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks do not divide {num_experts} experts; use as many ranks as divide them, or place_experts"
        )
    each = num_experts // num_ranks
    return Placement(tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(num_ranks)))


def place_experts(load: Sequence[float], num_ranks: int, experts_each: int) -> Placement:
    """Experts and copies of the hot ones on `num_ranks` ranks that hold at most `experts_each`.

    `load[e]` is how many tokens go to expert e, counted or predicted. Raises ValueError where there is no room for
    every expert, or more room than copies on different ranks can take.
    """
    num_experts, room = len(load), num_ranks * experts_each
    if room < num_experts:
        raise ValueError(
            f"{num_ranks} ranks of experts_each={experts_each} hold {room} of {num_experts} experts; raise "
            f"experts_each to {-(-num_experts // num_ranks)}"
        )
    if experts_each > num_experts:
        raise ValueError(f"experts_each={experts_each} is not allowed; allowed: up to the {num_experts} there are")
    copies = count_copies(load, room, num_ranks)
    placed: list[set[int]] = [set() for _ in range(num_ranks)]
    carried = [0.0] * num_ranks
    # The experts with most copies first among equals: each needs a different rank for every copy.
    order = sorted(range(num_experts), key=lambda e: (-load[e] / copies[e], -copies[e], e))
    pieces = [(load[expert] / copies[expert], expert) for expert in order for _ in range(copies[expert])]
    for share, expert in pieces:
        free = [r for r in range(num_ranks) if len(placed[r]) < experts_each and expert not in placed[r]]
        if not free:
            free = [_make_room(placed, carried, load, copies, expert, experts_each)]
        rank = min(free, key=lambda r: (carried[r], r))
        placed[rank].add(expert)
        carried[rank] += share
    return Placement(tuple(tuple(sorted(held)) for held in placed))


def count_copies(load: Sequence[float], room: int, num_ranks: int) -> list[int]:
    """How many copies of each expert fill `room` places: one more, again and again, for the expert whose copies have
    the most load, up to one on each rank."""
    copies = [1] * len(load)
    for _ in range(room - len(load)):
        growing = [expert for expert in range(len(load)) if copies[expert] < num_ranks]
        expert = max(growing, key=lambda e: (load[e] / copies[e], -e))
        copies[expert] += 1
    return copies


def _make_room(
    placed: list[set[int]], carried: list[float], load: Sequence[float], copies: list[int], expert: int, most: int
) -> int:
    """Every rank that has room holds `expert` already: move another expert there, and give its place to this one."""
    for full in sorted(range(len(placed)), key=lambda rank: carried[rank]):
        if expert in placed[full]:
            continue
        for target in (rank for rank in range(len(placed)) if len(placed[rank]) < most):
            for other in sorted(placed[full] - placed[target], key=lambda e: load[e] / copies[e]):
                placed[full].remove(other)
                placed[target].add(other)
                carried[full] -= load[other] / copies[other]
                carried[target] += load[other] / copies[other]
                return full
    raise AssertionError("a rank with room lacks some expert that a full rank has")
