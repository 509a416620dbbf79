"""vLLM's keywords of `LLM`, as minillm's own. Built in chapter 04."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minillm.engine.config import EngineConfig
from minillm.engine.vllm_absent import KEYWORDS
from minillm.sampling.checks import check_float, refuse_absent

GIB = 2**30
IN_BYTES = {"cpu_offload_gb": "cpu_offload_bytes", "kv_offloading_size": "host_kv_bytes"}  # GiB -> bytes
SYNONYMS = {"num_gpu_blocks_override": "num_kv_blocks"}
SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
# Keywords of which some values say what minillm does anyway.
ONE_WAY = {
    "runner": ("auto", "generate", "pooling"),  # one LLM generates and embeds
    "convert": ("auto", "none", "embed"),
    "max_logprobs": range(-1, 2**31),  # there is no limit to be raised
    "disable_log_stats": (True, False),  # outputs have their metrics anyway
    "enable_sleep_mode": (True, False),  # every LLM can sleep
    "swap_space": range(0, 2**31),  # preemption_mode="swap" takes host_kv_bytes
}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
POOLING_TYPES = ("LAST", "MEAN")


@dataclass(frozen=True)
class ModelOptions:
    """What vLLM's `LLM` takes and the engine does not read."""

    tokenizer: str | Path | None = None  # of another model
    chat_template: str | Path | None = None  # in the place of the model's own
    override_generation_config: Mapping[str, Any] | None = None  # laid over the model's default parameters
    pooling_type: str = "LAST"  # what `embed` makes of a text's hidden states
    normalize: bool = True
    profile_folder: Path = Path()  # where `stop_profile` writes
    load_format: str = "auto"  # "dummy" has random weights, until `reload_weights`


def translated(given: Mapping[str, Any]) -> tuple[dict[str, Any], ModelOptions]:
    """vLLM's keywords as `EngineConfig`'s, and the rest. Raises NotImplementedError for one that the book does not
    build, TypeError for one that neither has."""
    given = refuse_absent(KEYWORDS, dict(given))
    config: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in ONE_WAY:
            if value is not None and value not in ONE_WAY[name]:
                raise ValueError(f"{name}={value!r} is not allowed; allowed: {', '.join(map(repr, ONE_WAY[name]))}")
        elif value is None and name in KNOWN:
            continue
        elif name in IN_BYTES:
            check_float(name, value, 0, 2**20)
            config[IN_BYTES[name]] = int(value * GIB)
        elif name in SYNONYMS:
            config[SYNONYMS[name]] = value
        elif name in SPECULATIVE:
            config.setdefault("speculative_config", {})[SPECULATIVE[name]] = value
        elif name == "pooler_config":
            options |= _pooler(value)
        elif name == "profiler_config":
            options["profile_folder"] = Path(_fields(name, value).get("torch_profiler_dir") or "").expanduser()
        elif name == "override_generation_config":
            options[name] = dict(_fields(name, value))
        elif name == "load_format":
            check_choice(name, value, LOAD_FORMATS)
            options[name] = value
        elif name in ("tokenizer", "chat_template"):
            options[name] = value
        else:
            raise TypeError(_unknown(name))
    return config, ModelOptions(**options)


KNOWN = {
    *IN_BYTES, *SYNONYMS, *SPECULATIVE, "pooler_config", "profiler_config", "override_generation_config", "tokenizer",
    "chat_template", "load_format",
}  # fmt: skip


def merged(own: dict[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], ModelOptions]:
    """The arguments of `EngineConfig`: minillm's `own`, and vLLM's names for them.
    Raises ValueError for a value that is given under two names."""
    config, options = translated(given)
    defaults = {one.name: one.default for one in fields(EngineConfig)}
    for name, value in config.items():
        if own.get(name) is not None and own[name] != defaults[name]:
            raise ValueError(f"{name}={own[name]!r} is given under two names; leave one out")
        own[name] = value
    return own, options


def _pooler(value: Any) -> dict[str, Any]:
    value = _fields("pooler_config", value)
    kind = value.get("pooling_type") or value.get("seq_pooling_type") or "LAST"
    check_choice("pooler_config: pooling_type", kind, POOLING_TYPES)
    activate = next((value[name] for name in ("use_activation", "normalize") if value.get(name) is not None), True)
    return {"pooling_type": kind, "normalize": bool(activate)}


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {', '.join(allowed)}")


def _fields(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: a dictionary, or None")
    return value


def _unknown(name: str) -> str:
    names = [one.name for one in fields(EngineConfig)]
    near = difflib.get_close_matches(name, [*names, *KNOWN, *KEYWORDS], n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"LLM has no argument {name}{hint} Its arguments: {', '.join(names)}"
