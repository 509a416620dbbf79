"""Grouped matrix products: each row meets the weight of its own expert, in one launch. Built in chapter 21.

    assignments, token by token    [ 0->e2  0->e0 | 1->e2  1->e1 | 2->e0  2->e2 ]     two experts a token
    order, sorted by expert        [ 0->e0  2->e0 | 1->e1 | 0->e2  1->e2  2->e2 ]     = assignments[order]
    offsets                          0              2       3                      6
    inverse                        [ 3 0 4 2 1 5 ]                                    where each assignment went

The rows of an expert lie side by side, so its weight is read once for all of them. A program makes one tile of the
result; a tile never has rows of two experts, and which expert it belongs to follows from the offsets:

    offsets 0 | 2 | 3 | 6, tiles of 2 rows:    tile 0: e0   tile 1: e1   tile 2: e2   tile 3: e2, its last row

The grid has as many tiles as there can be at most, so that the host need not know the offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels import native, native_experts
from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.kernels.matmul import Config, choose_config


@dataclass(frozen=True)
class SortedRows:
    """The assignments of tokens to experts, sorted by expert; those of one expert stay in the order of their tokens."""

    order: Tensor  # int64 [num_tokens * experts_per_token], assignment numbers: token * experts_per_token + choice
    inverse: Tensor  # int64, the row of each assignment
    offsets: Tensor  # int64 [num_experts + 1], expert e has the rows offsets[e]:offsets[e + 1]
    experts_per_token: int

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.order // self.experts_per_token

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's rows, [num_tokens, size], summed in float32 in the order of its choices.

        rows [num_rows, size] sorted by expert; weights [num_tokens, experts_per_token] float32.
        """
        if native.serves(rows) and not (rows.requires_grad or weights.requires_grad):
            return native_experts.combine(rows, self.inverse, weights)
        chosen = rows[self.inverse].view(*weights.shape, -1).float()
        return (chosen * weights[..., None]).sum(1).to(rows.dtype)


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedRows:
    """experts int64 [num_tokens, experts_per_token], each from 0 to num_experts - 1. The host does not wait."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat + 1, torch.ones_like(flat))
    return SortedRows(order, inverse, counts.cumsum(0), experts.shape[1])


def run_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """The weighted sum of what the chosen experts make of each token of x [num_tokens, hidden_size].

    weights float32 and experts int64 [num_tokens, experts_per_token]; gate_up [num_experts, 2 * intermediate_size,
    hidden_size] and down [num_experts, hidden_size, intermediate_size].
    """
    rows = sort_by_expert(experts, len(gate_up))
    gate, up = grouped_matmul(x, gate_up, rows.offsets, rows.tokens).chunk(2, dim=-1)
    return rows.combine(grouped_matmul(activation(gate).mul_(up), down, rows.offsets), weights)


def grouped_matmul(
    x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """Row i of the result, [num_rows, out_features], is a row of x times the weight of the expert that has row i.

    weight [num_experts, out_features, in_features]; offsets int64 [num_experts + 1] as `SortedRows` has them. With
    `rows`, int64 [num_rows], row i is row rows[i] of x, else x has them all. Raises ValueError where shapes or dtypes
    do not fit.
    """
    _check(x, weight, offsets)
    num_experts, n, k = weight.shape
    num_rows = len(x) if rows is None else len(rows)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    config = config or choose_config(max(1, num_rows // num_experts), n, k, x.dtype, capability(x))
    tiles = min(num_rows, num_rows // config.tile_m + num_experts)  # each expert may leave one tile partly empty
    grouped_matmul_kernel[(tiles, triton.cdiv(n, config.tile_n))](
        x, rows, weight.contiguous(), offsets, out, n, k, x.stride(0), num_experts,
        EXPERTS=next_power_of_2(num_experts), TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def torch_grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """The twin."""
    _check(x, weight, offsets)
    x = x if rows is None else x[rows]
    parts = [F.linear(x[first:end], one) for one, (first, end) in zip(weight, pairwise(offsets.tolist()))]
    return torch.cat(parts)


def _check(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or x.dtype != weight.dtype:
        raise ValueError(f"cannot multiply {x.dtype} {list(x.shape)} by experts of {weight.dtype} {list(weight.shape)}")
    if offsets.shape != (len(weight) + 1,):
        raise ValueError(f"offsets {list(offsets.shape)} of {len(weight)} experts; there must be one more than experts")


@triton.jit
def grouped_matmul_kernel(
    x, rows, weight, offsets, out, n, k, x_row, num_experts,
    EXPERTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, first, end = find_tile(offsets, tl.program_id(0), num_experts, EXPERTS, TILE_M)
    if expert < num_experts:  # else there are fewer tiles than programs
        at = first + tl.arange(0, TILE_M)
        columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        inner = tl.arange(0, TILE_K)
        source = at if rows is None else tl.load(rows + at, at < end, 0)
        x_tile = x + source[:, None].to(tl.int64) * x_row + inner[None, :]  # pointers [TILE_M, TILE_K]
        w_tile = weight + expert.to(tl.int64) * n * k + columns[None, :].to(tl.int64) * k + inner[:, None]
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start in range(0, k, TILE_K):
            left = k - start
            x_values = tl.load(x_tile, (at < end)[:, None] & (inner < left)[None, :], 0.0)
            w_values = tl.load(w_tile, (inner < left)[:, None] & (columns < n)[None, :], 0.0)
            acc = tl.dot(x_values, w_values, acc, input_precision=PRECISION)
            x_tile += TILE_K
            w_tile += TILE_K
        where = out + at[:, None].to(tl.int64) * n + columns[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), (at < end)[:, None] & (columns < n)[None, :])


@triton.jit
def find_tile(offsets, tile, num_experts, EXPERTS: tl.constexpr, TILE_M: tl.constexpr):
    """The expert of a tile, its first row, and the end of the expert's rows; num_experts or more beyond the last."""
    each = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + each, each < num_experts, 0).to(tl.int32)
    ends = tl.load(offsets + each + 1, each < num_experts, 0).to(tl.int32)
    tiles = (ends - begins + TILE_M - 1) // TILE_M
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    mine = each == expert
    first = tl.sum(tl.where(mine, begins + (tile - tile_ends + tiles) * TILE_M, 0), 0)
    return expert, first, tl.sum(tl.where(mine, ends, 0), 0)
