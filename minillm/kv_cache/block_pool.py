"""The block pool: who owns which block of KV memory, and which may be taken next. Built in chapter 06.

    block 0        the null block: stands in a table where there is nothing to read, is never handed out
    owned          ref_cnt >= 1: in the tables of that many requests
    free, cached   ref_cnt 0 with a hash: its keys and values are still good; a prefix hit takes it back
    free, empty    ref_cnt 0 without a hash

Free blocks stand in one queue: the empty ones in front, behind them the cached ones, the least recently used first.
Allocation takes from the front and forgets what the block held, so no cached block is evicted while an empty one is
free; a hit takes a block out of the middle. Each of these costs the same however large the pool is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Hands out blocks 1 to `num_blocks` by id, counts references, and finds cached blocks by hash."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not allowed; a pool needs at least 1 block")
        self.num_blocks = num_blocks
        self.ref_cnt = [0] * (num_blocks + 1)
        self.block_hash: list[bytes | None] = [None] * (num_blocks + 1)
        self.cached: dict[bytes, int] = {}  # hash -> block
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        # Where else blocks may be kept (chapter 17) hears of each that is handed out again while it holds a hash.
        self.on_evict: Callable[[int, bytes], None] = lambda block, block_hash: None
        self.on_evict_all: Callable[[], None] = lambda: None

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the blocks that are owned, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """The `count` blocks at the front of the queue, now owned once. Raises ValueError when there are fewer."""
        if count > self.num_free:
            raise ValueError(
                f"{count} blocks asked, {self.num_free} of {self.num_blocks} are free; check num_free first"
            )
        blocks = [self.free_queue.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self.ref_cnt[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; one that was free leaves the queue."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.ref_cnt[block] == 0:
                del self.free_queue[block]
            self.ref_cnt[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each block; those without an owner join the queue, in this order: cached blocks at its
        end, empty ones at its front.

        Raises ValueError for a block that has no owner.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.ref_cnt[block] == 0:
                raise ValueError(f"block {block} is free already; every owner frees it once")
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.free_queue[block] = None
                if self.block_hash[block] is None:
                    self.free_queue.move_to_end(block, last=False)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Let `block` be found by `block_hash`. The first block of a hash keeps it; a second copy stays unknown."""
        if block_hash not in self.cached and self.block_hash[block] is None:
            self.cached[block_hash] = block
            self.block_hash[block] = block_hash

    def lookup(self, block_hash: bytes) -> int | None:
        return self.cached.get(block_hash)

    def forget(self, block: int) -> None:
        """Let `block` be found no longer. Owners keep it; without an owner it is the next to be handed out."""
        block_hash, self.block_hash[block] = self.block_hash[block], None
        if block_hash is not None:
            del self.cached[block_hash]
        if block in self.free_queue:
            self.free_queue.move_to_end(block, last=False)

    def evict_all(self) -> None:
        """Forget every hash: nothing is a hit any more. Owners keep their blocks."""
        self.cached.clear()
        self.block_hash = [None] * (self.num_blocks + 1)
        self.on_evict_all()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless every block is free or owned exactly as often as `tables` say."""
        tables, owned = list(tables), [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                owned[block] += 1
        owned[NULL_BLOCK] = 0
        if owned != self.ref_cnt:
            block = next(i for i, (said, found) in enumerate(zip(self.ref_cnt, owned)) if said != found)
            raise RuntimeError(f"block {block}: ref_cnt={self.ref_cnt[block]}, but {owned[block]} tables hold it")
        unowned = owned.count(0) - 1  # all but the null block
        held = {block for table in tables for block in table} | {NULL_BLOCK}
        if len(self.free_queue) != unowned or any(block in self.free_queue for block in held):
            raise RuntimeError(
                f"{unowned} blocks have no owner, but {len(self.free_queue)} stand in the free queue, or others do"
            )
        named = len(self.block_hash) - self.block_hash.count(None)
        if named != len(self.cached) or any(self.block_hash[block] != key for key, block in self.cached.items()):
            raise RuntimeError("the hashes of the blocks and the index of cached blocks disagree")

    def _forget(self, block: int) -> None:
        block_hash, self.block_hash[block] = self.block_hash[block], None
        if block_hash is not None:
            del self.cached[block_hash]
            self.on_evict(block, block_hash)
