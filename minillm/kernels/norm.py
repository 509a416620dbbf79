"""RMSNorm, alone and fused with the addition before it. Built in chapter 10.

A row is read once into registers; its mean square, the division and the weight happen there; it is written once.
Rows of a hidden state are long, and each gets a program. The heads of Qwen3 are short: a program takes several.

    add_rms_norm, one program:   x        [ row ] --load--.
                                 residual [ row ] --load--(+)--store--> residual
                                                           |
                                                           '-- normed --store--> out
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import next_power_of_2, tl, triton

ELEMENTS = 1024  # a program's work where rows are short, so that a warp has some loads under way at a time


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, as a new tensor (Zhang & Sennrich 2019).

    x [..., size]: its rows may lie apart, as the heads of a fused projection [tokens, heads, size] do. The mean is
    taken in float32, and the quotient rounded to x's dtype before it meets the weight [size].
    """
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, size)  # [outer, inner, size], a view where x allows it
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    num_rows, width = rows.shape[0] * rows.shape[1], next_power_of_2(size)
    tile = max(1, ELEMENTS // width)
    rms_norm_kernel[(triton.cdiv(num_rows, tile),)](
        rows, weight, out, num_rows, rows.shape[1], rows.stride(0), rows.stride(1), eps,
        SIZE=size, WIDTH=width, ROWS=tile, num_warps=choose_num_warps(tile * width),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place; returns the RMSNorm of the new residual. All that lies between two matrix products.

    x, residual [num_tokens, size], weight [size]. The sum is rounded to the residual's dtype, then normed.
    """
    if x.shape != residual.shape or x.dim() != 2 or x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} and residual {list(residual.shape)} must both be [num_tokens, size], "
                         "with each row in one piece")  # fmt: skip
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    width = next_power_of_2(size)
    add_rms_norm_kernel[(num_tokens,)](
        x, residual, weight, out, x.stride(0), residual.stride(0), eps,
        SIZE=size, WIDTH=width, num_warps=choose_num_warps(width),
    )  # fmt: skip
    return out


def choose_num_warps(elements: int) -> int:
    """Warps for a program that holds so many elements: eight a thread, 16 bytes of a 2-byte type in one load."""
    return min(max(elements // (32 * 8), 1), 16)


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2^31
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    change = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    before = tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
    weights = tl.load(weight + columns, inside, 0.0)  # under way while the sum is taken
    total = (before + change).to(residual.dtype.element_ty)  # what is normed is what is stored
    tl.store(residual + row * residual_stride + columns, total, inside)

    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)  # the lanes outside hold zeros
    normed = (values * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + columns, normed * weights, inside)


@triton.jit(do_not_specialize=["num_rows"])  # a batch size is no reason to compile
def rms_norm_kernel(
    x, weight, out, num_rows, inner, outer_stride, inner_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = (rows // inner) * outer_stride + (rows % inner) * inner_stride
    values = tl.load(x + starts[:, None] + columns[None, :], inside, 0.0).to(tl.float32)  # [ROWS, WIDTH]
    weights = tl.load(weight + columns, columns < SIZE, 0.0)

    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)  # [ROWS]
    normed = (values * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * SIZE + columns[None, :], normed * weights[None, :], inside)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin: eight operations, and as many passes over x."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))  # at least: a float64 stays what it is
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale).to(x.dtype) * weight


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin."""
    return torch_rms_norm(residual.add_(x), weight, eps)
