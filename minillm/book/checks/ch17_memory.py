"""Checks of chapter 17: blocks placed in tiers, and heavy hitters. Built in chapter 17."""

from __future__ import annotations

from functools import partial
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Raised, Timed
from minillm.book.checks.beside import ClassChecker, Story

TIERS = ("device", "host", "disk", "compute")
Rooms = tuple[int, int, int]


def best_plan(
    prefixes: list, device: int, host: int, disk: int, costs: dict[str, int], *, by_uses: bool = False
) -> list[str]:
    """A plan that takes the least time; the keyword is a mistake."""
    if by_uses:
        return _most_used_first(prefixes, [device, host, disk], costs)
    states: dict[Rooms, tuple[int, tuple[str, ...]]] = {(device, host, disk): (0, ())}
    for size, uses in prefixes:
        following: dict[Rooms, tuple[int, tuple[str, ...]]] = {}
        for left, (spent, plan) in states.items():
            for index, tier in enumerate(TIERS):
                room = tuple(r - size * (i == index) for i, r in enumerate(left))
                option = (spent + size * uses * costs.get(tier, 0), (*plan, tier))
                if min(room) >= 0 and (room not in following or option < following[room]):
                    following[room] = option
        states = following
    return list(min(states.values())[1])


def _most_used_first(prefixes: list, rooms: list[int], costs: dict[str, int]) -> list[str]:
    plan = ["compute"] * len(prefixes)
    for index in sorted(range(len(prefixes)), key=lambda i: -prefixes[i][1]):
        size = prefixes[index][0]
        fitting = [tier for tier in range(3) if rooms[tier] >= size]
        if fitting:
            plan[index] = TIERS[fitting[0]]
            rooms[fitting[0]] -= size
    return plan


def _time(plan: list[str], prefixes: list, device: int, host: int, disk: int, costs: dict[str, int]) -> int:
    return sum(size * uses * costs.get(tier, 0) for (size, uses), tier in zip(prefixes, plan))


def _is_plan(case: Case, plan: Any, prefixes: list, *rooms_and_costs: Any) -> None:
    case.true(
        type(plan) is list and len(plan) == len(prefixes) and all(type(tier) is str and tier in TIERS for tier in plan),
        f"the plan must be a list of {len(prefixes)} of {', '.join(map(repr, TIERS))}; it is {plan!r}",
    )
    for tier, room in zip(TIERS, rooms_and_costs[:3]):
        used = sum(size for (size, _), where in zip(prefixes, plan) if where == tier)
        case.true(used <= room, f"the plan puts {used} blocks on the {tier}, which has room for {room}")


def _better(got: Any, expected: int, *given: Any) -> str:
    return f"Here a better plan exists: {best_plan(*given)} takes {expected}."


def _random_place(draw: Draw, count: int = 0) -> tuple:
    prefixes = [(draw.randint(1, 7), draw.randint(0, 13)) for _ in range(count or draw.randint(3, 9))]
    rooms = [draw.randint(0, 13 if count else 7) for _ in range(3)]
    low, high = sorted((draw.randint(0, 12), draw.randint(0, 12)))
    return prefixes, *rooms, {"host": low, "disk": high, "compute": draw.randint(4, 25)}


_COSTS = {"host": 1, "disk": 10, "compute": 15}
_TWELVE = Timed(
    "a plan for 12 prefixes",
    partial(_random_place, count=12),
    "Remember the best for each (device left, host left, disk left); try no state twice.",
    part="random",
)
_ROOMY = Timed(
    "a plan for 12 prefixes and tiers of up to 20 blocks",
    lambda draw: (_random_place(draw, 12)[0], 20, 12, 8, {"host": 3, "disk": 5, "compute": draw.randint(7, 11)}),
    _TWELVE.hint,
    part="random",
)
check_place = FunctionChecker(
    "place",
    best_plan,
    observe=_time,
    returns="the total time of the plan",
    form=_is_plan,
    examples=[
        ([(2, 5), (1, 9), (3, 1)], 3, 2, 10, _COSTS),
        ([(3, 10), (2, 9), (2, 9)], 4, 0, 0, _COSTS),  # the most popular one keeps out two others
    ],
    edges=[
        ([], 4, 4, 4, _COSTS),
        ([(2, 3), (1, 1)], 0, 0, 0, _COSTS),
        ([(5, 100)], 4, 6, 6, _COSTS),  # too large for the device
        ([(3, 4), (1, 5)], 3, 0, 0, _COSTS),  # twelve block uses against five
        ([(2, 0), (2, 4)], 2, 0, 0, _COSTS),  # no request needs the first
        ([(1, 2), (2, 2)], 0, 0, 9, {"host": 1, "disk": 20, "compute": 15}),  # computing beats the disk
        ([(1, 2), (2, 2)], 0, 9, 9, {"host": 30, "disk": 10, "compute": 15}),  # and the host may be the worst
        ([(3, 7), (3, 7), (3, 7)], 6, 3, 0, _COSTS),
        ([(4, 6), (3, 6), (3, 6), (2, 6)], 6, 6, 0, _COSTS),  # must be packed well
        ([(4, 10), (3, 9), (3, 9)], 6, 4, 0, _COSTS),
        ([(3, 5), (2, 1)], 3, 2, 0, {"host": 0, "disk": 0, "compute": 1}),
    ],
    random=_random_place,
    trials=26,
    timed=(_TWELVE, _TWELVE, _TWELVE, _ROOMY),
    explain=_better,
    hint="Total time = the sum of num_blocks * uses * cost of the tier; the device costs 0.",
    misconceptions={
        "The most used prefix first is not the best: it may keep out two others.": dict(by_uses=True),
    },
)


class Hitters:
    """Sums of weights by position; the keywords are mistakes."""

    def __init__(self, budget: int, recent: int, *, last_step: bool = False, largest: bool = False) -> None:
        self.budget, self.recent = budget, recent
        self.last_step, self.largest = last_step, largest
        self.kept: list[int] = []
        self.sums: dict[int, float] = {}
        self.steps = 0

    def step(self, weights: list[float]) -> int | None:
        if len(weights) != len(self.kept) + 1:
            raise ValueError("one weight for each kept position and the new one")
        self.kept.append(self.steps)
        self.steps += 1
        for position, weight in zip(self.kept, weights):
            before = 0.0 if self.last_step else self.sums.get(position, 0.0)
            self.sums[position] = before + weight
        if len(self.kept) <= self.budget:
            return None
        sign = -1 if self.largest else 1
        out = min(self.kept[: len(self.kept) - self.recent], key=lambda p: (sign * self.sums[p], p))
        self.kept.remove(out)
        return out


def _why_out(got: Any, expected: Any, hitters: Hitters, call: tuple) -> str | None:
    if isinstance(expected, Raised):
        return "Check the length first, and change nothing: a refused step takes no position."
    hitters.step(*call[1:])
    there = sorted({*hitters.kept, *([expected] if expected is not None else [])})
    sums = {position: round(hitters.sums[position], 4) for position in there}
    told = f"Sums now: {sums}; budget {hitters.budget}, the last {hitters.recent} are safe."
    if type(got) is int and got in there[-hitters.recent :]:
        told = f"Position {got} is among the last {hitters.recent} kept. {told}"
    if isinstance(got, list):
        told = f"Positions count all steps, also of what was thrown out, and stand in ascending order. {told}"
    return told


def _story(budget: int, recent: int, steps: list[list[float]]) -> Story:
    return Story((budget, recent), [("step", weights) for weights in steps])


def _random_steps(draw: Draw) -> Story:
    budget = draw.randint(1, 7)
    steps = []
    for number in range(draw.randint(1, 30)):
        right = min(number, budget) + 1
        sizes = (right, draw.randint(0, budget + 3)) if draw.rng.random() < 0.2 else (right,)  # the other is refused
        steps += [[draw.randint(0, 9) / 8 for _ in range(size)] for size in sizes[::-1]]  # eighths: sums are exact
    return _story(budget, draw.randint(1, budget + 1), steps)


def _two_objects(case: Case) -> None:
    first, second = case.run(case.student, 2, 1), case.run(case.student, 2, 1)
    case.run(first.step, [1.0])
    case.equal(second.kept, [], "kept of a second object", hint="Two objects share no lists.")


check_heavy_hitters = ClassChecker(
    "heavy_hitters",
    Hitters,
    what="object",
    shows=("kept",),
    examples=[
        _story(  # each mistake evicts another position
            4,
            1,
            [
                [1.0],
                [0.75, 0.25],
                [0.5, 0.25, 0.25],
                [0.25, 0.5, 0.125, 0.125],
                [0.5, 0.0625, 0.25, 0.125, 0.0625],
                [0.25, 0.25, 0.25, 0.125, 0.125],
            ],
        )
    ],
    edges=[
        _story(1, 1, [[1.0], [0.9, 0.1], [0.9, 0.1]]),  # only the newest
        _story(  # a sliding window
            3, 3, [[1.0], [0.5, 0.5], [0.5, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.25, 0.25]]
        ),
        _story(2, 1, [[1.0], [1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]),
        _story(4, 2, [[0.0] * n for n in (1, 2, 3, 4, 5, 5, 5)]),  # all equal: the smallest position
        # the sum, not the last step: 0 was looked at long ago, 1 just now
        _story(3, 1, [[1.0], [1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.25, 0.25], [0.0, 0.25, 0.5, 0.25]]),
        _story(2, 1, [[0.3], [0.0, 0.3 - 1e-9], [0.0, 0.0, 0.1]]),  # nearly equal, and not equal
        _story(3, 1, [[1.0], [], [1.0], [0.5, 0.25, 0.25], [0.5, 0.5]]),  # three are refused
        # Two are refused, whose weights would keep position 0.
        _story(2, 1, [[0.25], [0.25, 0.75], [1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]),
    ],
    also={"edges": _two_objects},
    random=_random_steps,
    trials=25,
    raises=(ValueError,),
    explain=_why_out,
    hint="Add the weights to the sums, then the smallest sum goes, but never one of the last `recent`; equal: "
    "the smallest position.",
    misconceptions={
        "All weights that a position ever had count, not those of the last step.": dict(last_step=True),
        "The smallest sum goes, not the largest.": dict(largest=True),
    },
)
