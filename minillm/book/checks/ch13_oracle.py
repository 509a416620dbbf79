"""References of chapter 13: states of a softmax, programs on a GPU's places, pages and their places.
Built in chapter 13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

PAGED = tuple(
    f"minillm.kernels.paged_decode.{name}"
    for name in ("merge_splits", "torch_merge_splits", "paged_decode", "torch_paged_decode", "choose_num_splits")
)


class Costs(NamedTuple):
    """What a split costs, in nanoseconds."""

    start: int  # a program, before its first tile
    tile: int  # each tile of a program
    launch: int  # the second kernel, if there is one
    part: int  # each split that it merges


def programs_of(
    seq_lens: Sequence[int], num_kv_heads: int, tile_n: int, num_splits: int, costs: Costs,
    *, even: bool = False, idle: bool = True,
) -> list[int]:  # fmt: skip
    """The time of each program, in the order in which they start. The keywords are mistakes."""
    order = [(split, length) for split in range(num_splits) for length in seq_lens]
    times = []
    for split, length in order:
        tiles = -(-length // tile_n)
        each = -(-tiles // num_splits)
        own = len(range(tiles)[split * each : (split + 1) * each])
        if even:
            own = tiles // num_splits + (split < tiles % num_splits)
        times += [costs.start + own * costs.tile] * (num_kv_heads if own or idle else 0)
    return times


def last_end(times: Sequence[int], places: int) -> int:
    """When the last of these programs ends: each takes the place that is free first."""
    free = numpy.zeros(places, dtype=numpy.int64)
    for time in times:
        free[free.argmin()] += time
    return int(free.max())


def merge_time(num_splits: int, costs: Costs) -> int:
    return costs.launch + num_splits * costs.part if num_splits > 1 else 0


def best_splits(
    seq_lens: Sequence[int], num_kv_heads: int, places: int, tile_n: int, max_splits: int, costs: Costs,
    *, end: Callable[[Sequence[int], int], int] = last_end, merge: Callable[[int, Costs], int] = merge_time,
    chosen: int = 0, **mistakes: bool,
) -> tuple[int, int]:  # fmt: skip
    """The number of splits, and the nanoseconds that a decode takes then. The keywords are mistakes."""
    times = [
        end(programs_of(seq_lens, num_kv_heads, tile_n, splits, costs, **mistakes), places) + merge(splits, costs)
        for splits in range(1, max_splits + 1)
    ]
    return [splits for splits, time in enumerate(times, 1) if time == min(times)][chosen], min(times)


def kept(length: int, window: int) -> range:
    """The positions of a sequence that lie in the window."""
    return range(max(length - window, 0), length)


def gathered(pages: Tensor, block_table: Tensor, seq_lens: Sequence[int], window: int) -> Tensor:
    """[2, num_kv_heads, total, head_dim]: the windows of all sequences one after the other,
    zeros for the null block."""
    rows = []
    for length, table in zip(seq_lens, block_table.tolist()):
        for position in kept(length, window):
            block, offset = table[position // pages.shape[1]], position % pages.shape[1]
            rows.append(pages[block, offset] if block else torch.zeros_like(pages[0, 0]))
    return torch.stack(rows).permute(1, 2, 0, 3).contiguous()


def slot_places(slots: Sequence[int], num_blocks: int, block_size: int, width: int) -> Tensor:
    """[2, num_tokens, width] int64: where the keys and the values of each token go, -1 for padding."""
    rows = torch.tensor([[slot * width, (num_blocks * block_size + slot) * width] for slot in slots])
    places = rows.T[:, :, None] + torch.arange(width)
    return torch.where(torch.tensor(slots)[None, :, None] >= 0, places, -1)
