"""What the checks of chapter 15 expect: references that take their time; their keywords are mistakes.
Built in chapter 15."""

from __future__ import annotations

from collections.abc import Callable
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
    *,
    nearest: Callable[[Tensor], Tensor] = lambda places: torch.floor(places + 0.5),
    rounded: bool = True,
    ends: bool = True,
    zeros: bool = True,
    dtype: torch.dtype = torch.float32,
    gaps: int = -1,
    shared: bool = False,
    padded: bool = False,
    divide: Callable[[Tensor, Tensor], Tensor] = torch.div,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and lows, group by group."""
    most, codes, steps, lows = 2**bits - 1, [], [], []
    for part in weight.split(group):
        size = len(part)
        if padded:
            part = torch.nn.functional.pad(part, (0, 0, 0, group - size))
        low, high = part.amin(0), part.amax(0)
        if shared:
            low, high = (x.expand(weight.shape[1]).clone() for x in (low.min(), high.max()))
        step = (high - low) / (2**bits + gaps)
        steps.append(step.half())
        lows.append(low.half())
        if rounded:
            low, step = low.half().to(dtype), step.half().to(dtype)
        used = (steps[-1] > 0) | (not zeros)
        places = nearest(divide(part.to(dtype) - low, torch.where(used, step.clamp(min=2.0**-24), 1.0)))
        places = torch.where(used, places, 0.0)[:size].float()
        codes.append((places.clamp(0, most) if ends else places.long() % 256).to(torch.uint8))
    return torch.cat(codes), torch.stack(steps), torch.stack(lows)


class Words:
    """Codes in words, as text of zeros and ones."""

    def __init__(self, bits: int, *, mirrored=False, flipped=False, crosses=True, rows=True, signed=False) -> None:
        self.bits, self.mirrored, self.rows, self.signed = bits, mirrored, rows, signed
        self.step = -1 if flipped or mirrored else 1
        self.each = 10**9 if crosses else 32 // bits  # codes that follow each other without a gap

    def pack(self, codes: Tensor) -> Tensor:
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:
            raise ValueError(f"a code does not fit into {self.bits} bits")
        num_words, texts = self._num_words(codes.shape[1]), []
        for row in codes.tolist():
            written = [f"{code:0{self.bits}b}"[:: self.step] for code in row]
            parts = [written[i : i + self.each] for i in range(0, len(written), self.each)]
            text = "".join("".join(part).ljust(32 if len(parts) > 1 else 0, "0") for part in parts)
            texts.append(text.ljust(num_words * 32, "0")[: num_words * 32] if self.rows else text)
        stream = "".join(texts).ljust(len(codes) * num_words * 32, "0")
        words = [self._number(stream[i : i + 32]) for i in range(0, len(stream), 32)]
        return torch.tensor(words, dtype=torch.int64).view(len(codes), num_words).to(torch.int32)

    def unpack(self, words: Tensor, count: int) -> Tensor:
        if words.shape[1] != self._num_words(count):
            raise ValueError(f"{count} codes of {self.bits} bits do not take {words.shape[1]} words")
        out = []
        for row in words.tolist():
            text = "".join(f"{word & 0xFFFFFFFF:032b}"[:: -1 if self.mirrored else 1] for word in row)
            codes = [text[i * self.bits : (i + 1) * self.bits][:: self.step] for i in range(count)]
            out.append([int(code, 2) - (2**self.bits if self.signed and code[0] == "1" else 0) for code in codes])
        return torch.tensor(out, dtype=torch.int64).view(len(words), count)

    def _num_words(self, count: int) -> int:
        return -(-count * self.bits // 32)

    def _number(self, text: str) -> int:
        number = int(text[:: -1 if self.mirrored else 1], 2)
        return number - 2**32 if number >> 31 else number


_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mx(
    x: Tensor,
    *,
    order: Callable[[int], int] = lambda place: place % 2,
    swapped: bool = False,
    negative: Callable[[Tensor], Tensor] = torch.signbit,
    zeros: int = 0,
    least: int = -127,
    below: int = 2,
    up: bool = False,
    exact: bool = True,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Packed codes and stored exponents, one number at a time."""
    codes, exponents = [], []
    for row in x.double():
        for block in row.reshape(-1, 32):
            most = float((row if shared else block).abs().max())
            exponent = max(least, min(125, _power(most, below, up, exact))) if most else zeros - 127
            exponents.append((exponent + 127) % 256)
            values = (block.abs() * 2.0 ** -float(exponent)).tolist()
            for value, sign in zip(values, negative(block).tolist()):
                place = min(range(8), key=lambda i: (abs(_VALUES[i] - value), order(i)))
                codes.append(place + 8 * sign)
    halves = torch.tensor(codes, dtype=torch.uint8).view(len(x), -1, 2).flip(2 if swapped else ())
    packed = halves[..., 0] << 4 | halves[..., 1]
    return packed, torch.tensor(exponents, dtype=torch.uint8).view(len(x), -1)


def _power(most: float, below: int, up: bool, exact: bool) -> int:
    if up:
        return int(torch.ceil(torch.log2(torch.tensor(most / 6, dtype=torch.float64))))
    if exact:
        return int(torch.frexp(torch.tensor(most, dtype=torch.float64)).exponent) - 1 - below
    return int(torch.floor(torch.log2(torch.tensor(most, dtype=torch.float32)))) - below
