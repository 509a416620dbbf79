"""Attention of one token a sequence over pages, split over the length, and the merge. Built in chapter 13.

A decode step is memory-bound: every key and value of every sequence is read once. A program reads one KV head's
pages for all the query heads that share it. With few sequences that is few programs, and most of the GPU would look
on, so the length is split among `num_splits` programs, each of which leaves its own softmax: a largest score, a sum and
a weighted mean. Two kernels, no synchronisation between programs (FlashDecoding, Dao et al. 2023):

    pages of one sequence   |  split 0  |  split 1  |  split 2  |        merge_splits
                            mean, log-sum   ...         ...     ->   weights 2^(log-sum - largest), one mean

With a plan (`minillm.kernels.decode_plan`), which is how a step runs it, each sequence has a number of splits of its
own, most have one and write their result, and the last split of the others to finish merges them: one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.decode_plan import MIN_SPLIT, DecodePlan, even_bounds, merge_parts, read_item
from minillm.kernels.flash_attention import LOG2_E, check_heads, dot_precision, take_in, torch_attend
from minillm.kernels.kv_codes import as_codes, check_codes, load_both, pair_of, score, store_both, take_in_codes, units
from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.kernels.paged_prefill import gather_pages
from minillm.kernels.sinks import begin_softmax, check_sinks, torch_attend_sinks

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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: int = 0,
    q_sink: Tensor | None = None,
    plan: DecodePlan | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """One query a sequence, its last position: [num_seqs, num_heads, head_dim].

    q [num_seqs, num_heads, head_dim], any stride from sequence to sequence; keys, values, scales and sinks as in
    `paged_prefill`; seq_lens [num_seqs], 0 for a row that only fills up a batch: its result is 0. `num_splits` from
    `choose_num_splits`; a `plan` of these seq_lens, used once, takes its place.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = keys.shape
    check_heads(q, values.transpose(1, 2)[0], values.transpose(1, 2)[0], window)
    check_codes(keys, values, key_scales, value_scales)
    check_sinks(q, q_sink, sinks, window, sink_logits)
    if out is None:
        out = torch.empty(num_seqs, num_heads, head_dim, dtype=q.dtype, device=q.device)
    group, pair = num_heads // num_kv_heads, pair_of(keys)
    width = max(16, next_power_of_2(head_dim // pair))
    tile_n, num_stages = choose_tile(width, q.element_size(), keys.element_size(), capability(q))
    part, logs, grid = out.unsqueeze(2), q.new_empty(0, dtype=torch.float32), (num_kv_heads, num_seqs, num_splits)
    tokens, planned = 1, {}
    if plan is not None:
        tokens, num_slots, grid = plan.tokens_each, plan.counters.shape[0], (num_kv_heads, plan.items.shape[1])
        parts = torch.empty(num_slots, num_kv_heads, tokens * group, head_dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(num_slots, num_kv_heads, tokens * group, dtype=torch.float32, device=q.device)
        planned = {"plan": plan.items, "counters": plan.counters, "parts": parts}
    elif num_splits > 1:
        part = torch.empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(num_seqs, num_heads, num_splits, dtype=torch.float32, device=q.device)
    paged_decode_kernel[grid](
        q, as_codes(keys, capability(q)), as_codes(values, capability(q)), part, logs, seq_lens, block_table,
        key_scales, value_scales, q_sink, sink_logits, (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        q.stride(0), q.stride(1), part.stride(0), part.stride(1), part.stride(2),
        keys.stride(0), values.stride(0), block_table.stride(0),
        GROUP=group, ROWS=max(16, next_power_of_2(tokens * group)), HEAD_DIM=head_dim, WIDTH=width, PAIR=pair,
        BLOCK_SIZE=block_size, WINDOW=window or 0, SINKS=sinks, SPLIT=plan is None and num_splits > 1, TILE_N=tile_n,
        PRECISION=dot_precision(q.dtype), TOKENS=tokens, num_warps=4, num_stages=num_stages, **planned,
    )  # fmt: skip
    if plan is None and num_splits > 1:
        merge_splits(part, logs, out)
    return out


def choose_tile(width: int, query_bytes: int, key_bytes: int, capability: int) -> tuple[int, int]:
    """Keys at a time, and stages: one is computed with while the others are on their way.

    Tiles of 8 KB of keys and as many values, two of them on their way (48 KB on Hopper, whose memory is faster),
    let four programs share an SM. Without tensor cores a product needs the registers, and copies are not asynchronous
    on a T4.
    """
    if capability < 80 or query_bytes == 4:
        return max(16, min(64, 8192 // width) // query_bytes), 2
    return max(16, min(64, 8192 // key_bytes // width)), 4 if capability >= 90 else 3


def choose_num_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """As many as give every SM two programs, where the longest sequence can be cut so often. A power of two, so that
    batches of similar size run the same kernel."""
    wanted = 2 * num_sms // max(1, num_seqs * num_kv_heads)
    possible = max_seq_len // MIN_SPLIT
    return next_power_of_2(max(1, min(wanted, possible, MAX_SPLITS)) // 2 + 1)  # rounded down to a power of two


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["seq_lens", "block_table"])
def paged_decode_kernel(
    q, keys, values, part, logs, seq_lens, block_table, key_scales, value_scales, q_sink, sink_logits, scale,
    q_seq, q_head, part_seq, part_head, part_split, key_block, value_block, table_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr = 1, PAIR: tl.constexpr = 1, plan=None, counters=None, parts=None,
):  # fmt: skip
    kv_head, seq, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_splits, num_tokens = tl.num_programs(2), 1
    if plan is not None:
        seq, num_tokens, first, last, split, num_splits, slot = read_item(plan, tl.program_id(1), tl.num_programs(1))
        if seq < 0:
            return
    length = tl.load(seq_lens + seq).to(tl.int32)
    if plan is None:
        begin, end = split_bounds(length, split, num_splits, WINDOW, TILE_N)
    else:
        begin, end = even_bounds(first, last, split, num_splits, TILE_N)

    rows = tl.arange(0, ROWS)  # the query heads of this KV head; a product of tiles wants 16 rows at least
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP  # of several tokens, those of the first one first
    WIDE: tl.constexpr = HEAD_DIM // PAIR  # elements of a vector: of int4 each has two dimensions
    dims = tl.arange(0, WIDTH)
    real = rows < num_tokens * GROUP
    inside = real[:, None] & (dims < WIDE)[None, :]
    dims *= PAIR
    query = q + (seq + tokens)[:, None] * q_seq + heads[:, None] * q_head + dims[None, :]
    queries, odd = load_both(query, inside, PAIR)
    block_table += seq * table_row
    keys += kv_head * WIDE * BLOCK_SIZE
    values += kv_head * BLOCK_SIZE * WIDE
    if key_scales is not None:
        key_scales += kv_head * BLOCK_SIZE
        value_scales += kv_head * BLOCK_SIZE

    best, total = begin_softmax(sink_logits, heads, real, split == 0, ROWS)
    acc, acc_odd = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)  # odd: of int4 only
    if SINKS > 0:  # the first keys, which all see, are left to the first split
        query = q_sink + ((seq + tokens) * tl.num_programs(0) * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
        turned, turned_odd = load_both(query, inside, PAIR)
        best, total, acc, acc_odd = read_pages(
            best, total, acc, acc_odd, turned, turned_odd, keys, values, block_table, key_scales, value_scales,
            key_block, value_block, scale, 0, tl.where(split == 0, tl.minimum(SINKS, length + num_tokens - 1), 0),
            length, tokens, tl.num_programs(0), WIDE, WIDTH, PAIR, BLOCK_SIZE, 0, 0, TILE_N, TOKENS, PRECISION,
        )  # fmt: skip
    best, total, acc, acc_odd = read_pages(
        best, total, acc, acc_odd, queries, odd, keys, values, block_table, key_scales, value_scales, key_block,
        value_block, scale, begin, end, length, tokens, tl.num_programs(0), WIDE, WIDTH, PAIR, BLOCK_SIZE, WINDOW,
        SINKS, TILE_N, TOKENS, PRECISION,
    )  # fmt: skip
    some = tl.where(total == 0.0, 1.0, total)  # an empty split, or a row that only fills up the batch: zeros
    log = best + tl.log2(some)
    if key_scales is not None:
        some = units(some, PAIR)
    mean, mean_odd = acc / some[:, None], acc_odd / some[:, None]
    result = part + (seq + tokens)[:, None] * part_seq + heads[:, None] * part_head + dims[None, :]
    if plan is None:
        store_both(result + split * part_split, mean, mean_odd, inside, PAIR)
        if SPLIT:
            num_heads = tl.num_programs(0) * GROUP
            tl.store(logs + (seq * num_heads + heads) * num_splits + split, log, real)
    elif num_splits == 1:
        store_both(result, mean, mean_odd, inside, PAIR)
    else:
        STRIDE: tl.constexpr = TOKENS * GROUP  # rows of a slot
        where = (slot * tl.num_programs(0) + kv_head) * STRIDE + rows
        step = tl.num_programs(0) * STRIDE
        place = parts + (where + split * step)[:, None] * HEAD_DIM + dims[None, :]
        store_both(place, mean, mean_odd, inside, PAIR)
        tl.store(logs + where + split * step, log, real)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        counter = counters + slot * tl.num_programs(0) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            mean = merge_parts(parts, logs, where, step, num_splits, real, inside, dims, HEAD_DIM, ROWS, WIDTH)
            tl.store(result, mean, inside)
            if PAIR == 2:
                mean = merge_parts(parts + 1, logs, where, step, num_splits, real, inside, dims, HEAD_DIM, ROWS, WIDTH)
                tl.store(result + 1, mean, inside)
            tl.store(counter, 0)  # for the next layer


@triton.jit
def read_pages(
    best, total, acc, acc_odd, queries, odd, keys, values, block_table, key_scales, value_scales, key_block,
    value_block, scale, begin, end, length, tokens, num_kv_heads, WIDE: tl.constexpr, WIDTH: tl.constexpr,
    PAIR: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, TILE_N: tl.constexpr,
    TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the positions begin:end of a sequence, those that its last one sees and that are no sinks.
    Of several tokens the first one is the last of `length` positions, and each of `tokens` sees so many more.
    WIDE elements of a vector have PAIR dimensions each."""
    dims = tl.arange(0, WIDTH)
    columns = begin + tl.arange(0, TILE_N)
    # Block ids are loaded a tile ahead: keys and values whose addresses they are can then be on their way themselves.
    following = tl.load(block_table + columns // BLOCK_SIZE, columns // BLOCK_SIZE * BLOCK_SIZE < end, 0)
    for tile in range(begin, end, TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        blocks = following.to(tl.int64)
        ahead = columns + TILE_N
        following = tl.load(block_table + ahead // BLOCK_SIZE, ahead // BLOCK_SIZE * BLOCK_SIZE < end, 0)
        there = columns < end
        if WINDOW > 0:
            there = there & (columns >= length - WINDOW)
        if SINKS > 0:
            there = there & (columns >= SINKS)
        held = columns // BLOCK_SIZE * BLOCK_SIZE < end  # whole blocks, so that loads of 16 bytes are not cut
        offsets = columns % BLOCK_SIZE
        wide = (dims < WIDE)[:, None] & held[None, :]
        page = keys + (blocks * key_block + offsets)[None, :] + dims[:, None] * BLOCK_SIZE
        scores = score(queries, odd, tl.load(page, wide, 0.0), PAIR, PRECISION) * scale  # [ROWS, TILE_N]
        if key_scales is not None:
            place = blocks * (num_kv_heads * BLOCK_SIZE) + offsets
            scores *= tl.load(key_scales + place, held, 0.0)[None, :]
        seen = there[None, :]
        if TOKENS > 1:
            seen = seen & (columns[None, :] < (length + tokens)[:, None])
            if WINDOW > 0:
                seen = seen & (columns[None, :] >= (length + tokens)[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        page = values + (blocks * value_block + offsets * WIDE)[:, None] + dims[None, :]
        wide = there[:, None] & (dims < WIDE)[None, :]
        held_values = tl.load(page, wide, 0.0)
        if value_scales is None:
            best, total, acc = take_in(best, total, acc, scores, held_values, True, PRECISION)
        else:
            scales = tl.load(value_scales + place, there, 0.0)
            best, total, acc, acc_odd = take_in_codes(
                best, total, acc, acc_odd, scores, held_values, scales, queries, PAIR, True, PRECISION
            )
    return best, total, acc, acc_odd


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
    """One softmax out of several. part [num_seqs, num_heads, num_splits, head_dim] float32 are the weighted means of
    the splits, logs [num_seqs, num_heads, num_splits] float32 the base-2 logarithms of their sums of exponentials, -inf
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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: int = 0,
    q_sink: Tensor | None = None,
    plan: DecodePlan | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """The twin: gather each sequence's pages, then the formula; `num_splits` and `plan` change nothing."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out
    for row, (length, table) in enumerate(zip(seq_lens.tolist(), block_table)):
        if length:
            k, v = gather_pages(keys, values, table, length, key_scales, value_scales)
            this = slice(row, row + 1)
            if sinks:
                out[this] = torch_attend_sinks(q[this], k, v, window, scale, sinks, q_sink[this], sink_logits)
            else:
                out[this] = torch_attend(q[this], k, v, window, scale, sink_logits)
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
