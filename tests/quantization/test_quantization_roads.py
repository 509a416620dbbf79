"""Products with quantized weights: every road multiplies with the same weight, and holds it once."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.quantization.activations import quantize_activations
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rtn import round_to_nearest
from minillm.quantization.torch_matrix import panel_order
from tests.quantization.test_quantization import weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [
    dict(format="int8", group_size=None), dict(format="int4", group_size=64),
    dict(format="int4", group_size=32, symmetric=False), dict(format="fp8", group_size=None),
    dict(format="fp4", group_size=32), dict(format="int3", group_size=64),
])  # fmt: skip
def test_every_road_multiplies_with_the_same_weight(config, dtype):
    quantized = round_to_nearest(weight(48, 192), **config)
    bias = torch.linspace(-1, 1, 48).to(dtype)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ quantized.dequantize().double().t() + bias.double()
    roads = 0
    for road in ("native", "torch", "plain"):
        try:
            linear = QuantizedLinear(quantized).prepare(dtype, road)
        except ValueError:
            continue
        roads += 1
        found = linear(x, bias)
        assert found.dtype is dtype and linear.road == road
        close = dict(rtol=0, atol=1e-5) if dtype is torch.float32 else dict(rtol=0.02, atol=0.02)
        torch.testing.assert_close(found.double(), expected, **close)
        torch.testing.assert_close(
            linear.dequantize(), quantized.dequantize(), rtol=0, atol=2e-3 if dtype is torch.bfloat16 else 1e-7
        )
    assert roads >= 1


TORCH_ROAD = [
    (dict(format="int8", group_size=None), torch.float32, 64 * 128 + 4 * 64),
    # Scales for the product, and as they are.
    (dict(format="int8", group_size=None), torch.bfloat16, 64 * 128 + (4 + 2) * 64),
    # The product's with zero points.
    (dict(format="int4", group_size=32), torch.bfloat16, 64 * 128 // 2 + (2 + 4) * 64 * 4),
    (dict(format="int3", group_size=64, symmetric=False), torch.bfloat16, 64 * 128 // 2 + (2 + 1 + 4) * 64 * 2),
]


@pytest.mark.parametrize("config, dtype, num_bytes", TORCH_ROAD)
def test_pytorchs_products_hold_the_codes_once(config, dtype, num_bytes):
    """Also for many rows, which are multiplied with the unpacked weight, and for a row that is looked up."""
    if config["format"] != "int8":
        skip_unknown_layouts()
    quantized = round_to_nearest(weight(64, 128), **config)
    linear = QuantizedLinear(quantized).prepare(dtype, "torch")
    assert linear.weight is None and linear.held_bytes == num_bytes
    held = {
        part.data_ptr(): part.nbytes
        for holder in (linear, linear.matrix)
        for part in vars(holder).values()
        if isinstance(part, torch.Tensor)
    }
    assert sum(held.values()) == num_bytes
    assert torch.equal(linear.dequantize(), quantized.dequantize())
    ids = torch.tensor([63, 0, 17, 17])
    assert torch.equal(linear.rows(ids, dtype), quantized.dequantize()[ids].to(dtype))
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = x.double() @ quantized.dequantize().double().t()
    for rows in (1, 8, 40):  # packed products up to 8
        torch.testing.assert_close(
            linear(x[:rows]).double(),
            expected[:rows],
            **(dict(rtol=0, atol=1e-5) if dtype is torch.float32 else dict(rtol=0.02, atol=0.02)),
        )


def skip_unknown_layouts():
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert panel_order() is not None and sorted(panel_order().tolist()) == list(range(len(panel_order())))
    elif panel_order() is None:
        pytest.skip("this processor's int4 layout is not known")


def test_a_layout_that_nobody_knows_takes_the_plain_road(monkeypatch):
    quantized = round_to_nearest(weight(64, 128), "int4", 32)
    monkeypatch.setattr("minillm.quantization.torch_matrix.panel_order", lambda: None)
    with pytest.raises(ValueError, match="the 'torch' road does not serve int4"):
        QuantizedLinear(quantized).prepare(torch.bfloat16, "torch")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_model_on_pytorchs_road_says_what_the_plain_road_says(name, monkeypatch):
    if name == "int4":
        skip_unknown_layouts()
    said = []
    for road in ("torch", "plain"):
        roads = ("torch", "plain") if road == "torch" else ("plain",)
        monkeypatch.setattr("minillm.quantization.linear.ROADS", roads)
        llm = LLM("tinyworld", device="cpu", dtype="bfloat16", quantization=name)
        quantized = [module for module in llm.model.modules() if isinstance(module, QuantizedLinear)]
        assert {linear.road for linear in quantized} == {road} and all(
            layer.whole is None for layer in llm.model.layers
        )
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        [out] = llm.generate("Once upon a time there was a little bird", params, use_tqdm=False)
        said.append(torch.tensor([next(iter(row.values())).logprob for row in out.prompt_logprobs[1:]]))
    torch.testing.assert_close(said[0], said[1], rtol=0, atol=0.15)


@pytest.mark.parametrize("static", [False, True])
def test_eight_bits_on_both_sides_is_the_integer_product(static):
    quantized = round_to_nearest(weight(40, 96), "int8", None)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(2))
    scale = torch.tensor(0.02) if static else None
    values, scales = quantize_activations(x, "int8", scale)
    integers = values.long() @ (quantized.codes.long() - 128).t()
    expected = integers.float() * scales * quantized.scales.t()
    for road in ("native", "plain"):
        try:
            linear = QuantizedLinear(quantized, "int8", scale).prepare(torch.float32, road)
        except ValueError:
            continue
        torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=0)


def test_activations_take_the_nearest_value_and_are_cut_off():
    x = torch.tensor([[0.0, 0.0], [1.27, -0.004], [0.3, 0.1]])
    values, scales = quantize_activations(x, "int8")
    assert scales[0] == 1 and values[1].tolist() == [127, 0] and torch.allclose(scales[1], torch.tensor(0.01))
    values, scales = quantize_activations(x, "int8", torch.tensor(0.001))
    assert values[1, 0] == 127 and scales.tolist() == [[pytest.approx(0.001)]] * 3
