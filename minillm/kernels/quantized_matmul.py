"""Products with weights of 4 or 8 bits: read as codes, multiplied as numbers. Built in chapter 15.

A decode step waits for its weights, so a quarter of the bytes is almost a quarter of the time, if decoding keeps up
with memory. `decode` (minillm.kernels.packed_weight) does, and both kernels share it:

    few rows     a tile of outputs by all rows. There are few tiles, so the inputs are split among programs, each leaves
                 a part of the sum in memory, and the last of a tile to arrive adds the parts up, in their order. Scales
                 are taken after the product of a group: one multiplication a group, no rounding of the weights.
    many rows    a tile of outputs by a tile of rows. Scales go into the weights: a row more costs nothing then.

Both compute the transposed product, W xᵀ: tensor cores take their first operand from registers, which is where decoded
weights are, and the second from shared memory. From BY_DEQUANTIZING rows on (and on a T4, for which Triton makes no
tensor-core code) the weight is written out once as numbers and multiplied by torch: decoding it again for every tile
of rows would cost more.

Rows do not see each other: a row's result does not depend on the others' values. How many there are chooses the kernel,
and with it the rounding. Frantar et al. 2024 (Marlin, arXiv:2408.11743) reach the limit of the bytes this way in CUDA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.kernels.packed_weight import OPERAND, PackedWeight, decode, pack, serves_format

__all__ = ["PackedWeight", "dequantize", "pack", "quantized_matmul", "serves_format", "torch_quantized_matmul"]
FEW_ROWS = 64
BY_DEQUANTIZING = 1024
PROGRAMS_PER_SM = 4
MIN_UNITS = 2  # of a split: 8 KB of weights


def quantized_matmul(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, num_splits: int | None = None
) -> Tensor:
    """x Wᵀ + bias, [rows, out_features], in the dtype of x; x [rows, in_features] float32, float16 or bfloat16.

    Summed in float32. `num_splits` of the inputs, for few rows; None chooses by the shape and the GPU.
    Raises ValueError where x does not fit the weight. Products with the same weight must not run at the same time on
    two streams.
    """
    rows, in_features = x.shape
    if in_features != weight.in_features:
        raise ValueError(f"x has {in_features} columns and the weight {weight.in_features} inputs; they have to agree")
    has_tensor_cores = capability(x) >= 80 and x.dtype is not torch.float32
    if rows >= BY_DEQUANTIZING or (capability(x) < 80 and rows > 8):
        return F.linear(x, dequantize(weight, x.dtype), bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, weight.out_features, dtype=x.dtype, device=x.device)
    if rows > FEW_ROWS:
        _many_rows(x, weight, bias, out)
    elif rows:
        _few_rows(x, weight, bias, out, num_splits, has_tensor_cores)
    return out


def torch_quantized_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The twin: the weight as numbers of x's dtype, then one product."""
    return F.linear(x, weight.unpack_rows().to(x.dtype), bias)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[out_features, in_features], scaled in float32 and rounded once."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.words.device)
    grid = (triton.cdiv(weight.out_features, 64), weight.words.shape[0])
    dequantize_kernel[grid](
        weight.words, weight.scales, weight.zeros, out, weight.out_features, weight.in_features,
        TILE_N=64, **_format_constants(weight), num_warps=4,
    )  # fmt: skip
    return out


def choose_num_splits(num_tiles: int, num_units: int, num_sms: int) -> int:
    """As many as give every SM its programs, where a split keeps MIN_UNITS units. It does not depend on the rows."""
    wanted = PROGRAMS_PER_SM * num_sms // num_tiles
    return max(1, min(wanted, num_units // MIN_UNITS))


def _few_rows(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, num_splits: int | None, has_tensor_cores: bool
) -> None:
    rows, num_units = x.shape[0], weight.words.shape[0]
    tile_n = 64 if has_tensor_cores else 16
    tile_m = 1 if rows == 1 and not has_tensor_cores else max(16, next_power_of_2(rows))
    num_tiles = triton.cdiv(weight.out_features, tile_n)
    splits = num_splits or choose_num_splits(num_tiles, num_units, _num_sms(x))
    parts = torch.empty(splits if splits > 1 else 0, rows, weight.out_features, dtype=torch.float32, device=x.device)
    few_rows_kernel[(num_tiles, splits)](
        x, weight.words, weight.scales, weight.zeros, bias, parts, weight.counters, out,
        rows, weight.out_features, weight.in_features, num_units, x.stride(0),
        TILE_M=tile_m, TILE_N=tile_n, SPLIT=splits > 1, **_format_constants(weight),
        # Two warps with 32 outputs each: on Hopper a group of four would take wgmma, which wants more rows than there
        # are.
        num_warps=2 if tile_m == 16 and has_tensor_cores else 4, num_stages=4,
    )  # fmt: skip


def _many_rows(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    rows, n = out.shape
    if x.dtype is torch.float32:
        tile_m, tile_n, warps = 32, 64, 4
    else:
        tile_m, tile_n, warps = 128, 128, 8
        if triton.cdiv(rows, tile_m) * triton.cdiv(n, tile_n) < 2 * _num_sms(x):
            tile_m = 64  # SMs would stay idle otherwise
    many_rows_kernel[(triton.cdiv(rows, tile_m), triton.cdiv(n, tile_n))](
        x, weight.words, weight.scales, weight.zeros, bias, out, rows, n, weight.in_features, weight.words.shape[0],
        x.stride(0), TILE_M=tile_m, TILE_N=tile_n, **_format_constants(weight), num_warps=warps, num_stages=3,
    )  # fmt: skip


def _format_constants(weight: PackedWeight) -> dict[str, int]:
    """GROUP 0 is a scale for the whole row. SPAN: how many operands of a unit share a scale; 0 where groups cut one."""
    group = 0 if weight.scales.shape[0] == 1 else weight.group_size
    span = next((span for span in (4, 2, 1) if span * OPERAND <= weight.unit and group % (span * OPERAND) == 0), 0)
    return {
        "BITS": weight.bits,
        "HALF": weight.half,
        "GROUP": group,
        "SPAN": span,
        "EVEN": weight.in_features % weight.unit == 0,
    }


def _num_sms(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 8


@triton.jit(do_not_specialize=["m"])  # TILE_M is all that the rows of a step may compile anew
def few_rows_kernel(
    x, words, scales, zeros, bias, parts, counters, out, m, n, k, num_units, x_row,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SPLIT: tl.constexpr,
    BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows, columns = tl.arange(0, TILE_M), tile * TILE_N + tl.arange(0, TILE_N)
    size = tl.cdiv(num_units, num_splits)
    first = split * size
    CHAINED: tl.constexpr = GROUP == 0 or SPAN == 0  # one sum throughout; otherwise one for each group
    WIDTH: tl.constexpr = TILE_M if TILE_M > 1 else 32  # one row alone: 32 sums for each output, added up at the end
    acc = tl.zeros((TILE_N, WIDTH), tl.float32)
    for unit in range(first, tl.minimum(first + size, num_units)):
        packed = load_words(words, unit, columns, n)
        for step in tl.static_range(16 // BITS):
            start = unit * (512 // BITS) + step * 32  # the first input of this operand
            inputs = load_inputs(x, rows, start, m, k, x_row, EVEN)
            if SPAN == 0:
                values = decode_ragged(
                    packed, scales, zeros, start, columns, n, k, step, BITS, HALF, GROUP, x.dtype.element_ty
                )
            else:
                if step % SPAN == 0:
                    zero = load_group(zeros, start, columns, n, k, GROUP, tl.int32) if zeros is not None else None
                values = decode(packed, zero, None, step, BITS, HALF, x.dtype.element_ty)
            if CHAINED:
                part = acc
            elif step % SPAN == 0:
                part = tl.zeros((TILE_N, WIDTH), tl.float32)
            if TILE_M > 1:
                part = tl.dot(values, tl.trans(inputs), part, input_precision="ieee")
            else:
                part += values.to(tl.float32) * inputs.to(tl.float32)
            if CHAINED:
                acc = part
            elif (step + 1) % SPAN == 0:
                acc += part * load_group(scales, start, columns, n, k, GROUP, tl.float32)[:, None]
    if GROUP == 0:
        acc *= load_group(scales, 0, columns, n, k, GROUP, tl.float32)[:, None]
    if TILE_M == 1:
        acc = tl.sum(acc, 1)[:, None]

    inside = (columns < n)[:, None] & (rows < m)[None, :]
    where = rows[None, :].to(tl.int64) * n + columns[:, None]
    if SPLIT:
        tl.store(parts + split * m * n + where, acc, inside)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            total = tl.zeros((TILE_N, TILE_M), tl.float32)
            for other in range(num_splits):
                total += tl.load(parts + other * m * n + where, inside, 0.0)
            store_result(out, where, total, bias, columns, n, inside)
            tl.store(counters + tile, 0)  # for the next launch
    else:
        store_result(out, where, acc, bias, columns, n, inside)


@triton.jit(do_not_specialize=["m"])
def many_rows_kernel(
    x, words, scales, zeros, bias, out, m, n, k, num_units, x_row,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    acc = tl.zeros((TILE_N, TILE_M), tl.float32)
    for unit in range(num_units):
        packed = load_words(words, unit, columns, n)
        for step in tl.static_range(16 // BITS):
            start = unit * (512 // BITS) + step * 32
            inputs = load_inputs(x, rows, start, m, k, x_row, EVEN)
            if SPAN == 0:
                values = decode_ragged(
                    packed, scales, zeros, start, columns, n, k, step, BITS, HALF, GROUP, x.dtype.element_ty
                )
            else:
                if step % SPAN == 0:
                    zero = load_group(zeros, start, columns, n, k, GROUP, tl.int32) if zeros is not None else None
                    scale = load_group(scales, start, columns, n, k, GROUP, tl.float32) if GROUP > 0 else None
                values = decode(packed, zero, scale, step, BITS, HALF, x.dtype.element_ty)
            acc = tl.dot(values, tl.trans(inputs), acc, input_precision="ieee")
    if GROUP == 0:
        acc *= load_group(scales, 0, columns, n, k, GROUP, tl.float32)[:, None]
    where = rows[None, :].to(tl.int64) * n + columns[:, None]
    store_result(out, where, acc, bias, columns, n, (columns < n)[:, None] & (rows < m)[None, :])


@triton.jit
def dequantize_kernel(
    words, scales, zeros, out, n, k,
    TILE_N: tl.constexpr,
    BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    unit, columns = tl.program_id(1), tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    packed = load_words(words, unit, columns, n)
    for step in tl.static_range(16 // BITS):
        start = unit * (512 // BITS) + step * 32
        inner = start + tl.arange(0, 32)
        values = decode_ragged(
            packed, scales, zeros, start, columns, n, k, step, BITS, HALF, GROUP, out.dtype.element_ty
        )
        where = columns[:, None].to(tl.int64) * k + inner[None, :]
        tl.store(out + where, values, (columns < n)[:, None] & (inner < k)[None, :])


@triton.jit
def load_words(words, unit, columns, n):
    """[TILE_N, 16], one piece of memory."""
    row = (unit * n + columns).to(tl.int64)
    return tl.load(words + row[:, None] * 16 + tl.arange(0, 16)[None, :], (columns < n)[:, None], 0)


@triton.jit
def load_inputs(x, rows, start, m, k, x_row, EVEN: tl.constexpr):
    """[TILE_M, 32]; zeros beyond the last input, so that what pads a unit counts for nothing."""
    inner = start + tl.arange(0, 32)
    inside = (rows < m)[:, None] if EVEN else (rows < m)[:, None] & (inner < k)[None, :]
    return tl.load(x + rows[:, None].to(tl.int64) * x_row + inner[None, :], inside, 0.0)


@triton.jit
def load_group(per_group, start, columns, n, k, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """[TILE_N], the scales or zeros of the group that input `start` is in."""
    group = 0 if GROUP == 0 else tl.minimum(start, k - 1) // GROUP  # a unit may end with padding
    return tl.load(per_group + group * n + columns, columns < n, 0).to(DTYPE)


@triton.jit
def decode_ragged(
    packed, scales, zeros, start, columns, n, k, STEP: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`decode` with the scale and zero of every weight looked up for itself: for groups that are no multiple of 32."""
    inner = start + tl.arange(0, 32)
    inside = (columns < n)[:, None] & (inner < k)[None, :]
    group = inner // (GROUP if GROUP > 0 else 1 << 30)
    where = group[None, :] * n + columns[:, None]
    values = decode(packed, None, None, STEP, BITS, HALF, tl.float32)
    if zeros is not None:
        values -= tl.load(zeros + where, inside, 0).to(tl.float32)
    return (values * tl.load(scales + where, inside, 0.0).to(tl.float32)).to(DTYPE)


@triton.jit
def store_result(out, where, total, bias, columns, n, inside):
    if bias is not None:
        total += tl.load(bias + columns, columns < n, 0.0).to(tl.float32)[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), inside)
