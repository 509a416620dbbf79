"""A family's tensors as the decoder has them: parts apart, turning dimensions beside each other. Built in chapter 02.

Phi-3 stores q, k and v as one matrix, and gate and up as another; they are cut apart, to be fused again where there is
room for them. And it rotates only the first dimensions of each head. What is rotated depends on which dimensions turn
together alone, not on their places, so the rows of q and k change places, once, and every kernel stays as it is:

    a checkpoint's head of 8, 4 of them rotated     a0 a1 b0 b1 | c0 c1 c2 c3        a turns with b
    ours                                            a0 a1 c0 c1 | b0 b1 c2 c3        i turns with i + 4, c by nothing

DeepSeek rotates dimension 2i of a head's rotary part with 2i + 1, and only that part:

    a checkpoint's head of 4 + 4                    c0 c1 c2 c3 | a0 b0 a1 b1
    ours                                            c0 c1 c2 c3 | a0 a1 b0 b1        i turns with i + 2

Experts that a file has in one tensor [num_experts, out_features, in_features] are cut apart too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from minillm.model import gpt_oss
from minillm.model.config import ModelConfig
from minillm.model.layers import rotated_dims
from minillm.model.parts import QuantizedPart

Named = tuple[str, Tensor | QuantizedPart]
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj|gate_up_proj)(?:\.weight)?")
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.")
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}


def adapted(config: ModelConfig, tensors: Iterable[Named]) -> Iterator[Named]:
    """The tensors of a checkpoint of transformers, by names and in rows that the decoder has views for."""
    for stored, whole in tensors:
        if config.num_mtp_layers and _layer_of(stored) >= config.num_layers:
            continue  # it drafts tokens, and is no part of the decoder
        for name, tensor in _apart(config, stored, whole):
            if config.mla is not None:
                tensor = _turning_in_halves(config, name, tensor)
            elif ".self_attn.q_" in name or ".self_attn.k_" in name:
                tensor = _turning_beside(config, tensor)
            yield name, tensor.float() + 1 if config.norm_plus_one and name.endswith("norm.weight") else tensor


def _apart(config: ModelConfig, name: str, tensor: Tensor | QuantizedPart) -> Iterator[Named]:
    """What one tensor is fused of. One of another size stays as it is, to be named as misshapen."""
    if config.activation == gpt_oss.CLAMPED and ".mlp." in name:
        yield from gpt_oss.apart(config, name, tensor)
        return
    if (match := EXPERTS.fullmatch(name)) is not None:
        yield from _experts_apart(config, match, tensor)
        return
    if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:  # as GGUF files have it
        tensor = tensor[None]
    place, _, kind = name.rpartition(".")
    module, _, fused = place.rpartition(".")
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }.get(fused, {})
    if not parts or tensor.shape[:1] != (sum(parts.values()),):
        yield name, tensor
        return
    start = 0
    for part, rows in parts.items():
        yield f"{module}.{part}.{kind}", tensor[torch.arange(start, start + rows)]
        start += rows


def _experts_apart(config: ModelConfig, match: re.Match, whole: Tensor | QuantizedPart) -> Iterator[Named]:
    """The matrices of each expert, from a tensor [num_experts, out_features, in_features], or from the rows of all."""
    count = config.moe.num_experts if config.moe else 0
    if not count or (len(whole.shape) == 3 and whole.shape[0] != count) or len(whole.shape) < 2:
        yield match[0], whole
        return
    flat = whole.flatten(0, 1) if len(whole.shape) == 3 else whole
    names = FUSED.get(match[2], (match[2],))
    rows = flat.shape[0] // (count * len(names))
    for place, (expert, name) in enumerate(product(range(count), names)):
        yield f"{match[1]}.{expert}.{name}.weight", flat[place * rows : (place + 1) * rows]


def _turning_beside(config: ModelConfig, tensor: Tensor | QuantizedPart) -> Tensor | QuantizedPart:
    """Rows, or a norm's weights, of whole heads in our order."""
    head_dim, rotated = config.head_dim, rotated_dims(config.rope, config.head_dim)
    if rotated == head_dim or not tensor.shape or tensor.shape[0] % head_dim:
        return tensor
    first, second, others = torch.arange(head_dim).split([rotated // 2, rotated // 2, head_dim - rotated])
    ours = torch.cat([first, others[: len(others) // 2], second, others[len(others) // 2 :]])
    heads = torch.arange(tensor.shape[0]).view(-1, head_dim)
    return tensor[heads[:, ours].flatten()]


def _turning_in_halves(config: ModelConfig, name: str, tensor: Tensor | QuantizedPart) -> Tensor | QuantizedPart:
    """Rows of latent attention in our order: of each head's query, and of the one rotary key."""
    mla = config.mla
    if name.endswith((".q_proj.weight", ".q_b_proj.weight")):
        kept, heads = mla.qk_nope_head_dim, config.num_heads
    elif ".kv_a_proj_with_mqa." in name:
        kept, heads = mla.kv_lora_rank, 1
    else:
        return tensor
    width = kept + mla.qk_rope_head_dim
    if not mla.interleaved or tensor.shape[:1] != (heads * width,):
        return tensor
    ours = torch.cat([torch.arange(kept), torch.arange(kept, width).view(-1, 2).t().flatten()])
    rows = torch.arange(heads * width).view(heads, width)
    return tensor[rows[:, ours].flatten()]


def _layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 for one outside of the layers."""
    match = LAYER.match(name)
    return int(match[1]) if match else -1
