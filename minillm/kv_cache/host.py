"""Host memory for KV blocks that a device has no room for: ids of places, handed out and taken back.
Built in chapter 06.

    owned    owners >= 1: blocks of that many requests that were preempted by swapping
    cold     no owner, but a hash: a prefix that the device had no room for (chapter 17)
    empty    neither

Room is taken from the empty places first, then from the cold ones, the least recently used in front. A place that a
copy of this step reads or writes is `in_motion` and is not handed out before the copy is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice


class HostPool:
    """`num_blocks` places in host memory, each as large as a block of all layers.

    `on_evict(place, hash)` hears of every cold block whose place is handed out again.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] = lambda place, block_hash: None):
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.owners = [0] * num_blocks
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}  # hash -> place, of cold and of owned ones
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.in_motion: set[int] = set()

    @property
    def num_free(self) -> int:
        """Places without an owner, cold ones included."""
        return len(self.free_queue)

    @property
    def num_available(self) -> int:
        """Places that can be handed out now: free ones that stand still."""
        return len(self.free_queue) - sum(place in self.free_queue for place in self.in_motion)

    def allocate(self, count: int) -> list[int]:
        """Places owned once, and in motion. Raises ValueError when fewer are available."""
        places = list(islice((place for place in self.free_queue if place not in self.in_motion), count))
        if len(places) < count:
            raise ValueError(
                f"{count} host blocks asked, {len(places)} of {self.num_blocks} are free; raise host_kv_bytes"
            )
        for place in places:
            del self.free_queue[place]
            self.owners[place] = 1
            self._forget(place)
        self.in_motion.update(places)
        return places

    def touch(self, places: Iterable[int]) -> None:
        """One more owner for each place."""
        for place in places:
            if self.owners[place] == 0:
                del self.free_queue[place]
            self.owners[place] += 1

    def free(self, places: Iterable[int]) -> None:
        """One owner less for each place. What has a hash stays as a cold block, to be evicted in this order."""
        for place in places:
            if self.owners[place] == 0:
                raise ValueError(f"host place {place} is free already; every owner frees it once")
            self.owners[place] -= 1
            if self.owners[place] == 0:
                self.free_queue[place] = None
                if self.block_hash[place] is None:
                    self.free_queue.move_to_end(place, last=False)

    def cache(self, place: int, block_hash: bytes) -> None:
        """Let `place` be found by `block_hash`; the first place of a hash keeps it."""
        if block_hash not in self.cached:
            self.cached[block_hash] = place
            self.block_hash[place] = block_hash

    def lookup(self, block_hash: bytes | None) -> int | None:
        return self.cached.get(block_hash)

    def forget(self, place: int) -> None:
        """Let `place` be found no longer, and hand it out first if nothing owns it."""
        block_hash, self.block_hash[place] = self.block_hash[place], None
        if block_hash is not None:
            del self.cached[block_hash]
        if place in self.free_queue:
            self.free_queue.move_to_end(place, last=False)

    def settle(self) -> None:
        """The copies of this step are made."""
        self.in_motion.clear()

    def evict_all(self) -> None:
        """Forget every hash; owners keep their places."""
        self.cached.clear()
        self.block_hash = [None] * self.num_blocks

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless every place is free or owned exactly as often as it stands in `held`."""
        owned = [0] * self.num_blocks
        for place in held:
            owned[place] += 1
        if owned != self.owners or set(self.free_queue) != {place for place, count in enumerate(owned) if not count}:
            raise RuntimeError(f"host places: {sum(owned)} held and {self.num_free} free of {self.num_blocks}")
        named = {block_hash: place for place, block_hash in enumerate(self.block_hash) if block_hash is not None}
        if named != self.cached:
            raise RuntimeError("the hashes of the host places and the index of cold blocks disagree")

    def _forget(self, place: int) -> None:
        block_hash, self.block_hash[place] = self.block_hash[place], None
        if block_hash is not None:
            del self.cached[block_hash]
            self.on_evict(place, block_hash)
