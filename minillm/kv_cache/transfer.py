"""BlockTransfer: makes the copies between a device, host memory and a disk that a step asks for. Built in chapter 17.

Host memory keeps a block of all layers in one row, so that a block is one transfer and one file,
whatever it is made of.

    device   keys[0] keys[1] ... values[0] ...      one tensor a layer and part, [num_blocks + 1, ...]
                |  gather     ^  scatter            on the stream that computes
             packed [num_blocks moved, bytes_per_block]
                |             |                     on a stream of their own, while the device computes
    host     rows   [num_places, bytes_per_block]   page-locked where there is a GPU
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.device import pin_memory
from minillm.kv_cache.disk import MOST_WAITING, DiskStore
from minillm.kv_cache.manager import BlockMoves
from minillm.kv_cache.paged import PagedKVCache
from minillm.staging import upload

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockTransfer:
    """Moves blocks between a `PagedKVCache`, `num_places` rows of host memory and a `DiskStore`."""

    def __init__(self, cache: PagedKVCache, num_places: int, disk: DiskStore | None = None):
        self.cache, self.disk = cache, disk
        layers = [layer for part in cache.parts.values() for layer in part]
        widths = [layer[0].numel() * layer.element_size() for layer in layers]  # bytes a block
        # Copied in words of 8 bytes where they fit: torch moves single bytes 10 times slower.
        word = next(word for word in WORDS if all(width % word.itemsize == 0 for width in widths))
        # Each [num_blocks + 1, its words].
        self.parts = [layer.view(torch.uint8).flatten(1).view(word) for layer in layers]
        self.widths = [width // word.itemsize for width in widths]
        self.bytes_per_block = sum(widths)
        self.device = layers[0].device
        self.rows = torch.empty(num_places, sum(self.widths), dtype=word)
        self.bytes_moved: Counter[str] = Counter()  # by the names of BlockMoves
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            pin_memory(self.rows)
            self.outward, self.inward = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self.leaving: set[int] = set()  # places that copies on `outward` may still be writing

    def move(self, moves: BlockMoves) -> None:
        """Make the copies of a step, before its forward pass; on a GPU, that pass waits for swap_in alone.

        In this order: a place is read before it is overwritten, and written before it is read.
        """
        # The CPU is about to touch rows that copies may be using.
        if self.on_gpu and (moves.to_disk or moves.from_disk):
            self.outward.synchronize()
            self.inward.synchronize()
        for place, block_hash in moves.to_disk:
            self.disk.write(block_hash, self.rows[place].clone().view(torch.uint8))
        if moves.swap_out:
            self._swap_out(*zip(*moves.swap_out))
        for block_hash, place in moves.from_disk:
            self.rows[place].view(torch.uint8).copy_(self.disk.take(block_hash))
        if moves.copies:
            self.cache.move(BlockMoves(copies=moves.copies))
        if moves.swap_in:
            self._swap_in(*zip(*moves.swap_in))
        for kind in ("to_disk", "swap_out", "from_disk", "swap_in"):
            if count := len(getattr(moves, kind)):
                self.bytes_moved[kind] += count * self.bytes_per_block

    def spill(self, host: list[tuple[int, bytes]], device: list[tuple[int, bytes]]) -> None:
        """Let the disk have (place, hash) of host memory, then (block, hash) of the device, and wait until it does.
        What stands last is kept longest; what there is no room for is not written at all."""
        device = device[-self.disk.capacity :]
        host = host[max(0, len(host) + len(device) - self.disk.capacity) :]
        if self.on_gpu:
            self.outward.synchronize()
        self._spill(host, lambda places: self.rows[list(places)])
        self._spill(device, lambda blocks: self._gather(self._index(blocks)).cpu())

    def _spill(self, named: list[tuple[int, bytes]], read: Callable[[tuple[int, ...]], Tensor]) -> None:
        for start in range(0, len(named), MOST_WAITING):
            some = named[start : start + MOST_WAITING]
            self.disk.flush()  # what is too much at once would be dropped
            for block_hash in (block_hash for _, block_hash in some if block_hash in self.disk):
                self.disk.touch(block_hash)
            if new := [one for one in some if one[1] not in self.disk]:
                indices, hashes = zip(*new)
                for row, block_hash in zip(read(indices), hashes):  # each [words of a block]
                    self.disk.write(block_hash, row.view(torch.uint8))
                self.bytes_moved["to_disk"] += len(new) * self.bytes_per_block
        self.disk.flush()

    def _swap_out(self, blocks: tuple[int, ...], places: tuple[int, ...]) -> None:
        packed = self._gather(self._index(blocks))
        if not self.on_gpu:
            self.rows.index_copy_(0, torch.tensor(places), packed)
            return
        # `packed` is a copy, so the step may write over the blocks at once; nothing but `outward` waits for it.
        # Whatever `inward` still read of these places in earlier steps is behind what computes, and so behind this too.
        if self.outward.query():
            self.leaving.clear()
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            for row, place in enumerate(places):
                self.rows[place].copy_(packed[row], non_blocking=True)
        packed.record_stream(self.outward)  # its memory is not handed out again before that
        self.leaving.update(places)

    def _swap_in(self, places: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        if not self.on_gpu:
            self._scatter(self._index(blocks), self.rows.index_select(0, torch.tensor(places)))
            return
        computing = torch.cuda.current_stream(self.device)
        if not self.leaving.isdisjoint(places):
            self.inward.wait_stream(self.outward)
        with torch.cuda.stream(self.inward):
            packed = torch.empty(len(places), self.rows.shape[1], dtype=self.rows.dtype, device=self.device)
            for row, place in enumerate(places):
                packed[row].copy_(self.rows[place], non_blocking=True)
        computing.wait_stream(self.inward)  # until here the device may still be at the step before
        self._scatter(self._index(blocks), packed)
        packed.record_stream(computing)

    def _gather(self, blocks: Tensor) -> Tensor:
        """[len(blocks), words of a block]"""
        return torch.cat([part.index_select(0, blocks) for part in self.parts], dim=1)

    def _scatter(self, blocks: Tensor, packed: Tensor) -> None:
        for part, rows in zip(self.parts, packed.split(self.widths, dim=1)):
            part.index_copy_(0, blocks, rows)

    def _index(self, blocks: tuple[int, ...]) -> Tensor:
        return upload(blocks, device=self.device)[0]
