"""Checks of chapter 06: slots, a pool that gives out the lowest id, copy on write, victims. Built in chapter 06.

What drives a student's object beside a reference is in `ch06_pool` and `ch06_forks`; `ch06_slots` and `ch06_victims`
have the two functions.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch06_forks import ForkTrial
from minillm.book.checks.ch06_pool import PoolTrial
from minillm.book.checks.ch06_slots import check_slot_mapping
from minillm.book.checks.ch06_victims import Running, check_choose_victims
from minillm.book.checks.patience import bounded, within

__all__ = ["Running", "check_choose_victims", "check_forked_tables", "check_lowest_pool", "check_slot_mapping"]

_PACKAGE = ("minillm.kv_cache.block_pool.BlockPool", "minillm.kv_cache.manager.KVCacheManager")


# 2 · the lowest free block

check_lowest_pool = Checker(
    "lowest_pool",
    hint="A block is free when it has no owner, and of the free ones the lowest ids go first.",
    forbid=_PACKAGE,
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
    trial.touch([1, 2])  # block 2 has no owner
    trial.touch([3, 9])
    trial.touch([1, 3, 0, 3]), trial.touch([4, 1], once=True)
    trial.free([3, 1, 4, 3]), trial.free([1], once=True)
    trial.allocate(3)
    trial.allocate(2)
    trial.free([1, 3, 4, 2, 5], once=True)
    trial.allocate(5)
    one = PoolTrial(case, 1)
    one.allocate(1), one.free([1]), one.free([1]), one.allocate(1)
    _pool_cost(case, 100_000)


def _pool_cost(case: Case, num_blocks: int) -> None:
    """One block costs a few steps in a large pool. Lines of Python are counted; a loop inside `min` takes time."""
    told = "A loop over the pool: find a structure that gives the lowest in a few steps (a heap)."
    pool, owned = case.run(case.student, num_blocks), num_blocks // 2
    case.run(pool.allocate, owned)
    lowest = owned + 1
    for _ in range(3):
        got = bounded(case, 1_000, told, pool.allocate, 1)
        bounded(case, 1_000, told, pool.touch, [lowest])
        bounded(case, 1_000, told, pool.free, [lowest, lowest])
        case.equal(got, [lowest], f"allocate(1) where blocks 1 to {owned:,} of {num_blocks:,} have owners")
    wrong = None
    with within(case, f"5,000 times allocate, touch and free of one block of {num_blocks:,}", told, seconds=1):
        for _ in range(5_000):
            [block] = pool.allocate(1)
            pool.touch([block]), pool.free([block, block])
            wrong = block if block != lowest else wrong
    case.equal(wrong, None, f"a block that allocate(1) gave while {lowest} was the lowest free one,")
    case.equal(pool.num_free, num_blocks - owned, "num_free after them")


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


# 3 · copy on write

check_forked_tables = Checker(
    "forked_tables",
    hint="Before a sequence writes into a block that has another owner, it gets a copy of it.",
    forbid=_PACKAGE[1:],
)


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
    trial.append("a", 8)  # to the brim: no sequence writes into a shared block
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
    _freed_in_its_step(case)


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


def _freed_in_its_step(case: Case) -> None:
    """b goes after its copy was planned: the copy is made all the same, and a, the only owner left, needs none."""
    trial = ForkTrial(case, 6, 4)
    trial.append("a", 2), trial.step()
    trial.fork("a", "b")
    trial.append("b", 1), trial.free("b")
    trial.append("a", 1), trial.append("x", 4)
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
                    gone = case.rng.random() < 0.15
                else:
                    gone = case.rng.random() < 0.5
                if gone and name in trial.texts:
                    trial.free(name)
            trial.step()
