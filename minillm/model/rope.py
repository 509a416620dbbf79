"""Rotary position embedding: its settings in a configuration. Built in chapter 02."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how it is stretched to longer texts.

    `type` is one of ROPE_TYPES: "linear" divides every frequency by `factor`, "llama3" only the
    slow ones, "yarn" (Peng et al. 2023) blends the two and scales attention by `attention_factor`. A GGUF
    file keeps the result instead, a divisor for each frequency: "divided".
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3: wavelengths over original / low_freq_factor are stretched
    high_freq_factor: float = 4.0  # llama3: those under original / high_freq_factor are kept
    beta_fast: float = 32.0  # yarn: dimensions turning more often than this over the original text are kept
    beta_slow: float = 1.0  # yarn: those turning less often are stretched
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: round the two borders to whole dimensions
    divisors: tuple[float, ...] = ()  # divided: head_dim / 2 of them


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling` (the hub), or one `rope_parameters` (transformers 5).

    Raises ValueError naming the field for a kind that is not computed, or two spellings that disagree.
    """
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
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not supported; supported: 1.0")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope_type == "default":
        return RopeConfig(theta=theta)
    max_position = required(raw, "max_position_embeddings")
    original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = original or max_position
    factor = scaling.get("factor") or max_position / original
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
    given = {key: scaling[key] for key in optional if scaling.get(key) is not None}
    if rope_type == "yarn":
        given["attention_factor"] = _yarn_attention_factor(scaling, factor)
    return RopeConfig(theta, rope_type, factor, original, **given)


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN sharpens attention as the text grows: 0.1 ln(factor) + 1, or a ratio of two such (DeepSeek)."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def required(raw: dict[str, Any], key: str) -> int:
    if raw.get(key) is None:
        raise ValueError(f"config.json has no {key!r}, which the decoder cannot be built without")
    return raw[key]
