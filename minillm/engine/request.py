"""One request: a prompt that was checked, and how to continue it. Built in chapter 04."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams


@dataclass(frozen=True)
class Request:
    """What the engine is asked to do; `max_tokens` is what both the parameters and `max_model_len` allow."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    max_tokens: int
    arrival_time: float = field(default_factory=time.monotonic)  # seconds

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every token that ends this request."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.eos_token_ids

    def sample_seed(self, index: int) -> int:
        """The seed of sample `index` of n. The first one keeps the request's, so it is the same for any n."""
        return derive_seed(self.seed, index) if index else self.seed
