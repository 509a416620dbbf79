"""Memory of the pretended GPU: every storage on "cuda" is counted as long as it lives, as torch's allocator would.

An ideal allocator: requests are rounded up to 512 bytes and a pool to 2 MiB, free memory of a pool serves any request
of that pool (no fragmentation), and what a pool ever held stays reserved until `empty_cache`. A graph's pool keeps it
as long as one of its graphs lives. cuBLAS takes a workspace for each stream at its first product there, and keeps it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import torch

MIB = 2**20
CONTEXT = 500 * MIB  # CUDA context, kernels and libraries, before the first tensor


@dataclass(eq=False)
class Pool:
    live: int = 0
    reserved: int = 0  # the most that was live since the last `empty_cache`
    graphs: int = 0  # that replay in it

    @property
    def rounded(self) -> int:
        return -(-self.reserved // (2 * MIB)) * 2 * MIB


@dataclass
class Memory:
    total: int
    workspace_bytes: int  # of cuBLAS, for a stream
    pools: list[Pool] = field(default_factory=lambda: [Pool()])
    blocks: dict[int, int] = field(default_factory=dict)  # storage -> serial number
    sizes: dict[int, tuple[int, Pool]] = field(default_factory=dict)  # serial number of what lives
    workspaces: dict[int, int] = field(default_factory=dict)  # stream -> serial number
    current: Pool | None = None  # of the capture under way
    peak: int = 0  # of memory allocated, since it was last reset
    peak_used: int = 0  # of what the driver would report, ever
    serials: itertools.count = field(default_factory=itertools.count)

    @property
    def allocated(self) -> int:
        return sum(pool.live for pool in self.pools)

    @property
    def used(self) -> int:
        return CONTEXT + sum(pool.rounded for pool in self.pools)

    def track(self, tensor: torch.Tensor) -> int:
        """Count what `tensor` lies in, if that is new. Returns its serial number."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.blocks:
            self.blocks[place] = serial = self.take(storage.nbytes())
            weakref.finalize(storage, self._free, place, serial).atexit = False
        return self.blocks[place]

    def take(self, num_bytes: int) -> int:
        pool = self.current or self.pools[0]
        size = -(-num_bytes // 512) * 512
        if pool.live + size > pool.reserved and self.used + (pool.live + size - pool.reserved) > self.total:
            self.empty_cache()
            if (used := self.used + max(0, pool.live + size - pool.reserved)) > self.total:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory (rehearsed): {num_bytes} bytes more make {used} of {self.total}"
                )
        serial = next(self.serials)
        self.sizes[serial] = size, pool
        pool.live += size
        pool.reserved = max(pool.reserved, pool.live)
        self.peak, self.peak_used = max(self.peak, self.allocated), max(self.peak_used, self.used)
        return serial

    def _free(self, place: int | None, serial: int) -> None:
        if place is not None:
            del self.blocks[place]
        size, pool = self.sizes.pop(serial)
        pool.live -= size

    def empty_cache(self) -> None:
        for pool in self.pools:
            if not pool.graphs and pool is not self.current:
                pool.reserved = pool.live
        self.pools = [self.pools[0], *(pool for pool in self.pools[1:] if pool.reserved or pool.graphs)]

    def use_workspace(self, stream: int) -> None:
        """A product of matrices on `stream`."""
        if stream not in self.workspaces:
            self.workspaces[stream] = self.take(self.workspace_bytes)

    def clear_workspaces(self) -> None:
        for serial in self.workspaces.values():
            self._free(None, serial)
        self.workspaces.clear()

    def graph_pool(self, pool: Pool | None) -> Pool:
        """The pool of a new graph, which shares `pool` if it is given one."""
        if pool is None:
            pool = Pool()
        if pool not in self.pools:
            self.pools.append(pool)
        pool.graphs += 1
        return pool

    def drop_graph(self, pool: Pool) -> None:
        pool.graphs -= 1
