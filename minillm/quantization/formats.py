"""Low-bit number formats, and weights written in them. Built in chapter 15.

A format is a table: a code of `bits` bits names one of 2^bits values. A weight is a code, and a scale that a group of
weights of one output share; where the grid need not be symmetric, a zero point too:

    w = scale * (table[code] - zero)

    int4    code    0    1  ...   7    8    9  ...  15          fp4 (e2m1)   0  0.5  1  1.5  2  3  4  6  and negative
            value  -8   -7  ...  -1    0    1  ...   7          fp8 (e4m3)   0 ... 448, 3 bits after the point

    codes of a row, in=8, group_size=4:   [ c c c c | c c c c ]
    scales of that row:                   [    s    |    s    ]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from minillm.rounding import ceil_div

E4M3_MAX = 448.0  # the largest e4m3 value; 0x7f and 0xff are NaN (Micikevicius et al. 2022, arXiv:2209.05433)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the fourth bit is the sign (OCP Microscaling Formats 1.0)


@dataclass(frozen=True)
class Format:
    """The values that a code of `bits` bits can name. `FORMATS` has them by name."""

    name: str
    bits: int
    is_integer: bool

    @property
    def table(self) -> Tensor:
        """The value of every code, float32 [2 ** bits]; NaN for the two codes of e4m3 that mean it."""
        return _table(self.name)

    def table_on(self, device: torch.device) -> Tensor:
        """`table`, copied to a device once: a copy from host memory makes the host wait."""
        return _table_on(self.name, device)

    @property
    def largest(self) -> float:
        """The largest magnitude that a symmetric grid uses: 7 of int4, which could say -8 too."""
        if self.is_integer:
            return float(2 ** (self.bits - 1) - 1)
        return E4M3_MAX if self.name == "fp8" else E2M1[-1]

    def encode(self, values: Tensor) -> Tensor:
        """The code of the nearest value, uint8, of the same shape; beyond the ends of the table the last one."""
        values = values.float()
        if self.is_integer:
            half = 2 ** (self.bits - 1)
            return (values.round().clamp(-half, half - 1) + half).to(torch.uint8)
        if self.name == "fp8":
            return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        positive = self.table_on(values.device)[: len(E2M1)]
        nearest = torch.bucketize(values.abs(), (positive[1:] + positive[:-1]) / 2)  # a tie goes to the smaller
        return (nearest + 8 * (values < 0)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The value of each code, float32."""
        if self.is_integer:
            return codes.float() - 2 ** (self.bits - 1)
        return self.table_on(codes.device)[codes.long()]


@cache
def _table_on(name: str, device: torch.device) -> Tensor:
    return _table(name).to(device)


@cache
def _table(name: str) -> Tensor:
    if name == "fp8":
        return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    if name == "fp4":
        return torch.tensor(E2M1 + tuple(-value for value in E2M1))
    size = 2 ** FORMATS[name].bits
    return torch.arange(size, dtype=torch.float32) - size // 2


FORMATS = {f"int{bits}": Format(f"int{bits}", bits, True) for bits in range(2, 9)}
FORMATS |= {"fp8": Format("fp8", 8, False), "fp4": Format("fp4", 4, False)}


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out_features, in_features] as codes. Canonical and unpacked: what methods write, files pack, and the
    products turn into their own layouts."""

    format: Format
    codes: Tensor  # uint8 [out_features, in_features]
    scales: Tensor  # [out_features, num_groups], float16 for groups, float32 for whole rows
    zeros: Tensor | None = None  # int8 [out_features, num_groups], a value of the table; None where it is 0 throughout
    scale_bits: int = 0  # 0: those of the dtype; 8 where the scales are powers of two (MX formats)

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @cached_property
    def group_size(self) -> int:
        """How many inputs share a scale. The last group may be shorter."""
        return group_size_of(self.in_features, self.scales.shape[1])

    @property
    def bits_per_weight(self) -> float:
        """Codes, scales and zero points, over the number of weights."""
        side = self.scale_bits or 8 * self.scales.element_size()
        if self.zeros is not None:
            side += self.format.bits
        return self.format.bits + side * self.scales.numel() / self.codes.numel()

    @property
    def num_bytes(self) -> int:
        """What the weight takes when its codes are packed."""
        return int(ceil_div(self.bits_per_weight * self.codes.numel(), 8))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out_features, in_features]"""
        values = self.format.decode(self.codes)
        if self.zeros is not None:
            values = values - spread(self.zeros.float(), self.in_features)
        return (values * spread(self.scales.float(), self.in_features)).to(dtype)

    def __getitem__(self, rows: Tensor | slice) -> QuantizedWeight:
        """Some of the outputs."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)


def group_size_of(in_features: int, num_groups: int) -> int:
    """Groups are as even as they go: all of `group_size`, but for the last one."""
    return ceil_div(in_features, num_groups)


def spread(per_group: Tensor, in_features: int) -> Tensor:
    """[out_features, num_groups] -> [out_features, in_features], each value as often as its group is long. A view where
    a row has one group."""
    if per_group.shape[1] == 1:
        return per_group.expand(-1, in_features)
    size = group_size_of(in_features, per_group.shape[1])
    return per_group.repeat_interleave(size, dim=1)[:, :in_features]


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of several weights of the same input, one after the other: q, k and v as one product.

    Raises ValueError where format or groups differ.
    """
    first = parts[0]
    for part in parts[1:]:
        alike = part.format == first.format and part.scales.shape[1] == first.scales.shape[1]
        if not alike or part.in_features != first.in_features:
            raise ValueError(
                f"{first.format.name} in groups of {first.group_size} and {part.format.name} in groups of "
                f"{part.group_size} cannot be one weight; quantize parts of a fused layer alike"
            )
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.zeros_like(p.scales, dtype=torch.int8) if p.zeros is None else p.zeros for p in parts])
    return replace(
        first, codes=torch.cat([p.codes for p in parts]), scales=torch.cat([p.scales for p in parts]), zeros=zeros
    )


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n] -> bytes uint8 [rows, ceil(n * bits / 8)]: bit i of a row is bit i % 8 of byte i // 8,
    and a code's lowest bit comes first. Eight bits stay as they are; of 4 bits the even code is the low half."""
    if bits == 8:
        return codes.contiguous()
    rows, count = codes.shape
    ones = (codes[:, :, None] >> torch.arange(bits, device=codes.device, dtype=torch.uint8)) & 1  # [rows, n, bits]
    padded = torch.nn.functional.pad(ones.reshape(rows, count * bits), (0, -count * bits % 8)).view(rows, -1, 8)
    return (padded << torch.arange(8, device=codes.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` codes of each row that `pack_codes` packed."""
    if bits == 8:
        return packed
    rows = packed.shape[0]
    ones = ((packed[:, :, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1).view(rows, -1)
    ones = ones[:, : count * bits].view(rows, count, bits)
    return (ones << torch.arange(bits, device=packed.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
