"""Attention of one token a sequence over pages, split over the length, and the merge. Built in chapter 13.

A decode step only waits for memory: every key and value of every sequence is read once. A program reads one KV head's
pages for all the query heads that share it. With few sequences that is few programs, and most of the GPU would look
on, so the length is split among `num_splits` programs, each of which leaves its own softmax: a largest score, a sum and
a weighted mean. Two kernels, no synchronisation between programs (FlashDecoding, Dao et al. 2023):

    pages of one sequence   |  split 0  |  split 1  |  split 2  |        merge_splits
                            mean, log-sum   ...         ...     ->   weights 2^(log-sum - largest), one mean
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.flash_attention import LOG2_E, check_heads, dot_precision, take_in, torch_attend
from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.kernels.paged_prefill import gather_pages

MIN_SPLIT = 256  # positions; a shorter split would spend its time on starting and merging
MAX_SPLITS = 64


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_splits: int = 1,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One query a sequence, its last position: [num_seqs, num_heads, head_dim].

    q [num_seqs, num_heads, head_dim], any stride from sequence to sequence; keys and values as in `paged_prefill`;
    seq_lens [num_seqs], 0 for a row that only fills up a batch: its result is 0. `num_splits` from `choose_num_splits`.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = keys.shape
    check_heads(q, values.transpose(1, 2)[0], values.transpose(1, 2)[0], window)
    if out is None:
        out = torch.empty(num_seqs, num_heads, head_dim, dtype=q.dtype, device=q.device)
    group, width = num_heads // num_kv_heads, next_power_of_2(head_dim)
    # Keys at a time: 16 KB of them, many bytes in flight and few registers; without tensor cores a product needs more.
    has_tensor_cores = capability(q) >= 80 and q.element_size() == 2
    tile_n = max(16, min(64, 8192 // width) // (1 if has_tensor_cores else 2 * q.element_size() // 2))
    part, logs = out.unsqueeze(2), q.new_empty(0, dtype=torch.float32)
    if num_splits > 1:
        part = torch.empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(num_seqs, num_heads, num_splits, dtype=torch.float32, device=q.device)
    paged_decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        q, keys, values, part, logs, seq_lens, block_table, (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        q.stride(0), q.stride(1), part.stride(0), part.stride(1), part.stride(2),
        keys.stride(0), values.stride(0), block_table.stride(0),
        GROUP=group, ROWS=max(16, next_power_of_2(group)), HEAD_DIM=head_dim, WIDTH=width,
        BLOCK_SIZE=block_size, WINDOW=window or 0, SPLIT=num_splits > 1, TILE_N=tile_n,
        PRECISION=dot_precision(q.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(part, logs, out)
    return out


def choose_num_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """As many as give every SM two programs, where the longest sequence can be cut so often. A power of two, so that
    batches of similar size run the same kernel."""
    wanted = 2 * num_sms // max(1, num_seqs * num_kv_heads)
    possible = max_seq_len // MIN_SPLIT
    return next_power_of_2(max(1, min(wanted, possible, MAX_SPLITS)) // 2 + 1)  # rounded down to a power of two


@triton.jit
def paged_decode_kernel(
    q, keys, values, part, logs, seq_lens, block_table, scale,
    q_seq, q_head, part_seq, part_head, part_split, key_block, value_block, table_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, seq, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(seq_lens + seq).to(tl.int32)
    begin, end = split_bounds(length, split, tl.num_programs(2), WINDOW, TILE_N)

    rows = tl.arange(0, ROWS)  # the query heads of this KV head; a product of tiles wants 16 rows at least
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, WIDTH)
    inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + seq * q_seq + heads[:, None] * q_head + dims[None, :], inside, 0.0)
    block_table += seq * table_row
    keys += kv_head * HEAD_DIM * BLOCK_SIZE
    values += kv_head * BLOCK_SIZE * HEAD_DIM

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(begin, end, TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        there = columns < end
        if WINDOW > 0:
            there = there & (columns >= length - WINDOW)
        held = columns // BLOCK_SIZE * BLOCK_SIZE < end  # whole blocks, so that loads of 16 bytes are not cut
        blocks = tl.load(block_table + columns // BLOCK_SIZE, held, 0).to(tl.int64)
        offsets = columns % BLOCK_SIZE
        wide = (dims < HEAD_DIM)[:, None] & held[None, :]
        page = keys + (blocks * key_block + offsets)[None, :] + dims[:, None] * BLOCK_SIZE
        scores = tl.dot(queries, tl.load(page, wide, 0.0), input_precision=PRECISION) * scale  # [ROWS, TILE_N]
        scores = tl.where(there[None, :], scores, float("-inf"))
        page = values + (blocks * value_block + offsets * HEAD_DIM)[:, None] + dims[None, :]
        wide = there[:, None] & (dims < HEAD_DIM)[None, :]
        best, total, acc = take_in(best, total, acc, scores, tl.load(page, wide, 0.0), True, PRECISION)

    some = tl.where(total == 0.0, 1.0, total)  # an empty split, or a row that only fills up the batch: zeros
    part += seq * part_seq + split * part_split
    tl.store(part + heads[:, None] * part_head + dims[None, :], acc / some[:, None], inside)
    if SPLIT:
        num_heads = tl.num_programs(0) * GROUP
        where = (seq * num_heads + heads) * tl.num_programs(2) + split
        tl.store(logs + where, best + tl.log2(some), rows < GROUP)


@triton.jit
def split_bounds(length, split, num_splits, WINDOW: tl.constexpr, TILE_N: tl.constexpr):
    """The positions that a split reads: whole tiles, as even as they go, from the window's first one on."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE_N * TILE_N
    size = tl.cdiv(tl.cdiv(length - first, TILE_N), num_splits) * TILE_N
    begin = first + split * size
    return begin, tl.minimum(begin + size, length)


def merge_splits(part: Tensor, logs: Tensor, out: Tensor) -> Tensor:
    """One softmax out of several. part [num_seqs, num_heads, num_splits, head_dim] float32 are the weighted means of the
    splits, logs [num_seqs, num_heads, num_splits] float32 the base-2 logarithms of their sums of exponentials, -inf
    for an empty one. Written to out [num_seqs, num_heads, head_dim]."""
    num_seqs, num_heads, num_splits, head_dim = part.shape
    merge_kernel[(num_heads, num_seqs)](
        part, logs, out, out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, WIDTH=next_power_of_2(head_dim), NUM_SPLITS=num_splits, SPLITS=next_power_of_2(num_splits),
        num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def merge_kernel(
    part, logs, out, out_seq, out_head,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (seq * tl.num_programs(0) + head) * NUM_SPLITS
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    sums = tl.load(logs + row + splits, splits < NUM_SPLITS, float("-inf"))
    largest = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(largest == float("-inf"), 0.0, largest))
    inside = (splits < NUM_SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    means = tl.load(part + (row + splits)[:, None] * HEAD_DIM + dims[None, :], inside, 0.0)
    total = tl.sum(weights, 0)
    mean = tl.sum(weights[:, None] * means, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + seq * out_seq + head * out_head + dims, mean, dims < HEAD_DIM)


def torch_paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_splits: int = 1,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The twin: gather each sequence's pages, then the formula; `num_splits` changes nothing."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out
    for row, (length, table) in enumerate(zip(seq_lens.tolist(), block_table)):
        if length:
            k, v = gather_pages(keys, values, table, length)
            out[row : row + 1] = torch_attend(q[row : row + 1], k, v, window, scale)
        else:
            out[row] = 0
    return out


def torch_merge_splits(part: Tensor, logs: Tensor, out: Tensor) -> Tensor:
    """The twin of `merge_splits`."""
    largest = logs.amax(-1, keepdim=True)
    weights = torch.exp2(logs - largest.masked_fill(largest == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True)
    means = (weights[..., None] * part).sum(2) / total.masked_fill(total == 0, 1.0)
    return out.copy_(means)
