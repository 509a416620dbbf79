"""Events of the prefix cache: which blocks can be found, and which no longer. Built in chapter 22.

    BlockPool.cached, HostPool.cached  --stored, removed-->  CacheEvents.take  -->  a router far away

A router that knows these events knows what each replica caches, without asking. A block counts as stored from the
first tier that has it, and as removed when the last tier has lost it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from minillm.kv_cache.manager import KVCacheManager


class CacheChange(NamedTuple):
    """What has changed since the last look. Apply `removed` first, then `stored`."""

    removed: list[bytes]
    stored: list[bytes]


class CacheEvents:
    """Watches the hashes of a `KVCacheManager`. All methods belong to the thread that steps the engine."""

    def __init__(self, manager: KVCacheManager):
        self._tiers: Counter[bytes] = Counter()  # how many tiers have a block
        self._before: dict[bytes, bool] = {}  # what has changed: whether the block was there at the last look
        for pool in (manager.pool, manager.host):
            known = pool.cached
            pool.cached = _Watched(self)
            pool.cached.update(known)

    def take(self) -> CacheChange:
        """The changes since the last call. A block that left and came back is none."""
        removed = [one for one, was_there in self._before.items() if was_there and one not in self._tiers]
        stored = [one for one, was_there in self._before.items() if not was_there and one in self._tiers]
        self._before.clear()
        return CacheChange(removed, stored)

    @property
    def has_changes(self) -> bool:
        return bool(self._before)

    def _add(self, block_hash: bytes) -> None:
        self._before.setdefault(block_hash, block_hash in self._tiers)
        self._tiers[block_hash] += 1

    def _remove(self, block_hash: bytes) -> None:
        self._before.setdefault(block_hash, True)
        self._tiers[block_hash] -= 1
        if not self._tiers[block_hash]:
            del self._tiers[block_hash]


class _Watched(dict[bytes, int]):
    """A pool's dictionary of hashes that reports each change."""

    def __init__(self, events: CacheEvents):
        super().__init__()
        self._events = events

    def __setitem__(self, block_hash: bytes, block: int) -> None:
        if block_hash not in self:
            self._events._add(block_hash)
        super().__setitem__(block_hash, block)

    def __delitem__(self, block_hash: bytes) -> None:
        super().__delitem__(block_hash)
        self._events._remove(block_hash)

    def clear(self) -> None:
        for block_hash in list(self):
            del self[block_hash]

    def update(self, others: Mapping[bytes, int], **none: Any) -> None:  # type: ignore[override]
        for block_hash, block in others.items():
            self[block_hash] = block
