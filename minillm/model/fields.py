"""What a field of a configuration may hold: whole numbers, numbers, texts, within their limits. Built in chapter 02.

A file may hold anything that JSON can write. What the decoder computes from is checked first, in one place, so that
"num_hidden_layers": "2" or -2 is named, and nothing is allocated for 2,000,000,000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown  # of values of any size and depth
from typing import Any

MOST = 2**31 - 1


@dataclass(frozen=True)
class Whole:
    """Whole numbers from `least` to `most`."""

    least: int = 1
    most: int = MOST

    def takes(self, value: Any) -> bool:
        return type(value) is int and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Number:
    """Numbers over `above` and up to `most`; none of them infinite."""

    above: float = 0.0
    most: float = 1e30

    def takes(self, value: Any) -> bool:
        is_number = type(value) in (int, float) and (isinstance(value, int) or math.isfinite(value))
        return is_number and self.above < value <= self.most

    def __str__(self) -> str:
        return f"a number above {self.above:g}, up to {self.most:g}"


@dataclass(frozen=True)
class Kind:
    """Values of a type, and of a list each of its values by `inner`."""

    type: type
    name: str
    inner: Whole | Number | Kind | None = None

    def takes(self, value: Any) -> bool:
        return isinstance(value, self.type) and (self.inner is None or all(map(self.inner.takes, value)))

    def __str__(self) -> str:
        return self.name


FLAG, TEXT, OBJECT = Kind(bool, "true or false"), Kind(str, "a text"), Kind(dict, "an object of names and values")
FACTORS, TEXTS = Kind(list, "a list of numbers above 0", Number()), Kind(list, "a list of texts", TEXT)
SIZE, LAYERS, HEADS = Whole(), Whole(most=10_000), Whole(most=2**16)
Allowed = Whole | Number | Kind

CONFIG: dict[str, Allowed] = {
    **dict.fromkeys(("model_type", "hidden_act", "hidden_activation", "topk_method", "scoring_func"), TEXT),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), SIZE),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window_pattern", "no_rope_layer_interval"), SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), HEADS),
    "num_hidden_layers": LAYERS,
    "sliding_window": Whole(least=0),
    "max_window_layers": Whole(least=0),
    "bos_token_id": Whole(least=-1),
    "rms_norm_eps": Number(above=-1e-30, most=1.0),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), Number(above=1.0)),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), Number()),
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), Number()
    ),
    "partial_rotary_factor": Number(most=1.0),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), FLAG),
    **dict.fromkeys(("is_causal", "use_bidirectional_attention"), FLAG),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), Whole(least=0, most=2**16)),
    **dict.fromkeys(("num_experts_per_tok", "decoder_sparse_step", "n_group", "topk_group"), HEADS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), Whole(least=0, most=10_000)),
    **dict.fromkeys(("norm_topk_prob", "qkv_bias", "rope_interleave"), FLAG),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEADS),
    **dict.fromkeys(("moe_layer_freq", "num_nextn_predict_layers", "num_mtp_layers"), Whole(least=0, most=10_000)),
    **dict.fromkeys(("routed_scaling_factor", "clip_qkv", "swiglu_alpha", "swiglu_limit"), Number()),
    "mlp_only_layers": Kind(list, "a list of layers", Whole(least=0)),
    "layer_types": TEXTS,
    "no_rope_layers": Kind(list, "a list of 0 or 1 for each layer", Whole(0, 1)),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), OBJECT),
}
ROPE: dict[str, Allowed] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "rope_theta": Number(above=1.0),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), Number()),
    "attention_factor": Number(),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Number(above=-1e-30)),  # 0 is none
    "original_max_position_embeddings": SIZE,
    "partial_rotary_factor": Number(most=1.0),
    "truncate": FLAG,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
}


def check_fields(raw: Mapping[str, Any], allowed: Mapping[str, Allowed], of: str = "") -> None:
    """Raise ValueError naming the field whose value is not `allowed`. A field may be null, or missing."""
    for name, kind in allowed.items():
        value = raw.get(name)
        if value is not None and not kind.takes(value):
            raise ValueError(f"{of}{name}={shown(value)} is not allowed; allowed: {kind}")


def check_config(raw: Mapping[str, Any]) -> None:
    """`check_fields` of a config.json, and of what it says about rotation."""
    check_fields(raw, CONFIG)
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        for key, of_layers in given.items():
            if key in ("full_attention", "sliding_attention") and of_layers is not None:
                check_fields({key: of_layers}, {key: OBJECT}, f"{name}: ")
                check_fields(of_layers, ROPE, f"{name}: {key}: ")
        check_fields(given, ROPE, f"{name}: ")
