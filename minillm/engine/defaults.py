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
    naming the file that has a wrong one, TypeError or ValueError naming override_generation_config."""
    given = _renamed(load_sampling_defaults(path) if generation_config == "auto" else {})
    try:
        params = SamplingParams(**given)
    except (TypeError, ValueError) as error:
        way_out = "mend the file, or pass generation_config='vllm'"
        raise CheckpointError(f"{path / GENERATION}: {error}; {way_out}") from None
    if not override:
        return params
    try:
        return SamplingParams(**given | _renamed(override))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"override_generation_config={dict(override)!r}: {error}") from None


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """With the name that vLLM's parameters have for max_new_tokens."""
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
