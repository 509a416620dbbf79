"""`minillm quantize`: the folder it writes says what the model in memory says; what it prints; what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from minillm import LLM, SamplingParams
from minillm.cli import app
from minillm.model.attention import NoCacheAttention
from minillm.model.calibration import whole_sequences
from minillm.model.checkpoint import CheckpointError, load_model, read_model
from minillm.model.quantize import quantize_decoder
from minillm.model.quantized_folder import save_quantized
from minillm.quantization.config import QuantizationConfig, resolve
from minillm.quantizing import bits_per_weight, config_of
from tests.helpers.model_zoo import save_checkpoint

SEQUENCES = [[1, *torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()]]
PROMPTS = ["Once upon a time", "What is 12 plus 7?", "A"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def run(*arguments):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def said(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def gptq_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize") / "three"
    done = run("tinyworld", "--method", "gptq", "--bits", 3, "--documents", 8, "--out", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    return folder, done.output


def test_it_says_what_it_costs(gptq_folder):
    folder, output = gptq_folder
    size = (folder / "model.safetensors").stat().st_size
    words = " ".join(output.split())
    assert "3.69 bits per weight" in words  # 3 + (16 + 3) / 64, and one part in twelve, the output matrix, of 8
    assert f"-> {size:,} bytes" in words and "held-out documents of the corpus" in words
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja"} <= {
        file.name for file in folder.iterdir()
    }
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (stored["quant_method"], stored["method"], stored["weights"], stored["num_documents"]) == (
        "minillm",
        "gptq",
        "int3",
        8,
    )


def test_the_folder_says_what_the_model_in_memory_says(gptq_folder):
    folder, _ = gptq_folder
    config = config_of("gptq", 3, num_documents=8)
    in_memory, loaded = LLM("tinyworld", device="cpu", quantization=config.as_dict()), LLM(folder, device="cpu")
    assert said(loaded) == said(in_memory)
    assert loaded.model.fingerprint == in_memory.model.fingerprint
    # The same once more is no contradiction.
    assert said(LLM(folder, device="cpu", quantization=config.as_dict())) == said(loaded)
    with pytest.raises(
        CheckpointError, match=r"quantization asks for rtn, int8; .* is quantized already \(gptq, int3\)"
    ):
        LLM(folder, device="cpu", quantization="int8")
    differ = r"leave quantization out; it differs in group_size \(32 asked, 64 there\), seed \(3 asked, 0 there\)$"
    with pytest.raises(CheckpointError, match=differ):
        LLM(folder, device="cpu", quantization=config.as_dict() | {"group_size": 32, "seed": 3})


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = run("tinyworld", "--out", tmp_path)
    assert done.exit_code == 1 and "is not empty" in " ".join(done.output.split())
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--method", "gtpq"], "method='gtpq' is not allowed"),
        (["--group-size", "48"], "layer 0, self_attn.qkv_proj: group_size=48 does not divide in_features=256"),
        (["--method", "smoothquant", "--bits", "4"], "--bits 8 or --format fp8"),
        (["--method", "awq", "--act-order"], "act_order=True with method='awq' is not allowed: gptq alone reads it"),
        (["--bits", "4", "--format", "fp8"], "give one of them"),
        (["--format", "fp9"], "weights='fp9' is not allowed"),
        (["--documents", "1"], "is too little; at least 256"),
        (["--seed", "1"], "held-out"),
        (["--calibration", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_are_named(tmp_path, arguments, message):
    done = run("tinyworld", "--out", tmp_path / "out", "--device", "cpu", *arguments)
    assert done.exit_code == 1 and message in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_bits_outside_the_formats_are_a_usage_error(tmp_path):
    assert run("tinyworld", "--bits", "9", "--out", tmp_path / "out").exit_code == 2


@pytest.mark.parametrize(
    "method, options, expected",
    [
        ("gptq", {}, dict(weights="int4", group_size=64, symmetric=False)),
        ("rtn", dict(bits=3, group_size=None), dict(weights="int3", group_size=None, symmetric=True)),
        ("smoothquant", {}, dict(weights="int8", activations="int8", group_size=None, symmetric=True)),
        ("llm_int8", dict(format="fp8"), dict(weights="fp8", activations="fp8", group_size=None)),
        ("gptq", dict(format="fp4", act_order=True), dict(weights="fp4", symmetric=True, act_order=True)),
    ],
)
def test_options_mean_a_configuration(method, options, expected):
    config = config_of(method, **options)
    assert config.method == method and {name: getattr(config, name) for name in expected} == expected


# Every kind of tensor that a folder can have, on tiny models of every family


@pytest.mark.parametrize(
    "family, quantization",
    [
        ("llama-mqa-biases-tied", {"method": "gptq", "weights": "int3", "group_size": 16, "symmetric": False}),
        ("llama-mqa-biases-tied", {"method": "awq", "weights": "int4", "group_size": 16, "lm_head": None}),
        ("llama-mqa-biases-tied", {"name": "awq", "group_size": 16}),
        ("qwen2-full", {"name": "smoothquant", "activation_scales": "static"}),
        ("qwen3-biases-window", {"name": "llm_int8", "outlier_threshold": 1.0}),
        ("mistral-window", {"weights": "fp4", "group_size": 16, "lm_head": None}),
        ("mistral-window", {"name": "nvfp4", "lm_head": None}),
        ("llama-rope-llama3", {"name": "fp8", "activations": "fp8"}),
        ("llama-mqa-biases-tied", {"name": "gptq", "weights": "int3", "group_size": 16, "rotate": True}),
        ("gemma", {"weights": "int4", "group_size": 16, "lm_head": None, "rotate": True}),
    ],
)
def test_a_folder_holds_every_kind_of_tensor(tmp_path, family, quantization):
    save_checkpoint(tmp_path / "original", family)
    config = resolve(quantization)
    decoder = read_model(tmp_path / "original", "float32", "cpu")
    quantize_decoder(decoder, config, SEQUENCES)
    folder = save_quantized(decoder, config, tmp_path / "original", tmp_path / "quantized")
    loaded = load_model(folder, "float32", "cpu")
    assert bits_per_weight(loaded) == bits_per_weight(decoder)
    batch, attention = whole_sequences(SEQUENCES, all_logits=True), NoCacheAttention(decoder.config.layer_windows)
    expected = decoder.prepare()(batch, attention)
    assert torch.equal(loaded(batch, attention), expected)
    assert not torch.equal(load_model(tmp_path / "original", "float32", "cpu")(batch, attention), expected)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda tensors: tensors.pop("layers.1.mlp.down_proj.scales"),
            "layers.1.mlp.down_proj.codes or .*scales is missing",
        ),
        (
            lambda tensors: tensors.update({"layers.0.self_attn.o_proj.codes": torch.zeros(48, 7, dtype=torch.uint8)}),
            r"o_proj.codes is uint8 \[48, 7\]; int4 of 48 x 48 is \[48, 24\]",
        ),
        (lambda tensors: tensors.pop("model.norm.weight"), "1 missing: model.norm.weight"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, spoil, message):
    save_checkpoint(tmp_path / "original", "llama-mha")
    decoder, config = read_model(tmp_path / "original", "float32", "cpu"), QuantizationConfig(group_size=16)
    quantize_decoder(decoder, config)
    folder = save_quantized(decoder, config, tmp_path / "original", tmp_path / "quantized")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "float32", "cpu")


def test_only_an_unprepared_decoder_is_saved(tmp_path):
    save_checkpoint(tmp_path / "original", "llama-mha")
    decoder, config = read_model(tmp_path / "original", "float32", "cpu"), QuantizationConfig(group_size=16)
    quantize_decoder(decoder, config)
    for linear in (layer.mlp.down_proj for layer in decoder.layers):
        linear.quantized.weight = None  # as a kernel that has packed it leaves it
    with pytest.raises(ValueError, match="before `prepare`"):
        save_quantized(decoder, config, tmp_path / "original", tmp_path / "quantized")
