"""Formats, rounding, packing, the configuration, and models whose weights are in few bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from minillm import LLM, SamplingParams
from minillm.model.checkpoint import load_model, read_model, resolve_model
from minillm.model.fingerprint import fingerprint
from minillm.model.layers import Linear
from minillm.quantization.config import NAMED, QuantizationConfig, resolve
from minillm.quantization.formats import FORMATS, QuantizedWeight, concatenate, pack_codes, unpack_codes
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rtn import round_to_nearest


def weight(out_features: int = 24, in_features: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("name", FORMATS)
def test_encode_finds_the_nearest_value_of_the_table(name):
    format = FORMATS[name]
    values = torch.linspace(-1.2, 1.2, 4001) * format.largest
    table = format.table[~format.table.isnan()]
    reach = format.largest if not format.is_integer else table.abs().max()
    decoded = format.decode(format.encode(values))
    nearest = (values.clamp(-reach, reach)[:, None] - table).abs().amin(1)
    torch.testing.assert_close((values.clamp(-reach, reach) - decoded).abs(), nearest, rtol=0, atol=1e-6 * reach)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_says_itself(name):
    format = FORMATS[name]
    codes = torch.arange(2**format.bits)
    codes = codes[~format.table.isnan()].to(torch.uint8)
    values = format.decode(codes)
    assert torch.equal(format.decode(format.encode(values)), values)


def test_e2m1_and_e4m3_are_the_published_values():
    assert FORMATS["fp4"].table.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    table = FORMATS["fp8"].table
    assert (
        table[0b0_1111_110] == 448
        and table[0b0_0000_001] == 2.0**-9
        and table[0b1_0111_000] == -1
        and table[0x7F].isnan()
    )


@given(bits=st.integers(2, 8), rows=st.integers(1, 3), count=st.integers(1, 40), seed=st.integers(0, 99))
def test_packing_loses_nothing_and_takes_what_it_says(bits, rows, count, seed):
    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, -(-count * bits // 8)) and torch.equal(unpack_codes(packed, bits, count), codes)


def test_four_bits_lie_low_half_first():
    assert pack_codes(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8", "fp8", "fp4"])
@pytest.mark.parametrize("group_size", [None, 32, 64])
def test_rounding_is_off_by_half_a_step_at_most(name, group_size):
    original = weight()
    quantized = round_to_nearest(original, name, group_size)
    values = quantized.format.table[~quantized.format.table.isnan()].unique()
    widest = float(values.diff().max())  # the widest step of the table
    scales = quantized.scales.float().repeat_interleave(128 // quantized.scales.shape[1], 1)
    assert ((original - quantized.dequantize()).abs() <= scales * widest * 0.5001 + 1e-6).all()
    assert quantized.scales.shape == (24, 128 // (group_size or 128))


def test_an_asymmetric_grid_follows_a_shifted_weight():
    shifted = weight() + 0.2
    errors = [
        float((round_to_nearest(shifted, "int4", 32, symmetric=s).dequantize() - shifted).norm()) for s in (True, False)
    ]
    assert errors[1] < 0.6 * errors[0]  # it spans what is there and zero, not twice the largest
    zeros = round_to_nearest(shifted, "int4", 32, symmetric=False).zeros
    assert zeros.dtype is torch.int8 and zeros.min() >= -8 and zeros.max() <= 7


def test_zeros_stay_zeros_in_every_grid():
    original = weight()
    original[3] = 0
    original[:, 5] = 0
    for name, format in FORMATS.items():
        for symmetric in (True, False) if format.is_integer else (True,):
            found = round_to_nearest(original, name, 32, symmetric).dequantize()
            assert not found[3].any() and not found[:, 5].any(), (name, symmetric)


def test_one_scale_for_the_tensor_and_powers_of_two():
    assert round_to_nearest(weight(), "fp8", None, per_tensor=True).scales.unique().numel() == 1
    mx = round_to_nearest(weight(), "fp4", 32, scale_format="power_of_two")
    assert torch.equal(mx.scales.log2(), mx.scales.log2().round()) and mx.bits_per_weight == 4 + 8 / 32


def test_scales_of_two_levels_are_e4m3_times_one_number():
    original = weight() * torch.logspace(-3, 1, 24)[:, None]
    nv = round_to_nearest(original, "fp4", 16, scale_format="e4m3")
    whole = nv.scales.max() / 448
    levels = nv.scales / whole
    torch.testing.assert_close(levels.to(torch.float8_e4m3fn).float(), levels, rtol=1e-6, atol=0)
    assert nv.scales.shape == (24, 8) and nv.bits_per_weight == 4 + 8 / 16
    plain = round_to_nearest(original, "fp4", 16)
    exact = (original.abs().view(24, 8, 16).amax(-1) / 6).float()
    assert ((nv.scales - exact).abs() <= exact / 16 + 448 * whole * 2**-18).all(), "rounded to 3 bits after the point"
    off = [(one.dequantize() - original).norm() for one in (plain, nv)]
    assert off[0] < off[1] < 1.2 * off[0]
    with pytest.raises(ValueError, match="scale_format='e5m2' is unknown; allowed: None, 'power_of_two', 'e4m3'"):
        round_to_nearest(original, "fp4", 16, scale_format="e5m2")


def test_bytes_are_codes_and_scales_and_zero_points():
    assert round_to_nearest(weight(), "int4", 64).num_bytes == 24 * (128 // 2 + 2 * 2)
    assert round_to_nearest(weight(), "int4", 64, symmetric=False).num_bytes == 24 * (128 // 2 + 2 * 2 + 1)
    assert round_to_nearest(weight(), "int8", None).num_bytes == 24 * (128 + 4)
    assert round_to_nearest(weight(), "int3", 64).bits_per_weight == 3.25


def test_parts_of_a_fused_weight_are_one_weight():
    parts = [round_to_nearest(weight(seed=i), "int4", 32, symmetric=i != 1) for i in range(3)]
    whole = concatenate(parts)
    torch.testing.assert_close(whole.dequantize(), torch.cat([part.dequantize() for part in parts]), rtol=0, atol=0)
    with pytest.raises(ValueError, match="int4 in groups of 32 and int4 in groups of 64"):
        concatenate([parts[0], round_to_nearest(weight(), "int4", 64)])


def test_a_group_must_divide_the_inputs():
    with pytest.raises(ValueError, match="group_size=48 does not divide in_features=128; possible are 32, 64, 128"):
        round_to_nearest(weight(), "int4", 48)


@pytest.mark.parametrize("what, message", [
    ("int9", "quantization='int9' is not allowed; allowed: int8, int4"),
    ({"method": "magic"}, "method='magic' is not allowed; allowed: rtn, gptq"),
    ({"bits": 4}, "no field 'bits'; fields: method, weights"),
    ({"weights": "fp8", "symmetric": False}, "symmetric=False is not allowed for weights='fp8'"),
    ({"weights": "int4", "activations": "int8"}, "both sides of a product are in one format"),
    ({"weights": "int8", "group_size": 64, "activations": "int8"}, "need group_size=None"),
    ({"group_size": 0}, "group_size=0 is not allowed"),
    ({"scale_format": "fp16"}, "scale_format='fp16' is not allowed; allowed: None, power_of_two, e4m3"),
    ({"name": "nvfp4", "group_size": None}, "scale_format='e4m3' is for groups without a zero point"),
    ({"name": "mxfp4", "method": "gptq"}, "scale_format='power_of_two' with method='gptq' is not allowed: rtn alone"),
    ({"name": "gptq", "per_tensor": True},
     "per_tensor=True with method='gptq' is not allowed: rtn and smoothquant alone read it"),
    ({"name": "llm_int8", "per_tensor": True}, "per_tensor=True with method='llm_int8'"),
    ({"act_order": True},
     "act_order=True with method='rtn' is not allowed: gptq alone reads it; leave it out, or change the method"),
    ({"name": "awq", "damping": 0.1}, "damping=0.1 with method='awq' is not allowed: gptq alone reads it"),
    ({"name": "llm_int8", "alpha": 0.8}, "alpha=0.8 with method='llm_int8' is not allowed: smoothquant alone reads it"),
    ({"name": "smoothquant", "outlier_threshold": 3}, "outlier_threshold=3 with method='smoothquant'"),
    ({"name": "int8", "activation_scales": "static"},
     "activation_scales='static' with activations=None has nothing to scale"),
    ({"calibration": "a.txt"}, "calibration='a.txt' with method='rtn' is not read"),
    ({"method": "llm_int8"},
     ("method='llm_int8' with activations=None is not allowed: it is there to round activations too; "
      "start from {'name': 'llm_int8'}")),
    ({"method": "smoothquant", "weights": "int8", "group_size": None}, "method='smoothquant' with activations=None"),
    ({"name": "llm_int8", "symmetric": False}, "symmetric=True"),
])  # fmt: skip
def test_a_wrong_configuration_is_named(what, message):
    with pytest.raises(ValueError) as error:
        resolve(what)
    assert message in str(error.value)


@pytest.mark.parametrize("field, value", [
    ("alpha", "0.5"), ("damping", None), ("symmetric", "no"), ("group_size", True), ("num_documents", 1.5),
    ("seed", "a"), ("per_tensor", 1), ("rotate", "yes"),
])  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(field, value):
    with pytest.raises(TypeError, match=f"{field}={value!r} is not allowed; allowed: "):
        QuantizationConfig(**{field: value})


def test_what_is_read_is_allowed():
    for allowed in (
        {"name": "smoothquant", "per_tensor": True, "alpha": 0.8}, {"name": "gptq", "damping": 0.1, "act_order": True},
        {"name": "llm_int8", "outlier_threshold": 3.0},
        {"name": "int8", "activations": "int8", "activation_scales": "static", "calibration": "a.txt"},
    ):  # fmt: skip
        assert (
            resolve(allowed).as_dict().items()
            >= {key: value for key, value in allowed.items() if key != "name"}.items()
        )


def test_a_dict_starts_from_a_name():
    assert resolve({"name": "gptq", "weights": "int3"}) == QuantizationConfig(
        method="gptq", weights="int3", symmetric=False
    )
    assert resolve("int8") is NAMED["int8"] and resolve(None) is None
    with pytest.raises(TypeError, match="quantization=4"):
        resolve(4)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp4", "mxfp4", "nvfp4"])
def test_a_model_in_few_bits_speaks_and_weighs_what_the_formula_says(name):
    llm = LLM("tinyworld", device="cpu", quantization=name)
    config, model = NAMED[name], llm.model.config
    bits = FORMATS[config.weights].bits
    for linear in (m for m in llm.model.modules() if isinstance(m, Linear)):
        head = linear is llm.model.lm_head
        groups = 1 if head or config.group_size is None else linear.in_features // config.group_size
        width = FORMATS[config.lm_head].bits if head else bits
        scale_bytes = 4 if groups == 1 else 1 if config.scale_format else 2
        assert linear.quantized.num_bytes == linear.out_features * (
            linear.in_features * width // 8 + groups * scale_bytes
        )
        assert linear.plain is None and linear.panels is None
        if linear.quantized.road == "native" and not config.scale_format:  # which are kept as float32 in memory
            # Tables.
            assert linear.quantized.num_bytes <= linear.quantized.held_bytes <= 1.01 * linear.quantized.num_bytes + 512
    assert llm.model.embed_tokens is None and model.tie_word_embeddings
    full = LLM("tinyworld", device="cpu", quantization=None)
    text = "Once upon a time"
    ids = full.get_tokenizer().encode(text)
    prompt, params = {"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=24, prompt_logprobs=0)
    said = [one.generate(prompt, params, use_tqdm=False)[0] for one in (llm, full)]
    losses = [-sum(row[t].logprob for t, row in zip(ids[1:], out.prompt_logprobs[1:])) / (len(ids) - 1) for out in said]
    assert abs(losses[0] - losses[1]) < (0.05 if bits == 8 else 0.5)
    assert len(said[0].outputs[0].token_ids) == 24


def test_another_quantization_is_another_model_to_the_prefix_cache():
    prints = {
        load_model(resolve_model("tinyworld-draft"), "float32", "cpu", name).fingerprint
        for name in (None, "int8", {"group_size": 32}, "fp8")
    }
    assert len(prints) == 4


def test_whatever_a_product_depends_on_makes_another_model():
    """Not only its codes: zero points, rounded activations, outliers.
    And not only column 0, which GPTQ rounds like everybody."""
    codes = round_to_nearest(weight(64, 128), "int8", None)
    other = codes.codes.clone()
    other[:, 77] += 1
    linears = [
        QuantizedLinear(codes), QuantizedLinear(replace(codes, codes=other)), QuantizedLinear(codes, "int8"),
        QuantizedLinear(codes, "int8", torch.tensor(0.5)),
        QuantizedLinear(replace(codes, zeros=torch.ones(64, 1, dtype=torch.int8))),
        QuantizedLinear(codes, outliers=(torch.tensor([3]), torch.ones(64, 1))),
        QuantizedLinear(codes, order=torch.arange(128).flip(0)),
    ]  # fmt: skip
    prints = set()
    for linear in linears:
        model = read_model(resolve_model("tinyworld-draft"), "float32", "cpu", {"group_size": 32})
        model.layers[0].mlp.down_proj.quantized = linear
        prints.add(fingerprint(model))
    assert len(prints) == len(linears)


def test_a_weight_of_another_shape_is_refused():
    linear = Linear(128, 24, False, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="24 x 64 does not fit a product of 24 x 128"):
        linear.quantize(QuantizedLinear(round_to_nearest(weight(24, 64), "int8", None)))


def test_some_rows_of_a_weight():
    quantized = round_to_nearest(weight(), "int4", 32, symmetric=False)
    rows = torch.tensor([5, 0, 5])
    assert isinstance(quantized[rows], QuantizedWeight)
    torch.testing.assert_close(quantized[rows].dequantize(), quantized.dequantize()[rows], rtol=0, atol=0)
    linear = QuantizedLinear(quantized)
    torch.testing.assert_close(linear.rows(rows, torch.float32), quantized.dequantize()[rows], rtol=0, atol=0)
