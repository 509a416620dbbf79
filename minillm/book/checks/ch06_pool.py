"""The check of chapter 06's pool that gives out the lowest block. Built in chapter 06."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from minillm.book.checks import Case, Draw, Raised
from minillm.book.checks.beside import ClassChecker, Once, Story
from minillm.book.checks.patience import bounded, within


class Lowest:
    """A pool as a list of reference counts; the keywords are mistakes."""

    def __init__(self, num_blocks: int, *, null: bool = False, once: bool = False, falls: bool = False) -> None:
        self.num_blocks, self.ref_cnt = num_blocks, [0] * (num_blocks + 1)
        self.null, self.once, self.falls = null, once, falls

    @property
    def free_ids(self) -> list[int]:
        ids = range(not self.null, self.num_blocks + (not self.null))
        return sorted((block for block in ids if not self.ref_cnt[block]), reverse=self.falls)

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def allocate(self, count: int) -> list[int]:
        free = self.free_ids
        if not 0 <= count <= len(free):
            raise ValueError("all or nothing")
        for block in free[:count]:
            self.ref_cnt[block] = 1
        return free[:count]

    def touch(self, blocks: Iterable[int]) -> None:
        counts = self._counted(blocks)
        if self.once:
            counts = Counter(counts.keys())
        if any(not self.owners(block) for block in counts):
            raise ValueError("a block has no owner")
        for block, times in counts.items():
            self.ref_cnt[block] += times

    def free(self, blocks: Iterable[int]) -> None:
        counts = self._counted(blocks)
        if any(times > self.owners(block) for block, times in counts.items()):
            raise ValueError("too few owners")
        for block, times in counts.items():
            self.ref_cnt[block] -= times

    def owners(self, block: int) -> int:
        return self.ref_cnt[block] if 0 < block <= self.num_blocks else 0

    def _counted(self, blocks: Iterable[int]) -> Counter:
        return Counter(block for block in blocks if block)


def _why(got: Any, expected: Any, pool: Lowest, call: tuple) -> str | None:
    method, argument = call
    if method == "allocate":
        return _why_allocated(got, expected, pool, argument)
    blocks = argument.values if isinstance(argument, Once) else argument
    counts = Counter(block for block in blocks if block)
    if isinstance(expected, Raised):
        first = next(block for block, times in counts.items() if times > pool.owners(block) or not pool.owners(block))
        if not 0 < first <= pool.num_blocks:
            return f"There is no block {first}."
        if method == "touch":
            return f"Block {first} has no owner, so it holds nothing that could be shared."
        return f"Owners of block {first}: {pool.owners(first)}, this call would take away: {counts[first]}."
    if isinstance(argument, Once):
        return "An iterator can be read once: if you need the blocks twice, make a list first."
    return None


def _why_allocated(got: Any, expected: Any, pool: Lowest, count: int) -> str | None:
    free = pool.free_ids
    if isinstance(expected, Raised):
        why = "a negative count is an error" if count < 0 else f"{len(free)} blocks are free"
        return f"All or nothing: {why}."
    if not isinstance(got, list) or len(got) != count:
        return None
    owned = [block for block in got if pool.owners(block)]
    if owned:
        return f"Block {owned[0]} has {pool.owners(owned[0])} owner(s): a block is free when its last owner frees it."
    if sorted(got) == expected:
        return "These are the right blocks, but not in ascending order: the lowest ids go first."
    return f"Free are {free[:12]}{' ...' if len(free) > 12 else ''}: the lowest ids go first, whatever was freed last."


def _cost(case: Case, num_blocks: int = 100_000) -> None:
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
            pool.touch([block])
            pool.free([block, block])
            wrong = block if block != lowest else wrong
    case.equal(wrong, None, f"a block that allocate(1) gave while {lowest} was the lowest free one,")
    case.equal(pool.num_free, num_blocks - owned, "num_free after them")


def _random(draw: Draw) -> Story:
    return Story((draw.randint(1, 24),), partial(_moves, draw))


def _moves(draw: Draw, pool: Lowest) -> Iterator[tuple]:
    for _ in range(30):
        owned = [block for block, count in enumerate(pool.ref_cnt) for _ in range(count)]
        move, kind = draw.rng.random(), Once if draw.rng.random() < 0.3 else list
        if move < 0.4:
            yield "allocate", draw.randint(0, min(8, pool.num_free + 2) + 1)
        elif move < 0.55 and owned:
            yield "touch", kind(draw.rng.sample(owned, draw.randint(1, min(5, len(owned)) + 1)))
        elif move < 0.92 and owned:
            yield "free", kind(draw.rng.sample(owned, draw.randint(1, min(9, len(owned)) + 1)))
        else:
            yield draw.rng.choice(("free", "touch")), [draw.randint(0, pool.num_blocks + 2) for _ in range(4)]


check_lowest_pool = ClassChecker(
    "lowest_pool",
    Lowest,
    what="pool",
    shows=("num_blocks", "ref_cnt", "num_free"),
    examples=[
        Story(
            (6,),
            "allocate(4) · free([3]) · free([1]) · allocate(1) · touch([2, 4]) · free([4, 2]) ·"
            "allocate(3) · allocate(1)",
        )
    ],
    edges=[
        Story(
            (5,),
            "allocate(0) · allocate(6) · allocate(-1) · allocate(5) · allocate(1) · free([-1]) · touch([-1]) ·"
            # The second of [4, 2] is free already: the first stays owned. Of [4, 4] there is one owner.
            "free([0, 5, 0, 2]) · free([2]) · free([4, 2]) · free([4, 4]) · free([6]) ·"
            # Block 2 has no owner, and there is no block 9.
            "touch([1, 2]) · touch([3, 9]) · touch([1, 3, 0, 3]) · touch(iter([4, 1])) ·"
            "free([3, 1, 4, 3]) · free(iter([1])) · allocate(3) · allocate(2) ·"
            "free(iter([1, 3, 4, 2, 5])) · allocate(5)",
        ),
        Story((1,), "allocate(1) · free([1]) · free([1]) · allocate(1)"),
    ],
    also={"edges": _cost},
    random=_random,
    trials=15,
    raises=(ValueError,),
    explain=_why,
    hint="A block is free when it has no owner, and of the free ones the lowest ids go first.",
    misconceptions={
        "Block 0 is the null block: the ids that are handed out go from 1 to num_blocks.": dict(null=True),
        "A block that comes twice in one call counts twice.": dict(once=True),
        "From the other end: the lowest ids go first, not the highest.": dict(falls=True),
    },
    forbid=("minillm.kv_cache.block_pool.BlockPool", "minillm.kv_cache.manager.KVCacheManager"),
)
