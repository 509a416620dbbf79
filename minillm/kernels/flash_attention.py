"""FlashAttention, forward: softmax attention in tiles, without the matrix of scores. Built in chapter 12.

A program answers TILE_M queries of one head. It walks over the keys in tiles of TILE_N and keeps, for each query, the
largest score so far, the sum of exponentials below it, and the weighted sum of values; a larger score rescales the
other two (Milakov & Gimelshein 2018; Dao et al. 2022). Nothing of size queries x keys is ever written.

        keys ->                    tiles of one program, causal, with a window:
    q   . / # # # \\ . . .          .  outside, never loaded      #  inside, no mask needed
        . . / # # # \\ . .          \\  on the diagonal, masked    /  at the window's edge, masked
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.kernels.softcap import sink_softmax
from minillm.kernels.tile_plan import plan_tiles
from minillm.kernels.tiles import choose_tiles, fit_to_queries

LOG2_E = 1 / math.log(2)  # the hardware's exponential is 2^x


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal self-attention of sequences that bring all of their tokens: [num_tokens, num_heads, head_dim].

    q [num_tokens, num_heads, head_dim]; k and v [num_tokens, num_kv_heads, head_dim], any stride from token to token
    and head to head; sequence i owns the tokens query_start_loc[i]:query_start_loc[i + 1], at most `max_query_len`.
    Query head h reads KV head h // (num_heads / num_kv_heads). A query sees at most `window` positions, its own too.
    `scale` multiplies the scores, 1 / sqrt(head_dim) where it is None. Any head_dim from 16 to 256.
    """
    check_heads(q, k, v, window)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    tiles = fit_to_queries(choose_tiles(head_dim, q.dtype, capability(q), windowed=window is not None), max_query_len)
    plan = plan_tiles(query_start_loc, None, num_tokens, max_query_len, tiles.tile_m)
    flash_attention_kernel[(num_heads, len(plan))](
        q, k, v, out, query_start_loc, plan, base_2_scale(scale, head_dim),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        GROUP=num_heads // k.shape[1], HEAD_DIM=head_dim, WIDTH=next_power_of_2(head_dim), WINDOW=window or 0,
        TILE_M=tiles.tile_m, TILE_N=tiles.tile_n, PRECISION=dot_precision(q.dtype),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def flash_attention_kernel(
    q, k, v, out, query_start_loc, plan, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0), tl.load(plan + 2 * tl.program_id(1))  # the heads of a tile start together
    if seq < 0:
        return
    begin = tl.load(plan + 2 * tl.program_id(1) + 1)
    first = tl.load(query_start_loc + seq).to(tl.int64)
    length = (tl.load(query_start_loc + seq + 1) - first).to(tl.int32)

    rows = begin + tl.arange(0, TILE_M)
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + first * q_token + head * q_head + rows[:, None] * q_token + dims[None, :], inside, 0.0)
    k += first * k_token + (head // GROUP) * k_head
    v += first * v_token + (head // GROUP) * v_head

    best = tl.full((TILE_M,), float("-inf"), tl.float32)  # the largest score of each query so far, in powers of two
    total = tl.zeros((TILE_M,), tl.float32)  # its sum of exponentials
    acc = tl.zeros((TILE_M, WIDTH), tl.float32)  # its weighted sum of values

    # Which tiles need a mask: those on the diagonal, and with a window those at its edge. The others are taken in
    # first.
    end = tl.minimum(begin + TILE_M, length)
    whole = 0
    if WINDOW > 0:
        # All queries see the tiles from here on.
        whole = tl.cdiv(tl.maximum(begin + TILE_M - WINDOW, 0), TILE_N) * TILE_N
    diagonal = tl.maximum((begin + 1) // TILE_N * TILE_N, whole)
    diagonal = tl.minimum(diagonal, tl.cdiv(end, TILE_N) * TILE_N)
    start, edge = diagonal, diagonal
    if WINDOW > 0:
        start, edge = tl.maximum(begin - WINDOW + 1, 0) // TILE_N * TILE_N, tl.minimum(whole, diagonal)
    best, total, acc = walk(
        best, total, acc, queries, k, v, k_token, v_token, rows, scale, whole, diagonal, diagonal, diagonal, length,
        HEAD_DIM, WIDTH, WINDOW, TILE_N, False, PRECISION,
    )  # fmt: skip
    best, total, acc = walk(
        best, total, acc, queries, k, v, k_token, v_token, rows, scale, start, edge, diagonal, end, length,
        HEAD_DIM, WIDTH, WINDOW, TILE_N, True, PRECISION,
    )  # fmt: skip
    out += first * out_token + head * out_head
    total = tl.where(rows < length, total, 1.0)  # a row without a query may have seen nothing
    tl.store(out + rows[:, None] * out_token + dims[None, :], acc / total[:, None], inside)


@triton.jit
def walk(
    best, total, acc, queries, k, v, k_token, v_token, rows, scale, begin, gap, after, end, length,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the keys begin:gap and after:end, tile by tile.
    One loop, as two would need more registers than there are."""
    dims = tl.arange(0, WIDTH)
    for tile in range(begin, end - (after - gap), TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        if MASKED and WINDOW > 0:
            columns += tl.where(tile < gap, 0, after - gap)
        there = (dims < HEAD_DIM)[None, :]
        if MASKED:
            there = there & (columns < length)[:, None]
        keys = tl.load(k + columns[:, None].to(tl.int64) * k_token + dims[None, :], there, 0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)  # [TILE_M, TILE_N], not scaled yet
        if MASKED:
            seen = columns[None, :] <= rows[:, None]
            if WINDOW > 0:
                seen = seen & (columns[None, :] > rows[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(v + columns[:, None].to(tl.int64) * v_token + dims[None, :], there, 0.0)
        best, total, acc = take_in(best, total, acc, scores, values, MASKED, PRECISION, scale)
    return best, total, acc


@triton.jit
def take_in(best, total, acc, scores, values, MASKED: tl.constexpr, PRECISION: tl.constexpr, scale=1.0):
    """The online softmax: one more tile of scores [queries, keys] and its values [keys, dims]. The scores times
    `scale`, more than 0, are powers of two, as `best` is: scaled after the maximum and inside the exponent,
    which cost one multiplication a query and, as a fused multiply-add, none a score."""
    larger = tl.maximum(best, tl.max(scores, 1) * scale)
    reference = larger
    if MASKED:
        reference = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen so far: -inf - -inf is not a number
    rescale = tl.exp2(best - reference)
    weights = tl.exp2(tl.fma(scores, scale, -reference[:, None]))
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return larger, total, acc


def base_2_scale(scale: float | None, head_dim: int) -> float:
    """What turns scores into powers of two; 1 / sqrt(head_dim) where `scale` is None. ValueError for 0 and below,
    where the largest score would not be the largest any more."""
    if scale is not None and not scale > 0:
        raise ValueError(f"scale={scale}: scores are multiplied by a number above 0; use None for 1 / sqrt(head_dim)")
    return (head_dim**-0.5 if scale is None else scale) * LOG2_E


def dot_precision(dtype: torch.dtype) -> str:
    """What a product of this dtype needs: a float32 one is rounded to tf32 on a GPU unless it says "ieee"."""
    return "ieee" if dtype is torch.float32 else "tf32"


def check_heads(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    """Raise ValueError unless the kernels can attend with these: [tokens, heads, head_dim], dimensions side by side."""
    if window is not None and window < 1:
        raise ValueError(f"window={window} leaves a query not even itself; use 1 or more, or None for all positions")
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim={head_dim}: the attention kernels take 16 to 256; use attention_backend='torch'")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the dimensions of a head must lie side by side in q, k and v; call .contiguous()")


def torch_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The twin: the formula, one sequence after the other."""
    bounds = query_start_loc.tolist()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start, end in pairwise(bounds):
        out[start:end] = torch_attend(q[start:end], k[start:end], v[start:end], window, scale)
    return out


def torch_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    scale: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence whose last positions are the queries;
    q, k, v and the result [tokens, heads, head_dim]."""
    num_queries, num_keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    position = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    accurate = torch.promote_types(q.dtype, torch.float32)  # at least: a float64 stays what it is
    keys, values = (x.to(accurate).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(accurate), keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    weights = sink_softmax(scores.masked_fill(~seen, float("-inf")), sink_logits)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
