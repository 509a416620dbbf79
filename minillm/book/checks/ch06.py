"""Checks of chapter 06: slots, a pool that gives out the lowest id, copy on write, victims. Built in chapter 06.

`ch06_forks` drives the forked tables; the other exercises have a module each.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch06_forks import ForkTrial
from minillm.book.checks.ch06_pool import check_lowest_pool
from minillm.book.checks.ch06_slots import check_slot_mapping
from minillm.book.checks.ch06_victims import Running, check_choose_victims

__all__ = ["Running", "check_choose_victims", "check_forked_tables", "check_lowest_pool", "check_slot_mapping"]

# 3 · copy on write

check_forked_tables = Checker(
    "forked_tables",
    hint="Before a sequence writes into a block that has another owner, it gets a copy of it.",
    forbid=("minillm.kv_cache.manager.KVCacheManager",),
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
