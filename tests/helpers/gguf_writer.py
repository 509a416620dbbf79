"""GGUF files as llama.cpp's converter writes them, from tiny models of transformers:
what `minillm.model.gguf` is tested on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.helpers.tiny import byte_tokenizer


def write(
    path: Path, model, kind=Type.F32, kinds: dict[str, Type] | None = None, drop=(), change=None, extra=()
) -> Path:
    """`model` of transformers as llama.cpp's converter writes it, matrices as `kind` (those in `kinds` otherwise).

    `drop` are metadata keys to leave out, `change` tensors to replace, `extra` (method, *values) of the writer to call.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type.removesuffix("_text"))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = gguf.GGUFWriter(str(path), arch)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head_dim,
        "value_length": head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": rope["rope_theta"],
    }
    for key, value in values.items():
        if key not in drop:
            getattr(writer, f"add_{key}")(value)
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if hasattr(config, "num_experts_per_tok") and "experts" not in drop:
        of_experts(writer, config)
    if arch in OF_FAMILY and "family" not in drop:
        OF_FAMILY[arch](writer, config, rope)
    for method, *values in extra:
        getattr(writer, method)(*values)
    if "tokenizer" not in drop:
        write_tokenizer(writer)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in with_experts_apart(model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch in ("llama", "smollm3", "granite") and re.search(
            r"\.[qk]_proj\.", name
        ):  # dimension i of a head goes beside i + head_dim / 2
            tensor = tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        used = (
            (kinds or {}).get(target, kind) if tensor.dim() > 1 and not name.endswith("mlp.gate.weight") else Type.F32
        )
        data = change[target] if change and target in change else gguf.quantize(tensor.float().numpy(), used)
        if data is not None:
            writer.add_tensor(target, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def of_experts(writer, config) -> None:
    """What the converter writes of each: Mixtral and OLMoE have no size of an expert."""
    writer.add_expert_count(config.num_experts if hasattr(config, "num_experts") else config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def with_experts_apart(state: dict) -> dict:
    """Gate and up of all experts as two tensors, and the gate of the shared expert as a row."""
    tensors = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            place = name.removesuffix("gate_up_proj")
            tensors[f"{place}gate_proj.weight"], tensors[f"{place}up_proj.weight"] = tensor.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            tensors[f"{name}.weight"] = tensor
        else:
            tensors[name] = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
    return tensors


def of_granite(writer, config, rope) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def of_phi3(writer, config, rope) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(scale) / np.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def of_gemma(writer, config, rope) -> None:
    if config.model_type != "gemma":
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


OF_FAMILY = {"granite": of_granite, "phi3": of_phi3, **dict.fromkeys(("gemma", "gemma2", "gemma3"), of_gemma)}


def write_tokenizer(writer) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # how it cuts text, in llama.cpp's words
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)


def llama3_divisors(rope: dict, head_dim: int) -> np.ndarray:
    """By wavelength, as llama.cpp's converter computes them."""
    divisors = []
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)
