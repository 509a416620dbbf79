"""Tiers: what the device has no room for goes to host memory, and from there to disk. Built in chapter 17.

    device  --a cached block is handed out again-->  host  --a cold place is handed out again-->  disk
    device  <--------a prefix hit, swap_in---------  host  <-----read by a thread since add------  disk

A block's hash says model, layout and every token before it, so a block found by its hash is right wherever it lies.
A block that goes up leaves its copy below: going down again, it costs nothing. Requests that were swapped out come
first: their blocks own their places, cold ones make room for them. A block has a hash only when it is full of tokens
that are known and computed (`KVCacheManager.cache_blocks`): so equal hashes are equal content, and nothing is compared.

No call moves blocks down. Where a block or a place is handed out, what was in it is on its way already:

    pool.allocate  --on_evict-->  Tiers._cool  ->  host.allocate  --on_evict-->  Tiers._freeze  ->  to_disk

Memory: host places are all that `host_kv_bytes` pays for. Blocks on their way from disk lie beside them, at most
`max_reading` of them: half as many as there are places, or 8. Blocks on their way to it wait in the `DiskStore`.

Like the manager, this decides and moves no data. One step's copies are made in the order of `BlockMoves`: to_disk reads
what swap_out overwrites, swap_out reads what the step computes over, and swap_in reads what from_disk brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from minillm.kv_cache.block_pool import NULL_BLOCK, BlockPool
from minillm.kv_cache.host import HostPool

if TYPE_CHECKING:
    from minillm.kv_cache.manager import BlockMoves, ComputedBlocks

TIERS = ("device", "host", "disk")
LEAST_READING = 8  # blocks; fewer would not keep a disk busy


class Disk(Protocol):
    """What the tiers ask of a `minillm.kv_cache.disk.DiskStore`; a block is one opaque value here."""

    def __contains__(self, block_hash: bytes) -> bool: ...
    def fetch(self, block_hash: bytes) -> Future[Any]:
        """Read it, beside the caller; the result is None where it cannot be read."""

    def keep(self, block_hash: bytes, data: Any) -> None:
        """Hold what was read until the step that puts it into host memory takes it."""

    def touch(self, block_hash: bytes) -> None: ...


@dataclass
class FoundTokens:
    """How many tokens of the requests that looked for a prefix were found where, over the life of a cache."""

    device: int = 0
    host: int = 0
    disk: int = 0
    computed: int = 0  # found nowhere

    def add(self, computed: ComputedBlocks, num_tokens: int) -> None:
        for tier, count in computed.found.items():
            setattr(self, tier, getattr(self, tier) + count)
        self.computed += num_tokens - computed.num_tokens

    def hit_rate(self, tier: str) -> float:
        """Share of all tokens that this tier had, 0 to 1. Raises ValueError for a tier that there is not."""
        if tier not in TIERS:
            raise ValueError(f"tier={tier!r} is not allowed; allowed: {', '.join(TIERS)}")
        return getattr(self, tier) / max(1, self.device + self.host + self.disk + self.computed)


class Tiers:
    """The way of blocks between a `BlockPool`, a `HostPool` and a disk, if there is one."""

    def __init__(self, pool: BlockPool, host: HostPool, disk: Disk | None, moves: BlockMoves):
        self.pool, self.host, self.disk = pool, host, disk
        self.moves = moves  # of the step that is being scheduled
        self.max_reading = max(LEAST_READING, host.num_blocks // 2)
        self.fetching: dict[bytes, Future[Any]] = {}  # in the order they were asked for
        self.fetched: set[bytes] = set()  # came from disk, and no request has used it yet
        self.found = FoundTokens()
        # Blocks that left the device when every host place was owned or in motion: a small host starves the disk.
        self.num_lost = 0
        if host.num_blocks:
            pool.on_evict, pool.on_evict_all = self._cool, self.evict_all
        if disk is not None:
            host.on_evict = self._freeze

    def to_host(self, blocks: Sequence[int]) -> dict[int, int] | None:
        """An owned host place for each device block, copied there where host memory does not have it yet; None, and
        nothing changed, if there is no room."""
        places: dict[int, int] = {}
        for block in blocks:
            if (place := self.host.lookup(self.pool.block_hash[block])) is not None:
                places[block] = place
        self.host.touch(places.values())
        missing = [block for block in blocks if block not in places]
        if len(missing) > self.host.num_available:
            self.host.free(places.values())
            return None
        for block, place in zip(missing, self.host.allocate(len(missing))):
            self._copy_out(block, place, self.pool.block_hash[block])
            places[block] = place
        return places

    def to_device(self, computed: ComputedBlocks) -> list[int]:
        """New device blocks for what `computed` found in host memory, in its order, and the orders to fill them."""
        places = list(computed.from_host.values())
        self.host.in_motion.update(places)  # before blocks are allocated: what they evict may want a host place
        blocks = self.pool.allocate(len(places))
        for place, block in zip(places, blocks):
            self.moves.swap_in.append((place, block))
            if (block_hash := self.host.block_hash[place]) is not None:
                self.pool.cache(block, block_hash)
                self.fetched.discard(block_hash)
        self._refresh(places)
        return blocks

    def swapped_blocks(self, entries: Sequence[int | bytes | None]) -> tuple[list[int], dict[int, int]] | None:
        """The device blocks of a request that was swapped out, and the host places of the others, by index. `entries`
        are its host places, and the hashes of what it shared; None if a block that it shared was evicted meanwhile."""
        blocks: list[int] = []
        from_host: dict[int, int] = {}
        for index, entry in enumerate(entries):
            block, place = None, entry
            if isinstance(entry, bytes):
                block, place = self.pool.lookup(entry), self.host.lookup(entry)
                if block is None and place is None:
                    return None
            if block is None and place is not None:
                from_host[index] = place
            blocks.append(NULL_BLOCK if block is None else block)
        return blocks, from_host

    def found_in(self, place: int) -> str:
        """The tier to thank for what lies in a host place."""
        return "disk" if self.host.block_hash[place] in self.fetched else "host"

    def prefetch(self, hashes: Iterable[bytes]) -> None:
        """Start reading what of these blocks is on disk alone, up to the first that is nowhere, or until enough are on
        their way."""
        for block_hash in hashes:
            if block_hash in self.fetching or self._in_memory(block_hash):
                continue
            if self.disk is None or block_hash not in self.disk:
                return  # the prefix ends here: what comes after it is no use
            if self.num_reading >= self.max_reading:
                return
            self.fetching[block_hash] = self.disk.fetch(block_hash)

    def wait_for(self, hashes: Sequence[bytes]) -> None:
        """Give host places to what is on disk of these blocks, waiting until it is read: the whole engine waits.

        That is worth it. The request is about to be scheduled, the thread has been reading since it was added, and a
        block is read in about the time of a step. Were the block left out instead, the device would compute it again,
        and hold up all requests of the batch for longer.
        """
        if self.disk is None:
            return
        self.prefetch(hashes)
        if not any(block_hash in self.fetching for block_hash in hashes):
            return
        known = [place for block_hash in hashes if (place := self.host.lookup(block_hash)) is not None]
        self.host.touch(known)  # room for the tail of a prefix is not made by throwing out its head
        for block_hash in hashes:
            if block_hash in self.fetching:
                self._install(block_hash)
        self.host.free(reversed(known))

    def take_in_arrived(self) -> None:
        """Give host places to what has come from disk meanwhile, for any request."""
        for block_hash in [block_hash for block_hash, read in self.fetching.items() if read.done()]:
            self._install(block_hash)

    def evict_all(self) -> None:
        """Forget what is in host memory. What is on disk was written whole, and stays."""
        self.host.evict_all()
        self.fetched.clear()

    def cold_blocks(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """What memory holds of prefixes, each once: (place, hash) of host memory and (block, hash) of the device,
        from the least recently used on. What requests own is left out: end them first."""
        device = [(block, self.pool.block_hash[block]) for block in self.pool.free_queue]
        device = [one for one in device if one[1] is not None]
        known = {None, *(block_hash for _, block_hash in device)}
        host = [(place, self.host.block_hash[place]) for place in self.host.free_queue]
        return [one for one in host if one[1] not in known], device

    @property
    def num_reading(self) -> int:
        """Blocks from disk that lie in memory beside the host places, or soon will."""
        return len(self.fetching) + len(self.moves.from_disk)

    def _in_memory(self, block_hash: bytes) -> bool:
        return self.pool.lookup(block_hash) is not None or self.host.lookup(block_hash) is not None

    def _cool(self, block: int, block_hash: bytes) -> None:
        """A device block that held `block_hash`, and is handed out again: keep a copy, if a place can be had."""
        place = self.host.lookup(block_hash)
        if place is not None:
            self._refresh([place])
        elif self.host.num_available:
            [place] = self.host.allocate(1)
            self._copy_out(block, place, block_hash)
            self.host.free([place])
        else:
            self.num_lost += 1

    def _freeze(self, place: int, block_hash: bytes) -> None:
        """A host place that held `block_hash`, and is handed out again: the disk keeps a copy."""
        self.fetched.discard(block_hash)
        if block_hash in self.disk:
            self.disk.touch(block_hash)
        else:
            self.moves.to_disk.append((place, block_hash))

    def _copy_out(self, block: int, place: int, block_hash: bytes | None) -> None:
        """`block_hash` is what the block holds; the pool may have forgotten it by now.
        None: a block that is not full."""
        self.moves.swap_out.append((block, place))
        if block_hash is not None:
            self.host.cache(place, block_hash)

    def _install(self, block_hash: bytes) -> None:
        """Give a host place to a block that was asked for, when it is read."""
        data = self.fetching.pop(block_hash).result()
        if data is None or self.host.lookup(block_hash) is not None or not self.host.num_available:
            return
        [place] = self.host.allocate(1)
        self.host.cache(place, block_hash)
        self.disk.keep(block_hash, data)
        self.moves.from_disk.append((block_hash, place))
        self.fetched.add(block_hash)
        self.host.free([place])

    def _refresh(self, places: Iterable[int]) -> None:
        """These are the most recently used now; of a prefix, the tail is to go first, as on the device."""
        for place in reversed(list(places)):
            if place in self.host.free_queue:
                self.host.free_queue.move_to_end(place)
