"""A family's tensors as the decoder has them: parts apart, turning dimensions beside each other. Built in chapter 02.

Phi-3 stores q, k and v as one matrix, and gate and up as another; they are cut apart, to be fused again where there is
room for them. And it rotates only the first dimensions of each head. What is rotated depends on which dimensions turn
together alone, not on their places, so the rows of q and k change places, once, and every kernel stays as it is:

    a checkpoint's head of 8, 4 of them rotated     a0 a1 b0 b1 | c0 c1 c2 c3        a turns with b
    ours                                            a0 a1 c0 c1 | b0 b1 c2 c3        i turns with i + 4, c by nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.layers import rotated_dims
from minillm.model.parts import QuantizedPart

Named = tuple[str, Tensor | QuantizedPart]


def adapted(config: ModelConfig, tensors: Iterable[Named]) -> Iterator[Named]:
    """The tensors of a checkpoint of transformers, by names and in rows that the decoder has views for."""
    for stored, whole in tensors:
        for name, tensor in _apart(config, stored, whole):
            if ".self_attn.q_" in name or ".self_attn.k_" in name:
                tensor = _turning_beside(config, tensor)
            yield name, tensor.float() + 1 if config.norm_plus_one and name.endswith("norm.weight") else tensor


def _apart(config: ModelConfig, name: str, tensor: Tensor | QuantizedPart) -> Iterator[Named]:
    """What one tensor is fused of. One of another size stays as it is, to be named as misshapen."""
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


def _turning_beside(config: ModelConfig, tensor: Tensor | QuantizedPart) -> Tensor | QuantizedPart:
    """Rows, or a norm's weights, of whole heads in our order."""
    head_dim, rotated = config.head_dim, rotated_dims(config.rope, config.head_dim)
    if rotated == head_dim or not tensor.shape or tensor.shape[0] % head_dim:
        return tensor
    first, second, others = torch.arange(head_dim).split([rotated // 2, rotated // 2, head_dim - rotated])
    ours = torch.cat([first, others[: len(others) // 2], second, others[len(others) // 2 :]])
    heads = torch.arange(tensor.shape[0]).view(-1, head_dim)
    return tensor[heads[:, ours].flatten()]
