"""What a drafter is: something that guesses the next tokens of a request. Built in chapter 18.

A drafter may guess anything: the target model checks every token, so a bad guess costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from minillm.sampling.grammar.protocol import Grammar
from minillm.sampling.params import SamplingParams


class DraftedRequest(Protocol):
    """What a drafter reads of a request (`minillm.engine.request`). When it returns, everything is as it was: a grammar
    that it moved on is rolled back."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]  # prompt and output, all that is certain
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    stop_token_ids: frozenset[int]
    cache_salt: str | None  # requests with different salts share nothing
    grammar: Grammar | None  # what the guesses should obey (chapter 19)

    def sample_seed(self) -> int: ...


@dataclass(frozen=True)
class Draft:
    """Guesses for one request, in order. `probs` [len(token_ids), vocab_size] float32 is what each was drawn from,
    where it was drawn by chance that the target does not share: rejection sampling takes more such guesses.
    Without, a guess counts if the target draws the same token, which is right for any guess;
    greedy and seeded requests do so always."""

    token_ids: list[int] = field(default_factory=list)
    probs: Tensor | None = None


def by_chance(request: DraftedRequest) -> bool:
    """Whether its guesses may be drawn and checked by chance. With a seed the draft looks at the very noise that the
    target will look at instead, and usually sees the same winner."""
    return request.params.seed is None and not request.params.is_greedy


class Drafter(Protocol):
    """Asked before every step; `forget` comes some time after a request has ended, with the next step at the latest."""

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[Draft]:
        """A draft for each request, of at most as many tokens as its count says; fewer, or none, is always allowed."""
        ...

    def forget(self, request_id: str) -> None: ...
