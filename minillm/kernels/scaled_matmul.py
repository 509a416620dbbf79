"""Products of 8-bit inputs with 8-bit weights: int8 and fp8 on the tensor cores. Built in chapter 16.

Weights in 8 bits save half of the bytes; with inputs in 8 bits the multiplication itself is twice as fast. One scale a
token and one an output come out of the sum, so the inner product sees small numbers only:

    out[token, output] = row_scale[token] * column_scale[output] * sum over k of x_code[token, k] * w_code[output, k]
                                                                   int8: exact, in 32-bit integers

The codes of a token depend on that token alone, and so do its results. fp8 (e4m3) multiplies as it is from sm_89 on;
below, its codes are decoded to float16, which holds every e4m3 value and makes the same products. On a T4 Triton
compiles no product of int8 and has no tensor cores: there the twin serves, by torch._int_mm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import capability, next_power_of_2, tl, triton

LARGEST = {"int8": 127.0, "fp8": 448.0}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantize_rows(x: Tensor, format: str, scale: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """Each row of x [rows, k] in 8 bits: codes int8 or float8_e4m3fn [rows, k], and their scales float32 [rows].

    A scale is the row's largest magnitude over 127 (int8) or 448 (fp8), 1 for a row of zeros, or the fixed `scale`
    (calibrated; whatever exceeds the grid is cut off). Codes are round-half-even(x / scale), bit for bit those of the
    twin. Raises ValueError for another format.
    """
    _check_format(format)
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        fixed = None if scale is None else torch.as_tensor(scale, dtype=torch.float32, device=x.device)
        width = next_power_of_2(k)
        quantize_rows_kernel[(rows,)](
            x,
            fixed,
            codes,
            scales,
            k,
            x.stride(0),
            FP8=format == "fp8",
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
        )
    return codes.view(DTYPES[format]), scales


def torch_quantize_rows(x: Tensor, format: str, scale: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """The twin."""
    _check_format(format)
    x = x.float()
    if scale is None:
        scales = x.abs().amax(-1) / LARGEST[format]
    else:
        scales = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(1).expand(x.shape[0])
    scales = torch.where(scales == 0, 1.0, scales)
    values = (x / scales[:, None]).clamp(-LARGEST[format], LARGEST[format])
    return (values.round() if format == "int8" else values).to(DTYPES[format]), scales


def pack(codes: Tensor, format: str) -> Tensor:
    """Codes uint8 [out, in] of an int8 or fp8 weight as the product reads them: int8, or float8_e4m3fn."""
    _check_format(format)
    if format == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn)
    return (codes ^ 128).view(torch.int8).contiguous()  # code - 128, in two's complement


def scaled_matmul(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    column_scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """codes [rows, k] with scales [rows], times weight [out, k] with scales [out]: [rows, out] in out_dtype.

    codes and weight int8, or both float8_e4m3fn; scales float32. Raises ValueError where dtypes or shapes do not fit.
    """
    if codes.dtype is not weight.dtype or codes.dtype not in DTYPES.values() or codes.shape[1] != weight.shape[1]:
        raise ValueError(
            f"cannot multiply {codes.dtype} {list(codes.shape)} by {weight.dtype} {list(weight.shape)}; "
            "quantize both alike"
        )
    (rows, k), n = codes.shape, weight.shape[0]
    is_fp8, gpu = codes.dtype is torch.float8_e4m3fn, capability(codes)
    if gpu < 80:
        return torch_scaled_matmul(codes, row_scales, weight, column_scales, bias, out_dtype)
    out = torch.empty(rows, n, dtype=out_dtype, device=codes.device)
    if rows == 0:
        return out
    if rows <= 16:  # waits for the weight: narrow tiles give every SM a share
        tile_m, tile_n, tile_k, warps = 16, 32, 256, 4
    elif rows <= 64:
        tile_m, tile_n, tile_k, warps = 64, 64, 128, 4
    else:
        tile_m, tile_n, tile_k, warps = 128, 128, 128, 8
    decodes = is_fp8 and gpu < 89
    native = is_fp8 and not decodes
    scaled_matmul_kernel[(triton.cdiv(rows, tile_m), triton.cdiv(n, tile_n))](
        codes if native else codes.view(torch.uint8) if is_fp8 else codes,
        weight if native else weight.view(torch.uint8) if is_fp8 else weight,
        row_scales, column_scales, bias, out, rows, n, k, codes.stride(0), weight.stride(0),
        TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, DECODES=decodes, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def torch_scaled_matmul(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    column_scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The twin: int8 by torch._int_mm, exact; fp8 in float32."""
    if codes.dtype is torch.int8:
        rows, n = codes.shape[0], weight.shape[0]
        # On a GPU it wants more than 16 rows, and multiples of 8.
        padded = torch.nn.functional.pad(
            codes, (0, -codes.shape[1] % 8, 0, max(17, rows) - rows if codes.is_cuda else 0)
        )
        weight = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 8, 0, -n % 8))
        sums = torch._int_mm(padded.contiguous(), weight.t())[:rows, :n].float()
    else:
        sums = codes.float() @ weight.float().t()
    out = sums * row_scales[:, None] * column_scales
    return (out if bias is None else out + bias.float()).to(out_dtype)


def _check_format(format: str) -> None:
    if format not in LARGEST:
        raise ValueError(f"format={format!r} has no 8-bit product; use int8 or fp8")


@triton.jit
def quantize_rows_kernel(x, fixed, codes, scales, k, x_row, FP8: tl.constexpr, WIDTH: tl.constexpr):
    row, inner = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    values = tl.load(x + row * x_row + inner, inner < k, 0.0).to(tl.float32)
    LARGEST_CODE: tl.constexpr = 448.0 if FP8 else 127.0
    if fixed is not None:
        scale = tl.load(fixed)
    else:
        scale = tl.div_rn(tl.max(tl.abs(values), 0), LARGEST_CODE)  # "/" is an approximation on a GPU
    scale = tl.where(scale == 0.0, 1.0, scale)
    values = tl.minimum(tl.maximum(tl.div_rn(values, scale), -LARGEST_CODE), LARGEST_CODE)
    found = encode_e4m3(values) if FP8 else round_half_even(values).to(tl.int32)
    tl.store(codes + row * k + inner, (found & 0xFF).to(tl.uint8), inner < k)
    tl.store(scales + row, scale)


@triton.jit
def round_half_even(values):
    """For magnitudes below 2^22: next to 1.5 * 2^23 a float32 has no fraction left, and adding rounds."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def encode_e4m3(values):
    """The code of the nearest e4m3 value, ties to even, of magnitudes up to 448; by integers, for GPUs without fp8."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 bits of the fraction go: adding almost half of them, and one more where what stays is odd, rounds.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)  # exponent bias 127 to 7
    # Below 2^-6 the values are multiples of 2^-9: next to 2^14 a float32 is one too.
    small = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(codes):
    """float16, exact: the sign and, next to it, exponent and fraction as they are;
    2^8 makes up for the exponent's bias."""
    codes = codes.to(tl.int16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit(do_not_specialize=["m"])  # a batch size is no reason to compile
def scaled_matmul_kernel(
    codes, weight, row_scales, column_scales, bias, out, m, n, k, codes_row, weight_row,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, DECODES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    a_tile = codes + rows[:, None].to(tl.int64) * codes_row + inner[None, :]
    b_tile = weight + columns[None, :].to(tl.int64) * weight_row + inner[:, None]
    IS_INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    acc = tl.zeros((TILE_M, TILE_N), tl.int32 if IS_INT8 else tl.float32)
    for start in range(0, k, TILE_K):
        left = k - start
        a = tl.load(a_tile, (rows < m)[:, None] & (inner < left)[None, :], 0.0)
        b = tl.load(b_tile, (columns < n)[None, :] & (inner < left)[:, None], 0.0)
        if DECODES:
            acc = tl.dot(decode_e4m3(a), decode_e4m3(b), acc)
        elif IS_INT8:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        else:  # Hopper adds up products of fp8 in 14 bits: after each tile the sum goes on in float32
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=TILE_K)
        a_tile += TILE_K
        b_tile += TILE_K
    total = (
        acc.to(tl.float32)
        * tl.load(row_scales + rows, rows < m, 0.0)[:, None]
        * tl.load(column_scales + columns, columns < n, 0.0)[None, :]
    )
    if bias is not None:
        total += tl.load(bias + columns, columns < n, 0.0).to(tl.float32)[None, :]
    where = rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), (rows < m)[:, None] & (columns < n)[None, :])
