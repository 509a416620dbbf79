"""Which positions each program of a decode step reads, by the lengths on the device. Built in chapter 13.

One number of splits for a batch serves neither a long sequence among short ones nor a recorded step,
whose host knows no length. So one small program reads all lengths, once a step, and lists the work:
every sequence gets the splits that its own share of all positions is worth, most of them one. The grid is as long as
the longest such list can be, which the host does know: a program beyond the list returns at once,
and there are at most as many as the GPU was to run extra.

    lengths        64 x 1,024                    100,000             padding
    items     [ one program each ... ]  [ 0 | 1 | 2 | ... | 39 ]   [ writes 0 ]   (empty)
                write their result        leave parts; the last one to finish merges them

Consecutive rows may be tokens of one sequence (a draft to verify, chapter 18). An item takes up to `tokens_each` of
them, so their keys are read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels.language import next_power_of_2, tl, triton
from minillm.rounding import ceil_div

MIN_SPLIT = 256  # positions; a shorter split would spend its time on starting and merging
PROGRAMS_PER_SM = 4  # how finely a batch is cut: enough to even out programs of different length
FIELDS = 7  # of an item: row (-1: none), tokens, first position, end, split, number of splits, first slot for parts
BLOCK = 512  # rows that the planning program takes at a time


@dataclass(frozen=True)
class DecodePlan:
    """Made by `plan_decode` for one step and one window, and read by `paged_decode`. Lies on the device."""

    items: Tensor  # [FIELDS, num_items] int32
    counters: Tensor  # [num_slots, num_kv_heads] int32, 0 at the start: splits of a sequence that are done
    tokens_each: int  # rows of one sequence that an item takes, at most; a power of two

    def part_bytes(self, num_heads: int, head_dim: int) -> int:
        """Of the parts that a launch allocates: a mean and a log-sum for each split, token and query head."""
        return self.counters.shape[0] * self.tokens_each * num_heads * (head_dim + 1) * 4


def plan_decode(
    seq_lens: Tensor,
    num_kv_heads: int,
    max_seq_len: int,
    num_sms: int,
    window: int | None = None,
    query_index: Tensor | None = None,
    tokens_each: int = 1,
) -> DecodePlan:
    """The items of a batch of rows with seq_lens [num_rows], int32 or int64; 0 for a row that only fills up a batch.

    The size of the plan follows from the number of rows, `max_seq_len` and the GPU alone, so a step can be recorded.
    query_index [num_rows]: how many rows before each one are tokens of the same sequence, which are consecutive and
    whose lengths rise by one; None where every row is a sequence of its own.
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    num_items, num_slots, target = plan_sizes(num_rows, num_kv_heads, max_seq_len, num_sms, window)
    items = torch.empty(FIELDS, num_items, dtype=torch.int32, device=device)
    counters = torch.empty(num_slots, num_kv_heads, dtype=torch.int32, device=device)
    tokens_each = next_power_of_2(tokens_each) if query_index is not None else 1
    plan_decode_kernel[(1,)](
        seq_lens, query_index, items, counters, num_rows, num_items, counters.numel(), target,
        WINDOW=window or 0, TOKENS=tokens_each, MIN_SPLIT=MIN_SPLIT, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return DecodePlan(items, counters, tokens_each)


def plan_sizes(
    num_rows: int, num_kv_heads: int, max_seq_len: int, num_sms: int, window: int | None = None
) -> tuple[int, int, int]:
    """Items at most, slots for parts at most, and how many splits the work of all sequences is worth.

    A split is a target-th of all positions or more, and a sequence has round(its positions / that), at least 1. So all
    together have at most `target` more than there are rows, and those with two or more at most 4/3 of `target`.
    """
    target = max(1, PROGRAMS_PER_SM * num_sms // num_kv_heads)
    longest = max_seq_len if window is None else min(max_seq_len, window + BLOCK)
    extra = min(target, num_rows * (longest // MIN_SPLIT))
    return num_rows + extra, max(1, min(4 * target // 3, 2 * extra)), target


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_counters", "target"],
    do_not_specialize_on_alignment=["seq_lens", "query_index"],
)
def plan_decode_kernel(
    seq_lens, query_index, items, counters, num_rows, num_items, num_counters, target,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.arange(0, BLOCK)
    total = 0
    for begin in range(0, num_rows, BLOCK):
        first, end, tokens = find_sequences(seq_lens, query_index, begin + places, num_rows, WINDOW, TOKENS)
        total += tl.sum(end - first, 0)
    size = tl.maximum(tl.cdiv(total, target), MIN_SPLIT)

    num_done, num_slots = 0, 0
    for begin in range(0, num_rows, BLOCK):
        rows = begin + places
        first, end, tokens = find_sequences(seq_lens, query_index, rows, num_rows, WINDOW, TOKENS)
        splits = tl.where(tokens > 0, tl.maximum((end - first + size // 2) // size, 1), 0)
        several = tl.where(splits > 1, splits, 0)
        here = items + num_done + tl.cumsum(splits, 0) - splits
        slot = num_slots + tl.cumsum(several, 0) - several
        for split in range(0, tl.max(splits, 0)):
            mine = split < splits
            tl.store(here + split, rows, mine)
            tl.store(here + split + num_items, tokens, mine)
            tl.store(here + split + 2 * num_items, first, mine)
            tl.store(here + split + 3 * num_items, end, mine)
            tl.store(here + split + 4 * num_items, split, mine)
            tl.store(here + split + 5 * num_items, splits, mine)
            tl.store(here + split + 6 * num_items, slot, mine)
        num_done += tl.sum(splits, 0)
        num_slots += tl.sum(several, 0)
    for begin in range(num_done, num_items, BLOCK):
        tl.store(items + begin + places, -1, begin + places < num_items)
    for begin in range(0, num_counters, BLOCK):
        tl.store(counters + begin + places, 0, begin + places < num_counters)


@triton.jit
def find_sequences(seq_lens, query_index, rows, num_rows, WINDOW: tl.constexpr, TOKENS: tl.constexpr):
    """Of each row that begins an item: the first position it sees, the end of what its last token sees, its tokens. Of
    others 0 tokens and no positions."""
    real = rows < num_rows
    length = tl.load(seq_lens + rows, real, 0).to(tl.int32)
    tokens = real.to(tl.int32)
    if query_index is not None:
        index = tl.load(query_index + rows, real, 0).to(tl.int32)
        for more in tl.static_range(1, TOKENS):
            after = rows + more
            tokens += (tl.load(query_index + after, after < num_rows, 0).to(tl.int32) == index + more).to(tl.int32)
        tokens = tl.where(real & (index % TOKENS == 0), tokens, 0)
    end = tl.where((tokens > 0) & (length > 0), length + tokens - 1, 0)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(length)
    return tl.minimum(first, end), end, tokens


@triton.jit
def read_item(plan, item, num_items):
    """The fields of an item of a `DecodePlan`."""
    plan += item
    seq, tokens, first = tl.load(plan).to(tl.int64), tl.load(plan + num_items), tl.load(plan + 2 * num_items)
    last, split = tl.load(plan + 3 * num_items), tl.load(plan + 4 * num_items)
    return seq, tokens, first, last, split, tl.load(plan + 5 * num_items), tl.load(plan + 6 * num_items)


@triton.jit
def even_bounds(first, last, split, num_splits, TILE_N: tl.constexpr):
    """`split_bounds` of a plan's item: no split is empty where there are tiles enough."""
    first = first // TILE_N
    tiles = tl.cdiv(last, TILE_N) - first
    begin, end = first + split * tiles // num_splits, first + (split + 1) * tiles // num_splits
    return begin * TILE_N, tl.minimum(end * TILE_N, last)


@triton.jit
def merge_parts(
    parts,
    logs,
    where,
    step,
    num_splits,
    real,
    inside,
    dims,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One softmax out of several, as `merge_kernel` makes it, split by split in their order: [ROWS, WIDTH]."""
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in tl.range(num_splits, loop_unroll_factor=4):
        largest = tl.maximum(largest, tl.load(logs + where + split * step, real, float("-inf")))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in tl.range(num_splits, loop_unroll_factor=4):  # four loads on their way at a time
        weights = tl.exp2(tl.load(logs + where + split * step, real, float("-inf")) - largest)
        total += weights
        mean += weights[:, None] * tl.load(
            parts + (where + split * step)[:, None] * HEAD_DIM + dims[None, :], inside, 0.0
        )
    return mean / tl.where(total == 0.0, 1.0, total)[:, None]


def torch_plan_decode(
    seq_lens: Tensor,
    num_kv_heads: int,
    max_seq_len: int,
    num_sms: int,
    window: int | None = None,
    query_index: Tensor | None = None,
    tokens_each: int = 1,
) -> DecodePlan:
    """The twin, in plain Python."""
    lengths, num_rows = seq_lens.tolist(), seq_lens.shape[0]
    num_items, num_slots, target = plan_sizes(num_rows, num_kv_heads, max_seq_len, num_sms, window)
    index = [0] * num_rows if query_index is None else query_index.tolist()
    tokens_each = next_power_of_2(tokens_each) if query_index is not None else 1
    sequences = []  # row, tokens, first position, end
    for row, length in enumerate(lengths):
        if index[row] % tokens_each == 0:
            tokens = 1
            while tokens < tokens_each and index[row + tokens : row + tokens + 1] == [index[row] + tokens]:
                tokens += 1
            sequences.append((row, tokens, max(length - (window or length), 0), length + tokens - 1 if length else 0))
    size = max(ceil_div(sum(end - first for *_, first, end in sequences), target), MIN_SPLIT)
    listed, slot = [], 0
    for row, tokens, first, end in sequences:
        splits = max((end - first + size // 2) // size, 1)
        listed += [(row, tokens, first, end, split, splits, slot) for split in range(splits)]
        slot += splits if splits > 1 else 0
    listed += [(-1, *[0] * (FIELDS - 1))] * (num_items - len(listed))
    items = torch.tensor(listed, dtype=torch.int32, device=seq_lens.device).T.contiguous()
    return DecodePlan(
        items, torch.zeros(num_slots, num_kv_heads, dtype=torch.int32, device=seq_lens.device), tokens_each
    )
