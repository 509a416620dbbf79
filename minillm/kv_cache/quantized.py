"""Keys and values in 8 or 4 bits: a scale for each token and head, and codes. Built in chapter 17.

    x       [..., head_dim]   any float                what attention would have stored
    codes   [..., head_dim]   int8 or fp8              x / scale, to the nearest code (ties to even)
            [..., head_dim/2] uint8, of int4           two codes from -7 to 7 in a byte
    scales  [...]             float32                  the largest |x| of the vector / the largest code

A scale of its own for every vector needs no calibration and never changes once it is written: a token is quantized when
it comes, and later ones cannot stretch its grid. Along the vector the scale is constant, so it leaves the sums of
attention: score = (q . codes of k) * scale of k, and a value weighs in with probability * its scale.

A number is off by at most half a scale: 1/254 of the vector's largest number in int8, 1/14 in int4.

    a byte of int4    high nibble: dimension 2i + 1    low nibble: dimension 2i    two's complement both
"""

from __future__ import annotations

import torch
from torch import Tensor

# By their name in `kv_cache_dtype`; pages of bytes are int4's, which torch has no dtype for.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
INT4 = KV_DTYPES["int4"]
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 7.0}  # grids are symmetric: no -128, no -8


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `dtype` and scales [...] float32 for x [..., head_dim], computed in float32. Codes are
    [..., head_dim], or [..., head_dim / 2] where a byte holds two.

    A vector of zeros has scale 1; one with an infinity or a NaN comes back as NaN, which is not hidden.
    """
    x, largest = x.float(), LARGEST_CODE[dtype]
    scales = x.abs().amax(dim=-1) / largest
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (x / scales[..., None]).clamp(-largest, largest)
    if dtype is INT4:
        return pack_nibbles(codes.round().to(torch.int8)), scales
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales


def dequantize_vectors(codes: Tensor, scales: Tensor, dtype: torch.dtype, dim: int = -1) -> Tensor:
    """codes * scales, in `dtype`; scales has the shape of codes with 1 where a scale is shared, as it broadcasts.
    `dim` is the dimension of the head, along which bytes of int4 become two numbers."""
    codes = unpack_nibbles(codes, dim) if codes.dtype is INT4 else codes
    return (codes.to(torch.float32) * scales).to(dtype)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n / 2] of int8 codes [..., n] from -8 to 7, n even: each byte has an even place and the next."""
    even, odd = codes.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (even & 15) | (odd << 4)


def unpack_nibbles(packed: Tensor, dim: int = -1) -> Tensor:
    """int8 codes of uint8 bytes, twice as many along `dim`."""
    signed, place = packed.view(torch.int8), dim % packed.dim()
    return torch.stack([(signed << 4) >> 4, signed >> 4], dim=place + 1).flatten(place, place + 1)


def bytes_per_vector(head_dim: int, dtype: torch.dtype) -> int:
    """What the key or the value of one token and head takes, its scale included."""
    codes = head_dim // 2 if dtype is INT4 else head_dim * dtype.itemsize
    return codes + (4 if dtype in LARGEST_CODE else 0)
