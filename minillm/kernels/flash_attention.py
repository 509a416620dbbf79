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

import torch
from torch import Tensor

from minillm.kernels.language import capability, next_power_of_2, tl, triton

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
    tile_m, tile_n, num_warps, num_stages = choose_tiles(head_dim, q.dtype, capability(q))
    tile_m = min(tile_m, max(16, next_power_of_2(max_query_len)))
    grid = (triton.cdiv(max_query_len, tile_m), num_heads, query_start_loc.shape[0] - 1)
    flash_attention_kernel[grid](
        q, k, v, out, query_start_loc, (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        GROUP=num_heads // k.shape[1], HEAD_DIM=head_dim, WIDTH=next_power_of_2(head_dim), WINDOW=window or 0,
        TILE_M=tile_m, TILE_N=tile_n, PRECISION=dot_precision(q.dtype), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def choose_tiles(head_dim: int, dtype: torch.dtype, capability: int) -> tuple[int, int, int, int]:
    """TILE_M, TILE_N, num_warps, num_stages for a GPU of this capability (80 is an A100, 90 an H100).

    Queries and sums stay in registers, TILE_M x head_dim of each, shared by the warps: the largest tiles whose builds
    spill nothing. Keys and values pass through shared memory, num_stages tiles of TILE_N x head_dim each, the next ones
    on their way while one is multiplied. Hopper's tensor cores read them from there, which leaves more registers.
    """
    width = next_power_of_2(head_dim)
    if dtype.itemsize == 4:  # no tensor cores in full precision: small tiles
        return (32, 32, 4, 2) if width <= 64 else (16, 32, 4, 2) if width <= 128 else (16, 16, 4, 1)
    if capability >= 90:
        return (128, 64, 8, 2) if width <= 128 else (64, 32, 8, 2)
    return (128, 64, 8, 3) if width <= 64 else (64, 64, 8, 2) if width <= 128 else (32, 32, 8, 2)


@triton.jit
def flash_attention_kernel(
    q, k, v, out, query_start_loc, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first = tl.load(query_start_loc + tl.program_id(2)).to(tl.int64)
    length = (tl.load(query_start_loc + tl.program_id(2) + 1) - first).to(tl.int32)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M  # the last queries have the most work: they start first
    if begin >= length:
        return

    rows = begin + tl.arange(0, TILE_M)
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + first * q_token + head * q_head + rows[:, None] * q_token + dims[None, :], inside, 0.0)
    k += first * k_token + (head // GROUP) * k_head
    v += first * v_token + (head // GROUP) * v_head

    best = tl.full((TILE_M,), float("-inf"), tl.float32)  # the largest score of each query so far, in powers of two
    total = tl.zeros((TILE_M,), tl.float32)  # its sum of exponentials
    acc = tl.zeros((TILE_M, WIDTH), tl.float32)  # its weighted sum of values

    # Which tiles need a mask: those on the diagonal, and with a window those at its edge.
    end = tl.minimum(begin + TILE_M, length)
    start, whole = 0, 0
    if WINDOW > 0:
        start = tl.maximum(begin - WINDOW + 1, 0) // TILE_N * TILE_N
        whole = tl.cdiv(tl.maximum(begin + TILE_M - WINDOW, 0), TILE_N) * TILE_N  # all queries see the tiles from here on
    diagonal = tl.maximum((begin + 1) // TILE_N * TILE_N, whole)
    diagonal = tl.minimum(diagonal, tl.cdiv(end, TILE_N) * TILE_N)
    if WINDOW > 0:
        best, total, acc = walk(
            best, total, acc, queries, k, v, k_token, v_token, rows, scale, start, tl.minimum(whole, diagonal), length,
            HEAD_DIM, WIDTH, WINDOW, TILE_N, True, PRECISION,
        )  # fmt: skip
    best, total, acc = walk(
        best, total, acc, queries, k, v, k_token, v_token, rows, scale, whole, diagonal, length,
        HEAD_DIM, WIDTH, WINDOW, TILE_N, False, PRECISION,
    )  # fmt: skip
    best, total, acc = walk(
        best, total, acc, queries, k, v, k_token, v_token, rows, scale, diagonal, end, length,
        HEAD_DIM, WIDTH, WINDOW, TILE_N, True, PRECISION,
    )  # fmt: skip
    out += first * out_token + head * out_head
    total = tl.where(rows < length, total, 1.0)  # a row without a query may have seen nothing
    tl.store(out + rows[:, None] * out_token + dims[None, :], acc / total[:, None], inside)


@triton.jit
def walk(
    best, total, acc, queries, k, v, k_token, v_token, rows, scale, begin, end, length,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the keys begin:end, tile by tile."""
    dims = tl.arange(0, WIDTH)
    for tile in range(begin, end, TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        there = (dims < HEAD_DIM)[None, :]
        if MASKED:
            there = there & (columns < length)[:, None]
        keys = tl.load(k + columns[:, None].to(tl.int64) * k_token + dims[None, :], there, 0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale  # [TILE_M, TILE_N]
        if MASKED:
            seen = columns[None, :] <= rows[:, None]
            if WINDOW > 0:
                seen = seen & (columns[None, :] > rows[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(v + columns[:, None].to(tl.int64) * v_token + dims[None, :], there, 0.0)
        best, total, acc = take_in(best, total, acc, scores, values, MASKED, PRECISION)
    return best, total, acc


@triton.jit
def take_in(best, total, acc, scores, values, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The online softmax: one more tile of scores [queries, keys], in powers of two, and its values [keys, dims]."""
    larger = tl.maximum(best, tl.max(scores, 1))
    reference = larger
    if MASKED:
        reference = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen so far: -inf - -inf is not a number
    rescale = tl.exp2(best - reference)
    weights = tl.exp2(scores - reference[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return larger, total, acc


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
    for start, end in zip(bounds, bounds[1:]):
        out[start:end] = torch_attend(q[start:end], k[start:end], v[start:end], window, scale)
    return out


def torch_attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """Attention of one sequence whose last positions are the queries; q, k, v and the result [tokens, heads, head_dim]."""
    num_queries, num_keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    position = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    accurate = torch.promote_types(q.dtype, torch.float32)  # at least: a float64 stays what it is
    keys, values = (x.to(accurate).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(accurate), keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
