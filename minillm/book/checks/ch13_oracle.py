"""References of chapter 13: states of a softmax, programs on a GPU's places, pages and their places.
Built in chapter 13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor


class Costs(NamedTuple):
    """What a split costs, in nanoseconds."""

    start: int  # a program, before its first tile
    tile: int  # each tile of a program
    launch: int  # the second kernel, if there is one
    part: int  # each split that it merges


def state_of(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, log) of scores [num_heads, num_keys] over values [num_keys, head_dim], natural;
    of no keys: NaN and -inf."""
    if not scores.shape[1]:
        return scores.new_full((len(scores), values.shape[1]), torch.nan), scores.new_full((len(scores),), -torch.inf)
    return scores.softmax(1) @ values, scores.logsumexp(1)


def programs_of(seq_lens: Sequence[int], num_kv_heads: int, tile_n: int, num_splits: int, costs: Costs) -> list[int]:
    """The time of each program, in the order in which they start."""
    times = []
    for split in range(num_splits):
        for length in seq_lens:
            tiles = -(-length // tile_n)
            each = -(-tiles // num_splits)
            own = len(range(tiles)[split * each : (split + 1) * each])
            times += [costs.start + own * costs.tile] * num_kv_heads
    return times


def last_end(times: Sequence[int], places: int) -> int:
    """When the last of these programs ends: each takes the place that is free first."""
    free = numpy.zeros(places, dtype=numpy.int64)
    for time in times:
        free[free.argmin()] += time
    return int(free.max())


def merge_time(num_splits: int, costs: Costs) -> int:
    return costs.launch + num_splits * costs.part if num_splits > 1 else 0


def split_time(
    seq_lens: Sequence[int], num_kv_heads: int, places: int, tile_n: int, num_splits: int, costs: Costs
) -> int:
    """Nanoseconds of a decode with so many splits."""
    return last_end(programs_of(seq_lens, num_kv_heads, tile_n, num_splits, costs), places) + merge_time(
        num_splits, costs
    )


def mistaken_times(
    seq_lens: Sequence[int], num_kv_heads: int, places: int, tile_n: int, num_splits: int, costs: Costs
) -> dict[str, int]:
    """Hint -> the time that this mistake gives."""
    times = programs_of(seq_lens, num_kv_heads, tile_n, num_splits, costs)
    merge, right = merge_time(num_splits, costs), last_end(times, places)
    by_sequence = [
        times[(split * len(seq_lens) + seq) * num_kv_heads]
        for seq in range(len(seq_lens))
        for split in range(num_splits)
        for _ in range(num_kv_heads)
    ]
    longest = -(-max(-(-length // tile_n) for length in seq_lens) // num_splits)
    working = [time for time in times if time > costs.start]
    even = []
    for split in range(num_splits):
        for length in seq_lens:
            tiles = -(-length // tile_n)
            even += [costs.start + (tiles // num_splits + (split < tiles % num_splits)) * costs.tile] * num_kv_heads
    waves = -(-len(times) // places)
    return {
        "One split leaves nothing to merge: no second kernel.": right + costs.launch + num_splits * costs.part,
        "With more than one split there is a second kernel: its launch, and a part of it for each split.": right,
        "The second kernel costs its launch once, whatever it merges.": right + num_splits * costs.part,
        (
            "Places do not wait for each other: whoever is done takes the next program. "
            "Waves as long as their longest program would take longer."
        ): waves * (costs.start + longest * costs.tile) + merge,
        "Only as many programs run at a time as there are places.": max(times) + merge,
        "Programs start in their order: all of split 0 first, then all of split 1.": last_end(by_sequence, places)
        + merge,
        "Programs start in their order, not the longest first.": last_end(sorted(times, reverse=True), places) + merge,
        (
            "A split takes ceil(tiles / num_splits) tiles as long as there are any; "
            "the last one gets what is left, and those after it nothing."
        ): last_end(even, places) + merge,
        "A program without tiles is started all the same, and costs its start.": last_end(working, places) + merge,
        "This is the work of all, shared out evenly. A program is not divided among places.": sum(times) // places
        + merge,
    }


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
