"""Softmax of rows that fit on the chip. Built in chapter 10.

A program reads its row once, holds it in registers, and writes it once. Unfused, the row passes memory at each of the
four steps: its maximum, the exponentials, their sum, the quotient. A row too long for registers is walked over in
tiles: that is chapter 12's way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import next_power_of_2, tl, triton

LONGEST = 2**20  # elements: what Triton allows a block. From about 2^15 on a row no longer fits in registers.


def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) over the last dimension, as a new tensor; computed in float32.

    x [..., size]. An entry of -inf gets weight 0. A row of nothing but -inf, or with inf or NaN in it, has no softmax:
    it comes out as NaN, as in torch. Raises ValueError where size is beyond 2^20.
    """
    size = x.shape[-1]
    if size > LONGEST:
        raise ValueError(f"a row of {size} elements does not fit in one block of at most {LONGEST}; use torch.softmax")
    rows = x.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = next_power_of_2(size)
    # Eight elements a thread, while there are warps.
    num_warps = min(max(width // 256, 1), 16 if width <= 2**14 else 32)
    softmax_kernel[(rows.shape[0],)](rows, out, rows.stride(0), SIZE=size, WIDTH=width, num_warps=num_warps)
    return out


@triton.jit
def softmax_kernel(x, out, row_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    values = tl.load(x + row * row_stride + columns, inside, float("-inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))  # the largest becomes exp(0) = 1: nothing overflows
    tl.store(out + row * SIZE + columns, values / tl.sum(values, 0), inside)


def torch_softmax(x: Tensor) -> Tensor:
    """The twin."""
    return torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1).to(x.dtype)
