"""ModelConfig reads both spellings of config.json, and refuses by name what the decoder would get wrong."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from minillm.model.checkpoint import load_config
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.families import FAMILIES, OF_SOME
from tests.helpers.model_zoo import ALL, BASE, LLAMA3, LONGROPE, YARN, make_model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


LLAMA3_ALONE = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def read(**changes) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | changes)


def written_by_transformers(name: str) -> dict:
    return json.loads(AutoConfig.for_model(**BASE | ALL[name]).to_json_string(use_diff=False))


def as_on_the_hub(raw: dict) -> dict:
    """The older spelling of the same configuration."""
    raw = dict(raw)
    if raw["model_type"] == "gemma3_text":
        ropes = raw.pop("rope_parameters")
        full, sliding = ropes["full_attention"], ropes["sliding_attention"]
        raw |= {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": sliding["rope_theta"]}
        return raw | {"rope_scaling": full}
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if raw["model_type"] == "smollm3":  # made of no_rope_layers
        del raw["layer_types"]
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if raw.get("max_window_layers", 28) < raw["num_hidden_layers"]:
        del raw["layer_types"]  # there, max_window_layers said it
    return raw


@pytest.mark.parametrize("name", ALL)
def test_both_spellings_read_the_same(name):
    raw = written_by_transformers(name)
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(as_on_the_hub(raw))


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_as_transformers_counts_them(name):
    model = make_model(**ALL[name])
    assert ModelConfig.from_hf(written_by_transformers(name)).num_parameters() == model.num_parameters()


def test_defaults_of_what_a_file_may_leave_out():
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.layer_windows == (None,) * 4
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 5
    assert config.eos_token_ids == () and config.bos_token_id is None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_family_leaves_out_is_what_transformers_puts_there(model_type):
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"num_attention_heads": 32}
    if model_type in ("dots1", "deepseek_v2"):  # whose experts have no default
        sizes |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    theirs = json.loads(AutoConfig.for_model(model_type, **sizes).to_json_string(use_diff=False))
    kept = {key: theirs[key] for key in ("eos_token_id", "bos_token_id", "num_key_value_heads")}
    found, expected = (ModelConfig.from_hf(raw) for raw in (sizes | kept | {"model_type": model_type}, theirs))
    assert found == expected


def test_gelu_of_the_first_gemma_is_its_tanh_form():
    assert read(model_type="gemma", hidden_act="gelu") == read(model_type="gemma")
    assert read(model_type="gemma2", hidden_activation="gelu").activation == "gelu"


def test_fields_of_other_families_are_not_read():
    """As in transformers, where nothing of Llama looks at a multiplier."""
    assert read(**dict.fromkeys(OF_SOME, 3.0), norms="after") == read()
    assert read(model_type="granite", attn_logit_softcapping=3.0) == read(model_type="granite")


def test_swish_is_another_name_of_silu():
    assert read(hidden_act="swish") == read()


ROPE6 = {"rope_parameters": {key: value for key, value in LONGROPE.items() if key != "partial_rotary_factor"}}


def test_a_longrope_turns_otherwise_where_texts_stay_short():
    raw = written_by_transformers("phi3-longrope")
    config = ModelConfig.from_hf(raw)
    assert config.rope.divisors == (1.0, 2.0, 3.5) and config.for_texts_of(33) == config.for_texts_of(None) == config
    assert config.for_texts_of(32).rope.divisors == (1.0, 1.1, 1.3)
    some = ModelConfig.from_hf(raw | {"model_type": "smollm3", "head_dim": 6, "no_rope_layers": [1, 0, 1]} | ROPE6)
    short = some.for_texts_of(32)
    assert [rope and rope.divisors for rope in short.layer_ropes] == [short.rope.divisors, None, short.rope.divisors]
    assert short.rope.divisors == (1.0, 1.1, 1.3)
    for name in ("su", "yarn"):  # as its first files have it
        assert ModelConfig.from_hf(raw | {"rope_parameters": raw["rope_parameters"] | {"rope_type": name}}) == config


def test_switches_of_the_families():
    assert read(model_type="qwen2").qkv_bias and not read(model_type="qwen2").o_bias
    assert read(model_type="qwen3").qk_norm and read(model_type="qwen3").head_dim == 128
    biased = read(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias


MIXED = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    "changes, windows",
    [
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "llama", "sliding_window": 8}, (None,) * 4),
        ({"model_type": "llama", "sliding_window": 256, "layer_types": ["sliding_attention"] * 4}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, (8,) * 4),
        ({"model_type": "mistral", "sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        # transformers' mask follows layer_types here, whatever use_sliding_window says.
        ({"model_type": "smollm3", "sliding_window": 8, "layer_types": MIXED}, (None, 8, None, 8)),
        ({"model_type": "gemma2", "sliding_window": 8}, (8, None, 8, None)),
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": MIXED,
            },
            (None, 8, None, 8),
        ),
    ],
)
def test_windows_by_layer(changes, windows):
    assert read(**changes).layer_windows == windows


def test_rope_settings_are_kept():
    rope = read(rope_theta=5e5, rope_scaling=LLAMA3_ALONE).rope
    assert rope == RopeConfig(5e5, "llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0)
    assert read(rope_scaling=LLAMA3, rope_parameters=LLAMA3).rope == read(rope_parameters=LLAMA3).rope
    rope = read(rope_parameters=YARN).rope
    assert (rope.factor, rope.original_max_position_embeddings) == (4.0, 32)
    assert rope.attention_factor == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).rope == RopeConfig(10000.0, "linear", 2.0, 256)
    deepseek = read(rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}).rope
    assert deepseek.attention_factor == pytest.approx(1.1386294361 / 1.0693147181)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'.*llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "'proportional'.*default, linear, llama3, yarn, dynamic, long",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "0 numbers in its short_factor; 8 pairs are rotated"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "7 numbers in its long_factor; 8 pairs",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "1 no_rope_layers for num_hidden_layers=4"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .* model_type='llama'"),
        ({"hidden_act": "relu"}, "hidden_act='relu'.*silu, swish, gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized .gptq"),
        ({"is_causal": False}, "is_causal=False.*encoder"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True.*encoder"),
        ({"model_type": "gemma3_text", "rope_parameters": LLAMA3}, "rope_parameters=.*'factor'.*gemma3_text"),
        ({"model_type": "gemma3"}, "model_type='gemma3' .*gemma3_text"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": YARN},
            "rope_scaling and rope_parameters disagree: .*llama3.*yarn",
        ),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0}}, "disagree: .*8.0.*4.0"),
        ({"rope_theta": 5e5, "rope_parameters": LLAMA3, "rope_scaling": LLAMA3_ALONE}, "disagree: .*500000.*10000"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4.*num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"layer_types": ["full_attention"]}, "1 layer_types .* for num_hidden_layers=4"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window=None are not supported with model_type='llama'"),
        (
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
            "sliding_window=8 .*'llama'; supported: 'full_attention' for each layer",
        ),
        (
            {
                "model_type": "mistral",
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
                "sliding_window": 8,
            },
            "sliding_window=8 .*'mistral'; supported: 'sliding_attention' for each layer",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_eos_ids_of_both_files_several_and_once_each(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2, "bos_token_id": 1}))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_config(tmp_path).eos_token_ids == (2, 7, 9)
    assert load_config(tmp_path).bos_token_id == 1


def test_kv_bytes_per_token():
    config = read(num_key_value_heads=2)
    assert config.kv_bytes_per_token(torch.float32) == 2 * 4 * 2 * 16 * 4
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 4 * 2 * 16 * 2
