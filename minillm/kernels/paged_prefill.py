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

from minillm.kernels.flash_attention import LOG2_E, check_heads, choose_tiles, dot_precision, take_in, torch_attend
from minillm.kernels.language import capability, next_power_of_2, tl, triton


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
) -> Tensor:
    """Each query attends to all positions of its sequence up to its own: [num_tokens, num_heads, head_dim].

    q [num_tokens, num_heads, head_dim], any stride from token to token; keys [num_blocks, num_kv_heads, head_dim,
    block_size] and values [num_blocks, num_kv_heads, block_size, head_dim] hold the step's tokens already. Sequence i
    brings the tokens query_start_loc[i]:query_start_loc[i + 1], at most `max_query_len`, the last of its seq_lens[i]
    positions; its pages are block_table[i]. Sequences that bring no token are passed over. `out` is written to where
    it is given: rows that no sequence owns stay as they are.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = keys.shape
    check_heads(q, values.transpose(1, 2)[0], values.transpose(1, 2)[0], window)
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    group = num_heads // num_kv_heads
    tile_m, tile_n, num_warps, num_stages = choose_tiles(head_dim, q.dtype, capability(q))
    tile_m = max(16, next_power_of_2(group), min(tile_m, next_power_of_2(max_query_len * group)))
    grid = (triton.cdiv(max_query_len, tile_m // group), num_kv_heads, seq_lens.shape[0])
    paged_prefill_kernel[grid](
        q, keys, values, out, query_start_loc, seq_lens, block_table, (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), keys.stride(0), values.stride(0), block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, WIDTH=next_power_of_2(head_dim), BLOCK_SIZE=block_size, WINDOW=window or 0,
        TILE_M=tile_m, TILE_N=tile_n, PRECISION=dot_precision(q.dtype), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


@triton.jit
def paged_prefill_kernel(
    q, keys, values, out, query_start_loc, seq_lens, block_table, scale,
    q_token, q_head, out_token, out_head, key_block, value_block, table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    first = tl.load(query_start_loc + seq).to(tl.int64)
    num_queries = (tl.load(query_start_loc + seq + 1) - first).to(tl.int32)
    past = tl.load(seq_lens + seq).to(tl.int32) - num_queries  # positions before the first query
    tokens_per_tile: tl.constexpr = TILE_M // GROUP
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens_per_tile
    if begin >= num_queries:
        return

    rows = tl.arange(0, TILE_M)
    tokens = begin + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = (rows < tokens_per_tile * GROUP) & (tokens < num_queries)
    dims = tl.arange(0, WIDTH)
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    where = (first + tokens)[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
    queries = tl.load(q + where, inside, 0.0)
    positions = past + tokens
    block_table += seq.to(tl.int64) * table_row
    keys += kv_head * HEAD_DIM * BLOCK_SIZE
    values += kv_head * BLOCK_SIZE * HEAD_DIM

    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, WIDTH), tl.float32)
    length = tl.minimum(past + begin + tokens_per_tile, past + num_queries)  # the tile's last query sees up to here
    start, whole = 0, 0
    if WINDOW > 0:
        start = tl.maximum(past + begin - WINDOW + 1, 0) // TILE_N * TILE_N
        whole = tl.cdiv(tl.maximum(length - WINDOW, 0), TILE_N) * TILE_N  # all queries see the tiles from here on
    diagonal = tl.maximum((past + begin + 1) // TILE_N * TILE_N, whole)
    diagonal = tl.minimum(diagonal, tl.cdiv(length, TILE_N) * TILE_N)
    if WINDOW > 0:
        best, total, acc = walk_pages(
            best, total, acc, queries, keys, values, block_table, key_block, value_block, positions, scale,
            start, tl.minimum(whole, diagonal), length, HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, TILE_N, True, PRECISION,
        )  # fmt: skip
    best, total, acc = walk_pages(
        best, total, acc, queries, keys, values, block_table, key_block, value_block, positions, scale,
        whole, diagonal, length, HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, TILE_N, False, PRECISION,
    )  # fmt: skip
    best, total, acc = walk_pages(
        best, total, acc, queries, keys, values, block_table, key_block, value_block, positions, scale,
        diagonal, length, length, HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, TILE_N, True, PRECISION,
    )  # fmt: skip
    total = tl.where(real, total, 1.0)
    where = (first + tokens)[:, None] * out_token + heads[:, None] * out_head + dims[None, :]
    tl.store(out + where, acc / total[:, None], inside)


@triton.jit
def walk_pages(
    best, total, acc, queries, keys, values, block_table, key_block, value_block, positions, scale,
    begin, end, length, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the positions begin:end of a sequence, tile by tile, through its block table."""
    dims = tl.arange(0, WIDTH)
    for tile in range(begin, end, TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        there = columns < length if MASKED else columns >= 0
        # Whole blocks of keys, so that loads of 16 bytes are not cut; `scores` hides what lies beyond.
        held = columns // BLOCK_SIZE * BLOCK_SIZE < length if MASKED else columns // BLOCK_SIZE >= 0
        blocks = tl.load(block_table + columns // BLOCK_SIZE, held, 0).to(tl.int64)
        offsets = columns % BLOCK_SIZE
        wide = (dims < HEAD_DIM)[:, None] & held[None, :]
        page = keys + (blocks * key_block + offsets)[None, :] + dims[:, None] * BLOCK_SIZE
        scores = tl.dot(queries, tl.load(page, wide, 0.0), input_precision=PRECISION) * scale  # [rows, TILE_N]
        if MASKED:
            seen = columns[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (columns[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        page = values + (blocks * value_block + offsets * HEAD_DIM)[:, None] + dims[None, :]
        wide = there[:, None] & (dims < HEAD_DIM)[None, :]
        best, total, acc = take_in(best, total, acc, scores, tl.load(page, wide, 0.0), MASKED, PRECISION)
    return best, total, acc


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
) -> Tensor:
    """The twin: gather each sequence's pages, then the formula."""
    bounds = query_start_loc.tolist()
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for start, end, length, table in zip(bounds, bounds[1:], seq_lens.tolist(), block_table):
        if start < end:
            k, v = gather_pages(keys, values, table, length)
            out[start:end] = torch_attend(q[start:end], k, v, window, scale)
    return out


def gather_pages(keys: Tensor, values: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a sequence, each [length, num_kv_heads, head_dim]."""
    k = keys[table].permute(0, 3, 1, 2).flatten(0, 1)
    v = values[table].transpose(1, 2).flatten(0, 1)
    return k[:length], v[:length]
