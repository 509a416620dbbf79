"""What the checks of chapter 15 expect: references that take their time. Built in chapter 15."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Option(NamedTuple):
    """A way to write a matrix: what it takes, and what it loses."""

    num_bytes: int
    error: int


def columns(
    weight: Tensor,
    bits: int,
    group: int,
    nearest,
    rounded: bool = True,
    ends: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference; `nearest` rounds, and three mistakes can be asked for."""
    most, codes, steps, lows = 2**bits - 1, [], [], []
    for part in weight.split(group):
        low, step = part.amin(0), (part.amax(0) - part.amin(0)) / most
        steps.append(step.half())
        lows.append(low.half())
        if rounded:
            low, step = low.half().to(dtype), step.half().to(dtype)
        places = nearest(torch.where(steps[-1] > 0, (part.to(dtype) - low) / step, torch.zeros_like(part, dtype=dtype)))
        codes.append((places.clamp(0, most) if ends else places.long() % 256).to(torch.uint8))
    return torch.cat(codes), torch.stack(steps), torch.stack(lows)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """The reference, with Python's own numbers."""
    rows, count = codes.shape
    num_words, out = -(-count * bits // 32), []
    for row in codes.tolist():
        stream = 0
        for code in row:
            stream = stream << bits | code
        stream <<= num_words * 32 - count * bits
        words = [stream >> 32 * (num_words - 1 - i) & 0xFFFFFFFF for i in range(num_words)]
        out.append([word - 2**32 if word >> 31 else word for word in words])
    return torch.tensor(out, dtype=torch.int32).view(rows, num_words)


def best_choice(matrices: list[list[Option]], budget: int) -> tuple[int, int, list[int]]:
    best: dict[int, tuple[int, tuple]] = {0: (0, ())}
    for options in matrices:
        after: dict[int, tuple[int, tuple]] = {}
        for spent, (error, chosen) in best.items():
            for place, option in enumerate(options):
                key, value = spent + option.num_bytes, error + option.error
                if key <= budget and (key not in after or value < after[key][0]):
                    after[key] = (value, (*chosen, place))
        best = after
    size = min(best, key=lambda spent: (best[spent][0], spent))
    return best[size][0], size, list(best[size][1])


def mx(x: Tensor, ties: str = "even") -> tuple[Tensor, Tensor]:
    """The reference, one number at a time: codes and stored exponents."""
    values, codes, exponents = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), [], []
    for block in x.double().reshape(-1, 32):
        most = float(block.abs().max())
        stored = (
            max(0, min(252, int(torch.frexp(torch.tensor(most, dtype=torch.float64)).exponent) - 3 + 127))
            if most
            else 0
        )
        exponents.append(stored)
        for value, negative in zip((block.abs() * 2.0 ** (127 - stored)).tolist(), torch.signbit(block).tolist()):
            order = {"even": lambda i: i % 2, "down": lambda i: i, "up": lambda i: -i}[ties]
            codes.append(min(range(8), key=lambda i: (abs(values[i] - value), order(i))) + 8 * negative)
    return torch.tensor(codes, dtype=torch.int32).view(x.shape), torch.tensor(exponents, dtype=torch.int32).view(
        x.shape[0], -1
    )
