"""The families of decoders: what a config.json of each may leave out, and which layers slide. Built in chapter 02."""

from __future__ import annotations

from typing import Any

from minillm.model.rope import required, rotating_layers

FULL, SLIDING = "full_attention", "sliding_attention"
# Fields that some families read, and the others do not.
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
OF_SOME = (*MULTIPLIERS, *SOFTCAPS, "query_pre_attn_scalar")
# What a family's config.json may leave out. "norms" is ours: see `ModelConfig`.
LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norms": "before"}
QWEN = LLAMA | {"sliding_window": 4096, "max_window_layers": 28}
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
}
# Models of images and text, of which the text model is served: what it is where its text_config does not say.
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama"}
GEMMAS = ("gemma", "gemma2", "gemma3_text")
# Where the configuration's attention_bias is read, and where its mlp_bias.
WITH_BIASES = ("llama", "qwen3", "smollm3", "olmo2", "granite", *GEMMAS)
WITH_MLP_BIASES = ("llama", "smollm3", "granite")
SLIDES_EVERYWHERE, NEVER_SLIDES = ("mistral", "phi3"), ("llama", "olmo2", "granite", "gemma")
NULLABLE = ("sliding_window", *SOFTCAPS)  # null is none, not the default
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
    return defaults | known


def read_layer_types(raw: dict[str, Any]) -> list[str]:
    """What each layer attends to: everything, or its `sliding_window`. As transformers has it, Mistral and Phi-3 slide
    everywhere if there is a window, Llama, OLMo 2, Granite and the first Gemma never. For the others `layer_types`
    decides, where it is written; else Qwen slides from `max_window_layers` on, SmolLM3 where it does not rotate, and
    Gemma in all layers but every second or sixth. Qwen's window must be switched on, SmolLM3's if it writes no types.
    """
    num_layers, model_type = required(raw, "num_hidden_layers"), raw["model_type"]
    written, window = raw.get("layer_types"), raw.get("sliding_window")
    if written is not None:
        _check_layer_types(raw, written, num_layers)
    follows = model_type in (*SLIDES_EVERYWHERE, *GEMMAS) or (model_type == "smollm3" and written is not None)
    switched_off = not follows and not raw.get("use_sliding_window")
    if window is None or switched_off or model_type in NEVER_SLIDES:
        return [FULL] * num_layers
    if model_type in SLIDES_EVERYWHERE:
        return [SLIDING] * num_layers
    if written is not None:
        return written
    if model_type == "smollm3":
        return [FULL if rotates else SLIDING for rotates in rotating_layers(raw)]
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
