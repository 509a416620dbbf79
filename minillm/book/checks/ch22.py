"""Checks of chapter 22: a router, a migration, a stream that survives its replica, a day. Built in chapter 22.

`ch22_resumed` has the stream, `ch22_streams` the day, `ch22_oracle` the fleet of that day.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch22_resumed import check_resumed_stream
from minillm.book.checks.ch22_streams import check_autoscaler

__all__ = ["check_autoscaler", "check_migration_plan", "check_pick", "check_resumed_stream"]

State = tuple[int, frozenset[int]]  # a replica: blocks of work ahead, cached block ids


def picked(
    blocks: Sequence[int],
    replicas: Sequence[State],
    *,
    holes: bool = False,
    at_least: int = 1,
    key: Callable[[int, int, int], tuple] = lambda cost, head, index: (cost, -head, index),
    refuses: bool = True,
) -> int:
    """The replica where the prompt is computed first; of these the one that caches most of it, then the first.
    The keywords are mistakes."""
    if not replicas and refuses:
        raise ValueError("there is no replica")
    ranked = [
        key(cost, head, index)
        for index, one in enumerate(replicas)
        for cost, head in [_finish(blocks, one, holes, at_least)]
    ]
    return min(ranked)[-1] if ranked else 0


def _finish(blocks: Sequence[int], replica: State, holes: bool = False, at_least: int = 1) -> tuple[int, int]:
    """(blocks of work until the prompt is computed, blocks at its head that are cached)."""
    work, cached = replica
    known = [block in cached for block in blocks]
    head = sum(known) if holes else [*known, False].index(False)
    return work + max(at_least, len(blocks) - head), head


def _fleet(*replicas: tuple[int, tuple[int, ...]]) -> list[State]:
    return [(work, frozenset(cached)) for work, cached in replicas]


def _random_fleet(draw: Draw) -> tuple:
    blocks = tuple(draw.randint(0, 6) for _ in range(draw.randint(1, 9)))
    replicas = []
    for _ in range(draw.randint(1, 7)):
        head = blocks[: draw.randint(0, len(blocks) + 1)] if draw.rng.random() < 0.6 else ()
        replicas.append((draw.randint(0, 8), (*head, *(draw.randint(0, 9) for _ in range(draw.randint(0, 4))))))
    return blocks, _fleet(*replicas)


def _costs(got: object, expected: int, blocks: Sequence[int], replicas: Sequence[State]) -> str:
    told = (f"replica {index}: {_finish(blocks, one)[0]}" for index, one in enumerate(replicas[:8]))
    return f"Blocks until the prompt is computed: {'; '.join(told)}."


check_pick = FunctionChecker(
    "pick",
    picked,
    returns="the index of the replica",
    examples=[((1, 2, 3, 4), _fleet((0, ()), (0, (1, 2, 3)))), ((1, 2, 3, 4), _fleet((0, ()), (9, (1, 2, 3))))],
    edges=[
        ((1, 2), _fleet((3, ()), (3, ()), (3, ()))),
        ((1, 2, 3), _fleet((0, ()), (0, (2, 3)))),
        ((1, 2, 3), _fleet((1, ()), (3, (1, 2, 3)))),
        ((1, 2, 3), _fleet((1, (1, 2)), (1, (1, 2, 3)))),  # one block is computed either way
        ((1, 2), _fleet((1, ()), (2, (1,)), (0, ()))),
        ((1, 2, 3, 4), _fleet((0, ()), (2, (1, 2)))),
        ((7,), _fleet((5, ()), (4, (8,)), (4, (7,)))),
        ((1, 2, 3), _fleet((6, (1, 2, 3)))),
        ((1, 1, 2), _fleet((0, (1,)), (1, ()))),  # the same block twice in a prompt
        ((1, 2, 3), _fleet((2, (1, 3)), (2, (1, 8, 9)))),  # what else is cached decides nothing
        ((1, 2), []),
    ],
    random=_random_fleet,
    trials=150,
    raises=(ValueError,),
    explain=_costs,
    misconceptions={
        "If there is no replica, raise ValueError.": dict(refuses=False),
        "A cached block after the first missing one does not help: stop counting there.": dict(holes=True),
        "At least one block is computed, even where all are cached.": dict(at_least=0),
        "The cache is not everything: the work ahead counts too.": dict(key=lambda c, h, i: (-h, i)),
        "Among equal costs, take the replica with the largest head.": dict(key=lambda c, h, i: (c, i)),
        "Where cost and head are equal, take the first replica.": dict(key=lambda c, h, i: (c, -h, -i, i)),
        "The blocks of the head need not be computed: subtract them.": dict(key=lambda c, h, i: (c + h, i)),
    },
    forbid=("minillm.engine.routing.PrefixAware", "minillm.engine.routing.ReplicaView"),
)


def planned(
    num_tokens: int,
    remaining: int,
    copy_us: int,
    step_us: int,
    latency_us: int,
    max_stages: int,
    *,
    steps: Callable[[int, int], int] = lambda duration, step: duration // step,
    latency: bool = True,
    counts_down: bool = True,
    left: int = 1,
    most: int = 0,
    wins: Callable[[int, int], bool] = lambda new, best: new < best,
    checks: bool = True,
) -> list[int]:
    """The plan with the least downtime, of these the one with the fewest stages. The keywords are mistakes."""
    if checks and (min(num_tokens, remaining, copy_us, step_us, max_stages) < 1 or latency_us < 0):
        raise ValueError("every argument must be at least 1, the latency at least 0")
    plan = best = [num_tokens]
    while len(plan) < max_stages + most:
        generated = steps(latency * latency_us + plan[-1] * copy_us, step_us)
        remaining -= generated if counts_down else 0
        if remaining < left:  # the request ends before the next stage begins
            break
        plan = [*plan, generated]
        best = plan if wins(generated, best[-1]) else best
    return best


def _random_move(draw: Draw) -> tuple:
    step = draw.randint(1, 60) * 100
    copy = max(1, round(step * draw.rng.choice((0.001, 0.01, 0.2, 1.0, 1.7))))
    latency = draw.rng.choice((0, step // 3, step, 2 * step + 1))
    return draw.randint(1, 3_000), draw.randint(1, 400), copy, step, latency, draw.randint(1, 7)


def _plans(got: object, expected: list[int], *arguments: int) -> str:
    """Every possible plan is one with a number of stages of its own."""
    _, _, copy, _, latency, _ = arguments
    sizes = planned(*arguments, wins=lambda new, best: True)
    told = (f"{sizes[:n]}: {latency + copy * sizes[n - 1]} µs" for n in range(1, min(len(sizes), 6) + 1))
    return f"Possible plans and their downtime: {'; '.join(told)}."


_GOOD = (5, 5, 1, 1, 0, 3)
check_migration_plan = FunctionChecker(
    "migration_plan",
    planned,
    returns="the plan",
    examples=[(1_000, 500, 10, 20_000, 500, 4), (10_000, 500, 10, 20_000, 500, 4)],
    edges=[
        (10_000, 500, 10, 20_000, 500, 1),
        (10_000, 500, 10, 20_000, 500, 2),
        (10_000, 5, 10, 20_000, 500, 4),  # five tokens are left, and the first copy takes as long as five steps
        (10_000, 6, 10, 20_000, 500, 4),
        (10_000, 1, 10, 20_000, 500, 4),
        (100, 1_000, 300, 100, 0, 6),  # copying is slower than decoding: every stage is longer than the last
        (100, 10_000, 100, 100, 0, 6),  # as fast: nothing is gained
        (2_000, 500, 10, 20_000, 0, 5),  # the copy takes exactly one step
        (2_000, 500, 10, 20_000, 10, 5),
        (40, 5_000, 10, 100, 250, 8),  # the latency alone is longer than a step
        (1, 9, 1, 1_000_000, 0, 3),
        (10**17 + 1, 10**18, 1, 3, 0, 2),  # more than a float can count
        *(
            (*_GOOD[:place], value, *_GOOD[place + 1 :])
            for place, value in ((0, 0), (1, 0), (2, 0), (3, 0), (4, -1), (5, 0))
        ),
    ],
    random=_random_move,
    trials=150,
    raises=(ValueError,),
    explain=_plans,
    misconceptions={
        "Every argument is at least 1 and the latency at least 0: raise ValueError otherwise.": dict(checks=False),
        "There are at most max_stages stages.": dict(most=1),
        "One token must be left to generate when the last stage begins.": dict(left=0),
        "What is generated during a stage is no longer left to generate.": dict(counts_down=False),
        "The latency of a stage counts in its duration.": dict(latency=False),
        "A step that ends exactly with the stage counts.": dict(
            steps=lambda duration, step: max(0, duration - 1) // step
        ),
        "Divide whole numbers by //: a float is too short for large ones.": dict(
            steps=lambda duration, step: int(duration / step)
        ),
        "A token is generated for each whole step of a stage: round down.": dict(
            steps=lambda duration, step: -(-duration // step)
        ),
        "Copying while the request decodes makes the stop shorter.": lambda num_tokens, *rest: (
            planned(num_tokens, *rest) and [num_tokens]
        ),
        "Of plans with the same downtime, the one with the fewest stages.": dict(wins=lambda new, best: new <= best),
    },
    forbid=("minillm.engine.fleet.migration.stages", "minillm.engine.fleet.migration.pause_seconds"),
)
