"""BlockTables: the block table of every batch slot, on the host and on the device. Built in chapter 14.

slot       0           1       2
on_host    [4 7 . .]   [2 . .] [9 3 . .]     a step adds the entries that are new
on_device  the same, a copy of new entries behind: on a CPU it is the same memory
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.staging import upload


class BlockTables:
    """int32 [num_slots, num_blocks]; it grows in columns with what is set, in rows with `grow`."""

    def __init__(self, device: torch.device, num_slots: int, num_blocks: int):
        self.device = device
        self.on_host = np.zeros((0, num_blocks), np.int32)
        self.on_device: Tensor | None = None
        self._changes: list[tuple[int, int, list[int]]] = []  # (slot, first entry, blocks) not sent yet
        self.grow(num_slots)

    def set(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Entries of a slot's table from `first` on."""
        end = first + len(block_ids)
        if end > self.on_host.shape[1]:
            self.grow(len(self.on_host), max(end, 2 * self.on_host.shape[1]))
        self.on_host[slot, first:end] = block_ids
        if self.device.type != "cpu":
            self._changes.append((slot, first, list(block_ids)))

    def rows(self, slots: np.ndarray, num_blocks: int) -> tuple[np.ndarray, Tensor]:
        """The first entries of the tables of `slots`, on the host and on the device: [len(slots), num_blocks]."""
        on_host = self.on_host[slots, :num_blocks]
        if self.device.type == "cpu":
            return on_host, torch.from_numpy(on_host)
        self._send()
        return on_host, self.on_device[:, :num_blocks].index_select(0, upload(slots, device=self.device)[0])

    def _send(self) -> None:
        """Write new entries to the table on the device: their places and their blocks are one copy."""
        if not self._changes:
            return
        width = self.on_host.shape[1]
        places = [
            np.arange(slot * width + first, slot * width + first + len(ids)) for slot, first, ids in self._changes
        ]
        blocks = [np.asarray(ids, np.int32) for _, _, ids in self._changes]
        # The last one wins where an entry changed twice: index_copy_ leaves the order open.
        target, last = np.unique(np.concatenate(places)[::-1], return_index=True)
        place, block = upload(target, np.concatenate(blocks)[::-1][last], device=self.device)
        self.on_device.view(-1).index_copy_(0, place, block)
        self._changes.clear()

    def grow(self, num_slots: int, num_blocks: int | None = None) -> None:
        """Room for more; None keeps the number of columns."""
        table = np.zeros((num_slots, num_blocks or self.on_host.shape[1]), np.int32)
        table[: len(self.on_host), : self.on_host.shape[1]] = self.on_host
        self.on_host = table
        if self.device.type != "cpu":
            [self.on_device] = upload(table, device=self.device)
            self._changes.clear()  # they are in it
