"""A random mixture of experts as a GGUF file, so that llama.cpp can be measured with it. Built in chapter 21."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from ..model.config import ModelConfig
from .llama_cpp import MATRIX_TYPES

EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def write_moe_gguf(folder: Path, config: ModelConfig, kind: torch.dtype | str, path: Path) -> Path:
    """Write the Qwen3-MoE checkpoint in `folder` to `path`, without a vocabulary: matrices in float32, bfloat16, or one
    of MATRIX_TYPES, norms and routers in float32. Raises ValueError for another family or `kind`."""
    import gguf
    from safetensors.torch import load_file

    name = {torch.float32: "F32", torch.bfloat16: "BF16"}.get(kind, kind)
    if name not in MATRIX_TYPES:
        raise ValueError(f"kind={kind!r} is not written; allowed: {', '.join(MATRIX_TYPES)}")
    if config.model_type != "qwen3_moe":
        raise ValueError(f"model_type={config.model_type!r} is not written; only qwen3_moe is")
    kind, moe = gguf.GGMLQuantizationType[name], config.moe
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(moe.intermediate_size)
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.num_experts_per_tok)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_layers)
    for name, tensor in with_experts_together(load_file(folder / "model.safetensors")).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.dim() == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(target, tensor.float().numpy())
        else:
            writer.add_tensor(target, gguf.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_experts_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of all experts of a layer as one tensor [num_experts, out_features, in_features]."""
    together, found = {}, defaultdict(dict)
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            together[name] = tensor
        else:
            found[f"{match[1]}.{match[3]}.weight"][int(match[2])] = tensor
    return together | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in found.items()}
