"""The text model inside a model of images and text is served as transformers computes texts with it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import CheckpointError, load_config, load_model, read_model
from minillm.model.quantized_folder import save_quantized
from minillm.quantization.config import resolve

TEXT = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    initializer_range=0.2,
)
SEEING = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
SEEING |= dict(image_size=28, patch_size=14)
IMAGE = dict(image_token_index=96)
WRAPPERS = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=TEXT | dict(sliding_window=7), vision_config=SEEING, mm_tokens_per_image=4, **IMAGE)
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=TEXT | dict(model_type="mistral"), vision_config=SEEING | dict(model_type="pixtral"), **IMAGE
        )
    ),
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=TEXT | dict(model_type="llama", tie_word_embeddings=False),
            vision_config=SEEING | dict(model_type="clip_vision_model"),
            **IMAGE,
        )
    ),
}
TOKENS = [3 + 7 * i % 90 for i in range(20)]


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapped(request, tmp_path_factory):
    """A folder as transformers writes it, and its model."""
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp(request.param), WRAPPERS[request.param]().float().eval()
    model.save_pretrained(folder)
    return folder, model


def logits(folder) -> torch.Tensor:
    model = load_model(folder, "float32", "cpu")
    config = model.config
    cache = ContiguousKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 32, model.dtype)
    return model(ForwardBatch.single(TOKENS, all_logits=True), ContiguousAttention(cache, config))


def test_texts_are_those_of_transformers(wrapped):
    folder, model = wrapped
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(folder), expected, rtol=1e-4, atol=1e-4)


def test_names_in_the_order_of_newer_files_are_read_too(wrapped, tmp_path):
    """model.language_model.layers, not language_model.model.layers; and the head outside of both."""
    folder, _ = wrapped
    tensors = load_file(folder / "model.safetensors")
    newer = {}
    for name, tensor in tensors.items():
        inside = name.removeprefix("language_model.model.")
        newer[f"model.language_model.{inside}" if inside != name else name.removeprefix("language_model.")] = tensor
    save_file(newer, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert newer.keys() != tensors.keys() and torch.equal(logits(tmp_path), logits(folder))


def test_a_quantized_folder_of_ours_is_that_of_the_text_model(wrapped, tmp_path):
    config = resolve("int8")
    model = read_model(wrapped[0], "float32", "cpu", config)
    save_quantized(model, config, wrapped[0], tmp_path / "int8")
    ours = load_model(tmp_path / "int8", "float32", "cpu")
    assert ours.config == model.config and torch.equal(ours.lm_head.weight, model.lm_head.weight)


def test_a_text_model_of_another_kind_is_named(wrapped, tmp_path):
    raw = json.loads((wrapped[0] / "config.json").read_text())
    raw["text_config"]["model_type"] = "mamba"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises((CheckpointError, ValueError), match="model_type='mamba' is not supported; supported: llama"):
        load_config(tmp_path)


def test_what_gemma3_leaves_out_of_its_text_config_is_known(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [1]})
    )
    config, theirs = load_config(tmp_path), Gemma3Config(text_config=text).text_config
    assert config.eos_token_ids == (1,) and config.tie_word_embeddings
    assert [config.vocab_size, config.num_heads, config.num_kv_heads, config.max_position_embeddings] == [
        theirs.vocab_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.max_position_embeddings,
    ]
