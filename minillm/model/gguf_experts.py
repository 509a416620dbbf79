"""What a GGUF file says of experts, and what llama.cpp knows of them by the architecture. Built in chapter 21.

The experts of a layer are one tensor, [num_experts, out_features, in_features]. A file of Mixtral is one of "llama"
that has experts. Whether weights are renormalised stands in no file: llama.cpp does so for Mixtral and Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.model.gguf_families import ARCHITECTURES

Look = Callable[..., Any]  # a key of the model, without its architecture, and what stands for none
MIXTRAL = "mixtral"
WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe", "olmoe")
RENORMALISED = ("llama", "qwen3moe")


def model_type(architecture: str, look: Look) -> str:
    """The model_type of a config.json. Raises ValueError for experts in an architecture whose models have none."""
    if not (count := look("expert_count", 0)):
        return ARCHITECTURES[architecture]
    if architecture not in WITH_EXPERTS:
        raise ValueError(
            f"{architecture}.expert_count={count} is not supported; supported are experts of {', '.join(WITH_EXPERTS)}"
        )
    return MIXTRAL if architecture == "llama" else ARCHITECTURES[architecture]


def of_experts(architecture: str, look: Look, layers: Sequence[int], size: int | None) -> dict[str, Any]:
    """What a config.json would say: `layers` are those that have experts, `size` the intermediate size of one."""
    if not (count := look("expert_count", 0)):
        return {}
    for key, allowed in (("expert_gating_func", (1,)), ("expert_weights_scale", (0.0, 1.0))):  # softmax; no scale
        if look(key) is not None and look(key) not in allowed:
            raise ValueError(f"{architecture}.{key}={look(key)} is not supported; supported: {allowed[-1]}, or none")
    fields = {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": look("expert_used_count"),
        "norm_topk_prob": architecture in RENORMALISED,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": look("expert_shared_feed_forward_length"),
        "mlp_only_layers": [layer for layer in range(look("block_count")) if layer not in layers],
    }
    if architecture in ("llama", "olmoe"):
        fields["intermediate_size"] = size or look("feed_forward_length")
        if len(layers) != look("block_count"):
            raise ValueError(f"{len(layers)} of {look('block_count')} layers have blk.N.ffn_down_exps; all must")
    return fields
