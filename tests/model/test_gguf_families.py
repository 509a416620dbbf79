"""GGUF files of every family give the logits of the transformers model that they were written from."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import CheckpointError, load_config, load_model
from tests.helpers.gguf_writer import write
from tests.helpers.model_zoo import GEMMA3_ROPES, LLAMA3, YARN, make_model

TOKENS = list(range(3, 60))
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
PHI3, GEMMA = dict(model_type="phi3", original_max_position_embeddings=128), dict(head_dim=16, tie_word_embeddings=True)
GRANITE = dict(model_type="granite", attention_multiplier=0.1, embedding_multiplier=3.0, logits_scaling=0.5)
GEMMA2 = GEMMA | dict(model_type="gemma2", query_pre_attn_scalar=16, sliding_window=6)
GEMMA3 = GEMMA | dict(model_type="gemma3_text", query_pre_attn_scalar=16, sliding_window=7, num_hidden_layers=7)
FAMILIES = {
    "phi3": PHI3,
    "phi3 partial, window": PHI3 | dict(sliding_window=7, num_key_value_heads=4, rope_parameters=HALF),
    "phi3 longrope": PHI3 | dict(original_max_position_embeddings=32, rope_parameters=LONGROPE),
    "smollm3": dict(model_type="smollm3", num_hidden_layers=5, tie_word_embeddings=True),
    "smollm3 llama3": dict(model_type="smollm3", num_hidden_layers=5, rope_parameters=LLAMA3),
    "olmo2": dict(model_type="olmo2"),
    "olmo2 yarn": dict(model_type="olmo2", num_key_value_heads=4, rope_parameters=YARN),
    "granite": GRANITE | dict(residual_multiplier=0.4, tie_word_embeddings=True),
    "granite biases": GRANITE | dict(attention_bias=True, mlp_bias=True),
    "gemma": GEMMA | dict(model_type="gemma", num_key_value_heads=1),
    "gemma2": GEMMA2 | dict(attn_logit_softcapping=1.5, final_logit_softcapping=3.0),
    "gemma3": GEMMA3 | dict(rope_parameters=GEMMA3_ROPES),
}


def model_of(family: str):
    return make_model(**dict(vocab_size=300, hidden_size=64, intermediate_size=96) | FAMILIES[family])


def logits(model) -> torch.Tensor:
    config = model.config
    cache = ContiguousKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 64, model.dtype)
    return model(ForwardBatch.single(TOKENS, all_logits=True), ContiguousAttention(cache, config))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tmp_path):
    theirs = model_of(family)
    ours = load_model(write(tmp_path / "model.gguf", theirs), "float32", "cpu")
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(ours), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["phi3 partial, window", "granite biases", "gemma3"])
def test_fused_and_interleaved_matrices_stay_in_few_bits(family, tmp_path):
    """Rows are cut apart and change places as blocks: the weights are those of a file dequantized first."""
    theirs = model_of(family)
    path = write(tmp_path / "model.gguf", theirs, Type.Q8_0)
    layer = load_model(path, "float32", "cpu").layers[0]
    plain = load_model(write(tmp_path / "plain.gguf", theirs), "float32", "cpu").layers[0]
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        found, expected = layer.get_submodule(name), plain.get_submodule(name).weight
        assert found.quantized is not None
        torch.testing.assert_close(found.weight, expected, rtol=0, atol=float(expected.abs().max()) / 120)


def test_windows_and_caps_that_a_file_leaves_out_are_those_of_llama_cpp(tmp_path):
    theirs = model_of("gemma2")
    config = load_config(write(tmp_path / "model.gguf", theirs, drop=("family",)))
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.layer_windows == (4096, None, 4096)
    every = {"extra": [("add_sliding_window_pattern", [False, True, True])]}
    assert load_config(write(tmp_path / "each.gguf", theirs, **every)).layer_windows == (None, 6, 6)


@pytest.mark.parametrize(
    "family, extra, said",
    [
        (
            "olmo2",
            ("add_sliding_window", 8),
            "olmo2.attention.sliding_window=8 is not supported .*: OLMo 3 is not read",
        ),
        ("granite", ("add_rope_scaling_finetuned", False), "finetuned=False is not supported: such a model does not"),
        ("gemma", ("add_rope_dimension_count", 8), "gemma.rope.dimension_count=8 of head size 16 is not supported"),
    ],
)
def test_what_other_models_of_the_architecture_do_is_refused(family, extra, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        load_config(write(tmp_path / "model.gguf", model_of(family), extra=[extra]))
