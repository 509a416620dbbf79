"""SwiGLU's activation: silu(gate) * up, in one pass. Built in chapter 10.

gate_up of one token   [ gate: size | up: size ]
                          \\ tile      \\ tile        a program reads a tile of each ...
out                    [ tile ]                     ... and writes one: 3 * size elements move, not 5 * size
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.language import next_power_of_2, tl, triton

TILE = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [num_tokens, size], of gate_up [num_tokens, 2 * size]; silu(x) = x / (1 + exp(-x)).

    Computed in float32, with silu(gate) rounded to the dtype before it meets `up`, as two operations would.
    """
    if gate_up.stride(-1) != 1:
        raise ValueError("each row of gate_up must lie in one piece; call .contiguous()")
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    tile = min(TILE, next_power_of_2(size))
    silu_mul_kernel[(num_tokens, triton.cdiv(size, tile))](
        gate_up, out, gate_up.stride(0), SIZE=size, TILE=tile, num_warps=max(tile // 256, 1)
    )
    return out


@triton.jit
def silu_mul_kernel(gate_up, out, token_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up + token * token_stride + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * token_stride + SIZE + columns, inside, 0.0)
    silu = gate / (1 + tl.exp(-gate))  # exp(-gate) may be infinite: then the quotient is 0, as it should be
    tl.store(out + token * SIZE + columns, silu.to(up.dtype) * up, inside)


def torch_silu_mul(gate_up: Tensor) -> Tensor:
    """The twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
