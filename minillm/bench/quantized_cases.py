"""What `minillm bench kernels` measures of low-bit products: weights in 4 bits, weights and inputs in 8.
Built in chapter 15.

The limit of a case counts the bytes of the packed weight, with its scales, of the inputs and of the result; that of the
same product in 16 bits is four times or twice as far.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.quantized_matmul import pack, quantized_matmul, torch_quantized_matmul
from ..kernels.scaled_matmul import pack as pack_8, quantize_rows, scaled_matmul, torch_scaled_matmul
from .case import Case

SHAPES = ((4096, 4096), (14336, 4096), (1024, 3072))  # outputs, inputs
ROWS = (1, 4, 16, 64, 256)
GROUP = 128


def shapes_of(scale: int) -> list[tuple[int, int, int]]:
    """(rows, outputs, inputs); with a scale, smaller ones."""
    shapes = SHAPES if scale == 1 else SHAPES[:1]
    rows = ROWS if scale == 1 else (1, 3)
    return [(m, max(16, n // scale), max(64, k // scale)) for n, k in shapes for m in rows]


def w4a16_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """int4 in groups of 128 against the product that torch makes of the same weight in 16 bits,
    and torch's own int4."""
    cases = []
    for rows, n, k in shapes_of(scale):
        group = min(GROUP, k // 2)

        def make(rows=rows, n=n, k=k, group=group):
            codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
            scales = (torch.rand(n, k // group, device=device) + 0.5).to(
                torch.bfloat16 if dtype is torch.bfloat16 else torch.float16
            )
            weight = pack(codes, scales.half())  # bfloat16 first: torch's int4 keeps its scales in it
            x = torch.randn(rows, k, device=device, dtype=dtype)
            theirs = _torch_int4(codes, scales) if _has_torch_int4(device, dtype) else ()
            return x, weight, weight.unpack_rows().to(dtype), *theirs

        candidates: dict[str, Callable[..., Tensor]] = {
            "minillm": lambda x, weight, *_: quantized_matmul(x, weight),
            f"torch {str(dtype).removeprefix('torch.')}": lambda x, weight, plain, *_: F.linear(x, plain),
        }
        if rows <= 64:
            candidates["minillm, one split"] = lambda x, weight, *_: quantized_matmul(x, weight, num_splits=1)
        if scale > 1:
            candidates["twin"] = lambda x, weight, *_: torch_quantized_matmul(x, weight)
        if _has_torch_int4(device, dtype):
            candidates["torch int4"] = lambda x, weight, plain, packed, scales, group=group: (
                torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)
            )
        num_bytes = n * k // 2 + 2 * n * k // group + dtype.itemsize * rows * (n + k)
        cases.append(Case(f"W4A16 {rows} x {k} -> {n}", make, candidates, num_bytes, 2 * rows * n * k))
    return cases


def _has_torch_int4(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)


def _torch_int4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """torch keeps the even input in the high half of a byte, and scales with what is added:
    w = (code - 8) * scale + 0."""
    packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4) | codes[:, 1::2], 8)
    # [groups, n, 2]
    return packed, torch.stack([scales, torch.zeros_like(scales)], dim=-1).transpose(0, 1).contiguous()


def w8a8_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Codes by codes, and with the rounding of the inputs; one scale a row and one an output."""
    cases = []
    for format in ("int8", "fp8"):
        for rows, n, k in shapes_of(scale):

            def make(rows=rows, n=n, k=k, format=format):
                x = torch.randn(rows, k, device=device, dtype=dtype)
                codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
                if format == "fp8":
                    codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes)  # no NaN
                weight, scales = pack_8(codes, format), torch.full((n,), 0.01, device=device)
                plain = (weight.float() * scales[:, None]).to(dtype)
                return x, plain, *quantize_rows(x, format), weight, scales

            candidates = {
                "minillm": lambda x, plain, codes, row_scales, weight, scales: scaled_matmul(
                    codes, row_scales, weight, scales, None, x.dtype
                ),
                f"torch {str(dtype).removeprefix('torch.')}": lambda x, plain, *_: F.linear(x, plain),
                "minillm, inputs rounded too": lambda x, plain, codes, row_scales, weight, scales, format=format: (
                    scaled_matmul(*quantize_rows(x, format), weight, scales, None, x.dtype)
                ),
                **_torch_8_bits(format, rows, device, dtype),
            }
            num_bytes = n * k + rows * k + 4 * (n + rows) + dtype.itemsize * rows * n
            # Twice the rate in 8 bits: the limit is of bytes or of half the operations of 16 bits.
            cases.append(
                Case(f"W8A8 {format} {rows} x {k} -> {n}", make, candidates, num_bytes, rows * n * k, tolerance=5e-2)
            )
    return cases


def _torch_8_bits(format: str, rows: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    if device.type != "cuda":
        return {
            "twin": lambda x, plain, codes, row_scales, weight, scales: torch_scaled_matmul(
                codes, row_scales, weight, scales, None, x.dtype
            )
        }
    if format == "int8" and rows > 16:
        return {
            "torch._int_mm": lambda x, plain, codes, row_scales, weight, scales: (
                torch._int_mm(codes, weight.t()) * row_scales[:, None] * scales
            ).to(dtype)
        }
    if format == "fp8" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0):
        return {
            "torch._scaled_mm": lambda x, plain, codes, row_scales, weight, scales: torch._scaled_mm(
                codes, weight.t(), scale_a=row_scales[:, None], scale_b=scales[None], out_dtype=dtype
            )
        }
    return {}
