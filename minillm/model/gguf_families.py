"""What a GGUF file of each family says in its own way: names, windows, multipliers. Built in chapter 15.

A file leaves out what llama.cpp knows of the family: which layers slide, what Gemma divides its scores by. Norms are
stored as they multiply, so Gemma's need nothing added.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from minillm.model.families import FULL, SLIDING

# A file's general.architecture, and the model_type of the same model's config.json.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
}
# Dimension 2i of a head turns with 2i + 1 in the rows of these.
INTERLEAVED = ("llama", "smollm3", "granite")
WINDOWED = ("phi3", "gemma2", "gemma3")  # whose window we follow
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
LAST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OTHER_NAMES = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "olmo2": LAST_NORMS,
    "gemma2": LAST_NORMS,
    "gemma3": LAST_NORMS,
}
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, which divide scores by another number
Look = Callable[..., Any]  # a key of the model, without its architecture, and what stands for none


def hf_name(name: str, architecture: str = "llama") -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    names = NAMES | OTHER_NAMES.get(architecture, {})
    parts = re.fullmatch(r"(?:blk\.(?P<layer>\d+)\.)?(?P<what>\w+)\.(?P<kind>weight|bias)", name)
    if parts is None or parts["what"] not in names:
        return name
    layer = f"model.layers.{parts['layer']}." if parts["layer"] else ""
    return f"{layer}{names[parts['what']]}.{parts['kind']}"


def of_family(architecture: str, look: Look, head_dim: int) -> dict[str, Any]:
    """What a config.json of the family would say beside the sizes that all have."""
    return {"granite": _granite, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3}.get(architecture, _none)(
        look, head_dim
    )


def _none(look: Look, head_dim: int) -> dict[str, Any]:
    return {}


def _granite(look: Look, head_dim: int) -> dict[str, Any]:
    """A multiplier of 0 is none."""
    if not look("rope.scaling.finetuned", True):
        raise ValueError("granite.rope.scaling.finetuned=False is not supported: such a model does not rotate")
    return {
        "attention_multiplier": look("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": look("embedding_scale") or 1.0,
        "residual_multiplier": look("residual_scale") or 1.0,
        "logits_scaling": look("logit_scale") or 1.0,
    }


def _phi3(look: Look, head_dim: int) -> dict[str, Any]:
    original = look("rope.scaling.original_context_length") or look("context_length")
    return {"sliding_window": look("attention.sliding_window") or None, "original_max_position_embeddings": original}


def _gemma2(look: Look, head_dim: int) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _scalar("gemma2", look, head_dim),
        "attn_logit_softcapping": look("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": look("final_logit_softcapping", 30.0),
        "sliding_window": look("attention.sliding_window", 4096),
        "layer_types": _layer_types(look, 2),
    }


def _gemma3(look: Look, head_dim: int) -> dict[str, Any]:
    window = look("attention.sliding_window") or None
    return {
        "query_pre_attn_scalar": _scalar("gemma3", look, head_dim),
        "final_logit_softcapping": look("final_logit_softcapping") or None,
        "sliding_window": window,
        "layer_types": _layer_types(look, 6) if window else [FULL] * look("block_count"),
    }


def gemma3_ropes(look: Look, full: dict[str, Any]) -> dict[str, Any]:
    """Layers that slide turn at their own speed, and are never stretched."""
    sliding = {"rope_type": "default", "rope_theta": look("rope.freq_base_swa", 10000.0)}
    return {FULL: {"rope_type": "default"} | full, SLIDING: sliding}


def _layer_types(look: Look, pattern: int | list[bool]) -> list[str]:
    """Every so many layers one attends to everything; or the file says it of each."""
    pattern, num_layers = look("attention.sliding_window_pattern", pattern), look("block_count")
    if isinstance(pattern, list):
        slides = [bool(one) for one in pattern]
    else:
        slides = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
    return [SLIDING if one else FULL for one in slides]


def _scalar(architecture: str, look: Look, head_dim: int) -> int:
    """What scores are divided by the root of, which no file says."""
    if look("block_count") == LARGEST[architecture]:
        return look("embedding_length") // look("attention.head_count")
    return head_dim
