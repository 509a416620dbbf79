"""Checks of chapter 07: a pool of blocks that keeps what free blocks hold. Built in chapter 07."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minillm.book.checks import Case, Checker

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


check_cached_pool = Checker(
    "cached_pool",
    hint="Blocks are taken from the front. Freed ones join last block first, with a hash at the end, else in front.",
    misconceptions={hint: partial(Pool, mistake=mistake) for hint, mistake in _MISTAKES.items()},
    forbid=("minillm.kv_cache.block_pool.BlockPool",),
)


class Drive:
    """A student's pool and the right one, compared after every call."""

    def __init__(self, case: Case, num_blocks: int) -> None:
        self.case, self.right, self.names, self.done = case, Pool(num_blocks), [], []
        self.pool = case.run(case.student, num_blocks)
        self.compare(f"in a new pool of {num_blocks}")

    def does(self, method: str, *args: object) -> list[int]:
        hashes = args[-1:] if method == "cache" else args[0] if method == "hit" else ()
        self.names += [block_hash for block_hash in hashes if block_hash not in self.names]
        self.done.append(f"{method}({', '.join(map(repr, args))})")
        expected = getattr(self.right, method)(*args)
        got, when = self.case.run(getattr(self.pool, method), *args), f"after {' · '.join(self.done[-6:])}"
        self.case.equal(got, expected, f"what {method} returned {when},")
        self.compare(when)
        return list(expected or [])

    def refuses(self, method: str, *args: object) -> None:
        self.done.append(f"{method}({', '.join(map(repr, args))}) raised")
        self.case.raises(ValueError, getattr(self.pool, method), *args)
        self.compare(f"after {self.done[-1]}, which must change nothing,")

    def compare(self, when: str) -> None:
        for what in ("free_order()", "ref_cnt", f"lookup() of {self.names}"):
            self.case.equal(self.seen(self.pool, what), self.seen(self.right, what), f"{what} {when}")

    def seen(self, pool: Pool, what: str) -> object:
        if what == "ref_cnt":
            return pool.ref_cnt
        return pool.free_order() if what == "free_order()" else [pool.lookup(name) for name in self.names]


@check_cached_pool.part("example")
def _pool_example(case: Case) -> None:
    drive = Drive(case, 4)
    drive.does("allocate", 3)
    drive.does("cache", 0, "a"), drive.does("cache", 1, "ab")
    drive.does("free", [0, 1, 2])  # 2 is not full: to the front; 1, then 0 to the end
    drive.does("hit", ["a", "ab", "abc"])
    drive.does("allocate", 1)


@check_cached_pool.part("edges")
def _pool_edges(case: Case) -> None:
    drive = Drive(case, 5)
    drive.does("allocate", 0)
    drive.refuses("allocate", 6)
    drive.does("allocate", 5)
    for block, name in enumerate(("a", "ab", "abc", "x", "xy")):
        drive.does("cache", block, name)
    drive.does("free", [3, 4]), drive.does("free", [0, 1, 2])
    drive.does("hit", ["a", "ab"])  # out of the middle of the queue
    drive.does("hit", ["a"])  # block 0 has two owners now
    drive.does("free", [0, 1])  # it keeps one
    drive.refuses("free", [0, 1]), drive.refuses("free", [1, 0])  # 1 has none any more, and 0 keeps its own
    drive.does("hit", ["x", "?", "xy"])  # a hole
    drive.does("hit", [])
    drive.does("allocate", 2)
    drive.does("hit", ["xy"]), drive.does("hit", ["abc"])  # one of them was allocated again, the other was not
    drive = Drive(case, 4)
    drive.does("allocate", 4)
    # A second copy; a second hash.
    drive.does("cache", 0, "a"), drive.does("cache", 1, "a"), drive.does("cache", 0, "b")
    drive.does("free", [1, 2]), drive.does("free", [0]), drive.does("free", [3])
    drive.does("hit", ["a"]), drive.does("hit", ["b"]), drive.does("free", [0])
    drive.does("allocate", 4)
    drive.does("cache", 2, "a")  # free to take again: the block that had it was allocated
    drive.does("free", [0, 2])
    drive.does("hit", ["a"])
    drive = Drive(case, 3)  # hashes that count as false
    drive.does("allocate", 3)
    drive.does("cache", 0, 0), drive.does("cache", 1, ""), drive.does("free", [0, 1]), drive.does("hit", [0, ""])
    drive.does("free", [0, 1]), drive.does("allocate", 2)


@check_cached_pool.part("random")
def _pool_random(case: Case) -> None:
    for _ in range(12):
        drive, tables = Drive(case, case.randint(2, 9)), []
        for _ in range(30):
            text = case.rng.choice(("abcd", "abxy", "pqrs", "pq"))
            kind, names = case.rng.random(), [text[: i + 1] for i in range(len(text))]
            if kind < 0.3:
                hole = case.randint(0, 5) if case.rng.random() < 0.2 else 9
                tables.append(
                    drive.does("hit", [*names[:hole], "?", *names[hole:]] if hole < 9 else names[: case.randint(1, 5)])
                )
            elif kind < 0.6:
                tables.append(drive.does("allocate", case.randint(0, len(drive.right.order) + 1)))
            elif kind < 0.65:
                drive.refuses("allocate", len(drive.right.order) + case.randint(1, 4))
            elif kind < 0.85 and any(tables):
                owned = case.rng.choice([t for t in tables if t])
                for block, name in zip(owned[: case.randint(1, 5)], names):
                    drive.does("cache", block, name)
            elif tables:
                drive.does("free", tables.pop(case.randint(0, len(tables))))
