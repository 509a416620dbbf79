"""The shape of a decoder, read from a Hugging Face config.json. Built in chapter 02.

Llama, Mistral, Qwen and the other families are one architecture with a few switches. The switches
are the fields of `ModelConfig`; the rest of the engine never asks for a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from minillm.model.families import (
    ACTIVATIONS,
    GEMMAS,
    SLIDING,
    WITH_BIASES,
    WITH_MLP_BIASES,
    WITH_QK_NORM,
    read_layer_types,
    with_defaults,
)
from minillm.model.fields import HEADS, check_config
from minillm.model.gpt_oss import read_clamped
from minillm.model.mla_config import MLAConfig, read_mla
from minillm.model.moe_config import MoEConfig, read_moe
from minillm.model.rope import RopeConfig, read_layer_ropes, read_rope, required


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know. Sizes are counts; `layer_windows[i]` is how many
    positions layer i looks back over, itself included, or None for all of them.

    What follows the token ids is at its default in Llama, Mistral and Qwen. Attention divides its scores by
    `1 / attention_scale`, sqrt(head_dim) where that is None. With `mla` there is one KV head, of `mla.latent_dim`.
    """

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
    activation: str = "silu"
    norms: str = "before"  # where a half of a layer is normed: "before" it, "after" it, or "both"
    norm_plus_one: bool = False  # a checkpoint's norms hold their weights less one
    qk_norm_whole: bool = False  # queries and keys are normed over all heads at once, not each head
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # of each layer, where they differ; None does not rotate
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a half of a layer adds
    logit_scale: float = 1.0
    attention_softcap: float | None = None  # scores and logits become cap * tanh(score / cap)
    logit_softcap: float | None = None
    sink_logits: bool = False  # every head has a learned logit in its softmax: chapter 17
    moe: MoEConfig | None = None  # experts in place of some layers' MLPs: chapter 21
    mla: MLAConfig | None = None  # latents in place of keys and values
    num_mtp_layers: int = 0  # that a checkpoint has behind its last layer, to draft with; they are not read

    def __post_init__(self):
        if not HEADS.takes(self.head_dim):
            raise ValueError(f"head_dim={self.head_dim} is not allowed; allowed: {HEADS}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.rotary_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs, so it must be even")
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(f"{len(self.layer_windows)} layer_types for num_hidden_layers={self.num_layers}")
        if 0 in self.layer_windows:
            raise ValueError(
                "sliding_window=0 lets a token attend to nothing; allowed: numbers from 1, or null for none"
            )

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read the dictionary of a config.json, as the hub has it or as transformers 5 writes it.

        Raises ValueError naming the field for whatever the decoder would compute wrongly.
        """
        check_config(raw)
        raw = with_defaults(raw)
        model_type, num_layers = raw["model_type"], required(raw, "num_hidden_layers")
        _refuse_what_we_do_not_compute(raw)
        num_heads, hidden_size = required(raw, "num_attention_heads"), required(raw, "hidden_size")
        attention_bias = bool(raw.get("attention_bias")) and model_type in WITH_BIASES
        layer_types = read_layer_types(raw)
        rope, scalar, mla = read_rope(raw), raw.get("query_pre_attn_scalar"), read_mla(raw)
        return cls(
            model_type=model_type,
            vocab_size=required(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=required(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=1 if mla else raw.get("num_key_value_heads") or num_heads,
            head_dim=mla.latent_dim if mla else raw.get("head_dim") or hidden_size // num_heads,
            max_position_embeddings=required(raw, "max_position_embeddings"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
            qkv_bias=attention_bias or model_type == "qwen2" or (model_type == "qwen2_moe" and raw["qkv_bias"]),
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias")) and model_type in WITH_MLP_BIASES,
            qk_norm=model_type in WITH_QK_NORM,
            rope=rope,
            layer_windows=tuple(raw["sliding_window"] if kind == SLIDING else None for kind in layer_types),
            # One outside of the vocabulary (some write -1 for none) is never generated.
            eos_token_ids=tuple(i for i in as_token_ids(raw.get("eos_token_id")) if 0 <= i < raw["vocab_size"]),
            bos_token_id=raw.get("bos_token_id"),
            activation=read_clamped(raw) if model_type == "gpt_oss" else ACTIVATIONS[raw["hidden_act"]],
            norms=raw["norms"],
            norm_plus_one=model_type in GEMMAS,
            qk_norm_whole=model_type in ("olmo2", "olmoe"),
            layer_ropes=read_layer_ropes(raw, rope, layer_types),
            attention_scale=scalar**-0.5 if scalar else raw.get("attention_multiplier"),
            embedding_scale=hidden_size**0.5 if model_type in GEMMAS else raw.get("embedding_multiplier", 1.0),
            residual_scale=raw.get("residual_multiplier", 1.0),
            logit_scale=1.0 / raw.get("logits_scaling", 1.0),
            attention_softcap=raw.get("attn_logit_softcapping"),
            logit_softcap=raw.get("final_logit_softcapping"),
            sink_logits=model_type == "gpt_oss",
            moe=read_moe(raw),
            mla=mla,
            num_mtp_layers=raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 0)),
        )

    @property
    def is_plain(self) -> bool:
        """Whether a layer is what the fused kernels compute: `has_plain_halves`, and no experts."""
        return self.has_plain_halves and self.moe is None

    @property
    def has_plain_halves(self) -> bool:
        """Norms before the two halves of a layer, keys and values of their own, silu, and plain additions."""
        other = self.residual_scale != 1.0 or self.qk_norm_whole or self.mla is not None
        return self.norms == "before" and self.activation == "silu" and not other

    def for_texts_of(self, max_len: int | None) -> ModelConfig:
        """The same model, for texts of at most `max_len` tokens: some are rotated otherwise where texts stay short."""
        rope = self.rope
        if max_len is None or max_len > rope.original_max_position_embeddings or not rope.short_divisors:
            return self
        short = replace(rope, divisors=rope.short_divisors)
        layer_ropes = tuple(short if one == rope else one for one in self.layer_ropes)
        return replace(self, rope=short, layer_ropes=layer_ropes)

    def num_parameters(self, experts: int | None = None) -> int:
        """Weights of the whole model; a tied embedding counts once. With `experts` of each layer: those that a token
        uses are `num_parameters(moe.num_experts_per_tok)`."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += self.qkv_bias * (q_size + 2 * kv_size) + self.o_bias * self.hidden_size
        attention += self.sink_logits * self.num_heads
        attention += self.qk_norm * ((q_size + kv_size) if self.qk_norm_whole else 2 * self.head_dim)
        if self.mla is not None:
            attention = self.mla.parameters(self.hidden_size, self.num_heads, self.qkv_bias, self.o_bias)
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        norms = (4 if self.norms == "both" else 2) * self.hidden_size
        sparse = self.moe.layers if self.moe else ()
        mlps = mlp * (self.num_layers - len(sparse))
        mlps += sum(self.moe.parameters(self.hidden_size, experts) for _ in sparse)
        return self.num_layers * (attention + norms) + mlps + self.hidden_size + embeddings

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes the KV cache grows by with each token: a key and a value in every layer and KV head, or one latent."""
        return self.kv_vectors * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    @property
    def kv_vectors(self) -> int:
        """Vectors of `head_dim` that a token leaves in each layer and KV head: a key and a value, or one latent."""
        return 1 if self.mla is not None else 2

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that rotary embedding sees."""
        return self.mla.qk_rope_head_dim if self.mla is not None else self.head_dim


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Config files write one end-of-sequence id, a list of them, or null. Raises ValueError for anything else."""
    token_ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(type(token_id) is not int for token_id in token_ids):
        raise ValueError(f"eos_token_id={value!r:.200}; allowed: a token id, a list of them, or null")
    return token_ids


def _refuse_what_we_do_not_compute(raw: dict[str, Any]) -> None:
    for field, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if raw.get(field, not value) == value:
            raise ValueError(f"{field}={value} is not supported: an encoder generates no text")
    if raw["hidden_act"] not in ACTIVATIONS:
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    if raw["model_type"] == "olmoe" and raw.get("clip_qkv") is not None:
        raise ValueError(f"clip_qkv={raw['clip_qkv']} is not supported; supported: null")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"the checkpoint is quantized ({method}); use its bfloat16, float16 or float32 original")
