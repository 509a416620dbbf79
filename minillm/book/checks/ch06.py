"""Checks of chapter 06: slots, a pool that gives out the lowest id, copy on write, victims. Built in chapter 06.

The references, and the trials that drive a student's object beside them, are in `ch06_oracle` and `ch06_victims`.
`ch06_slots` has the slots.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch06_oracle import ForkTrial, bounded
from minillm.book.checks.ch06_pool import PoolTrial
from minillm.book.checks.ch06_slots import check_slot_mapping
from minillm.book.checks.ch06_victims import Running, best_by_groups, best_of_all, freed_by, random_running

__all__ = ["Running", "check_choose_victims", "check_forked_tables", "check_lowest_pool", "check_slot_mapping"]

_PACKAGE = ("minillm.kv_cache.block_pool.BlockPool", "minillm.kv_cache.manager.KVCacheManager")

check_lowest_pool = Checker(
    "lowest_pool",
    hint="A block is free when it has no owner, and of the free ones the lowest ids go first.",
    forbid=_PACKAGE,
)
check_forked_tables = Checker(
    "forked_tables",
    hint="Who is about to write into a block that has another owner writes into a copy of it.",
    forbid=_PACKAGE[1:],
)
check_choose_victims = Checker(
    "choose_victims",
    hint="A block is free when every request that holds it has gone. Cheapest first, then the fewest, then the latest.",
)


@check_lowest_pool.part("example")
def _pool_example(case: Case) -> None:
    trial = PoolTrial(case, 6)
    trial.allocate(4)
    trial.free([3])
    trial.free([1])
    trial.allocate(1)
    trial.touch([2, 4])
    trial.free([4, 2])
    trial.allocate(3)
    trial.allocate(1)


@check_lowest_pool.part("edges")
def _pool_edges(case: Case) -> None:
    trial = PoolTrial(case, 5)
    trial.allocate(0)
    trial.allocate(6)
    trial.allocate(-1)
    trial.allocate(5).clear()  # the list is the caller's
    trial.allocate(1)
    trial.free([-1]), trial.touch([-1])
    trial.free([0, 5, 0, 2])
    trial.free([2])  # twice
    trial.free([4, 2])  # the second of them is free already: the first stays owned
    trial.free([4, 4])  # one owner, freed twice in one call
    trial.free([6])
    trial.touch([1, 2])  # nobody owns block 2
    trial.touch([3, 9])
    trial.touch([1, 3, 0, 3]), trial.touch([4, 1], once=True)
    trial.free([3, 1, 4, 3]), trial.free([1], once=True)
    trial.allocate(3)
    trial.allocate(2)
    trial.free([1, 3, 4, 2, 5], once=True)
    trial.allocate(5)
    one = PoolTrial(case, 1)
    one.allocate(1), one.free([1]), one.free([1]), one.allocate(1)
    _pool_cost(case, 50_000)


def _pool_cost(case: Case, num_blocks: int) -> None:
    pool, told = (
        case.run(case.student, num_blocks),
        "A loop over the pool: find a structure that gives the lowest in a few steps (a heap).",
    )
    case.run(pool.allocate, num_blocks)
    case.run(pool.free, range(num_blocks // 2, 0, -1))
    for _ in range(3):
        [block] = bounded(case, 1_000, told, pool.allocate, 1)
        bounded(case, 1_000, told, pool.touch, [block])
        bounded(case, 1_000, told, pool.free, [block, num_blocks])
        pool.touch([num_blocks - 1]), pool.free([block, num_blocks - 1])
        num_blocks -= 1


@check_lowest_pool.part("random")
def _pool_random(case: Case) -> None:
    for _ in range(15):
        trial = PoolTrial(case, case.randint(1, 24))
        for _ in range(30):
            owned = [b for b, count in enumerate(trial.refs) for _ in range(count)]
            move, once = case.rng.random(), case.rng.random() < 0.3
            if move < 0.4:
                trial.allocate(case.randint(0, min(8, len(trial.free_ids) + 2) + 1))
            elif move < 0.55 and owned:
                trial.touch(case.rng.sample(owned, case.randint(1, min(5, len(owned)) + 1)), once)
            elif move < 0.92 and owned:
                trial.free(case.rng.sample(owned, case.randint(1, min(9, len(owned)) + 1)), once)
            else:
                blocks = [case.randint(0, trial.num_blocks + 2) for _ in range(4)]
                case.rng.choice((trial.free, trial.touch))(blocks)


@check_forked_tables.part("example")
def _forks_example(case: Case) -> None:
    trial = ForkTrial(case, 8, 4)
    trial.append("a", 6)
    trial.step()
    trial.fork("a", "b")
    trial.append("a", 1)  # a copy: b has the block too
    trial.append("b", 1)  # the last owner: in place
    trial.step()
    trial.append("a", 3), trial.append("b", 1)
    trial.step()


@check_forked_tables.part("edges")
def _forks_edges(case: Case) -> None:
    trial = ForkTrial(case, 9, 4)
    trial.append("a", 8)  # to the brim: nobody writes into a shared block
    trial.step()
    trial.fork("a", "b"), trial.fork("b", "c")
    trial.append("a", 1), trial.append("b", 5)
    trial.step()
    trial.fork("a", "c")  # c is taken
    trial.append("c", 1), trial.append("c", 2)
    trial.step()
    trial.free("b"), trial.append("c", 1)
    trial.step()
    trial = ForkTrial(case, 9, 4)
    trial.append("a", 7), trial.step()
    for child in "bcd":  # four owners of one block: three copies of it
        trial.fork("a", child)
    for name in "abcd":
        trial.append(name, 2)
    trial.step()
    trial = ForkTrial(case, 4, 4)
    trial.append("a", 6), trial.append("z", 17)  # z never came in
    trial.step()
    trial.fork("a", "b")
    trial.append("a", 11)  # 3 new ones and a copy, and 2 are free
    trial.append("a", 7)  # 2 new ones would be there, the copy is one too many
    trial.append("a", 6)
    trial.append("b", 2)
    trial.append("b", 1)  # nothing is left
    trial.step()
    trial.free("a"), trial.append("b", 1)
    trial.step()
    _reused(case)


def _reused(case: Case) -> None:
    """b goes in the middle of a step, and the block that a copied from is all there is for c's copy."""
    trial = ForkTrial(case, 4, 2)
    trial.append("c", 1), trial.append("a", 1), trial.step()
    trial.fork("a", "b"), trial.fork("c", "d")
    trial.append("x", 2), trial.append("a", 1)
    trial.free("b")
    trial.append("c", 1)
    trial.append("d", 1)
    trial.step()


@check_forked_tables.part("random")
def _forks_random(case: Case) -> None:
    for _ in range(12):
        trial, names = ForkTrial(case, case.randint(4, 16), case.randint(1, 6)), iter("abcdefghijklmnopqrstuvwxyz")
        for _ in range(10):
            live = list(trial.texts)
            if not live or (len(live) < 6 and case.rng.random() < 0.3):
                live.append(next(names))
            elif len(live) < 6 and case.rng.random() < 0.6:
                child = next(names)
                trial.fork(case.rng.choice(live), child)
                live.append(child)
            case.rng.shuffle(live)
            for name in live:
                if case.rng.random() < 0.8:
                    trial.append(name, case.rng.choice((1, 1, 1, 2, 5)))
                elif name in trial.texts and case.rng.random() < 0.5:
                    trial.free(name)
            trial.step()


@check_choose_victims.part("example")
def _victims_example(case: Case) -> None:
    running = [
        Running("a", "a", [1, 2, 3], 44),
        Running("b0", "b", [4, 5, 6], 40),
        Running("b1", "b", [4, 5, 7], 41),
        Running("c", "c", [8], 9),
    ]
    for k in range(1, 10):
        _victims(case, running, k, best_of_all(running, k))


@check_choose_victims.part("edges")
def _victims_edges(case: Case) -> None:
    def judge(*requests: tuple, k: int) -> None:
        running = [Running(*request) for request in requests]
        _victims(case, running, k, best_of_all(running, k))

    a, b = ("a", "a", [1, 2], 10), ("b", "b", [3, 4], 10)
    judge(k=0), judge(k=1), judge(a, b, k=0), judge(a, b, k=5)
    judge(a, b, k=2)  # the same cost, the same number: the later one
    judge(a, ("b", "b", [3], 5), ("c", "c", [4], 5), k=2)  # the same cost: one rather than two
    judge(("a", "a", [1], 3), ("b", "b", [2], 3), ("c", "c", [3], 3), ("d", "d", [4, 5], 9), k=2)
    judge(("a", "a", [0, 0, 1], 4), ("b", "b", [2, 3, 0], 5), k=2)  # the null block is nobody's
    judge(("a0", "a", [1, 2, 3, 4], 5), ("a1", "a", [1, 2, 3, 5], 5), ("b", "b", [6, 7], 12), k=2)
    judge(("a0", "a", [1, 2], 5), ("a1", "a", [1, 2], 5), ("b", "b", [6], 11), k=1)  # alone, neither frees anything
    # More than asked for, and cheaper.
    judge(("a", "a", [1, 2, 3, 4, 5], 8), ("b", "b", [6], 5), ("c", "c", [7], 5), k=2)
    judge(("a", "a", [1], 0), ("b", "b", [2], 0), k=1)
    judge(("b1", "b", [1, 4], 6), ("a", "a", [2, 3], 7), ("b0", "b", [1, 5], 1), k=3)  # a group need not stand together


@check_choose_victims.part("random")
def _victims_random(case: Case) -> None:
    for _ in range(40):
        running = random_running(case, case.randint(1, 9))
        k = case.randint(0, len(freed_by(running, range(len(running)))) + 2)
        _victims(case, running, k, best_of_all(running, k))
    for _ in range(2):
        running = random_running(case, 36)
        k = case.randint(20, 40)
        _victims(case, running, k, best_by_groups(running, k))


def _victims(case: Case, running: list[Running], k: int, expected: list[int] | None) -> None:
    told = (
        "Trying every subset takes forever here. Only requests of one group share blocks: "
        "solve each group, then put the groups together."
    )
    got = bounded(case, 3_000_000, told, case.student, running, k)
    names, hint = [one.name for one in running], None
    wanted = None if expected is None else [names[i] for i in expected]
    if got != wanted and isinstance(got, (list, tuple)) and set(got) <= set(names) and expected is not None:
        places = sorted(names.index(name) for name in set(got))
        freed, cost, least = (
            len(freed_by(running, places)),
            sum(running[i].cost for i in places),
            sum(running[i].cost for i in expected),
        )
        if freed < k:
            hint = (
                f"Blocks that {list(got)} free: {freed}. One that another request holds stays, "
                "one with several owners counts once, 0 is no block."
            )
        elif cost > least:
            hint = (
                f"{list(got)} cost {cost} and free {freed} blocks; {wanted} cost {least} and free "
                f"{len(freed_by(running, expected))}."
            )
        elif len(places) > len(expected):
            hint = f"Both cost {cost}: the smaller number of victims counts then."
        elif places != expected:
            hint = f"Both cost {cost}, and both are {len(places)}: the later arrivals go. Compare from the last one on."
        else:
            hint = "These are the right ones: each once, in the order of `running`."
    hint = f"{hint or case.hint}\n            running: {running}" if len(running) < 8 else hint
    case.equal(got, wanted, f"the list of victims for k={k}", hint=hint)
