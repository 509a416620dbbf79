"""Host memory beside the pretended GPU: which of it is pinned, and which copies are still on their way.

A copy that does not block leaves its host memory in the air until the host has waited for it. What arrives from the
device is poison until then, and what goes there must still be the same.
"""

from __future__ import annotations

import weakref
import zlib

import torch
from torch import Tensor

from .notes import NOTES

PINNED: set[int] = set()  # where storages begin


def pin(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    PINNED.add(storage.data_ptr())
    weakref.finalize(storage, PINNED.discard, storage.data_ptr()).atexit = False
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in PINNED


def poison(tensor: Tensor) -> Tensor:
    """What is read before it has arrived: no token has such an id, and no number is one."""
    if tensor.is_floating_point():
        return tensor.view(torch.int8).fill_(-1) if tensor.element_size() == 1 else tensor.fill_(float("nan"))
    return tensor.fill_(1 if tensor.dtype in (torch.bool, torch.uint8) else -77)


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy())


class Copy:
    """To the device if `arriving` is None; else those are the values that the host gets."""

    def __init__(self, host: Tensor, arriving: Tensor | None):
        self.host, self.arriving, self.is_done = host, arriving, False
        if arriving is None:
            self.checksum = checksum(host)
        elif host.numel():
            poison(host)

    def finish(self) -> None:
        """The host knows that it is done."""
        if self.is_done:
            return
        self.is_done = True
        if self.arriving is not None:
            self.host.copy_(self.arriving)
        elif checksum(self.host) != self.checksum:
            NOTES.fault("host memory was overwritten while its copy to the device was on its way")

    def overlaps(self, tensor: Tensor) -> bool:
        if self.host.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            return False
        (a, b), (c, d) = extent(self.host), extent(tensor)
        return a < d and c < b


def extent(tensor: Tensor) -> tuple[int, int]:
    """Bytes of its storage from the first it has to behind the last, for a tensor without negative strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


class Queue:
    """Copies that a stream has, or waits for, oldest first."""

    def __init__(self):
        self.copies: list[Copy] = []

    def add(self, copies: list[Copy]) -> None:
        known = set(map(id, self.copies))
        self.copies = [copy for copy in self.copies if not copy.is_done]
        self.copies += [copy for copy in copies if not copy.is_done and id(copy) not in known]

    def start(self, host: Tensor, arriving: Tensor | None, everywhere: list[Queue]) -> None:
        """Begin a copy. One that reads or writes the same host memory must be in this queue, so that the device keeps
        the order."""
        for queue in everywhere:
            for copy in queue.copies:
                if not copy.is_done and copy.overlaps(host) and (copy.arriving is not None or arriving is not None):
                    if copy not in self.copies:
                        NOTES.fault(
                            "two copies on different streams share host memory, and neither waits for the other"
                        )
                    copy.finish()  # the device does that one first
        self.add([Copy(host, arriving)])

    def finish(self) -> None:
        finish(self.copies)
        self.copies = []


def finish(copies: list[Copy]) -> None:
    for copy in copies:
        copy.finish()
