"""The sampling parameters of a request that is given none. Built in chapter 04."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.model.checkpoint import GENERATION, load_sampling_defaults
from minillm.model.errors import CheckpointError
from minillm.sampling.params import SamplingParams


def default_sampling_params(
    path: Path, generation_config: str, override: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The model's defaults, or ("vllm") the library's; `override` is laid over them. Raises CheckpointError
    naming the file of a wrong one, and TypeError or ValueError where `override` is laid over it."""
    given = (load_sampling_defaults(path) if generation_config == "auto" else {}) | dict(override or {})
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    try:
        return SamplingParams(**given)
    except (TypeError, ValueError) as error:
        way_out = "mend the file, or pass generation_config='vllm'"
        kind = type(error) if override else CheckpointError
        raise kind(f"{path / GENERATION}: {error}; {way_out}") from None
