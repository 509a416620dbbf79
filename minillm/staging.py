"""Between host and device without waiting: what a step sends goes in one copy, what it returns is waited for once.
Built in chapter 14.

    upload(a, b, c)     a | b | c side by side in page-locked memory  ->  one copy  ->  views of one piece of the device
    Download(x, y)      copies are queued behind the kernels that compute x and y; `wait` blocks for all of them

A copy from ordinary memory blocks: the driver moves it through page-locked memory of its own while the program stands
still. torch's allocator of page-locked memory remembers the copies that still read a piece, and hands it out again only
after them, so nothing here needs to be kept alive. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from minillm.rounding import round_up

ALIGNMENT = 16  # bytes; a kernel compiled for an aligned pointer serves every column


def upload(*columns: np.ndarray | Sequence[int], device: torch.device | str) -> list[Tensor]:
    """Each column as a tensor on `device`, int64 for plain lists of whole numbers,
    in a single copy that is not waited for."""
    arrays = [column if isinstance(column, np.ndarray) else np.asarray(column, np.int64) for column in columns]
    device = torch.device(device)
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts, num_bytes = layout(arrays)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    fill(host, arrays, starts)
    return views(
        torch.empty(num_bytes, dtype=torch.uint8, device=device).copy_(host, non_blocking=True), arrays, starts
    )


def layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins when they lie side by side, in bytes, and how many bytes they take."""
    ends = list(accumulate((round_up(array.nbytes, ALIGNMENT) for array in arrays), initial=0))
    return ends[:-1], max(ends[-1], ALIGNMENT)


def fill(host: Tensor, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Write the arrays into host memory, uint8."""
    room = host.numpy()
    for start, array in zip(starts, arrays):
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(memory: Tensor, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> list[Tensor]:
    """The arrays as tensors over `memory`, uint8, that holds what `fill` wrote."""
    dtypes = [torch.from_numpy(array[:0].reshape(-1)).dtype for array in arrays]
    pieces = [memory[start : start + array.nbytes] for start, array in zip(starts, arrays)]
    return [piece.view(dtype).view(array.shape) for piece, dtype, array in zip(pieces, dtypes, arrays)]


class Download:
    """Tensors on their way to the host, queued behind whatever computes them."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors
        self.arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self.tensors = tuple(self._queue(tensor) for tensor in tensors)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    @staticmethod
    def _queue(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors in host memory, in their order. Blocks until they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        return self.tensors
