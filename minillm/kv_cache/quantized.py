"""Keys and values in 8 bits: a scale for each token and head, and codes. Built in chapter 17.

    x       [..., head_dim]   any float       what attention would have stored
    codes   [..., head_dim]   int8 or fp8     x / scale, to the nearest code (ties to even)
    scales  [...]             float32         the largest |x| of the vector / the largest code

A scale of its own for every vector needs no calibration and never changes once it is written: a token is quantized when
it comes, and later ones cannot stretch its grid. Along the vector the scale is constant, so it leaves the sums of
attention: score = (q . codes of k) * scale of k, and a value weighs in with probability * its scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by their name in `kv_cache_dtype`
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # int8 leaves -128 out: the grid is symmetric


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [..., head_dim] of `dtype` and scales [...] float32 for x [..., head_dim], computed in float32.

    A vector of zeros has scale 1; one with an infinity or a NaN comes back as NaN, which is not hidden.
    """
    x, largest = x.float(), LARGEST_CODE[dtype]
    scales = x.abs().amax(dim=-1) / largest
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (x / scales[..., None]).clamp(-largest, largest)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales


def dequantize_vectors(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scales, in `dtype`; scales has the shape of codes with 1 where a scale is shared, as it broadcasts."""
    return (codes.to(torch.float32) * scales).to(dtype)


def bytes_per_vector(head_dim: int, dtype: torch.dtype) -> int:
    """What the key or the value of one token and head takes, its scale included."""
    return head_dim * dtype.itemsize + (4 if dtype in LARGEST_CODE else 0)
