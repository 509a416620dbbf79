"""Weights in few bits on a CPU, against float64 with the very weight that they stand for: formats, odd shapes,
zero points, one row and many; integer activations, bit for bit; other instruction sets; a decoder layer in one call."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from minillm.kernels import native, native_quant
from minillm.kernels.native_quant import Matrix
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.quantization.activations import quantize_activations
from minillm.quantization.formats import FORMATS, QuantizedWeight
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rtn import round_to_nearest
from tests.helpers.model_zoo import save_checkpoint
from tests.helpers.tiny import seeded

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
DTYPES = (torch.float32, torch.bfloat16)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 20, 33)


def random_weight(
    format: str, out: int, inputs: int, group: int | None, zeros: bool, half: bool, seed: int = 0
) -> QuantizedWeight:
    """Every code that means a number occurs, also those that rounding never makes; the last group may be shorter."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2 ** FORMATS[format].bits, (out, inputs), generator=generator).to(torch.uint8)
    if format == "fp8":
        codes[codes & 0x7F == 0x7F] = 0x80  # -0 in the place of NaN
    groups = 1 if group is None else math.ceil(inputs / group)
    scales = torch.randn(out, groups, generator=generator) * 10.0 ** torch.randint(
        -7, 3, (out, groups), generator=generator
    )
    low, high = (-(2 ** (FORMATS[format].bits - 1)), 2 ** (FORMATS[format].bits - 1))
    points = torch.randint(low, high, (out, groups), generator=generator).to(torch.int8) if zeros else None
    return QuantizedWeight(FORMATS[format], codes, scales.half() if half else scales, points)


def pack(weight: QuantizedWeight, dtype: torch.dtype, activations=None, activation_scale=None) -> Matrix:
    format = weight.format
    return native_quant.pack(
        weight.codes, format.table, format.bits, weight.scales, weight.zeros, dtype, activations, activation_scale
    )


def multiply(x: torch.Tensor, matrix: Matrix, bias=None, residual=None) -> torch.Tensor:
    """`multiply` itself, in place on the residual, inside of memory that must stay as it is."""
    room = torch.full((x.shape[0] + 2, matrix.out_features), float("nan"), dtype=x.dtype)
    out = room[1:-1]
    if residual is not None:
        out.copy_(residual)
    x = F.pad(x, (0, matrix.struct.in_features - x.shape[1])).contiguous()
    places = [None if t is None else t.data_ptr() for t in (bias, None if residual is None else out)]
    assert native.library(x.dtype).multiply(matrix.struct, x.data_ptr(), *places, out.data_ptr(), x.shape[0]) == 0
    assert room[0].isnan().all() and room[-1].isnan().all() and not out.isnan().any()
    return out


def assert_near(got: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, *added: torch.Tensor) -> None:
    """Within rounding of float64: of the sums, by the magnitudes in them, and of the result."""
    exact = weight.dequantize(torch.float64)
    expected = x.double() @ exact.t() + sum(a.double() for a in added)
    magnitude = weight.format.largest + (0 if weight.zeros is None else 2**weight.format.bits)
    scales = weight.scales.double().abs().repeat_interleave(weight.group_size, dim=1)[:, : weight.in_features]
    in_sums = x.double().abs() @ (scales * (exact.abs() / scales.clamp(min=1e-30)).clamp(min=magnitude)).t()
    rounded = 1e-6 if x.dtype is torch.float32 else 2**-8
    bound = 1e-6 * in_sums + rounded * (expected.abs() + sum(a.double().abs() for a in added)) * 2 + 1e-30
    worst = ((got.double() - expected).abs() / bound).max()
    assert worst <= 1, f"{worst:.1f} times what rounding explains"


@seeded
@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from([1, 5, 16, 33, 50]),
    st.sampled_from([(64, None), (64, 32), (96, 16), (63, 32), (7, None), (30, None), (254, 64), (1, None), (23, 8)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(ROWS),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)
def test_every_format_and_shape_equals_float64(format, out, shape, zeros, half, rows, dtype, seed):
    weight = random_weight(format, out, *shape, zeros and FORMATS[format].is_integer, half, seed)
    matrix = pack(weight, dtype)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, shape[0], generator=generator).to(dtype)
    bias, residual = (
        torch.randn(out, generator=generator).to(dtype),
        torch.randn(rows, out, generator=generator).to(dtype),
    )
    assert_near(multiply(x, matrix), x, weight)
    assert_near(multiply(x, matrix, bias), x, weight, bias.expand(rows, -1))
    assert_near(multiply(x, matrix, bias, residual), x, weight, bias.expand(rows, -1), residual)
    assert torch.equal(native_quant.linear(x, matrix, bias), multiply(x, matrix, bias))


@both_dtypes
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_its_company(format, dtype):
    """Also where not all groups of a row are decoded at once: those of 96 inputs are two at a time."""
    for inputs, group in ((255, 64), (671, 96)):
        weight = random_weight(format, 40, inputs, group, FORMATS[format].is_integer, True)
        matrix = pack(weight, dtype)
        x = torch.randn(70, inputs).to(dtype)
        together = multiply(x, matrix)
        assert_near(together, x, weight)
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows], matrix), together[:rows]), (inputs, rows)
        for row in (0, 7, 16, 69):
            assert torch.equal(multiply(x[row : row + 1], matrix), together[row : row + 1]), (inputs, row)


@both_dtypes
@pytest.mark.parametrize("format", FORMATS)
def test_subnormal_numbers_are_the_same_in_any_company(format, dtype):
    weight = random_weight(format, 40, 255, 64, FORMATS[format].is_integer, True)
    matrix = pack(weight, dtype)
    for size in (1e-37, 1e-38, 1e-39):
        x = (torch.randn(70, 255) * size).to(dtype)
        together = multiply(x, matrix)
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows], matrix), together[:rows]), (size, rows)


@both_dtypes
@pytest.mark.parametrize("format", FORMATS)
def test_rows_unpack_to_the_weight_bit_for_bit(format, dtype):
    for zeros in {False, FORMATS[format].is_integer}:
        weight = random_weight(format, 37, 77, 16, zeros, True)
        matrix = pack(weight, dtype)
        ids = torch.tensor([36, 0, 5, 5, 16])
        assert torch.equal(matrix.unpack_rows(ids), weight.dequantize(dtype)[ids])
        assert (matrix.in_features, matrix.out_features) == (77, 37)
        for wrong in (-1, 37):
            with pytest.raises(IndexError, match="of a weight of 37"):
                matrix.unpack_rows(torch.tensor([0, wrong]))
    assert matrix.unpack_rows(torch.tensor([], dtype=torch.int64)).shape == (0, 77)


def test_a_packed_weight_takes_what_its_bits_say():
    out, inputs = 64, 128
    for format, group, codes in (
        ("int4", 64, 4),
        ("fp4", 32, 4),
        ("int2", 64, 4),
        ("int8", None, 8),
        ("fp8", None, 8),
        ("int5", 64, 8),
    ):
        weight = round_to_nearest(torch.randn(out, inputs), format, group)
        sides = weight.scales.nbytes
        extra = pack(weight, torch.float32).num_bytes - out * inputs * codes // 8 - sides
        assert 0 <= extra <= 80  # a table of 16 values at most, as floats and as bytes


@both_dtypes
@pytest.mark.parametrize("shape", [(5, 7), (33, 64), (16, 100), (50, 40)], ids=str)
def test_integer_activations_equal_integers_bit_for_bit(shape, dtype):
    out, inputs = shape
    weight = random_weight("int8", out, inputs, None, False, False)
    x = torch.randn(33, inputs).to(dtype)
    x[3] = 0
    x[4] *= 1e4
    bias = torch.randn(out).to(dtype)
    for scale in (None, torch.tensor(0.013), torch.tensor(0.0)):
        matrix = pack(weight, dtype, "int8", scale)
        values, row_scales = quantize_activations(x, "int8", scale)
        sums = (values.long() @ weight.format.decode(weight.codes).long().t()).float()
        expected = sums * row_scales * weight.scales.float().t()
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows], matrix), expected[:rows].to(dtype)), rows
        assert torch.equal(multiply(x, matrix, bias), (expected + bias.float()).to(dtype))
        residual = torch.randn(33, out).to(dtype)
        plus_bias = (expected + bias.float()).to(dtype).float()
        assert torch.equal(multiply(x, matrix, bias, residual), (plus_bias + residual.float()).to(dtype))
    assert torch.equal(matrix.unpack_rows(torch.arange(out)), weight.dequantize(dtype))


@both_dtypes
@pytest.mark.parametrize("scale", [None, 0.013])
def test_integer_activations_show_what_is_no_number(scale, dtype):
    weight = random_weight("int8", 20, 70, None, False, False)
    matrix = pack(weight, dtype, "int8", None if scale is None else torch.tensor(scale))
    x = torch.randn(9, 70).to(dtype)
    expected = native_quant.linear(x, matrix, None)
    x[4, 33] = float("nan")
    out = native_quant.linear(x, matrix, None)
    others = torch.arange(9) != 4
    assert out[4].isnan().all() and torch.equal(out[others], expected[others])


def test_integer_sums_stay_exact_where_they_are_largest():
    inputs = native_quant.MOST_INPUTS
    codes = torch.full((2, inputs), 255, dtype=torch.uint8)
    codes[1] = 0  # 127 and -128
    weight = QuantizedWeight(FORMATS["int8"], codes, torch.ones(2, 1))
    x = torch.ones(2, inputs)
    x[1] = -1
    sums = 127.0 * inputs * torch.tensor([[127.0, -128.0], [-127.0, 128.0]])
    scale = torch.tensor(1.0) / 127
    assert torch.equal(multiply(x, pack(weight, torch.float32, "int8")), sums * scale)


OTHER_CPUS = {
    "AVX-512 without bfloat16 and VNNI": ("-mno-avx512bf16", "-mno-avx512vnni"),
    "AVX2": ("-mno-avx512f",),
    "no AVX": ("-mno-avx",),
}


@pytest.mark.parametrize("flags", OTHER_CPUS.values(), ids=OTHER_CPUS)
def test_other_cpus_compute_the_same(flags, monkeypatch):
    """The kernels without the instructions that this CPU may have."""
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O1", *flags))  # compiled faster
    built = {dtype: native.library.__wrapped__(dtype) for dtype in DTYPES[1:]}
    if None in built.values():
        pytest.skip(f"the compiler here does not know {' '.join(flags)}")
    monkeypatch.setattr(native, "library", lambda dtype=torch.float32, kv_dtype=None: built[dtype])
    assert native.library(torch.bfloat16).code_pair() == 1
    test_integer_activations_equal_integers_bit_for_bit((33, 64), torch.bfloat16)
    for format in ("int3", "int4", "fp4", "int8", "fp8"):
        test_a_row_does_not_depend_on_its_company(format, torch.bfloat16)
        test_rows_unpack_to_the_weight_bit_for_bit(format, torch.bfloat16)
        weight = random_weight(format, 33, 96, 32, FORMATS[format].is_integer, True)
        x = torch.randn(20, 96).bfloat16()
        assert_near(multiply(x, pack(weight, torch.bfloat16)), x, weight)


def test_what_is_served_and_what_is_refused():
    assert all(
        native_quant.serves(name, format.bits, None, dtype) for name, format in FORMATS.items() for dtype in DTYPES
    )
    assert native_quant.serves("int8", 8, "int8", torch.bfloat16)
    assert not native_quant.serves("int8", 8, None, torch.float16)
    assert not native_quant.serves("fp8", 8, "fp8", torch.bfloat16) and not native_quant.serves(
        "fp8", 8, "int8", torch.bfloat16
    )
    assert native_quant.serves("int4", 4, None, torch.bfloat16, group_size=24)
    assert not native_quant.serves("int4", 4, None, torch.bfloat16, group_size=12)
    with pytest.raises(ValueError, match=r"groups of 12 inputs.*multiples of 8"):
        pack(random_weight("int4", 16, 48, 12, False, True), torch.float32)
    with pytest.raises(ValueError, match=r"activations='int8'.*65536 inputs.*48 inputs in 3 groups"):
        pack(random_weight("int8", 16, 48, 16, False, True), torch.float32, "int8")
    with pytest.raises(ValueError, match="0x7f and 0xff are not numbers"):
        pack(
            QuantizedWeight(FORMATS["fp8"], torch.full((16, 8), 0xFF, dtype=torch.uint8), torch.ones(16, 1)),
            torch.float32,
        )
    with pytest.raises(ValueError, match=r"whole or half numbers from -64 to 63\.5; this one holds 0, 0\.25"):
        native_quant.pack(
            torch.zeros(16, 8, dtype=torch.uint8), torch.arange(16) / 4, 4, torch.ones(16, 1), None, torch.float32
        )
    with pytest.raises(ValueError, match="integers, or signed magnitudes"):
        native_quant.pack(
            torch.zeros(16, 8, dtype=torch.uint8), torch.linspace(0, 1, 256), 8, torch.ones(16, 1), None, torch.float32
        )


def test_a_quantized_linear_takes_this_road():
    weight = round_to_nearest(torch.randn(24, 64), "int4", 32, symmetric=False)
    x, bias = torch.randn(3, 64), torch.randn(24)
    plain = QuantizedLinear(weight)(x, bias)
    linear = QuantizedLinear(weight).prepare(torch.float32)
    assert linear.road == "native" and linear.weight is None
    torch.testing.assert_close(linear(x, bias), plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear.dequantize(), weight.dequantize())


@both_dtypes
@pytest.mark.parametrize(
    "name, quantization",
    [
        ("llama-mqa-biases-tied", {"weights": "int4", "group_size": 16, "symmetric": False}),
        ("qwen3-wide-heads", {"weights": "int8", "group_size": None, "activations": "int8"}),
        ("mistral-window", {"weights": "fp8", "group_size": None, "lm_head": None}),
    ],
)
def test_a_quantized_layer_in_one_call_equals_the_layer_in_pieces(name, quantization, dtype, tmp_path):
    save_checkpoint(tmp_path, name)
    model = load_model(tmp_path, dtype, "cpu", quantization)
    assert all(layer.whole is not None for layer in model.layers)
    config = model.config
    batch = ForwardBatch(
        token_ids=torch.arange(12) + 3,
        positions=torch.arange(12),
        query_start_loc=torch.tensor([0, 12]),
        seq_lens=torch.tensor([12]),
        block_table=torch.tensor([[2, 1, 3]]),
        slot_mapping=torch.tensor([2, 1, 3]).repeat_interleave(4) * 4 + torch.arange(4).repeat(3),
        max_query_len=12,
        logits_indices=torch.arange(12),
        max_seq_len=12,
    )

    def logits() -> torch.Tensor:
        cache = PagedKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 3, 4, dtype)
        return model.forward(batch, NativeAttention(cache, config.layer_windows))

    whole = logits()
    for layer in model.layers:
        layer.whole = None
    tolerance = 1e-4 if dtype is torch.float32 else 0.5
    torch.testing.assert_close(whole, logits(), rtol=1e-4, atol=tolerance)
