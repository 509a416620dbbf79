"""References of chapter 10, in float64, and what its checkers share. Built in chapter 10."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minillm.book.checks.launcher import KernelChecker

DTYPES = (torch.float32, torch.float16)
KERNELS = tuple(
    f"minillm.kernels.{name}" for name in ("activation.silu_mul", "rotary.rotate_and_store", "softmax.softmax")
)
TWICE = (
    "Two programs, or two lanes of one, store the same number: on a GPU either may come last. "
    "Whose is it? Mask the other."
)
checker = partial(
    KernelChecker,
    near={torch.float32: (2e-5, 4e-6), torch.float16: (5e-4, 1e-6)},  # one rounding to the dtype
    nearly="Nearly: this is more than one rounding. Convert what is loaded to float32 before the arithmetic.",
    forbid=KERNELS,
)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output full of NaN, so that what is never written shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


def alternating(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gates at the even places, ups at the odd ones."""
    return x[..., ::2], x[..., 1::2]


def gated(
    x: Tensor,
    out: Tensor,
    limit: float,
    *,
    split: Callable[[Tensor], tuple[Tensor, Tensor]] = alternating,
    alpha: float = 1.702,
    shift: float = 1.0,
    gate: tuple[float, float] = (-torch.inf, 1.0),
    up: tuple[float, float] = (-1.0, 1.0),
) -> Tensor:
    """The activation; the keywords are mistakes. Bounds are multiples of `limit`."""
    gates, ups = split(x.double())
    gates = gates.clamp(gate[0] * limit, gate[1] * limit)
    ups = ups.clamp(up[0] * limit, up[1] * limit)
    return gates * torch.sigmoid(alpha * gates) * (ups + shift)


def rotated(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    neighbours: bool = True,
    sign: int = 1,
    by_number: bool = False,
    one_angle: bool = False,
) -> Tensor:
    """x with the first dimensions of its heads turned; the keywords are mistakes."""
    x, dim = x.double().clone(), table.shape[1]
    if by_number:
        positions = torch.arange(len(positions)) % len(table)
    if one_angle:
        table = table[:, [0] * (dim // 2) + [dim // 2] * (dim // 2)]
    cos, sin = table.double()[positions][:, None].chunk(2, -1)  # [num_tokens, 1, num_pairs]
    first_ones, second_ones = slice(0, dim // 2), slice(dim // 2, dim)
    if neighbours:
        first_ones, second_ones = slice(0, dim, 2), slice(1, dim, 2)
    a, b = x[..., first_ones].clone(), x[..., second_ones].clone()
    x[..., first_ones] = a * cos - sign * b * sin
    x[..., second_ones] = sign * a * sin + b * cos
    return x


def dequantized(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor,
    out: Tensor,
    group: int,
    *,
    reverse: bool = False,
    signed: bool = False,
    all_bits: bool = False,
    zero_last: bool = False,
    no_zero: bool = False,
    wraps: bool = False,
) -> Tensor:
    """(q - zero) * scale for the four weights of each word: [num_rows, width]; the keywords are mistakes."""
    shifts = [24, 16, 8, 0] if reverse else [0, 8, 16, 24]
    mask = -1 if all_bits else 0xFF
    q = torch.stack([(packed.long() >> shift) & mask for shift in shifts], -1).flatten(1)
    q = torch.where(q > 127, q - 256, q) if signed else q
    scale, zero = (part.double().repeat_interleave(group, 1)[:, : q.shape[1]] for part in (scales, zeros))
    if zero_last:
        return q * scale - zero
    q = q if no_zero else q - zero
    return (q % 256 if wraps else q) * scale


def log_softmax(logits: Tensor, out: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)
