"""GPTQ, AWQ, fp8 and compressed-tensors checkpoints are read as what they mean, or refused by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.model.checkpoint import CheckpointError, load_config, load_model, read_model
from minillm.model.hub_formats import AWQ, FP8, GPTQ, CompressedTensors
from minillm.model.parts import QuantizedPart
from tests.helpers import packed_weights as pw
from tests.helpers.tiny import save_tiny_llama

SIZES = dict(hidden_size=64, intermediate_size=96)  # head size 16; groups of 32 divide both
GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ4 = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
PACKED4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["the cat sat", "then the naïve cat ate 10"]


@pytest.fixture(scope="module")
def weight():
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(3)) * 0.2


def part_of(format, settings, pieces):
    parts, plain = format(settings).read((f"m.{name}", tensor) for name, tensor in pieces.items())
    assert parts.keys() | plain.keys() == {"m.weight"}
    return (parts or plain)["m.weight"]


# Bit by bit


@pytest.mark.parametrize(
    "version, form",
    [
        (1, {}),
        (1, {"checkpoint_format": "gptq"}),
        (2, {"checkpoint_format": "gptq_v2"}),
        (1, {"format": "gptq"}),
        (2, {"format": "gptq_v2"}),
    ],
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_means_what_its_bits_say(bits, version, form, weight):
    weight = weight[:32]  # zero points of 3 bits are packed by 32
    for group_size, act_order in ((-1, None), (32, None), (32, 7)):
        rounded = pw.round_weight(weight, bits, group_size, act_order)
        if group_size == 32:
            rounded.zeros[0, :2] = (0, 2**bits - 1)  # stored as the largest code in version 1, and the other end
        settings = {"bits": bits, "group_size": group_size, **form}
        part = part_of(GPTQ, settings, pw.gptq(rounded, bits, version))
        assert part.weight.format.name == f"int{bits}" and (part.order is None) == (act_order is None)
        assert part.weight.scales.shape == (32, 1 if group_size == -1 else 3)
        assert torch.equal(part.dequantize(), rounded.dequantize())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptqmodel_subtracts_from_whole_words(bits, weight):
    """A zero point of 0 borrows from its neighbour in the word, which adding gives back."""
    rounded = pw.round_weight(weight[:32], bits, 32)
    rounded.zeros[:, ::3] = 0
    pieces = pw.gptq(rounded, bits, 2)
    ones = torch.tensor(sum(1 << place for place in range(0, 32, bits)), dtype=torch.int32)
    pieces["qzeros"] = pieces["qzeros"] - ones
    settings = {"bits": bits, "group_size": 32, "meta": {"quantizer": ["gptqmodel:7.6.0"]}}
    assert torch.equal(part_of(GPTQ, settings, pieces).dequantize(), rounded.dequantize())


def test_a_symmetric_grid_has_no_zero_points_and_g_idx_may_be_absent(weight):
    rounded = pw.round_weight(weight, 4, 32, symmetric=True)
    part = part_of(GPTQ, GPTQ4, pw.gptq(rounded, 4, with_groups=False))
    assert part.weight.zeros is None and torch.equal(part.dequantize(), rounded.dequantize())


def test_uneven_groups_come_dequantized(weight):
    """GPTQModel cuts 96 inputs into 64 and 32; and a g_idx may hold any numbers."""
    rounded = pw.round_weight(weight, 4, 64)
    part = part_of(GPTQ, GPTQ4 | {"group_size": 64}, pw.gptq(rounded, 4))
    assert isinstance(part, torch.Tensor) and torch.equal(part, rounded.dequantize())
    rounded = pw.round_weight(weight, 4, 64, act_order=1)
    assert torch.equal(part_of(GPTQ, GPTQ4 | {"group_size": 64}, pw.gptq(rounded, 4)), rounded.dequantize())


def test_with_dynamic_settings_the_shapes_tell_bits_and_groups(weight):
    settings = GPTQ4 | {"dynamic": {"+:.*m": {"bits": 8, "group_size": 48}}}
    rounded = pw.round_weight(weight, 8, 48)
    assert torch.equal(part_of(GPTQ, settings, pw.gptq(rounded, 8)).dequantize(), rounded.dequantize())


@pytest.mark.parametrize("group_size", [-1, 32])
def test_awq_means_what_its_bits_say(group_size, weight):
    rounded = pw.round_weight(weight, 4, group_size)
    part = part_of(AWQ, AWQ4 | {"group_size": group_size}, pw.awq(rounded))
    assert part.weight.zeros is not None and torch.equal(part.dequantize(), rounded.dequantize())
    old_names = {"w_bit": 4, "q_group_size": group_size, "version": "GEMM"}
    assert torch.equal(part_of(AWQ, old_names, pw.awq(rounded)).dequantize(), rounded.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_packed(bits, weight):
    for group_size, act_order in ((-1, None), (32, None), (32, 5)):
        rounded = pw.round_weight(weight, bits, group_size, act_order)
        pieces = pw.compressed(rounded, bits, with_groups=act_order is not None)
        assert torch.equal(part_of(CompressedTensors, PACKED4, pieces).dequantize(), rounded.dequantize())
        if group_size == 32 and act_order is None:  # old files: zero points as signed bytes
            pieces["weight_zero_point"] = torch.from_numpy((rounded.zeros.T - 2 ** (bits - 1)).astype(np.int8))
            assert torch.equal(part_of(CompressedTensors, PACKED4, pieces).dequantize(), rounded.dequantize())


def test_compressed_tensors_in_bytes(weight):
    codes = (weight * 100).round().clamp(-127, 127).to(torch.int8)
    scales = torch.rand(40, 1).bfloat16()
    settings = PACKED4 | {"format": "int-quantized"}
    part = part_of(CompressedTensors, settings, {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)})
    assert part.weight.format.name == "int8" and torch.equal(part.dequantize(), codes.float() * scales.float())
    codes = weight.to(torch.float8_e4m3fn)
    part = part_of(
        CompressedTensors, PACKED4 | {"format": "float-quantized"}, {"weight": codes, "weight_scale": scales}
    )
    assert part.weight.format.name == "fp8" and torch.equal(part.dequantize(), codes.float() * scales.float())


@pytest.mark.parametrize(
    "scales, block",
    [
        (torch.tensor(0.3), None),
        (torch.tensor([0.3]), None),
        (torch.rand(40, 1), None),
        (torch.rand(40), None),
        (torch.rand(3, 3), [16, 32]),
        (torch.rand(2, 2), [32, 64]),
    ],
    ids=["tensor", "tensor of one", "rows", "rows flat", "blocks", "blocks that end short"],
)
def test_fp8_scales_of_tensors_rows_and_blocks(scales, block, weight):
    codes = weight.to(torch.float8_e4m3fn)
    part = part_of(FP8, {"weight_block_size": block}, {"weight": codes, "weight_scale_inv": scales})
    expected = torch.empty(40, 96)
    for o in range(40):
        for i in range(96):
            scale = (
                scales[o // block[0], i // block[1]] if block else scales.reshape(-1)[o if scales.numel() > 1 else 0]
            )
            expected[o, i] = codes[o, i].float() * scale
    assert torch.equal(part.dequantize() if isinstance(part, QuantizedPart) else part, expected)
    assert isinstance(part, QuantizedPart) == (block != [32, 64])


# Whole models


def pack_gptq(act_order=None, leave=("lm_head",), bits=4, version=1):
    def pack(module, weight):
        if module.endswith(leave):
            return None
        rounded = pw.round_weight(weight, bits, 32, act_order and act_order(module))
        return pw.gptq(rounded, bits, version), rounded.dequantize()

    return pack


def pack_awq(module, weight):
    rounded = pw.round_weight(weight, 4, 32)
    return None if module == "lm_head" else (pw.awq(rounded), rounded.dequantize())


def pack_compressed(module, weight):
    rounded = pw.round_weight(weight, 4, 32)
    return None if module == "lm_head" else (pw.compressed(rounded, 4), rounded.dequantize())


def pack_fp8(module, weight):
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return None if module == "lm_head" else ({"weight": codes, "weight_scale": scales}, codes.float() * scales)


def pack_fp8_static(module, weight):
    """With the scale of the inputs, by both of its names; and of the cache, whose zero point is at 0."""
    if (packed := pack_fp8(module, weight)) is None:
        return None
    scales = {"activation_scale": torch.tensor(0.5), "input_scale": torch.tensor([0.5])}
    of_cache = {"k_scale": torch.ones(1), "k_zero_point": torch.zeros(1)} if module.endswith("k_proj") else {}
    return packed[0] | scales | of_cache, packed[1]


def pack_nvfp4(module, weight):
    """Groups of 16: e4m3 scales times one number, two codes a byte."""
    if module == "lm_head":
        return None
    groups = weight.unflatten(1, (-1, 16))
    scales = groups.abs().amax(-1) / 6  # [out, groups]
    whole = scales.max() / 448
    levels = (scales / whole).to(torch.float8_e4m3fn)
    steps = levels.float() * whole
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (groups.abs() / steps[..., None]).sub(grid[:, None, None, None]).abs().argmin(0)
    codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    meant = (grid[nearest] * groups.sign() * steps[..., None]).flatten(1)
    pieces = {"weight": codes[:, ::2] + 16 * codes[:, 1::2], "weight_scale": levels, "weight_scale_2": whole}
    return pieces | {"input_scale": torch.tensor(0.01)}, meant


def pack_gptq_with_biases(module, weight):
    if (packed := pack_gptq()(module, weight)) is None:
        return None
    return packed[0] | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, packed[1]


# q, k, v see the same inputs
LIKE_ACTIVATIONS = lambda module: 1 + sum(map(ord, module.split(".")[2] + module.split(".")[3]))
FOLDERS = {
    "gptq": (GPTQ4, pack_gptq()),
    "gptq, act order": (GPTQ4 | {"desc_act": True}, pack_gptq(LIKE_ACTIVATIONS)),
    "gptq, an order each": (GPTQ4 | {"desc_act": True}, pack_gptq(lambda module: 1 + sum(map(ord, module)))),
    "gptq, 3 bits": (GPTQ4 | {"bits": 3}, pack_gptq(bits=3)),
    "gptq, head too, down_proj not": (GPTQ4 | {"lm_head": True}, pack_gptq(leave=("down_proj",))),
    "gptq, v_proj not": (GPTQ4, pack_gptq(leave=("lm_head", "v_proj"))),
    "awq": (AWQ4, pack_awq),
    "compressed-tensors": (PACKED4, pack_compressed),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, pack_fp8),
    "fp8, static activations": ({"quant_method": "fp8", "activation_scheme": "static"}, pack_fp8_static),
    "modelopt, nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, pack_nvfp4),
    "modelopt, fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, pack_fp8_static),
    "gptq, biases of zeros": (GPTQ4, pack_gptq_with_biases),
    "auto-round as gptq": (AUTO | {"packing_format": "auto_round:auto_gptq"}, pack_gptq()),
    "auto-round as gptq 2": (AUTO | {"packing_format": "auto_round:gptqmodel"}, pack_gptq(version=2)),
    "auto-round's own": (AUTO | {"packing_format": "auto_round"}, pack_gptq(version=2)),
    "auto-round as awq": (AUTO | {"packing_format": "auto_round:auto_awq"}, pack_awq),
}
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 16}}
CASES = [(family, how) for family in FAMILIES for how in ("gptq", "awq")]
CASES += [("llama", how) for how in FOLDERS if how not in ("gptq", "awq")]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in folders.items():
        # lm_head's outputs are packed by 32 where it is quantized too
        save_tiny_llama(folder, **SIZES | FAMILIES[name] | {"model_type": name, "vocab_size": 320})
    return folders


@pytest.mark.parametrize("family, how", CASES, ids=[f"{family}, {how}" for family, how in CASES])
def test_a_quantized_folder_says_what_its_dequantized_weights_say(family, how, families, tmp_path):
    settings, pack = FOLDERS[how]
    quantized, plain = pw.save_folders(families[family], tmp_path, settings, pack)
    few, full = (LLM(str(folder), dtype="float32", device="cpu", max_model_len=64) for folder in (quantized, plain))
    said = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for llm in (few, full)]
    tokens = [[answer.outputs[0].token_ids for answer in answers] for answers in said]
    assert tokens[0] == tokens[1] and len(set(map(tuple, tokens[0]))) == 2
    layer = few.model.layers[0]
    quantized = [
        layer.self_attn.qkv_proj,
        layer.self_attn.o_proj,
        layer.mlp.gate_up_proj,
        layer.mlp.down_proj,
        few.model.lm_head,
    ]
    expected = {
        "gptq, an order each": [False, True, False, True, False],
        "gptq, head too, down_proj not": [True, True, True, False, True],
        "gptq, v_proj not": [False, True, True, True, False],
    }
    assert [linear.quantized is not None for linear in quantized] == expected.get(how, [True, True, True, True, False])
    assert (layer.self_attn.o_proj.quantized.order is not None) == ("order" in how)


def test_settings_of_old_autogptq_stand_in_their_own_file(families, tmp_path):
    quantized, _ = pw.save_folders(families["llama"], tmp_path, GPTQ4, pack_gptq())
    expected = load_model(quantized, "float32", "cpu").fingerprint
    raw = json.loads((quantized / "config.json").read_text())
    settings = raw.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(raw))
    (quantized / "quantize_config.json").write_text(
        json.dumps({key: settings[key] for key in ("bits", "group_size", "desc_act", "sym")})
    )
    assert load_model(quantized, "float32", "cpu").fingerprint == expected


def test_settings_of_modelopt_may_stand_in_their_own_file(families, tmp_path):
    settings, pack = FOLDERS["modelopt, nvfp4"]
    quantized, _ = pw.save_folders(families["llama"], tmp_path, settings, pack)
    expected = load_model(quantized, "float32", "cpu").fingerprint
    raw = json.loads((quantized / "config.json").read_text())
    del raw["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(raw))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(own))
    assert load_model(quantized, "float32", "cpu").fingerprint == expected
    own["quantization"]["quant_algo"] = "NVFP4_AWQ"
    (quantized / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match="quant_algo='NVFP4_AWQ'; readable with quant_method='modelopt' are"):
        load_model(quantized, "float32", "cpu")


def test_pieces_of_a_matrix_may_lie_in_different_files(families, tmp_path):
    quantized, _ = pw.save_folders(families["llama"], tmp_path, GPTQ4, pack_gptq())
    expected = load_model(quantized, "float32", "cpu").fingerprint
    tensors = load_file(quantized / "model.safetensors")
    (quantized / "model.safetensors").unlink()
    for index, kinds in enumerate((("qweight", "bias"), ("scales", "weight"), ("qzeros", "g_idx"))):
        save_file(
            {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in kinds},
            quantized / f"part-{index}.safetensors",
        )
    assert load_model(quantized, "float32", "cpu").fingerprint == expected


# What is wrong is named


@pytest.fixture
def folder(families, tmp_path):
    return pw.save_folders(families["llama"], tmp_path, GPTQ4, pack_gptq())[0]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"quant_method": "bitsandbytes"}, r"quantized \(bitsandbytes\).* read are .*gptq, awq, fp8"),
        ({"bits": 5}, r"bits=5; readable with quant_method='gptq' are 2, 3, 4, 8"),
        ({"bits": 8}, r"down_proj.qzeros is \[3, 8\]; bits=8, group_size=32 and 48 inputs make it \[2, 16\]"),
        ({"group_size": 0}, "group_size=0; allowed are -1"),
        ({"group_size": 64}, r"down_proj.qzeros is \[3, 8\]; bits=4, group_size=64 and 96 inputs make it \[2, 8\]"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'; readable .* 'gptq', 'gptq_v2'"),
        ({"format": "marlin"}, "format='marlin'; readable .* 'gptq', 'gptq_v2'"),
        ({"is_marlin_format": True}, "is_marlin_format=True; readable"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "'gptq', 'format': 'gptq_v2'}, which disagree"),
        (
            AUTO | {"packing_format": "auto_round", "model_free": True},
            "model_free=True, .* quantize again with sym=True",
        ),
        (AUTO | {"packing_format": "auto_round:fake"}, "packing_format='auto_round:fake'; readable .*auto_gptq"),
        (AUTO | {"data_type": "mx_fp"}, "data_type='mx_fp'; readable"),
        (AWQ4 | {"version": "gemv"}, "version='gemv'; readable with quant_method='awq' are 'gemm'"),
        (AWQ4 | {"bits": 8}, "bits=8; readable with quant_method='awq' are 4"),
        (PACKED4 | {"format": "marlin-24"}, "format='marlin-24'; readable"),
    ],
    ids=str,
)
def test_settings_that_are_wrong_are_named(settings, said, folder):
    pw.set_config(folder, quantization_config=GPTQ4 | settings)
    with pytest.raises(CheckpointError, match=said) as error:
        load_model(folder, "float32", "cpu")
    assert str(folder) in str(error.value)


NAME = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    "piece, change, said",
    [
        ("scales", None, f"{NAME} has g_idx, qweight, qzeros, but no scales"),
        ("qzeros", None, f"{NAME} has .* but no qzeros"),
        ("qweight", None, rf"1 missing: {NAME}.weight.* 3 surplus: {NAME}.g_idx"),
        (
            "scales",
            lambda t: t[:, 1:],
            rf"{NAME}.scales is \[2, 31\]; bits=4, group_size=32 and 64 inputs make it \[2, 32\]",
        ),
        ("qweight", lambda t: t.long(), rf"{NAME}.qweight is int64 \[8, 32\]; it must be a matrix of int32 words"),
        ("qweight", lambda t: t[:4], rf"{NAME}.qzeros is \[2, 4\]; .* and 32 inputs make it \[1, 4\]"),
        ("g_idx", lambda t: t + 1, rf"{NAME}.g_idx is int32 \[64\], values 1 to 2; it must name one of 2 groups"),
        ("g_idx", lambda t: t[1:], rf"{NAME}.g_idx is int32 \[63\]"),
        ("bias", torch.ones(32), rf"1 surplus: {NAME}.bias"),
        (
            "k_zero_point",
            torch.ones(1),
            rf"{NAME}.k_zero_point is not 0: a KV cache with a zero point is not supported",
        ),
    ],
)
def test_tensors_that_are_wrong_are_named(piece, change, said, folder):
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(f"{NAME}.{piece}", None)
    if change is not None:
        tensors[f"{NAME}.{piece}"] = change if tensor is None else change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as error:
        load_model(folder, "float32", "cpu")
    assert str(folder) in str(error.value)


def test_a_matrix_of_another_size_is_named(families, folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    larger = pw.gptq(pw.round_weight(torch.randn(40, 64), 4, 32), 4)
    save_file(tensors | {f"{NAME}.{piece}": tensor for piece, tensor in larger.items()}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"1 misshapen: {NAME}.weight is \[40, 64\], the configuration says \[32, 64\]"
    ):
        load_model(folder, "float32", "cpu")


def test_what_is_quantized_is_not_quantized_again(folder):
    with pytest.raises(CheckpointError, match=r"quantized already .gptq, 4.: leave quantization out"):
        load_model(folder, "float32", "cpu", "int8")


def test_an_unset_weight_never_stays_on_meta(families, tmp_path):
    quantized, _ = pw.save_folders(families["qwen2"], tmp_path, GPTQ4, pack_gptq(leave=("lm_head", "v_proj", "o_proj")))
    model = read_model(quantized, "float32", "cpu")
    assert not any(parameter.is_meta for parameter in model.parameters()) and load_config(quantized).qkv_bias
    shutil.rmtree(quantized)
