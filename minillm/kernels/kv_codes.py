"""Keys and values as codes of 8 or 4 bits with one scale a token and head: into codes and out again, inside kernels.
Built in chapter 17.

    scale = largest |x| / 127 (int8), / 448 (fp8 e4m3) or / 7 (int4), float32;  1 where all of x is 0
    code  = x / scale, rounded to the nearest code, halves to the even one;  x is about code * scale

    keys, values              int8 or float8_e4m3fn, where they always were; int4 as uint8, two dimensions in a byte
    key_scales, value_scales  [num_blocks + 1, num_kv_heads, block_size] float32, likewise

From an L4 or H100 on, GPUs have an instruction that reads fp8. Before them, and in the interpreter,
a kernel sees bytes and moves their bits: an e4m3 byte is a float16 with the highest bit of the exponent and the low
ones of the fraction left out, so its bits in a float16's places, times 2^8 for the difference of the biases,
are its value, exactly.

    e4m3      s  eeee mmm               bias 7
    float16   s 0eeee mmm0000000        bias 15

A byte of int4 has an even dimension below and the next one above. A kernel never puts the two in their places: it reads
the even and the odd dimensions of a query as two tiles, and a product of one is added to that of the other. Values give
two sums in the same way, which are stored at the even and the odd places of the result.

    scores = even queries . low codes + odd queries . high codes
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import tl, triton

INT4 = torch.uint8  # of pages with two codes in a byte: torch has no dtype for them
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 7.0}  # the largest code that a page of a dtype may hold
# Weights times value scales, in these units, stay within float16 for values that do; scales of int4 are 18 times as
# large as those of int8.
UNIT, UNIT_OF_PAIRS = tl.constexpr(64.0), tl.constexpr(4.0)


@triton.jit
def encode(first, second, CODES: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """Heads in two halves, [HEADS, WIDTH] each, float32: codes of both as CODES (int8, or uint8 for the bytes of fp8),
    up to LARGEST_CODE, and scales [HEADS]."""
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST_CODE, tl.float32))
    scale = tl.where(scale > 0.0, scale, 1.0)
    whole = tl.broadcast_to(scale[:, None], first.shape)
    return to_code(tl.div_rn(first, whole), CODES), to_code(tl.div_rn(second, whole), CODES), scale


@triton.jit
def to_code(x, CODES: tl.constexpr):
    """The code nearest to each x, float32, halves to even. Adding a large power of two rounds: the bits below its last
    one fall away as the hardware rounds; a cast to an integer would cut them off."""
    if CODES == tl.int8:
        size = tl.minimum(tl.maximum(x, -127.0), 127.0)
        code = (size + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is below 1 falls away
    else:
        size = tl.minimum(tl.abs(x), 448.0)
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2^14: what is below 2^-9 falls away
        bits = size.to(tl.int32, bitcast=True)
        bits += 0x7FFFF + ((bits >> 20) & 1)  # three bits of the fraction stay
        code = tl.where(size < 0.015625, small, (bits >> 20) - ((127 - 7) << 3))  # below 2^-6 all steps are 2^-9
        code |= (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return code.to(CODES)


@triton.jit
def decode(codes, like):
    """Codes as numbers of the dtype of `like`, exactly; what is no code stays as it is."""
    if codes.dtype == like.dtype:
        return codes
    elif codes.dtype == tl.uint8:
        wide = codes.to(tl.int8, bitcast=True).to(tl.int16) << 7  # the sign twice, then all other bits in their places
        return ((wide & -0x4001).to(tl.float16, bitcast=True) * 256.0).to(like.dtype)
    else:
        return codes.to(like.dtype)


@triton.jit
def to_pairs(codes, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """int8 codes [HEADS, 2 * PAIRS] from -7 to 7 as bytes of int4 [HEADS, PAIRS]."""
    even, odd = tl.split(tl.reshape(codes, (HEADS, PAIRS, 2)))
    return ((even & 15) | (odd << 4)).to(tl.uint8, bitcast=True)


@triton.jit
def from_pairs(pairs, like):
    """Both codes of bytes of int4, those of the even dimensions and those of the odd ones, in the dtype of `like`."""
    signed = pairs.to(tl.int8, bitcast=True)
    return ((signed << 4) >> 4).to(like.dtype), (signed >> 4).to(like.dtype)


@triton.jit
def load_both(place, inside, PAIR: tl.constexpr):
    """What stands at `place`; with a PAIR of 2, the even dimensions there and the odd ones behind them."""
    if PAIR == 2:  # together, so that a load is no narrower than two numbers
        return tl.split(tl.load(place[:, :, None] + tl.arange(0, 2)[None, None, :], inside[:, :, None], 0.0))
    else:
        even = tl.load(place, inside, 0.0)
        return even, even


@triton.jit
def store_both(place, even, odd, inside, PAIR: tl.constexpr):
    """The reverse of `load_both`."""
    if PAIR == 2:
        tl.store(place[:, :, None] + tl.arange(0, 2)[None, None, :], tl.join(even, odd), inside[:, :, None])
    else:
        tl.store(place, even, inside)


@triton.jit
def units(total, PAIR: tl.constexpr):
    """`total` in the units that `take_in_codes` leaves sums in."""
    return total * (UNIT_OF_PAIRS if PAIR == 2 else UNIT)


@triton.jit
def score(queries, odd, keys, PAIR: tl.constexpr, PRECISION: tl.constexpr):
    """Products of queries [rows, dims] with the codes of keys [dims, positions], which stay as they are where they are
    none. With a PAIR of 2 keys are bytes of int4, and `odd` the queries' odd dimensions."""
    if PAIR == 2:
        low, high = from_pairs(keys, queries)
        products = tl.dot(queries, low, input_precision=PRECISION)
        return tl.dot(odd, high, products, input_precision=PRECISION)
    else:
        return tl.dot(queries, decode(keys, queries), input_precision=PRECISION)


@triton.jit
def take_in_codes(
    best, total, acc, acc_odd, scores, values, scales, queries,
    PAIR: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Chapter 12's `take_in` of values as codes [keys, dims] and scales [keys]: the weights take the scales with them
    into the product. acc is in units of 1 / UNIT; of int4 (a PAIR of 2) it takes in the even dimensions, acc_odd the
    odd ones, both in units of 1 / UNIT_OF_PAIRS."""
    larger = tl.maximum(best, tl.max(scores, 1))
    reference = larger
    if MASKED:
        reference = tl.where(larger == float("-inf"), 0.0, larger)
    rescale = tl.exp2(best - reference)
    weights = tl.exp2(scores - reference[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    weights *= units(scales, PAIR)[None, :]
    weights = weights.to(queries.dtype)
    if PAIR == 2:
        low, high = from_pairs(values, queries)
        acc = tl.dot(weights, low, acc, input_precision=PRECISION)
        acc_odd = tl.dot(weights, high, acc_odd * rescale[:, None], input_precision=PRECISION)
    else:
        acc = tl.dot(weights, decode(values, queries), acc, input_precision=PRECISION)
    return larger, total, acc, acc_odd


def as_codes(pages: Tensor, capability: int = 0) -> Tensor:
    """Pages as a kernel takes them: fp8 as bytes, unless a GPU of this compute capability knows it by itself."""
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn and capability < 89 else pages


def check_codes(keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None) -> None:
    """Raise ValueError unless pages and scales belong together: codes with scales of their shape, or neither."""
    if keys.dtype is not values.dtype:
        raise ValueError(f"keys are {keys.dtype} and values {values.dtype}; a cache holds both in one dtype")
    if keys.dtype not in LARGEST:
        if key_scales is not None or value_scales is not None:
            raise ValueError(f"scales were given for a cache of {keys.dtype}, which has none; leave them out")
        if keys.element_size() == 1:
            raise ValueError(f"a cache of {keys.dtype} cannot be read; pages of codes are int8, float8_e4m3fn or uint8")
        return
    shape = (values.shape[0], values.shape[1], values.shape[2])
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is None:
            raise ValueError(f"a cache of {keys.dtype} needs {name}, float32 {list(shape)}; none were given")
        if scales.dtype is not torch.float32 or tuple(scales.shape) != shape or not scales.is_contiguous():
            raise ValueError(
                f"{name} must be float32 {list(shape)} in one piece; they are {scales.dtype} {list(scales.shape)}"
            )


def torch_encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The twin of `encode`: codes [..., head_dim], of int4 in half as many bytes, and float32 scales [...] of vectors
    [..., head_dim]."""
    x = x.float()
    scales = x.abs().amax(-1) / LARGEST[dtype]
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (x / scales[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype is INT4:
        even, odd = codes.round().to(torch.int8).view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return (even & 15) | (odd << 4), scales
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales


def torch_decode(codes: Tensor) -> Tensor:
    """The twin of `decode` and `from_pairs`: float32 numbers of codes [..., head_dim], of int4 in half as many
    bytes."""
    if codes.dtype is INT4:
        signed = codes.view(torch.int8)
        return torch.stack([(signed << 4) >> 4, signed >> 4], dim=-1).flatten(-2).float()
    return codes.float()


def pair_of(pages: Tensor) -> int:
    """Dimensions in an element of pages: 2 in a byte of int4, else 1."""
    return 2 if pages.dtype is INT4 else 1
