"""Rotary position embedding: its settings in a configuration. Built in chapter 02."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

LATENT = ("deepseek_v2", "deepseek_v3")  # families of multi-head latent attention
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how it is stretched to longer texts.

    `type` is one of ROPE_TYPES: "linear" divides every frequency by `factor`, "llama3" only the
    slow ones, "yarn" (Peng et al. 2023) blends the two and scales attention by `attention_factor`. "longrope" (Ding et
    al. 2024) has a list of divisors, one for each frequency, for texts beyond the original length, and another for
    shorter ones; it is kept, as is what a GGUF file says of Llama 3's, as "divided". "dynamic" turns texts beyond the
    model's length alone otherwise, which it does not serve, so it is kept as "default".
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3: wavelengths over original / low_freq_factor are stretched
    high_freq_factor: float = 4.0  # llama3: those under original / high_freq_factor are kept
    beta_fast: float = 32.0  # yarn: dimensions turning more often than this over the original text are kept
    beta_slow: float = 1.0  # yarn: those turning less often are stretched
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    truncate: bool = True  # yarn: round the two borders to whole dimensions
    divisors: tuple[float, ...] = ()  # divided: head_dim / 2 of them
    short_divisors: tuple[float, ...] = ()  # longrope: those for texts of the original length and less
    partial: float = 1.0  # how much of a head is rotated, its first dimensions
    score_factor: float = 1.0  # of latent attention with yarn: multiplies the scores


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling` (the hub), or one `rope_parameters` (transformers 5).

    Raises ValueError naming the field for a kind that is not computed, or two spellings that disagree.
    """
    if raw["model_type"] == "gemma3_text":
        return _read_gemma_ropes(raw)[0]
    spellings = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    found = [_read_scaling(raw, scaling) for scaling in spellings or [{}]]
    if found[0] != found[-1]:
        scaling, parameters = map(asdict, found)
        differ = [f"{key} {scaling[key]} and {parameters[key]}" for key in scaling if scaling[key] != parameters[key]]
        raise ValueError(f"rope_scaling and rope_parameters disagree: {', '.join(differ)}; leave one of them out")
    return found[0]


def _read_scaling(raw: dict[str, Any], scaling: dict[str, Any]) -> RopeConfig:
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(f"rope_parameters differ by layer ({', '.join(scaling)}); supported: one for all layers")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    is_phi = raw["model_type"] == "phi3"
    if is_phi and rope_type in ("su", "yarn"):  # the names that its first files used
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and not is_phi:
        raise ValueError(
            f"partial_rotary_factor={partial} is not supported with model_type={raw['model_type']!r}; supported: 1.0"
        )
    theta = scaling.get("rope_theta") or raw["rope_theta"]
    if rope_type in ("default", "dynamic"):
        return RopeConfig(theta=theta, partial=partial)
    max_position = required(raw, "max_position_embeddings")
    original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = original or max_position
    factor = scaling.get("factor") or max_position / original
    if rope_type == "longrope":
        return _read_longrope(raw, scaling, RopeConfig(theta, "divided", factor, original, partial=partial))
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
    given = {key: scaling[key] for key in optional if scaling.get(key) is not None}
    if rope_type == "yarn":
        given["attention_factor"] = _yarn_attention_factor(scaling, factor)
    if raw["model_type"] in LATENT and scaling.get("mscale_all_dim"):
        given["score_factor"] = _yarn_mscale(factor, scaling["mscale_all_dim"]) ** 2
    return RopeConfig(theta, rope_type, factor, original, partial=partial, **given)


def _read_longrope(raw: dict[str, Any], scaling: dict[str, Any], rope: RopeConfig) -> RopeConfig:
    """Made for texts as long as the model serves: `ModelConfig.for_texts_of` makes it for shorter ones."""
    head_dim = raw.get("head_dim") or required(raw, "hidden_size") // required(raw, "num_attention_heads")
    needed = int(head_dim * rope.partial) // 2
    lists = {}
    for name in ("short_factor", "long_factor"):
        lists[name] = tuple(scaling.get(name) or ())
        if len(lists[name]) != needed:
            raise ValueError(f"rope_scaling has {len(lists[name])} numbers in its {name}; {needed} pairs are rotated")
    attention, original = scaling.get("attention_factor"), rope.original_max_position_embeddings
    if attention is None:
        attention = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    divisors = lists["long_factor" if raw["max_position_embeddings"] > original else "short_factor"]
    return replace(rope, attention_factor=attention, divisors=divisors, short_divisors=lists["short_factor"])


def read_layer_ropes(raw: dict[str, Any], rope: RopeConfig, layer_types: list[str]) -> tuple[RopeConfig | None, ...]:
    """The rotation of each layer, None for none; nothing where all layers rotate by `rope`."""
    if raw["model_type"] == "gemma3_text":
        full, sliding = _read_gemma_ropes(raw)
        return tuple(sliding if kind == "sliding_attention" else full for kind in layer_types)
    rotates = rotating_layers(raw)
    return () if all(rotates) else tuple(rope if rotates[layer] else None for layer in range(len(rotates)))


def _read_gemma_ropes(raw: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that attend to everything, and of those that slide, which turn faster and are never stretched."""
    parameters = raw.get("rope_parameters") or {}
    if not set(parameters) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"rope_parameters={sorted(parameters)} are not supported with model_type={raw['model_type']!r}; supported: "
            "one for 'full_attention' and one for 'sliding_attention'"
        )
    full = (parameters.get("full_attention") or {}) | (raw.get("rope_scaling") or {})
    sliding = parameters.get("sliding_attention") or {}
    local = raw | {"rope_theta": raw["rope_local_base_freq"]}
    return _read_scaling(raw, full), _read_scaling(local, sliding)


def rotating_layers(raw: dict[str, Any]) -> list[bool]:
    """Which layers rotate: all, but of SmolLM3 those that `no_rope_layers` says, every fourth if it says nothing.
    (There a 1 is a layer that does rotate.)"""
    num_layers = required(raw, "num_hidden_layers")
    if raw["model_type"] != "smollm3":
        return [True] * num_layers
    interval = raw.get("no_rope_layer_interval", 4)
    written = raw.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(written) < num_layers:
        raise ValueError(f"{len(written)} no_rope_layers for num_hidden_layers={num_layers}; each layer needs one")
    return [bool(rotates) for rotates in written[:num_layers]]


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN sharpens attention as the text grows: 0.1 ln(factor) + 1, or a ratio of two such (DeepSeek)."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _yarn_mscale(factor, scaling["mscale"]) / _yarn_mscale(factor, scaling["mscale_all_dim"])
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def required(raw: dict[str, Any], key: str) -> int:
    if raw.get(key) is None:
        raise ValueError(f"config.json has no {key!r}, which the decoder cannot be built without")
    return raw[key]
