"""The shape of a decoder, read from a Hugging Face config.json. Built in chapter 02.

Llama, Mistral, Qwen2 and Qwen3 are one architecture with a few switches. The switches
are the fields of `ModelConfig`; the rest of the engine never asks for a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minillm.model.rope import RopeConfig, read_rope, required

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know. Sizes are counts; `layer_windows[i]` is how many
    positions layer i looks back over, itself included, or None for all of them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs, so it must be even")
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(f"{len(self.layer_windows)} layer_types for num_hidden_layers={self.num_layers}")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read the dictionary of a config.json, as the hub has it or as transformers 5 writes it.

        Raises ValueError naming the field for whatever the decoder would compute wrongly.
        """
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        _refuse_what_we_do_not_compute(raw)
        num_heads, hidden_size = required(raw, "num_attention_heads"), required(raw, "hidden_size")
        # Only Qwen3 has a default head size of its own; the others divide the hidden size.
        head_dim = raw.get("head_dim") or (128 if model_type == "qwen3" else hidden_size // num_heads)
        attention_bias = bool(raw.get("attention_bias")) and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=required(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=required(raw, "intermediate_size"),
            num_layers=required(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=required(raw, "max_position_embeddings"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias")) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            rope=read_rope(raw),
            layer_windows=_read_windows(raw),
            # One outside of the vocabulary (some write -1 for none) is never generated.
            eos_token_ids=tuple(i for i in as_token_ids(raw.get("eos_token_id")) if 0 <= i < raw["vocab_size"]),
            bos_token_id=raw.get("bos_token_id"),
        )

    def num_parameters(self) -> int:
        """Weights of the whole model; a tied embedding counts once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += self.qkv_bias * (q_size + 2 * kv_size) + self.o_bias * self.hidden_size
        attention += self.qk_norm * 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size + embeddings

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes the KV cache grows by with each token: a key and a value in every layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Config files write one end-of-sequence id, a list of them, or null. Raises ValueError for anything else."""
    token_ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(type(token_id) is not int for token_id in token_ids):
        raise ValueError(f"eos_token_id={value!r:.200}; allowed: a token id, a list of them, or null")
    return token_ids


def _refuse_what_we_do_not_compute(raw: dict[str, Any]) -> None:
    if not raw.get("is_causal", True):
        raise ValueError("is_causal=False is not supported: an encoder generates no text")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"the checkpoint is quantized ({method}); use its bfloat16, float16 or float32 original")


def _read_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """One sliding window (or None) a layer. Mistral slides everywhere; Qwen from `max_window_layers` on,
    if `use_sliding_window`; `layer_types`, where written, decides layer by layer."""
    num_layers, model_type = required(raw, "num_hidden_layers"), raw["model_type"]
    window = raw.get("sliding_window", 4096)
    if model_type == "llama" or (model_type != "mistral" and not raw.get("use_sliding_window")):
        window = None
    if (layer_types := raw.get("layer_types")) is not None:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or ("sliding_attention" in layer_types and window is None):
            raise ValueError(
                f"layer_types={sorted(set(layer_types))} with sliding_window={window} is not supported; "
                "supported: 'full_attention', and 'sliding_attention' where sliding_window is a number"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = 0 if model_type == "mistral" else raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))
