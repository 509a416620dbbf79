"""Matrix multiply in tiles. Built in chapter 11.

A program makes one tile of C from a strip of rows of A and a strip of columns of B. It walks along both strips, a tile
of each at a time, and adds up their product in registers. num_stages tiles of A and B are on their way from memory
while the oldest is multiplied.

                    B  [ . . # . ]            programs in groups of GROUP_M rows of tiles, down
                       [ . . # . ]            the columns first:  neighbours in time share
           A           C                      strips, which the L2 cache then serves
        [ . . . ]      [ . . . . ]
        [ # # # ]      [ . . # . ]                0 2 4 6      GROUP_M = 2
        [ . . . ]      [ . . . . ]                1 3 5 7
                                                  8 ...

On a T4 (sm_75) Triton from 3.3 on makes no tensor-core code: there this kernel loses to torch's, which is cuBLAS. The
engine multiplies with torch everywhere; this kernel is for understanding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels.language import capability, tl, triton


@dataclass(frozen=True)
class Config:
    """How to cut a product into programs."""

    tile_m: int
    tile_n: int
    tile_k: int
    group_m: int
    num_warps: int
    num_stages: int


def matmul(a: Tensor, b: Tensor, config: Config | None = None) -> Tensor:
    """C = A B, [m, n], summed in float32 and rounded once; a [m, k] and b [k, n], transposed or sliced as they may be.

    Raises ValueError where the shapes or dtypes do not fit. float32 is multiplied exactly ("ieee"), never as tf32.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise ValueError(f"cannot multiply {a.dtype} {list(a.shape)} by {b.dtype} {list(b.shape)}")
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    config = config or choose_config(m, n, k, a.dtype, capability(a))
    grid = (triton.cdiv(m, config.tile_m) * triton.cdiv(n, config.tile_n),)
    matmul_kernel[grid](
        a, b, c, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k, GROUP_M=config.group_m,
        PRECISION="ieee" if a.dtype is torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return c


def choose_config(m: int, n: int, k: int, dtype: torch.dtype, capability: int = 80) -> Config:
    """A configuration for this shape and this GPU: 75 is a T4, 80 an A100, 89 an L4, 90 an H100.

    A tile of C costs tile_m x tile_n registers and saves memory traffic: each element of A is read n / tile_n times,
    each of B m / tile_m times. Shared memory holds num_stages tiles of A and B.
    """
    if dtype is torch.float32 or capability < 80:  # multiply-adds without tensor cores: registers are the limit
        return Config(tile_m=64, tile_n=64, tile_k=16, group_m=8, num_warps=4, num_stages=3)
    if m <= 16:  # a decode step is memory-bound: narrow tiles give every SM a share of B, deep stages prefetch it
        return Config(tile_m=16, tile_n=32, tile_k=128, group_m=1, num_warps=4, num_stages=4)
    if capability >= 90:  # wgmma: four warps multiply 64 rows of A straight from shared memory, and there is much of it
        large = Config(tile_m=128, tile_n=256, tile_k=64, group_m=8, num_warps=8, num_stages=3)
    else:  # mma.sync: A and B pass through registers; 48 KiB of tiles fit any GPU
        large = Config(tile_m=128, tile_n=128, tile_k=32, group_m=8, num_warps=8, num_stages=4)
    if triton.cdiv(m, large.tile_m) * triton.cdiv(n, large.tile_n) >= 100:
        return large
    return Config(tile_m=64, tile_n=64, tile_k=64, group_m=8, num_warps=4, num_stages=4)  # else SMs would stay idle


@triton.jit
def matmul_kernel(
    a, b, c, m, n, k, a_row, a_column, b_row, b_column,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_row, tile_column = grouped_order(tl.program_id(0), tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), GROUP_M)
    rows = tile_row * TILE_M + tl.arange(0, TILE_M)
    columns = tile_column * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    # A tile spans fewer than 2^31 elements; where it begins may be further.
    a_tile = a + rows[:, None].to(tl.int64) * a_row + inner[None, :] * a_column  # pointers [TILE_M, TILE_K]
    b_tile = b + inner[:, None] * b_row + columns[None, :].to(tl.int64) * b_column  # pointers [TILE_K, TILE_N]

    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        left = k - start  # masked lanes hold zeros and add nothing
        a_values = tl.load(a_tile, (rows < m)[:, None] & (inner < left)[None, :], 0.0)
        b_values = tl.load(b_tile, (inner < left)[:, None] & (columns < n)[None, :], 0.0)
        acc = tl.dot(a_values, b_values, acc, input_precision=PRECISION)
        a_tile += TILE_K * a_column
        b_tile += TILE_K * b_row

    c_tile = c + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(c_tile, acc.to(c.dtype.element_ty), (rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def grouped_order(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The tile (row, column) that a program makes: GROUP_M rows at a time, down each column of the group."""
    first = program // (GROUP_M * tiles_n) * GROUP_M  # row of the group's first tile
    height = tl.minimum(tiles_m - first, GROUP_M)  # the last group may be lower
    within = program % (GROUP_M * tiles_n)
    return first + within % height, within // height


def torch_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The twin."""
    return a @ b
