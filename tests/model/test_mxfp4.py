"""gpt-oss with experts in MXFP4, as the hub has it: served in its own codes, equal to transformers on the dequantized
weights, and a broken folder is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minillm import LLM, SamplingParams
from minillm.engine.parts import build_attention
from minillm.kernels import native
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, load_model, read_model, stored_quantization
from minillm.model.errors import CheckpointError
from tests.helpers import mxfp4_writer
from tests.helpers.packed_weights import set_config
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer, save_tiny_llama
from tests.model.test_families import batch_of, pages
from tests.model.test_gpt_oss import PROMPT, PROMPTS, WAYS

TOKENS = dict(vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE - 1)
PLAIN_LAYER = 2  # whose experts stay plain in the mixed folder
EXPERTS = "model.layers.1.mlp.experts."
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def random_model(seed: int):
    """A GptOssForCausalLM whose experts have zeros, blocks of very different sizes, and gates beyond their limit."""
    torch.manual_seed(seed)
    settings = {key: value for key, value in mxfp4_writer.CONFIG.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings | TOKENS)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name:
                parameter.normal_(std=0.4)
            elif name.endswith("sinks"):
                parameter.normal_(std=2.0)
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(torch.randint(-3, 3, (5, 96, 1)).exp2())
            layer.mlp.experts.gate_up_proj[:, :32, 5] = 0  # a block of zeros
    return model


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A folder in the hub's layout, and what transformers reads there: the model, and its tokens for each prompt."""
    folder = mxfp4_writer.write(tmp_path_factory.mktemp("mxfp4"), random_model(5), **TOKENS)
    byte_tokenizer().save_pretrained(folder)
    theirs = dequantized(folder)
    said = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    return folder, theirs, [tokens.tolist() for tokens in said]


def dequantized(folder):
    """The folder as transformers reads it, with the weights that its codes mean in float32."""
    settings = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32).eval()
    model.config._attn_implementation = "eager"
    return model


@torch.no_grad()
def expected(model):
    return model(torch.tensor([PROMPT])).logits[0]


def logits(model):
    return model(ForwardBatch.single(PROMPT, all_logits=True), NoCacheAttention.of(model))


def test_every_expert_is_what_its_blocks_and_scales_mean(oracle):
    """By the function that transformers has for them, bit by bit; and transformers read the same folder so."""
    folder, theirs, _ = oracle
    stored, model = load_file(folder / "model.safetensors"), read_model(folder, "float32", "cpu")
    for index, layer in enumerate(model.layers):
        for fused in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{index}.mlp.experts.{fused}"
            whole = convert_moe_packed_tensors(
                stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
            )  # [experts, inputs, outputs]
            assert torch.equal(whole, theirs.get_parameter(name))
            for expert, weight in zip(layer.mlp.experts, whole):
                right = weight.t() if fused == "down_proj" else torch.cat([weight.t()[::2], weight.t()[1::2]])
                assert torch.equal(getattr(expert, fused).quantized.dequantize(), right)


@pytest.mark.parametrize("backend", ["torch", "auto", "none"])
def test_logits_are_those_of_transformers_on_the_dequantized_weights(backend, oracle):
    folder, theirs, _ = oracle
    model = load_model(folder, "float32", "cpu")
    if backend == "none":
        found = logits(model)
    else:
        attention = build_attention(model, pages(model), backend)
        pieces = [(0, 20), (20, 32), (32, 33)]
        found = torch.cat([model(batch_of(PROMPT[a:b], a), attention) for a, b in pieces])
    torch.testing.assert_close(found, expected(theirs), rtol=1e-4, atol=1e-3)


def test_the_experts_stay_in_their_codes_and_the_rest_is_plain(oracle):
    """4 bits for a code and 16 for the scale of 32, where the kernels serve; the file has 8 for a scale."""
    model = load_model(oracle[0], "float32", "cpu")
    assert stored_quantization(oracle[0])["quant_method"] == "mxfp4"
    for place, linear in model.linears().items():
        if ".experts." not in place:
            assert linear.quantized is None, place
            continue
        quantized, weights = linear.quantized, linear.out_features * linear.in_features
        assert quantized.num_bytes * 8 == 4.25 * weights, place
        if native.library(torch.float32) is not None:
            table = 80  # bytes, of the sixteen values as floats and as bytes
            assert quantized.road == "native" and (quantized.held_bytes - table) * 8 == 4.5 * weights, place


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_tokens_are_those_of_transformers_in_every_way(way, backend, oracle):
    folder, _, said = oracle
    llm = LLM(str(folder), dtype="float32", device="cpu", attention_backend=backend, **WAYS[way])
    for _ in range(2):
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outs] == said
    for prompt, tokens in zip(PROMPTS, said):
        [alone] = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == tokens
    llm.engine.scheduler.check_integrity()


def test_experts_that_are_not_converted_stay_plain_beside_those_that_are(oracle, tmp_path):
    settings = mxfp4_writer.CONFIG["quantization_config"]
    plain = [*settings["modules_to_not_convert"], f"model.layers.{PLAIN_LAYER}.mlp.experts"]
    changed = TOKENS | {"quantization_config": settings | {"modules_to_not_convert": plain}}
    folder, theirs = mxfp4_writer.write(tmp_path, random_model(5), (PLAIN_LAYER,), **changed), random_model(5)
    with torch.no_grad():
        for layer, of_codes in zip(theirs.model.layers, oracle[1].model.layers):
            if layer is not theirs.model.layers[PLAIN_LAYER]:
                for name in ("gate_up_proj", "down_proj"):
                    getattr(layer.mlp.experts, name).copy_(getattr(of_codes.mlp.experts, name))
    model = load_model(folder, "float32", "cpu")
    kept = [layer.mlp.experts[0].down_proj.quantized is None for layer in model.layers]
    assert kept == [index == PLAIN_LAYER for index in range(4)]
    theirs.config._attn_implementation = "eager"
    torch.testing.assert_close(logits(model), expected(theirs), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("exponent", [-126, -24, 15, 90])
def test_scales_of_any_exponent_mean_their_power_of_two(exponent, oracle, tmp_path):
    """float16 ends at 2^-24 and 2^15: beyond that the scales are float32."""
    folder, name = copied(oracle[0], tmp_path), f"{EXPERTS}down_proj_scales"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 7, 1] = 127 + exponent
    save_file(tensors, folder / "model.safetensors")
    [weight] = [read_model(folder, "float32", "cpu").layers[1].mlp.experts[3].down_proj.quantized.weight]
    assert weight.scales.dtype is (torch.float16 if -24 <= exponent <= 15 else torch.float32)
    assert weight.scales[7, 1].double() == 2.0**exponent
    blocks = tensors[f"{EXPERTS}down_proj_blocks"], tensors[name]
    right = convert_moe_packed_tensors(*blocks, dtype=torch.float32)[3].t()
    assert torch.equal(weight.dequantize(), right)


# Broken folders


def copied(folder, to):
    to.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, to / name)
    return to


def without(piece):
    return lambda tensors: tensors.pop(EXPERTS + piece)


def changed(piece, change):
    def apply(tensors):
        tensors[EXPERTS + piece] = change(tensors[EXPERTS + piece]).contiguous()

    return apply


BROKEN = {
    "no scales": (without("down_proj_scales"), r"experts\.down_proj_blocks has no down_proj_scales beside it"),
    "no blocks": (without("gate_up_proj_blocks"), r"experts\.gate_up_proj_scales has no gate_up_proj_blocks beside it"),
    "neither": (
        lambda tensors: (without("down_proj_scales")(tensors), without("down_proj_blocks")(tensors)),
        r"5 missing: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight",
    ),
    "blocks of 32 bytes": (
        changed("down_proj_blocks", lambda blocks: blocks.repeat(1, 1, 1, 2)),
        r"experts\.down_proj_blocks is uint8 \[5, 64, 3, 32\]; it must be uint8 \[experts, outputs, inputs / 32, 16\]",
    ),
    "codes in another type": (
        changed("down_proj_blocks", lambda blocks: blocks.short()),
        r"experts\.down_proj_blocks is int16 \[5, 64, 3, 16\]; it must be uint8",
    ),
    "a scale too few": (
        changed("gate_up_proj_scales", lambda scales: scales[:, :, :1]),
        r"gate_up_proj_scales is uint8 \[5, 192, 1\]; beside blocks \[5, 192, 2, 16\] it must be uint8 \[5, 192, 2\]",
    ),
    "scales as numbers": (
        changed("gate_up_proj_scales", lambda scales: scales.float()),
        r"gate_up_proj_scales is float32 \[5, 192, 2\]; .* must be uint8",
    ),
    "a scale that is no number": (
        changed("down_proj_scales", lambda scales: scales.index_fill(2, torch.tensor([1]), 255)),
        r"experts\.down_proj_scales has the byte 255, which is no number in e8m0",
    ),
    "an expert too few": (
        lambda tensors: [changed(f"down_proj_{piece}", lambda of: of[:4])(tensors) for piece in ("blocks", "scales")],
        r"1 missing: model\.layers\.1\.mlp\.experts\.4\.down_proj\.weight",
    ),
    "other sizes": (
        lambda tensors: [
            changed(f"down_proj_{piece}", lambda of: of[:, :32])(tensors) for piece in ("blocks", "scales")
        ],
        r"down_proj\.weight is \[32, 96\], the configuration says \[64, 96\]",
    ),
    "no bias": (without("down_proj_bias"), r"5 missing: model\.layers\.1\.mlp\.experts\.0\.down_proj\.bias"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_named(name, oracle, tmp_path):
    break_it, said = BROKEN[name]
    folder = copied(oracle[0], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    break_it(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load_model(folder, "float32", "cpu")


def test_what_is_not_read_is_refused_by_name(oracle, tmp_path):
    save_tiny_llama(tmp_path / "llama")
    set_config(tmp_path / "llama", quantization_config=mxfp4_writer.CONFIG["quantization_config"])
    with pytest.raises(CheckpointError, match=r"quant_method='mxfp4' with model_type='llama' is not read; .*gpt_oss"):
        load_model(tmp_path / "llama", "float32", "cpu")
    with pytest.raises(CheckpointError, match=r"asks for rtn, fp4; .* is quantized already \(mxfp4\): leave"):
        load_model(oracle[0], "float32", "cpu", quantization="mxfp4")
    assert load_config(oracle[0]).num_parameters() == oracle[1].num_parameters()
    raw = json.loads((copied(oracle[0], tmp_path / "none") / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "none" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"surplus: .*experts\.(down|gate_up)_proj_(blocks|scales)"):
        load_model(tmp_path / "none", "float32", "cpu")
