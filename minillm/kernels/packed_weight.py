"""A quantized weight as a GPU reads it, 16 bytes a thread and no shuffling afterwards. Built in chapter 15.

A 32-bit word holds the codes of one output. Shift it right and mask it with 0x000F000F: two codes are left, one in each
half, and they belong to neighbouring inputs, as the tensor cores want their operands. Eight codes of 4 bits are four
such pairs; 16 words of one output, 64 bytes, are a unit of 128 inputs (of 64, where codes have 8 bits):

    bits of word j     31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
    input in the unit   97+2j  65+2j  33+2j   1+2j |  96+2j 64+2j 32+2j    2j

    word               0     1          15
    shift 0         [ 0 1 | 2 3 | ... | 30 31 ]      one operand of 32 inputs after each shift,
    shift 4         [32 33|34 35| ... | 62 63 ]      its columns in order
    shift 8, 12     ...

    words int32 [units, outputs, 16]: the tile of a program, some outputs of one unit, lies in one piece.

`decode` turns a pair into two numbers without a conversion: the bits of a code, put into the fraction of a half
precision number with a fixed exponent (0x6400 is 1024), are the number 1024 + code, and one packed instruction
subtracts 1024 + zero from both (Kim et al. 2022, arXiv:2211.10017). A code of fp8 or fp4 has its sign and its exponent
moved to where they belong, and is multiplied by a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.language import MODE, tl, triton
from minillm.rounding import ceil_div

WORDS = 16  # words of one output in a unit
OPERAND = 32  # inputs that come out of a unit at once
COMPILED = tl.constexpr(MODE == "compiled")  # the interpreter knows no PTX
BOTH = tl.constexpr(0x10001)  # times 16 bits: the same in both halves of a word
SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000


@dataclass(frozen=True)
class PackedWeight:
    """w = scale * (value of the code - zero), [out_features, in_features], laid out for the kernels.
    `pack` makes it."""

    words: Tensor  # int32 [num_units, out_features, 16]
    scales: Tensor  # [num_groups, out_features], float16 or float32
    zeros: Tensor | None  # int8 [num_groups, out_features]
    format: str  # "int2" to "int8", "fp8", "fp4"
    in_features: int
    group_size: int  # inputs that share a scale; the last group may be shorter
    counters: Tensor = field(repr=False)  # int32, one a tile of outputs: 0 between two products; see `few_rows_kernel`

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    @property
    def bits(self) -> int:
        return carrier_bits(self.format)

    @property
    def half(self) -> int:
        """The code of an integer 0; 0 for a floating-point format."""
        return 2 ** (int(self.format[3:]) - 1) if self.format.startswith("int") else 0

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        return WORDS * 32 // self.bits

    @property
    def num_bytes(self) -> int:
        """That a product reads."""
        return sum(x.numel() * x.element_size() for x in (self.words, self.scales, self.zeros) if x is not None)

    def codes(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The codes that were packed, uint8 [len(rows), in_features]."""
        words = self.words[:, rows].transpose(0, 1)[:, :, None, :, None]  # [rows, units, 1, 16, 1]
        steps = torch.arange(0, 16, self.bits, device=words.device, dtype=torch.int32)
        halves = torch.arange(0, 32, 16, device=words.device, dtype=torch.int32)  # the low one and the high one
        shifts = steps[:, None, None] + halves  # [pairs, 1, 2]
        codes = (words >> shifts) & (2**self.bits - 1)  # [rows, units, pairs, 16, 2]
        return codes.to(torch.uint8).flatten(1)[:, : self.in_features]

    def unpack_rows(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Rows of the weight, float32 [len(rows), in_features]."""
        values = value_of_codes(self.format, self.words.device)[self.codes(rows).long()]
        if self.zeros is not None:
            values = values - self._spread(self.zeros, rows)
        return values * self._spread(self.scales, rows)

    def _spread(self, per_group: Tensor, rows: Tensor | slice) -> Tensor:
        spread = per_group[:, rows].t().float().repeat_interleave(self.group_size, dim=1)
        return spread[:, : self.in_features]


def serves_format(name: str, bits: int) -> bool:
    """Whether there is a kernel for codes of this format: integers of 2 to 8 bits (those of 2 and 3 ride in 4 bits, of
    5 to 7 in 8), fp8 (e4m3) and fp4 (e2m1)."""
    return name in ("fp8", "fp4") or (name == f"int{bits}" and 2 <= bits <= 8)


def carrier_bits(name: str) -> int:
    """The bits that a code takes in a word."""
    return 4 if name in ("int2", "int3", "int4", "fp4") else 8


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, format: str = "int4") -> PackedWeight:
    """Codes uint8 [out, in], scales [out, groups] and zeros int8 [out, groups] as the kernels read them.

    The code of an integer is its value plus half of the range, as in `minillm.quantization.formats`. Raises ValueError
    for a format that no kernel serves, for zero points of a floating-point format, and where shapes do not fit.
    """
    (out_features, in_features), num_groups = codes.shape, scales.shape[1]
    if not serves_format(format, int(format[-1]) if format[-1].isdigit() else 0):
        raise ValueError(f"format={format!r} has no kernel; use int2 to int8, fp8 or fp4")
    if zeros is not None and not format.startswith("int"):
        raise ValueError(f"zero points of {format} are not served; quantize it symmetrically")
    if (
        codes.dtype is not torch.uint8
        or scales.shape[0] != out_features
        or (zeros is not None and zeros.shape != scales.shape)
    ):
        shapes = [list(x.shape) for x in (codes, scales, zeros) if x is not None]
        raise ValueError(
            f"codes ({codes.dtype}), scales and zeros of {shapes} do not fit; give uint8 [out, in] and [out, groups]"
        )
    group_size = ceil_div(in_features, num_groups)
    bits = carrier_bits(format)
    unit = WORDS * 32 // bits
    pairs = F.pad(codes, (0, -in_features % unit)).view(out_features, -1, unit // OPERAND, WORDS, 2).int()
    shifts = torch.arange(0, 16, bits, device=codes.device, dtype=torch.int32).view(-1, 1, 1)
    halves = (pairs << shifts).sum(2, dtype=torch.int32)  # [out, units, 16, 2], 16 bits in each
    words = halves[..., 0] | (halves[..., 1] << 16)
    return PackedWeight(
        words.transpose(0, 1).contiguous(),
        scales.t().contiguous(),
        None if zeros is None else zeros.t().contiguous(),
        format,
        in_features,
        group_size,
        torch.zeros(ceil_div(out_features, 16), dtype=torch.int32, device=codes.device),
    )


def value_of_codes(name: str, device: torch.device | str = "cpu") -> Tensor:
    """The value of every code, float32 [2 ** bits], computed on the device: nothing is copied to it,
    so that a CUDA graph can record it."""
    if name == "fp8":
        return torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).float()
    # A sign, two bits of exponent, one bit of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    if name == "fp4":
        codes = torch.arange(16, device=device)
        exponent, fraction = (codes >> 1) & 3, (codes & 1) / 2
        size = torch.where(exponent > 0, (1 + fraction) * (1 << exponent) / 2, fraction)
        return torch.where(codes < 8, size, -size)
    size = 2 ** int(name[3:])
    return torch.arange(size, dtype=torch.float32, device=device) - size // 2


@triton.jit
def decode(words, zero, scale, STEP: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Operand STEP of a unit: words [TILE_N, 16] -> the weights [TILE_N, 32] in DTYPE.

    zero int32 [TILE_N] and scale float32 [TILE_N], or None. HALF is the code of 0 of an integer format, 0 for a
    floating-point one. Without a scale every value is exact: integers up to 256 and the values of e4m3 are numbers of
    float16 and of bfloat16. float32 is decoded as float16 and widened.
    """
    HALF_TYPE: tl.constexpr = tl.float16 if DTYPE == tl.float32 else DTYPE
    pairs = decode_pairs(words, zero, STEP, BITS, HALF, HALF_TYPE)
    if scale is not None and DTYPE != tl.float32:
        pairs = multiply_subtract(pairs, pair_of(scale.to(DTYPE))[:, None], 0, DTYPE)
    values = numbers(pairs, HALF_TYPE).to(DTYPE)
    if scale is not None and DTYPE == tl.float32:
        values *= scale[:, None]
    return values


@triton.jit
def decode_pairs(words, zero, STEP: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """int32 [TILE_N, 16], in each of them two numbers of 16 bits: those of neighbouring inputs."""
    FRACTION: tl.constexpr = 7 if DTYPE == tl.bfloat16 else 10  # bits
    BIAS: tl.constexpr = 127 if DTYPE == tl.bfloat16 else 15
    ONE: tl.constexpr = (BIAS << FRACTION) * BOTH
    BASE: tl.constexpr = ((BIAS + FRACTION) << FRACTION) * BOTH  # 2 ** FRACTION: its fraction counts in ones
    TOP: tl.constexpr = (1 << (BITS - 1)) * BOTH  # a code's highest bit
    REST: tl.constexpr = TOP - BOTH
    codes = (words >> (STEP * BITS)) & (TOP + REST)
    if HALF == 0:  # sign, exponent (its bias is 7 or 1), fraction (3 bits or 1)
        pairs = ((codes & TOP) << (16 - BITS)) | ((codes & REST) << (FRACTION - (3 if BITS == 8 else 1)))
        pairs = multiply_subtract(pairs, ((2 * BIAS - (7 if BITS == 8 else 1)) << FRACTION) * BOTH, 0, DTYPE)
    elif HALF == 128 and DTYPE == tl.bfloat16:  # 8 bits do not fit a fraction of 7: the highest picks 128 or 256
        pairs = multiply_subtract((codes & REST) | BASE, ONE, (~codes & TOP) | BASE, DTYPE)
        if zero is not None:
            pairs = multiply_subtract(pairs, ONE, pair_of(zero.to(tl.float32).to(DTYPE))[:, None], DTYPE)
    elif zero is not None:
        pairs = multiply_subtract(codes | BASE, ONE, zero[:, None] * BOTH + (BASE + HALF * BOTH), DTYPE)
    else:
        pairs = multiply_subtract(codes | BASE, ONE, BASE + HALF * BOTH, DTYPE)
    return pairs


@triton.jit
def multiply_subtract(pairs, factor, offset, DTYPE: tl.constexpr):
    """pairs * factor - offset, the low and the high halves of 32-bit words each for itself."""
    if COMPILED:
        PTX: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if DTYPE == tl.bfloat16 else "fma.rn.f16x2 $0, $1, $2, $3;"
        pairs = tl.inline_asm_elementwise(
            PTX, "=r,r,r,r", [pairs, factor, offset ^ SIGNS], tl.int32, is_pure=True, pack=1
        )
    else:
        factor, offset = tl.zeros_like(pairs) + factor, tl.zeros_like(pairs) + offset
        low = half(pairs, 0, DTYPE) * half(factor, 0, DTYPE) - half(offset, 0, DTYPE)
        high = half(pairs, 16, DTYPE) * half(factor, 16, DTYPE) - half(offset, 16, DTYPE)
        pairs = bits_of(low.to(DTYPE)) | (bits_of(high.to(DTYPE)) << 16)
    return pairs


@triton.jit
def numbers(pairs, DTYPE: tl.constexpr):
    """Pairs [TILE_N, 16] as numbers [TILE_N, 32]; a thread that holds a pair holds both, so nothing moves."""
    low = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def half(pairs, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """For the interpreter: one half of each word, in float32. (It takes bfloat16's smallest numbers for 0.)"""
    if DTYPE == tl.bfloat16:
        values = ((pairs >> SHIFT) << 16).to(tl.float32, bitcast=True)
    else:
        values = (pairs >> SHIFT).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return values


@triton.jit
def bits_of(values):
    return values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pair_of(values):
    """A number of 16 bits in both halves of a word."""
    return bits_of(values) * BOTH
