"""The families of decoders: what a config.json of each may leave out, and which layers slide. Built in chapter 02."""

from __future__ import annotations

from typing import Any

from minillm.model.rope import LATENT, required, rotating_layers

FULL, SLIDING = "full_attention", "sliding_attention"
# Fields that some families read, and the others do not.
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
OF_SOME = (*MULTIPLIERS, *SOFTCAPS, "query_pre_attn_scalar")
# What a family's config.json may leave out. "norms" is ours: see `ModelConfig`.
LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norms": "before"}
QWEN = LLAMA | {"sliding_window": 4096, "max_window_layers": 28}
QWEN_MOE = QWEN | {"norm_topk_prob": False, "decoder_sparse_step": 1}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN_OF_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
GEMMA = LLAMA | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
    "phi3": LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    "smollm3": LLAMA | {"rope_theta": 2e6, "sliding_window": None, "tie_word_embeddings": True},
    "olmo2": LLAMA | {"rms_norm_eps": 1e-5, "norms": "after"},
    "gemma": GEMMA,
    "gemma2": GEMMA
    | {"norms": "both", "sliding_window": 4096, "query_pre_attn_scalar": 256, "sliding_window_pattern": 2}
    | dict(zip(SOFTCAPS, (50.0, 30.0))),
    "gemma3_text": GEMMA
    | {"norms": "both", "sliding_window": 4096, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6}
    | dict.fromkeys(SOFTCAPS)
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072}
    | {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    "granite": LLAMA | dict.fromkeys(MULTIPLIERS, 1.0),
    "mixtral": LLAMA
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": LLAMA | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "qwen2_moe": QWEN_MOE
    | {"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": QWEN_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "dots1": LLAMA
    | {"sliding_window": 4096, "max_window_layers": 62, "moe_intermediate_size": 1408, "norm_topk_prob": False}
    | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "deepseek_v2": LLAMA
    | MLA
    | {"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    "deepseek_v3": LLAMA
    | MLA
    | {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048}
    | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    | {"rope_interleave": True, "num_mtp_layers": 1},
    "gpt_oss": LLAMA
    | {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "head_dim": 64}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    | {"rope_scaling": YARN_OF_GPT_OSS},
}
# Models of images and text, of which the text model is served: what it is where its text_config does not say.
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama"}
GEMMAS = ("gemma", "gemma2", "gemma3_text")
# Where the configuration's attention_bias is read, and where its mlp_bias.
WITH_BIASES = (
    "llama",
    "qwen3",
    "smollm3",
    "olmo2",
    "granite",
    "olmoe",
    "qwen3_moe",
    "dots1",
    "gpt_oss",
    *GEMMAS,
    *LATENT,
)
WITH_MLP_BIASES = ("llama", "smollm3", "granite")
WITH_QK_NORM = ("qwen3", "olmo2", "gemma3_text", "olmoe", "qwen3_moe", "dots1")
SLIDES_EVERYWHERE = ("mistral", "phi3", "mixtral")
NEVER_SLIDES = ("llama", "olmo2", "granite", "gemma", "olmoe", *LATENT)
NULLABLE = ("sliding_window", "q_lora_rank", *SOFTCAPS)  # null is none, not the default
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


def text_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model. Whether its head is its embedding, the files say."""
    wrapper = raw.get("model_type")
    if wrapper not in WRAPPERS or not isinstance(raw.get("text_config"), dict):
        return raw
    ids = {key: raw[key] for key in ("eos_token_id", "bos_token_id") if raw.get(key) is not None}
    return {"model_type": WRAPPERS[wrapper]} | raw["text_config"] | ids | {"tie_word_embeddings": True}


def with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with what its family says where the file says nothing. Raises ValueError for a family that
    is not supported."""
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    defaults = FAMILIES[model_type]
    others = {key for key in OF_SOME if key not in defaults} | {"norms"}
    known = {key: raw[key] for key in raw if key not in others and (raw[key] is not None or key in NULLABLE)}
    if model_type in GEMMAS and (activation := raw.get("hidden_activation")):
        known["hidden_act"] = activation
    if model_type == "gemma" and known.get("hidden_act") == "gelu":  # its first files call the tanh form so
        known["hidden_act"] = "gelu_pytorch_tanh"
    if known.get("rope_parameters"):  # the other spelling of the same
        known.setdefault("rope_scaling", None)
    return defaults | known


def read_layer_types(raw: dict[str, Any]) -> list[str]:
    """What each layer attends to: everything, or its `sliding_window`. As transformers has it, Mistral, Mixtral and
    Phi-3 slide everywhere if there is a window, and so does Qwen3-MoE; Llama, OLMo 2, OLMoE, Granite, DeepSeek
    and the first Gemma never slide. For the others `layer_types` decides, where it is written; else Qwen slides from
    `max_window_layers` on, Qwen2-MoE in every second layer before it, gpt-oss in every second layer, SmolLM3 where it
    does not rotate, and Gemma in all layers but every second or sixth. Qwen's window must be switched on, SmolLM3's if
    it writes no types.
    """
    num_layers, model_type = required(raw, "num_hidden_layers"), raw["model_type"]
    written, window = raw.get("layer_types"), raw.get("sliding_window")
    if written is not None:
        _check_layer_types(raw, written, num_layers)
    has_no_switch = model_type in (*SLIDES_EVERYWHERE, "dots1", "gpt_oss", *GEMMAS)
    follows = has_no_switch or (model_type == "smollm3" and written is not None)
    switched_off = not follows and not raw.get("use_sliding_window")
    if window is None or switched_off or model_type in NEVER_SLIDES:
        return [FULL] * num_layers
    if model_type in (*SLIDES_EVERYWHERE, "qwen3_moe"):
        return [SLIDING] * num_layers
    if written is not None:
        return written
    if model_type == "smollm3":
        return [FULL if rotates else SLIDING for rotates in rotating_layers(raw)]
    if model_type == "qwen2_moe":  # every second layer, as transformers has it
        return [SLIDING if i % 2 == 0 and i < raw["max_window_layers"] else FULL for i in range(num_layers)]
    if model_type == "gpt_oss":
        return [FULL if i % 2 else SLIDING for i in range(num_layers)]
    if model_type in GEMMAS:
        return [SLIDING if (layer + 1) % raw["sliding_window_pattern"] else FULL for layer in range(num_layers)]
    return [SLIDING if layer >= raw["max_window_layers"] else FULL for layer in range(num_layers)]


def _check_layer_types(raw: dict[str, Any], written: list[str], num_layers: int) -> None:
    """Raise ValueError for kinds that are not known, and for kinds that the family does not have although the window
    is smaller than the model's texts: transformers has them in the cache, but not in the mask."""
    if len(written) != num_layers or not set(written) <= {FULL, SLIDING}:
        raise ValueError(
            f"{len(written)} layer_types {sorted(set(written))} for num_hidden_layers={num_layers} are not supported; "
            f"supported: {FULL!r} or {SLIDING!r} for each layer"
        )
    model_type, window = raw["model_type"], raw.get("sliding_window")
    has = {**dict.fromkeys(NEVER_SLIDES, FULL), **dict.fromkeys(SLIDES_EVERYWHERE, SLIDING if window else FULL)}
    narrow = window is None or window < required(raw, "max_position_embeddings")
    if model_type in has and narrow and set(written) != {has[model_type]}:
        raise ValueError(
            f"layer_types={sorted(set(written))} with sliding_window={window} are not supported with "
            f"model_type={model_type!r}; supported: {has[model_type]!r} for each layer"
        )
