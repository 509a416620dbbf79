"""Checks of chapter 07: a pool of blocks that keeps what free blocks hold. Built in chapter 07."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

from minillm.book.checks import Draw
from minillm.book.checks.beside import ClassChecker, Story

_MISTAKES = {
    "The blocks of a table join the queue last block first: heads of texts are what others share, "
    "so they are evicted last.": "head first",
    "allocate takes the block at the front of the queue; yours was at the end.": "most recent",
    "A block that is allocated must forget its hash at once: its new owner overwrites what it holds.": "hash stays",
    "The hash was forgotten when the block became free; it is forgotten only when the block is allocated.": (
        "hash goes early"
    ),
    "A block without a hash joins at the front of the queue: allocating it first loses nothing.": "all to the end",
    "A hit adds an owner: raise ref_cnt, or the first owner to finish frees the block.": "no owner on hit",
    "A block that was hit has an owner and must leave the queue, from any place in it.": "hit stays in the queue",
    "A hit ends at the first hash that is not known: blocks behind it are of no use.": "over the hole",
    "The first block of a hash keeps it; a second copy gets none.": "second copy wins",
    "free removes one owner; the block is free only when it has no owner left.": "one owner frees",
    "A block that has a hash keeps it, whatever second hash it is given.": "two hashes",
    "A block that was allocated has no hash any more: it can be cached again, and is free without one.": (
        "half forgotten"
    ),
    "A call that raises changes nothing: check the whole table first.": "half a table",
    "If too few blocks are free, raise ValueError.": "what there is",
    "Block 0 is a block like any other: compare with None.": "block 0",
    "0 and the empty string are hashes like any other: compare with None.": "falsy hash",
}


class Pool:
    """The pool of the statement on one plain list; `mistake` is one of _MISTAKES."""

    def __init__(self, num_blocks: int, mistake: str = "") -> None:
        self.mistake, self.order, self.ref_cnt = mistake, list(range(num_blocks)), [0] * num_blocks
        self.found: dict[object, int] = {}
        self.half_forgotten: set[int] = set()

    def free_order(self) -> list[int]:
        return list(self.order)

    def named(self, block: int) -> bool:
        return block in self.found.values() or block in self.half_forgotten

    def allocate(self, count: int) -> list[int]:
        if count > len(self.order) and self.mistake != "what there is":
            raise ValueError("too few blocks are free")
        blocks = [
            self.order.pop(-1 if self.mistake == "most recent" else 0) for _ in range(min(count, len(self.order)))
        ]
        for block in blocks:
            self.ref_cnt[block] = 1
            if self.mistake == "half forgotten" and self.named(block):
                self.half_forgotten.add(block)
            if self.mistake != "hash stays":
                self.forget(block)
        return blocks

    def cache(self, block: int, block_hash: object) -> None:
        known = block_hash in self.found and self.mistake != "second copy wins"
        refused = self.mistake == "falsy hash" and not block_hash
        if not known and not refused and (not self.named(block) or self.mistake == "two hashes"):
            self.found[block_hash] = block

    def lookup(self, block_hash: object) -> int | None:
        block = self.found.get(block_hash)
        return (block or None) if self.mistake == "block 0" else block

    def hit(self, hashes: Sequence[object]) -> list[int]:
        blocks = []
        for block_hash in hashes:
            block = self.lookup(block_hash)
            if block is None and self.mistake != "over the hole":
                break
            blocks += [] if block is None else [block]
        for block in blocks:
            if block in self.order and self.mistake != "hit stays in the queue":
                self.order.remove(block)
            self.ref_cnt[block] += self.mistake != "no owner on hit"
        return blocks

    def free(self, table: Sequence[int]) -> None:
        if self.mistake != "half a table":
            self.check_owned(table)
        for block in table if self.mistake == "head first" else reversed(table):
            self.check_owned([block])
            self.ref_cnt[block] = 0 if self.mistake == "one owner frees" else self.ref_cnt[block] - 1
            if self.ref_cnt[block] > 0 or block in self.order:
                continue
            if self.mistake == "hash goes early":
                self.forget(block)
            at_the_end = self.named(block) or self.mistake == "all to the end"
            self.order.insert(len(self.order) if at_the_end else 0, block)

    def check_owned(self, table: Sequence[int]) -> None:
        if any(self.ref_cnt[block] == 0 for block in table) and self.mistake != "no owner on hit":
            raise ValueError("a block has no owner")

    def forget(self, block: int) -> None:
        self.found = {block_hash: other for block_hash, other in self.found.items() if other != block}


_EDGES = [
    Story(
        (5,),
        "allocate(0) · allocate(6) · allocate(5) ·"
        "cache(0, 'a') · cache(1, 'ab') · cache(2, 'abc') · cache(3, 'x') · cache(4, 'xy') ·"
        # Out of the middle of the queue; then block 0 has two owners, and keeps one.
        "free([3, 4]) · free([0, 1, 2]) · hit(['a', 'ab']) · hit(['a']) · free([0, 1]) ·"
        # Block 1 has no owner any more, and 0 keeps its own. A hole ends a hit.
        "free([0, 1]) · free([1, 0]) · hit(['x', '?', 'xy']) · hit([]) ·"
        # One of them was allocated again, the other was not.
        "allocate(2) · hit(['xy']) · hit(['abc'])",
    ),
    Story(
        (4,),
        # A second copy, a second hash; then the hash is free to take again, since its block was allocated.
        "allocate(4) · cache(0, 'a') · cache(1, 'a') · cache(0, 'b') · free([1, 2]) · free([0]) · free([3]) ·"
        "hit(['a']) · hit(['b']) · free([0]) · allocate(4) · cache(2, 'a') · free([0, 2]) · hit(['a'])",
    ),
    # Hashes that count as false.
    Story((3,), "allocate(3) · cache(0, 0) · cache(1, '') · free([0, 1]) · hit([0, '']) · free([0, 1]) · allocate(2)"),
]


def _moves(draw: Draw, pool: Pool) -> Generator[tuple, list[int], None]:
    tables: list[list[int]] = []
    for _ in range(30):
        text, kind = draw.rng.choice(("abcd", "abxy", "pqrs", "pq")), draw.rng.random()
        names = [text[: i + 1] for i in range(len(text))]
        if kind < 0.3:
            hole = draw.randint(0, 5) if draw.rng.random() < 0.2 else 9
            hashes = [*names[:hole], "?", *names[hole:]] if hole < 9 else names[: draw.randint(1, 5)]
            tables.append((yield "hit", hashes))
        elif kind < 0.6:
            tables.append((yield "allocate", draw.randint(0, len(pool.order) + 1)))
        elif kind < 0.65:
            yield "allocate", len(pool.order) + draw.randint(1, 4)
        elif kind < 0.85 and any(tables):
            owned = draw.rng.choice([table for table in tables if table])
            for block, name in zip(owned[: draw.randint(1, 5)], names):
                yield "cache", block, name
        elif tables:
            yield "free", tables.pop(draw.randint(0, len(tables)))


def _looked_up(pool: Pool, calls: list[tuple]) -> dict[object, int | None]:
    """What the pool finds for each hash that it has heard of."""
    heard: list[object] = []
    for method, *arguments in calls:
        hashes = {"cache": arguments[-1:], "hit": arguments[0]}.get(method, ())
        heard += [block_hash for block_hash in hashes if block_hash not in heard]
    return {block_hash: pool.lookup(block_hash) for block_hash in heard}


check_cached_pool = ClassChecker(
    "cached_pool",
    Pool,
    what="pool",
    shows={
        "free_order()": lambda pool, calls: pool.free_order(),
        "ref_cnt": lambda pool, calls: pool.ref_cnt,
        "lookup() of each hash": _looked_up,
    },
    # 2 is not full and goes to the front, then 1, then 0 to the end.
    examples=[
        Story(
            (4,),
            "allocate(3) · cache(0, 'a') · cache(1, 'ab') · free([0, 1, 2]) · hit(['a', 'ab', 'abc']) · allocate(1)",
        )
    ],
    edges=_EDGES,
    random=lambda draw: Story((draw.randint(2, 9),), partial(_moves, draw)),
    raises=(ValueError,),
    hint="Blocks leave at the front; they return last block first, with a hash to the end, others to the front.",
    misconceptions={hint: partial(Pool, mistake=mistake) for hint, mistake in _MISTAKES.items()},
    forbid=("minillm.kv_cache.block_pool.BlockPool",),
)
