"""Attention of several tokens a sequence over pages: prompts, and the chunks of prompts. Built in chapter 13.

The keys and values of a chunk are in their slots already, beside those of all earlier chunks and of cached prefixes, so
the kernel reads everything from pages and nothing is gathered first. It is chapter 12's walk with two changes: a
key's address goes through the block table, and the rows of a tile are (token, head) pairs of one KV head's group, so
that a page is read once for all the heads that share it, and a chunk of few tokens still fills a tile.

    group of 3 heads, tile of 16 rows:   token 0: h0 h1 h2   token 1: h0 h1 h2   ...   token 4: h0 h1 h2   (unused)
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.flash_attention import base_2_scale, check_heads, dot_precision, take_in, torch_attend
from minillm.kernels.kv_codes import (
    as_codes,
    check_codes,
    load_both,
    pair_of,
    score,
    store_both,
    take_in_codes,
    torch_decode,
    units,
)
from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.kernels.sinks import begin_softmax, check_sinks, torch_attend_sinks
from minillm.kernels.tile_plan import plan_tiles
from minillm.kernels.tiles import TUNED, Tiles, choose_tiles, fit_to_queries


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: int = 0,
    q_sink: Tensor | None = None,
    plan: Tensor | None = None,
    tiles: Tiles | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Each query attends to all positions of its sequence up to its own: [num_tokens, num_heads, head_dim].

    q [num_tokens, num_heads, head_dim], any stride from token to token; keys [num_blocks, num_kv_heads, head_dim,
    block_size] and values [num_blocks, num_kv_heads, block_size, head_dim] hold the step's tokens already. Sequence i
    brings the tokens query_start_loc[i]:query_start_loc[i + 1], at most `max_query_len`, the last of its seq_lens[i]
    positions; its pages are block_table[i]. Sequences that bring no token are passed over. `out` is written to where
    it is given: rows that no sequence owns stay as they are.

    `plan` is that of a `PrefillPlan` for the same batch, made here where it is None; `tiles` are those of a timing.

    For chapter 17: keys and values may be codes of 8 or 4 bits, with scales as `minillm.kernels.kv_codes` has them.
    With `sinks` the first so many positions are seen by all, beside the window, by queries of their own:
    q_sink, contiguous. sink_logits, float32 [num_heads], are learned scores without a value, one in each softmax.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = keys.shape
    check_heads(q, values.transpose(1, 2)[0], values.transpose(1, 2)[0], window)
    check_codes(keys, values, key_scales, value_scales)
    check_sinks(q, q_sink, sinks, window, sink_logits)
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    group, pair = num_heads // num_kv_heads, pair_of(keys)
    tiles = prefill_tiles(q, keys, max_query_len, window, tiles)
    if plan is None:
        plan = plan_tiles(query_start_loc, seq_lens, num_tokens, max_query_len, tiles.tile_m // group)
    paged_prefill_kernel[(num_kv_heads * len(plan),)](
        q, as_codes(keys, capability(q)), as_codes(values, capability(q)), out, query_start_loc, seq_lens, block_table,
        plan, key_scales, value_scales, q_sink, sink_logits, base_2_scale(scale, head_dim),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), keys.stride(0), values.stride(0), block_table.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, WIDTH=max(16, next_power_of_2(head_dim // pair)),
        PAIR=pair, BLOCK_SIZE=block_size, WINDOW=window or 0, SINKS=sinks, TILE_M=tiles.tile_m, TILE_N=tiles.tile_n,
        PRECISION=dot_precision(q.dtype),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def prefill_tiles(q: Tensor, keys: Tensor, max_query_len: int, window: int | None, tiles: Tiles | None = None) -> Tiles:
    """`tiles`, or those of this GPU, with rows for all query heads of a KV head,
    and for no more queries than there are."""
    group = q.shape[1] // keys.shape[1]
    shape = q.shape[2], q.dtype, capability(q), keys.element_size() == 1, window is not None
    tiles = tiles or TUNED.get(shape) or choose_tiles(*shape)
    return fit_to_queries(tiles, max_query_len * group, group, keys.element_size() == 1)


class PrefillPlan:
    """The plan of a step, made by its first layer for all of them."""

    def __init__(self):
        self.batch: object = None
        self.plans: dict[int, Tensor] = {}  # by the tokens of a tile, which windows may make fewer

    def get(
        self, first: bool, batch: object, q: Tensor, keys: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
        max_query_len: int, window: int | None,
    ) -> Tensor:  # fmt: skip
        """That of `batch`, made anew if this is its `first` layer: a recorded batch is one object for many steps."""
        if first or self.batch is not batch:
            self.batch, self.plans = batch, {}
        tile = prefill_tiles(q, keys, max_query_len, window).tile_m // (q.shape[1] // keys.shape[1])
        if tile not in self.plans:
            self.plans[tile] = plan_tiles(query_start_loc, seq_lens, len(q), max_query_len, tile)
        return self.plans[tile]


# The index tensors may be slices, and the table as wide as the step's longest sequence: neither compiles a variant.
@triton.jit(
    do_not_specialize=["table_row"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"]
)
def paged_prefill_kernel(
    q, keys, values, out, query_start_loc, seq_lens, block_table, plan, key_scales, value_scales, q_sink, sink_logits,
    scale, q_token, q_head, out_token, out_head, key_block, value_block, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, place = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS  # the heads of a tile start together
    seq = tl.load(plan + 2 * place)
    if seq < 0:
        return
    begin = tl.load(plan + 2 * place + 1)
    first = tl.load(query_start_loc + seq).to(tl.int64)
    num_queries = (tl.load(query_start_loc + seq + 1) - first).to(tl.int32)
    past = tl.load(seq_lens + seq).to(tl.int32) - num_queries  # positions before the first query
    tokens_per_tile: tl.constexpr = TILE_M // GROUP

    rows = tl.arange(0, TILE_M)
    tokens = begin + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = (rows < tokens_per_tile * GROUP) & (tokens < num_queries)
    WIDE: tl.constexpr = HEAD_DIM // PAIR  # elements of a vector: of int4 each has two dimensions
    dims = tl.arange(0, WIDTH)
    inside = real[:, None] & (dims < WIDE)[None, :]
    dims *= PAIR
    where = (first + tokens)[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
    queries, odd = load_both(q + where, inside, PAIR)
    positions = past + tokens
    block_table += seq.to(tl.int64) * table_row
    keys += kv_head * WIDE * BLOCK_SIZE
    values += kv_head * BLOCK_SIZE * WIDE
    if key_scales is not None:
        key_scales += kv_head * BLOCK_SIZE
        value_scales += kv_head * BLOCK_SIZE

    best, total = begin_softmax(sink_logits, heads, real, True, TILE_M)
    acc = tl.zeros((TILE_M, WIDTH), tl.float32)
    acc_odd = tl.zeros((TILE_M, WIDTH), tl.float32)  # of int4 only
    length = tl.minimum(past + begin + tokens_per_tile, past + num_queries)  # the tile's last query sees up to here
    whole = 0
    if WINDOW > 0:
        whole = tl.cdiv(tl.maximum(length - WINDOW, SINKS), TILE_N) * TILE_N  # all queries see the tiles from here on
    diagonal = tl.maximum((past + begin + 1) // TILE_N * TILE_N, whole)
    diagonal = tl.minimum(diagonal, tl.cdiv(length, TILE_N) * TILE_N)
    start, edge = diagonal, diagonal
    if WINDOW > 0:
        start, edge = tl.maximum(past + begin - WINDOW + 1, 0) // TILE_N * TILE_N, tl.minimum(whole, diagonal)
    if SINKS > 0:
        row = (first + tokens) * KV_HEADS * GROUP + heads
        turned, turned_odd = load_both(q_sink + row[:, None] * HEAD_DIM + dims[None, :], inside, PAIR)
        best, total, acc, acc_odd = walk_pages(
            best, total, acc, acc_odd, turned, turned_odd, keys, values, block_table, key_scales, value_scales,
            key_block, value_block, tl.minimum(positions, SINKS - 1), scale, 0, 0, 0, tl.minimum(SINKS, length), length,
            KV_HEADS, WIDE, WIDTH, PAIR, BLOCK_SIZE, 0, 0, TILE_N, True, PRECISION,
        )  # fmt: skip
    best, total, acc, acc_odd = walk_pages(
        best, total, acc, acc_odd, queries, odd, keys, values, block_table, key_scales, value_scales, key_block,
        value_block, positions, scale, whole, diagonal, diagonal, diagonal, length, KV_HEADS,
        WIDE, WIDTH, PAIR, BLOCK_SIZE, WINDOW, SINKS, TILE_N, False, PRECISION,
    )  # fmt: skip
    best, total, acc, acc_odd = walk_pages(
        best, total, acc, acc_odd, queries, odd, keys, values, block_table, key_scales, value_scales, key_block,
        value_block, positions, scale, start, edge, diagonal, length, length, KV_HEADS,
        WIDE, WIDTH, PAIR, BLOCK_SIZE, WINDOW, SINKS, TILE_N, True, PRECISION,
    )  # fmt: skip
    total = tl.where(real, total, 1.0)
    if key_scales is not None:
        total = units(total, PAIR)
    where = (first + tokens)[:, None] * out_token + heads[:, None] * out_head + dims[None, :]
    store_both(out + where, acc / total[:, None], acc_odd / total[:, None], inside, PAIR)


@triton.jit
def walk_pages(
    best, total, acc, acc_odd, queries, odd, keys, values, block_table, key_scales, value_scales, key_block,
    value_block, positions, scale, begin, gap, after, end, length, num_kv_heads, WIDE: tl.constexpr,
    WIDTH: tl.constexpr, PAIR: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    TILE_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the positions begin:gap and after:end of a sequence, tile by tile, through its block table."""
    dims = tl.arange(0, WIDTH)
    for tile in range(begin, end - (after - gap), TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        if MASKED and WINDOW > 0:
            columns += tl.where(tile < gap, 0, after - gap)
        there = columns < length if MASKED else columns >= 0
        # Whole blocks of keys, so that loads of 16 bytes are not cut; `scores` hides what lies beyond.
        held = columns // BLOCK_SIZE * BLOCK_SIZE < length if MASKED else columns // BLOCK_SIZE >= 0
        blocks = tl.load(block_table + columns // BLOCK_SIZE, held, 0).to(tl.int64)
        offsets = columns % BLOCK_SIZE
        wide = (dims < WIDE)[:, None] & held[None, :]
        page = keys + (blocks * key_block + offsets)[None, :] + dims[:, None] * BLOCK_SIZE
        scores = score(queries, odd, tl.load(page, wide, 0.0), PAIR, PRECISION)  # [rows, TILE_N], not scaled yet
        if key_scales is not None:
            place = blocks * (num_kv_heads * BLOCK_SIZE) + offsets
            scores *= (tl.load(key_scales + place, held, 0.0) * scale)[None, :]  # both scales at once
        if MASKED:
            seen = columns[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (columns[None, :] > positions[:, None] - WINDOW)
            if SINKS > 0:
                seen = seen & (columns[None, :] >= SINKS)
            scores = tl.where(seen, scores, float("-inf"))
        page = values + (blocks * value_block + offsets * WIDE)[:, None] + dims[None, :]
        wide = there[:, None] & (dims < WIDE)[None, :]
        codes = tl.load(page, wide, 0.0)
        if value_scales is None:
            best, total, acc = take_in(best, total, acc, scores, codes, MASKED, PRECISION, scale)
        else:
            scales = tl.load(value_scales + place, there, 0.0)
            best, total, acc, acc_odd = take_in_codes(
                best, total, acc, acc_odd, scores, codes, scales, queries, PAIR, MASKED, PRECISION
            )
    return best, total, acc, acc_odd


def torch_paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: int = 0,
    q_sink: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """The twin: gather each sequence's pages, then the formula."""
    bounds = query_start_loc.tolist()
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for start, end, length, table in zip(bounds, bounds[1:], seq_lens.tolist(), block_table):
        if start < end:
            k, v = gather_pages(keys, values, table, length, key_scales, value_scales)
            if sinks:
                kept = sinks, q_sink[start:end]
                out[start:end] = torch_attend_sinks(q[start:end], k, v, window, scale, *kept, sink_logits)
            else:
                out[start:end] = torch_attend(q[start:end], k, v, window, scale, sink_logits)
    return out


def gather_pages(
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: int,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a sequence, each [length, num_kv_heads, head_dim]; of codes,
    what they stand for, in float32."""
    k = as_codes(keys)[table].view(keys.dtype).permute(0, 3, 1, 2).flatten(0, 1)[:length]
    v = as_codes(values)[table].view(values.dtype).transpose(1, 2).flatten(0, 1)[:length]
    if key_scales is None:
        return k, v
    scales = (x[table].transpose(1, 2).flatten(0, 1)[:length, :, None] for x in (key_scales, value_scales))
    return torch_decode(k) * next(scales), torch_decode(v) * next(scales)
