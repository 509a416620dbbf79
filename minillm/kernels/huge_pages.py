"""Memory in pages of 2 MiB, for what a step reads from one end to the other: weights, keys and values.
Built in chapter 14.

An address is looked up before it is read, page by page, and pages are 4 KiB unless one asks: reading a weight of 4 MiB
takes a thousand look-ups, and the CPU, which reads ahead by itself, stops at the end of each page. Linux gives larger
pages to memory that is marked before it is first written (`madvise`); elsewhere this is ordinary memory.
"""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

from minillm.rounding import round_up

ALIGNMENT = 64  # a line of the cache
CHUNK = 64 * 2**20  # taken from the system at once, and used from front to back; what is never written takes no memory


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of zeros in memory of its own, which is taken as it is written."""
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    return _mapping(math.prod(shape) * dtype.itemsize).view(dtype)[: math.prod(shape)].view(shape)


def copy(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous, beside what was copied before: weights are smaller than pages, so they share them.
    The memory is given back when nothing of a chunk is in use any more."""
    if tensor.numel() == 0:
        return tensor.clone()
    return _arena.take(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Arena:
    """Pieces of memory side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; its address is a multiple of 64."""
        with self._lock:
            if self._chunk is None or self._used + num_bytes > len(self._chunk):
                self._chunk, self._used = _mapping(max(num_bytes, CHUNK)), 0
            piece = self._chunk[self._used : self._used + num_bytes]
            self._used += round_up(num_bytes, ALIGNMENT)
            return piece


_arena = Arena()


def _mapping(num_bytes: int) -> Tensor:
    """uint8, zeros by the system's promise: at least `num_bytes`."""
    num_bytes = round_up(num_bytes, ALIGNMENT)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    # Not shared with other processes, which is what mmap means by default: shared memory has small pages only.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
