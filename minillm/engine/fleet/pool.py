"""The KV cache of a simulated replica, counted in tokens. Built in chapter 22.

    capacity = used (private tokens of running requests + pinned blocks) + idle (cached, evicted when needed) + rest

Blocks are those of the trace's hashes. They live as in `minillm.kv_cache`: a block is cached when it is computed,
pinned while requests use it, and evicted in order of last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class TokenPool:
    """Tokens and cached blocks of one replica. `changes` collects what the router is told of the cache."""

    def __init__(self, capacity: int, block_size: int, enable_prefix_caching: bool = True):
        self.capacity, self.block_size, self.caching = capacity, block_size, enable_prefix_caching
        self.used = 0
        self.pinned: dict[int, int] = {}  # block -> requests that use it
        self.idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.changes: dict[int, bool] = {}  # block -> whether it is cached now, since the last `take_changes`

    @property
    def free(self) -> int:
        """Tokens that can be taken: idle blocks count as free."""
        return self.capacity - self.used

    def hits(self, blocks: Sequence[int]) -> int:
        """How many blocks at the head are cached."""
        pinned, idle = self.pinned, self.idle
        for count, block in enumerate(blocks):
            if block not in pinned and block not in idle:
                return count
        return len(blocks)

    def to_pin(self, blocks: Sequence[int]) -> int:
        """Tokens that pinning these cached blocks would take."""
        return sum(block in self.idle for block in blocks) * self.block_size

    def pin(self, blocks: Sequence[int]) -> None:
        """One more request uses these cached blocks."""
        for block in blocks:
            if block in self.pinned:
                self.pinned[block] += 1
            else:
                del self.idle[block]
                self.pinned[block] = 1
                self.used += self.block_size

    def take(self, num_tokens: int) -> None:
        """Take private tokens, and evict idle blocks as needed. The caller has looked at `free`."""
        self.used += num_tokens
        room = self.capacity - self.used
        if room < 0:
            raise RuntimeError(f"{-room} tokens beyond the {self.capacity} of the cache are taken")
        while len(self.idle) * self.block_size > room:
            block, _ = self.idle.popitem(last=False)
            self.changes[block] = False

    def store(self, blocks: Sequence[int]) -> list[int]:
        """Private tokens have filled these blocks: those that are not cached yet become pinned ones, and are returned.

        A block that another request has stored first stays private, as a duplicate does in the engine.
        """
        if not self.caching:
            return []
        fresh = [block for block in blocks if block not in self.pinned and block not in self.idle]
        for block in fresh:
            self.pinned[block] = 1
            self.changes[block] = True
        return fresh

    def release(self, blocks: Sequence[int], private: int) -> None:
        """A request leaves: `private` tokens are free again, and blocks that no other request uses become idle."""
        self.used -= private
        for block in reversed(blocks):  # the end of a prefix is evicted before its beginning
            self.pinned[block] -= 1
            if not self.pinned[block]:
                del self.pinned[block]
                self.idle[block] = None
                self.used -= self.block_size

    def take_changes(self) -> tuple[list[int], list[int]]:
        """(stored, evicted) since the last call."""
        changes, self.changes = self.changes, {}
        stored = [block for block, cached in changes.items() if cached]
        return stored, [block for block, cached in changes.items() if not cached]
