"""Checks of chapter 17: blocks placed in tiers, and heavy hitters. Built in chapter 17."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.patience import within

check_place = Checker("place", hint="Total time = the sum of num_blocks * uses * cost of the tier; the device costs 0.")
check_heavy_hitters = Checker(
    "heavy_hitters",
    hint=(
        "Add the weights to the sums, then the smallest sum goes, but never one of the last `recent`; equal: "
        "the smallest position."
    ),
)
TIERS = ("device", "host", "disk", "compute")


def _best(prefixes: list, rooms: tuple[int, int, int], costs: dict[str, int]) -> tuple[int, list[str]]:
    """The smallest total time, and a plan that has it."""
    states: dict[tuple, tuple[int, tuple]] = {rooms: (0, ())}
    for size, uses in prefixes:
        following: dict[tuple, tuple[int, tuple]] = {}
        for left, (spent, plan) in states.items():
            for index, tier in enumerate(TIERS):
                room = tuple(r - size * (i == index) for i, r in enumerate(left))
                option = (spent + size * uses * costs.get(tier, 0), (*plan, tier))
                if min(room) >= 0 and (room not in following or option < following[room]):
                    following[room] = option
        states = following
    spent, plan = min(states.values())
    return spent, list(plan)


def _judge_plan(case: Case, prefixes: list, rooms: tuple[int, int, int], costs: dict[str, int]) -> None:
    setting = f"place({prefixes}, {', '.join(map(str, rooms))}, {costs})"
    with within(case, setting, "Remember the best for each (device left, host left, disk left); try no state twice."):
        plan = case.call(prefixes, *rooms, costs)
    case.true(
        isinstance(plan, list)
        and len(plan) == len(prefixes)
        and all(type(tier) is str and tier in TIERS for tier in plan),
        f"{setting} must be a list of {len(prefixes)} of {', '.join(map(repr, TIERS))}; it is {plan!r}",
    )
    for tier, room in zip(TIERS, rooms):
        used = sum(size for (size, _), where in zip(prefixes, plan) if where == tier)
        case.true(used <= room, f"{setting} puts {used} blocks on the {tier}, which has room for {room}")
    spent = sum(size * uses * costs.get(tier, 0) for (size, uses), tier in zip(prefixes, plan))
    least, best = _best(prefixes, rooms, costs)
    case.true(
        spent == least, f"{setting}: a better plan exists. Yours takes {spent}: {plan}; this one takes {least}: {best}"
    )


@check_place.part("example")
def _place_example(case: Case) -> None:
    costs = {"host": 1, "disk": 10, "compute": 15}
    _judge_plan(case, [(2, 5), (1, 9), (3, 1)], (3, 2, 10), costs)
    _judge_plan(case, [(3, 10), (2, 9), (2, 9)], (4, 0, 0), costs)  # the most popular one keeps out two others


@check_place.part("edges")
def _place_edges(case: Case) -> None:
    costs = {"host": 1, "disk": 10, "compute": 15}
    _judge_plan(case, [], (4, 4, 4), costs)
    _judge_plan(case, [(2, 3), (1, 1)], (0, 0, 0), costs)
    _judge_plan(case, [(5, 100)], (4, 6, 6), costs)  # too large for the device
    _judge_plan(case, [(3, 4), (1, 5)], (3, 0, 0), costs)  # twelve block uses against five
    _judge_plan(case, [(2, 0), (2, 4)], (2, 0, 0), costs)  # no request needs the first
    _judge_plan(case, [(1, 2), (2, 2)], (0, 0, 9), {"host": 1, "disk": 20, "compute": 15})  # computing beats the disk
    # And the host may be the worst.
    _judge_plan(case, [(1, 2), (2, 2)], (0, 9, 9), {"host": 30, "disk": 10, "compute": 15})
    _judge_plan(case, [(3, 7), (3, 7), (3, 7)], (6, 3, 0), costs)
    _judge_plan(case, [(4, 6), (3, 6), (3, 6), (2, 6)], (6, 6, 0), costs)  # must be packed well
    _judge_plan(case, [(4, 10), (3, 9), (3, 9)], (6, 4, 0), costs)
    _judge_plan(case, [(3, 5), (2, 1)], (3, 2, 0), {"host": 0, "disk": 0, "compute": 1})


@check_place.part("random")
def _place_random(case: Case) -> None:
    for number in range(30):
        count = 12 if number >= 26 else case.randint(3, 9)
        prefixes = [(case.randint(1, 7), case.randint(0, 13)) for _ in range(count)]
        rooms = tuple(case.randint(0, 13 if count == 12 else 7) for _ in range(3))
        low, high = sorted((case.randint(0, 12), case.randint(0, 12)))
        costs = {"host": low, "disk": high, "compute": case.randint(4, 25)}
        _judge_plan(case, prefixes, rooms, costs)


def _judge_hitters(case: Case, budget: int, recent: int, steps: list[list[float]]) -> None:
    student = case.run(case.student, budget, recent)
    kept, scores = [], {}
    for number, weights in enumerate(steps):
        kept.append(number)
        scores[number] = 0.0
        for position, weight in zip(kept, weights):
            scores[position] += weight
        out = None
        if len(kept) > budget:
            out = min(kept[: len(kept) - recent], key=lambda position: (scores[position], position))
            kept.remove(out)
        sums = {p: round(scores[p], 4) for p in sorted({*kept, *([out] if out is not None else [])})}
        got = case.run(student.step, weights)
        hint = f"Sums now: {sums}; budget {budget}, the last {recent} are safe."
        if got is not None and out is not None and got in sums and got != out and got in sorted(sums)[-recent:]:
            hint = f"Position {got} is among the last {recent} kept. " + hint
        case.equal(got, out, f"what step {number} of HeavyHitters({budget}, {recent}) throws out", hint=hint)
        case.equal(
            student.kept,
            kept,
            f"kept after step {number} of HeavyHitters({budget}, {recent})",
            hint="Positions count all steps, also of what was thrown out, and stand in ascending order.",
        )


@check_heavy_hitters.part("example")
def _hitters_example(case: Case) -> None:
    _judge_hitters(
        case, 3, 1, [[1.0], [0.75, 0.25], [0.5, 0.25, 0.25], [0.5, 0.125, 0.25, 0.125], [0.25, 0.5, 0.125, 0.125]]
    )


@check_heavy_hitters.part("edges")
def _hitters_edges(case: Case) -> None:
    _judge_hitters(case, 1, 1, [[1.0], [0.9, 0.1], [0.9, 0.1]])  # only the newest
    # A sliding window.
    _judge_hitters(case, 3, 3, [[1.0], [0.5, 0.5], [0.5, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.25, 0.25]])
    _judge_hitters(case, 2, 1, [[1.0], [1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    _judge_hitters(case, 4, 2, [[0.0] * n for n in (1, 2, 3, 4, 5, 5, 5)])  # all equal: the smallest position
    # the sum, not the last step: 0 was looked at long ago, 1 just now
    _judge_hitters(case, 3, 1, [[1.0], [1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.25, 0.25], [0.0, 0.25, 0.5, 0.25]])
    _judge_hitters(case, 2, 1, [[0.3], [0.0, 0.3 - 1e-9], [0.0, 0.0, 0.1]])  # nearly equal, and not equal
    hitters = case.run(case.student, 3, 1)
    case.run(hitters.step, [1.0])
    for wrong in ([], [1.0], [0.5, 0.25, 0.25]):
        case.raises(ValueError, hitters.step, wrong)
    case.equal(
        hitters.kept,
        [0],
        "kept after steps that were refused",
        hint="Check the length first, and change nothing.",
    )
    case.equal(case.run(hitters.step, [0.5, 0.5]), None, "the step after a refused one")
    case.equal(
        hitters.kept,
        [0, 1],
        "kept after the step that follows refused ones",
        hint="A refused step takes no position.",
    )
    first, second = case.run(case.student, 2, 1), case.run(case.student, 2, 1)
    case.run(first.step, [1.0])
    case.equal(second.kept, [], "kept of a second object", hint="Two objects share no lists.")


@check_heavy_hitters.part("random")
def _hitters_random(case: Case) -> None:
    for _ in range(25):
        budget = case.randint(1, 7)
        recent = case.randint(1, budget + 1)
        steps = [  # eighths: sums are exact
            [case.randint(0, 8) / 8 for _ in range(min(number, budget) + 1)] for number in range(case.randint(1, 30))
        ]
        _judge_hitters(case, budget, recent, steps)
