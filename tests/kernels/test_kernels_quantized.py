"""Products with weights, and with inputs too, in 4 and 8 bits: against float64, on ragged shapes, in every format.
Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minillm.kernels import packed_weight, quantized_matmul, scaled_matmul
from minillm.kernels.language import tl, triton
from minillm.kernels.packed_weight import PackedWeight, pack, serves_format
from minillm.kernels.quantized_matmul import choose_num_splits, dequantize, torch_quantized_matmul
from minillm.quantization.formats import FORMATS, QuantizedWeight
from tests.helpers.kernel_cases import (
    ROUNDING,
    device,
    error,
    every_dtype,
    framed,
    guarded_outputs,
    needs_triton,
    random,
)

FORMAT_NAMES = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp4", "fp8"]


@pytest.fixture(autouse=True)
def guards():
    with guarded_outputs():
        yield


def quantized(
    format: str, out: int, inputs: int, group: int | None, zeros: bool = False, seed: int = 0
) -> QuantizedWeight:
    """Every code as likely as another (but e4m3's two NaN), scales around 0.1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2 ** FORMATS[format].bits, (out, inputs), generator=generator, dtype=torch.uint8)
    if format == "fp8":
        codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes)
    groups = -(-inputs // (group or inputs))
    scales = (torch.rand(out, groups, generator=generator) * 0.1 + 0.05).to(torch.float16 if group else torch.float32)
    half = 2 ** (FORMATS[format].bits - 1)
    offsets = torch.randint(-half, half, (out, groups), generator=generator).to(torch.int8) if zeros else None
    return QuantizedWeight(FORMATS[format], codes, scales, offsets).to(device())


def packed(weight: QuantizedWeight) -> PackedWeight:
    """With NaN before and after the scales: a group too many would be seen."""
    here = pack(weight.codes, weight.scales, weight.zeros, weight.format.name)
    return replace(here, scales=framed(tuple(here.scales.shape), here.scales.dtype).copy_(here.scales))


def exact(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    values = weight.format.decode(weight.codes).double()
    group = weight.group_size
    spread = lambda per_group: per_group.double().repeat_interleave(group, dim=1)[:, : weight.in_features]
    values = (values - spread(weight.zeros) if weight.zeros is not None else values) * spread(weight.scales)
    out = x.double() @ values.t()
    return out if bias is None else out + bias.double()


# Packing


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("out, inputs, group", [(5, 128, 64), (3, 200, None), (1, 96, 32), (7, 64, 16)])
def test_packing_keeps_every_code_and_every_weight(format, out, inputs, group):
    weight = quantized(format, out, inputs, group, zeros=format.startswith("int"))
    here = packed(weight)
    assert torch.equal(here.codes(), weight.codes) and torch.equal(here.unpack_rows(), weight.dequantize())
    rows = torch.tensor([out - 1, 0], device=device())
    assert torch.equal(here.unpack_rows(rows), weight.dequantize()[rows])
    assert here.num_bytes < weight.codes.numel() * (1.6 if format in ("int2", "int3", "int4", "fp4") else 2.6)


def test_a_unit_lies_as_the_drawing_says():
    codes = (torch.arange(256) % 16).to(torch.uint8).view(2, 128)
    codes[1] = 0
    codes[1, 33] = 9  # input 1 + 2j of the pairs after a shift of 4: j = 0, bits 20 to 23
    words = pack(codes, torch.ones(2, 1)).words
    assert words.shape == (1, 2, 16) and words.dtype is torch.int32
    first = int(words[0, 0, 3])
    assert [(first >> shift) & 15 for shift in (0, 4, 8, 12, 16)] == [codes[0, k].item() for k in (6, 38, 70, 102, 7)]
    assert words[0, 1].tolist() == [9 << 20] + [0] * 15


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(format="fp6"), "format='fp6' has no kernel"),
        (dict(format="int9"), "format='int9' has no kernel"),
        (dict(format="fp8", zeros=torch.zeros(4, 2, dtype=torch.int8)), "zero points of fp8"),
        (dict(scales=torch.ones(3, 2)), "do not fit"),
        (dict(zeros=torch.zeros(4, 1, dtype=torch.int8)), "do not fit"),
        (dict(codes=torch.zeros(4, 64, dtype=torch.int8)), "do not fit"),
    ],
)
def test_what_cannot_be_packed_is_refused(change, message):
    given = (
        dict(codes=torch.zeros(4, 64, dtype=torch.uint8), scales=torch.ones(4, 2), zeros=None, format="int4") | change
    )
    with pytest.raises(ValueError, match=message):
        pack(**given)


def test_formats_with_a_kernel():
    assert [serves_format(name, FORMATS[name].bits) for name in FORMAT_NAMES] == [True] * 9
    assert not serves_format("int4", 8) and not serves_format("int9", 9) and not serves_format("nf4", 4)


# Weights in 4 and 8 bits


def check(
    weight: QuantizedWeight,
    rows: int,
    dtype: torch.dtype,
    bias: bool = True,
    splits: int | None = None,
    factor: float = 1.0,
):
    x = random((rows, weight.in_features), dtype)
    offset = random((weight.out_features,), dtype, seed=1) if bias else None
    here = packed(weight)
    out = quantized_matmul.quantized_matmul(x, here, offset, splits)
    assert out.shape == (rows, weight.out_features) and out.dtype == dtype
    assert error(out, exact(x, weight, offset)) < factor * ROUNDING[dtype]
    assert not here.counters.any(), "a tile's count is not back at 0"
    return out


@needs_triton
@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_every_format_equals_float64(format, dtype):
    for group, zeros in ((64, False), (None, format.startswith("int"))):
        check(quantized(format, 16, 128, group, zeros), 2, dtype)


@needs_triton
@every_dtype
@pytest.mark.parametrize("group", [None, 16, 24, 32, 64, 96, 128, 192])
def test_every_group_size(group, dtype):
    """Whole rows, groups of several units, parts of a unit, and groups that cut an operand; the last one is shorter."""
    check(quantized("int4", 8, 384, group, zeros=True), 3, dtype)
    check(quantized("int4", 8, 192, group, zeros=True), 1, dtype)


@needs_triton
@every_dtype
@pytest.mark.parametrize("rows, splits", [(1, 1), (1, 3), (16, 3), (17, 2), (40, 1)])
def test_few_rows_in_one_or_several_splits(rows, splits, dtype):
    """Ragged: 300 inputs are two units and 44 more, 19 outputs a tile and 3 more."""
    check(quantized("int4", 19, 300, 100, zeros=True), rows, dtype, splits=splits)


@needs_triton
@every_dtype
@pytest.mark.parametrize(
    "format, out, inputs, group", [("int4", 70, 200, 64), ("int8", 5, 64, None), ("fp8", 9, 100, 20)]
)
def test_many_rows(format, out, inputs, group, dtype):
    """Here the weights are rounded to the dtype, after their scales."""
    check(quantized(format, out, inputs, group), 67, dtype, factor=2)


@needs_triton
def test_more_splits_than_units_add_nothing():
    check(quantized("int4", 4, 128, 64), 1, torch.float16, splits=5)


@needs_triton
def test_a_row_does_not_depend_on_the_others():
    weight, x = packed(quantized("int4", 19, 256, 64)), random((5, 256), torch.float16)
    out = quantized_matmul.quantized_matmul(x, weight, num_splits=2)
    x[:2], x[3:] = 1000.0, -7.0
    assert torch.equal(quantized_matmul.quantized_matmul(x, weight, num_splits=2)[2], out[2])


@needs_triton
@every_dtype
def test_rows_may_lie_apart_and_be_none(dtype):
    weight, x = quantized("int4", 5, 96, 32), random((3, 200), dtype)
    out = quantized_matmul.quantized_matmul(x[:, 50:146], packed(weight))
    assert error(out, exact(x[:, 50:146], weight)) < ROUNDING[dtype]
    assert quantized_matmul.quantized_matmul(x[:0, :96], packed(weight)).shape == (0, 5)
    with pytest.raises(ValueError, match="200 columns and the weight 96 inputs"):
        quantized_matmul.quantized_matmul(x, packed(weight))


@needs_triton
@every_dtype
@pytest.mark.parametrize("format, zeros", [("int3", True), ("int8", True), ("fp4", False), ("fp8", False)])
def test_dequantize_says_what_the_weight_is(format, zeros, dtype):
    weight = quantized(format, 6, 150, 50, zeros)
    assert torch.equal(dequantize(packed(weight), dtype), weight.dequantize(dtype))


@needs_triton
def test_very_many_rows_multiply_the_dequantized_weight(monkeypatch):
    monkeypatch.setattr(quantized_matmul, "BY_DEQUANTIZING", 3)
    weight, x = quantized("int4", 6, 64, 32), random((4, 64), torch.float16)
    out = quantized_matmul.quantized_matmul(x, packed(weight))
    assert torch.equal(out, x @ weight.dequantize(torch.float16).t())


def test_the_twin_equals_float64():
    weight, x, bias = (
        quantized("int5", 6, 150, 50, True),
        random((3, 150), torch.float32),
        random((6,), torch.float32, seed=1),
    )
    assert error(torch_quantized_matmul(x, packed(weight), bias), exact(x, weight, bias)) < 1e-6


def test_splits_fill_the_gpu_and_stay_long_enough():
    assert choose_num_splits(num_tiles=64, num_units=32, num_sms=132) == 8
    assert choose_num_splits(num_tiles=16, num_units=24, num_sms=132) == 12  # two units each
    assert choose_num_splits(num_tiles=2000, num_units=32, num_sms=132) == 1
    assert choose_num_splits(num_tiles=1, num_units=1, num_sms=132) == 1


@needs_triton
def test_pairs_of_bfloat16_decode_exactly():
    """The interpreter multiplies bfloat16 matrices wrongly; numbers one by one it does not."""
    for format in FORMAT_NAMES:
        weight = quantized(format, 4, 64, None, zeros=format.startswith("int"))
        values = bfloat16_values(packed(weight))
        expected = weight.format.decode(weight.codes) - (0 if weight.zeros is None else weight.zeros.float())
        assert torch.equal(values.float(), expected), format


def bfloat16_values(weight: PackedWeight) -> torch.Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=torch.bfloat16, device=device())
    decode_all_kernel[(1,)](
        weight.words,
        weight.zeros,
        out,
        weight.in_features,
        BITS=weight.bits,
        HALF=weight.half,
        UNITS=weight.words.shape[0],
    )
    return out


@triton.jit
def decode_all_kernel(words, zeros, out, k, BITS: tl.constexpr, HALF: tl.constexpr, UNITS: tl.constexpr):
    columns = tl.arange(0, 4)
    zero = tl.load(zeros + columns).to(tl.int32) if zeros is not None else None
    for unit in range(UNITS):
        tile = tl.load(words + (unit * 4 + columns)[:, None] * 16 + tl.arange(0, 16)[None, :])
        for step in tl.static_range(16 // BITS):
            inner = unit * (512 // BITS) + step * 32 + tl.arange(0, 32)
            values = packed_weight.decode(tile, zero, None, step, BITS, HALF, tl.bfloat16)
            tl.store(out + columns[:, None] * k + inner[None, :], values, (inner < k)[None, :])


# Inputs in 8 bits too

FIXED = [None, 0.01, torch.tensor([0.5])]


@needs_triton
@every_dtype
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("scale", FIXED, ids=str)
def test_rows_are_quantized_as_the_twin_does_bit_for_bit(format, scale, dtype):
    x = random((6, 300), dtype) * torch.tensor([[1.0], [1e-3], [0.0], [500.0], [3.0], [-1.0]], device=device()).to(
        dtype
    )
    x[4] = ((torch.arange(300) - 150) / 2).to(dtype)  # ties
    x[5] = ((torch.arange(300) % 250 - 124.5) * 0.01).to(dtype)  # ties of the scale 0.01, which its inverse would miss
    x[4, 0] = 127.0 if format == "int8" else 448.0  # scale 1
    codes, scales = scaled_matmul.quantize_rows(x, format, scale)
    expected, expected_scales = scaled_matmul.torch_quantize_rows(x, format, scale)
    assert codes.dtype == expected.dtype and torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@needs_triton
def test_every_fp8_value_and_every_tie_is_encoded_as_torch_does():
    values = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    near = torch.tensor([float("inf"), float("-inf")])
    x = torch.cat([values, middle, middle.nextafter(near[0]), middle.nextafter(near[1])]).to(device())
    x = torch.stack([x, -x])
    codes, _ = scaled_matmul.quantize_rows(x, "fp8", 1.0)
    assert torch.equal(codes.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def eight_bits(format: str, rows: int, k: int, n: int):
    x = random((rows, k), torch.float32)
    codes, scales = scaled_matmul.torch_quantize_rows(x, format)
    weight = quantized(format, n, k, None)
    return codes, scales, scaled_matmul.pack(weight.codes, format), weight.scales[:, 0]


@needs_triton
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("rows, k, n", [(3, 300, 37), (20, 130, 70), (66, 64, 5)])
def test_scaled_products_equal_float64(format, rows, k, n):
    codes, row_scales, weight, column_scales = eight_bits(format, rows, k, n)
    bias = random((n,), torch.float32, seed=2)
    exact_sum = codes.double() @ weight.double().t()
    reference = exact_sum * row_scales.double()[:, None] * column_scales.double() + bias.double()
    for product in (scaled_matmul.scaled_matmul, scaled_matmul.torch_scaled_matmul):
        out = product(codes, row_scales, weight, column_scales, bias)
        assert out.dtype is torch.float32 and error(out, reference) < 1e-6
        assert (
            error(product(codes, row_scales, weight, column_scales, None, torch.float16), reference - bias.double())
            < 6e-4
        )


@needs_triton
def test_int8_sums_are_exact():
    """Larger than a float32 counts to: 2000 products of 127 by 127, and one more."""
    codes = torch.full((1, 2001), 127, dtype=torch.int8, device=device())
    weight = codes.clone()
    weight[0, 0], codes[0, 0] = 1, 1
    one = torch.ones(1, device=device())
    out = scaled_matmul.scaled_matmul(codes, one, weight, one)
    assert out.item() == torch.tensor(2000 * 127 * 127 + 1).float().item()


def test_eight_bit_products_refuse_what_does_not_fit():
    codes, row_scales, weight, column_scales = eight_bits("int8", 2, 64, 3)
    for other in (weight[:, :32], weight.float().to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="quantize both alike"):
            scaled_matmul.scaled_matmul(codes, row_scales, other, column_scales)
    for call in (scaled_matmul.quantize_rows, scaled_matmul.torch_quantize_rows, scaled_matmul.pack):
        with pytest.raises(ValueError, match="format='int4' has no 8-bit product"):
            call(torch.zeros(2, 4, dtype=torch.uint8), "int4")
