"""compressed-tensors: each module is read by the group of settings that names it, and checked against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm.model.hub_formats import CompressedTensors
from tests.helpers import packed_weights as pw

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
BYTES = PACKED | {"format": "float-quantized"}


def scheme(bits=4, kind="int", targets=("Linear",), **settings):
    return {"targets": list(targets), "weights": {"num_bits": bits, "type": kind, **settings}}


def read(settings, groups, pieces, module="model.layers.0.mlp.up_proj"):
    settings = settings | {"config_groups": {f"group_{index}": group for index, group in enumerate(groups)}}
    parts, plain = CompressedTensors(settings).read((f"{module}.{name}", tensor) for name, tensor in pieces.items())
    part = (parts | plain)[f"{module}.weight"]
    return part if isinstance(part, torch.Tensor) else part.dequantize()


def words(codes: np.ndarray, bits: int, dense: bool) -> torch.Tensor:
    """Rows of codes as words: the bits of a row end to end, or as many whole codes in a word as it has room for."""
    rows = []
    for row in codes:
        text = [format(int(code), f"0{bits}b")[::-1] for code in row]  # the lowest bit first
        if not dense:
            per_word = 32 // bits
            text = ["".join(text[i : i + per_word]).ljust(32, "0") for i in range(0, len(text), per_word)]
        text = "".join(text)
        rows.append([int(text[i : i + 32][::-1], 2) for i in range(0, len(text), 32)])
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32))


def pack(rounded: pw.Rounded, bits: int, dense: bool = True) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": words(rounded.codes, bits, dense),
        "weight_scale": torch.from_numpy(rounded.scales.T.copy()),
        "weight_shape": torch.tensor(rounded.codes.shape),
        "weight_zero_point": words(rounded.zeros, bits, dense).t().contiguous(),
    }


@pytest.fixture(scope="module")
def weight():
    return torch.randn(32, 96, generator=torch.Generator().manual_seed(3)) * 0.2


@pytest.mark.parametrize("dense", [True, False], ids=["end to end", "whole codes in a word"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_words_of_every_width_in_both_layouts(bits, dense, weight):
    """Codes of seven bits, four in a word, are as many words as codes of eight: the settings tell them apart."""
    rounded = pw.round_weight(weight, bits, 32)
    pieces = pack(rounded, bits, dense)
    groups = [scheme(bits, strategy="group", group_size=32)]
    assert torch.equal(read(PACKED, groups, pieces), rounded.dequantize())


def test_a_last_group_may_be_shorter(weight):
    rounded = pw.round_weight(weight, 4, 64)
    found = read(PACKED, [scheme(strategy="group", group_size=64)], pack(rounded, 4))
    assert torch.equal(found, rounded.dequantize())


def test_a_module_takes_the_group_that_names_it_best(weight):
    """By its name before a pattern, by a pattern before its class."""
    groups = [scheme(4), scheme(6, targets=["re:.*up_proj"]), scheme(7, targets=["model.layers.0.mlp.up_proj"])]
    for bits, module in ((7, "model.layers.0.mlp.up_proj"), (6, "model.layers.1.mlp.up_proj"), (4, "lm_head")):
        rounded = pw.round_weight(weight, bits, 32)
        assert torch.equal(read(PACKED, groups, pack(rounded, bits), module), rounded.dequantize())


def test_blocks_differ_by_group(weight):
    codes = weight.to(torch.float8_e4m3fn)
    groups = [
        scheme(8, "float", strategy="block", block_structure=[16, 32]),
        scheme(8, "float", ["re:.*down_proj"], strategy="block", block_structure=[8, 48]),
        scheme(8, "float", ["re:.*gate_proj"], strategy="channel"),
    ]
    for name, rows, columns in (("up_proj", 16, 32), ("down_proj", 8, 48), ("gate_proj", 1, 96)):
        scales = torch.rand(32 // rows, 96 // columns)
        expected = codes.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        assert torch.equal(read(BYTES, groups, {"weight": codes, "weight_scale": scales}, name), expected)


VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.mark.parametrize("name, size", [("nvfp4", 16), ("mxfp4", 32)])
def test_floats_of_four_bits(name, size):
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (32, 96))
    pieces = {"weight_packed": torch.from_numpy((codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8))}
    if name == "nvfp4":
        scales = torch.from_numpy(random.uniform(1, 400, (32, 96 // size))).to(torch.float8_e4m3fn)
        pieces |= {"weight_scale": scales, "weight_global_scale": torch.tensor([320.0])}
        pieces |= {"input_global_scale": torch.ones(1)}
        of_groups = scales.double() / 320
    else:
        scales = torch.from_numpy(random.integers(110, 135, (32, 96 // size)).astype(np.uint8))
        pieces |= {"weight_scale": scales}
        of_groups = 2.0 ** (scales.double() - 127)
    expected = torch.tensor(VALUES, dtype=torch.float64)[torch.from_numpy(codes)] * of_groups.repeat_interleave(size, 1)
    groups = [scheme(4, "float", strategy="tensor_group" if name == "nvfp4" else "group", group_size=size)]
    found = read(PACKED | {"format": f"{name}-pack-quantized"}, groups, pieces)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("packed", [True, False], ids=["words", "bytes"])
def test_a_scale_and_a_zero_point_for_the_whole_tensor(bits, packed, weight):
    """llm-compressor's "tensor" strategy: of every row alike, so the rows of q, k and v can be joined."""
    codes = np.random.default_rng(2).integers(0, 2**bits, (32, 96))
    pieces = {"weight_scale": torch.tensor([0.02]), "weight_zero_point": torch.tensor([5 - 2 ** (bits - 1)]).char()}
    if packed:
        pieces |= {"weight_packed": words(codes, bits, True), "weight_shape": torch.tensor([32, 96])}
    else:
        pieces["weight"] = torch.from_numpy(codes - 2 ** (bits - 1)).char()
    settings = PACKED if packed else PACKED | {"format": "int-quantized"}
    settings |= {"config_groups": {"group_0": scheme(bits, strategy="tensor", symmetric=False)}}
    found, _ = CompressedTensors(settings).read((f"layer.{name}", tensor) for name, tensor in pieces.items())
    part = found["layer.weight"]
    assert part.weight.scales.shape == part.weight.zeros.shape == (32, 1)
    assert torch.equal(part.dequantize(), torch.from_numpy(codes - 5).float() * torch.tensor(0.02))


def test_floats_of_eight_bits_with_powers_of_two(weight):
    """MXFP8: a group's scale is the exponent alone, in a byte."""
    codes, exponents = weight.to(torch.float8_e4m3fn), torch.randint(118, 130, (32, 3), dtype=torch.uint8)
    groups = [scheme(8, "float", strategy="group", group_size=32)]
    found = read(PACKED | {"format": "mxfp8-quantized"}, groups, {"weight": codes, "weight_scale": exponents})
    expected = codes.double() * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(found.double(), expected)


def test_an_embedding_is_no_linear_module(weight):
    """Each takes the group of its own class."""
    rounded = pw.round_weight(weight, 8, 32)
    groups = [scheme(8, targets=["Embedding"]), scheme(4)]
    found = read(PACKED, groups, pack(rounded, 8), "model.embed_tokens")
    assert torch.equal(found, rounded.dequantize())


def test_weights_that_are_plain_beside_a_cache_in_few_bits(weight):
    """kv_cache_scheme alone: the weights are as they were, the scales of the cache are not followed."""
    settings = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    tensors = {"layer.self_attn.k_proj.weight": weight, "layer.self_attn.k_scale": torch.ones(1)}
    parts, plain = CompressedTensors(settings).read(tensors.items())
    assert not parts and plain.keys() == {"layer.self_attn.k_proj.weight"}


@pytest.mark.parametrize(
    "settings, group, pieces, said",
    [
        (
            PACKED,
            scheme(3),
            {},
            r"weight_packed is int32 \[32, 12\]; .* 32 x 96 codes, quantization_config 3 bits each",
        ),
        (PACKED, scheme(4, "float"), {}, r"type='float', num_bits=4 of .*up_proj, whose tensor is int32 \[32, 12\]"),
        (PACKED, scheme(strategy="group", group_size=48), {}, r"scales \[32, 3\] do not fit .* blocks of 1 x 48"),
        (
            BYTES,
            scheme(8, "int"),
            {"weight": torch.zeros(32, 96).to(torch.float8_e4m3fn), "weight_scale": torch.ones(32, 1)},
            r"type='int', num_bits=8 of .*up_proj, whose tensor is float8_e4m3fn \[32, 96\]",
        ),
        (
            BYTES,
            scheme(8, "float"),
            {"weight": torch.zeros(32, 96, dtype=torch.int8), "weight_scale": torch.ones(32, 1)},
            r"type='float', num_bits=8 of .*up_proj, whose tensor is int8 \[32, 96\]",
        ),
        (
            PACKED | {"format": "nvfp4-pack-quantized"},
            scheme(4, "float"),
            {
                "weight_packed": torch.zeros(32, 48, dtype=torch.uint8),
                "weight_scale": torch.ones(32, 6).to(torch.float8_e4m3fn),
            },
            r"weight_scale is float8_e4m3fn \[32, 6\] beside no weight_global_scale",
        ),
    ],
    ids=["other bits", "another type", "other groups", "fp8 as integers", "integers as fp8", "no global scale"],
)
def test_settings_that_the_tensors_contradict_are_named(settings, group, pieces, said, weight):
    pieces = pieces or pack(pw.round_weight(weight, 4, 32), 4)
    with pytest.raises(ValueError, match=said):
        read(settings, [group], pieces)
