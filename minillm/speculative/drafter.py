"""What a drafter is: something that proposes the next tokens of a request. Built in chapter 18.

A drafter may propose anything: the target model verifies every token, so a bad draft costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from minillm.sampling.grammar.protocol import Grammar
from minillm.sampling.params import SamplingParams


class DraftedRequest(Protocol):
    """What a drafter reads of a request (`minillm.engine.input_batch.RequestState`). When it returns,
    everything is as it was: a grammar that it moved on is rolled back."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]  # prompt and output, all that is certain
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    stop_token_ids: frozenset[int]
    cache_salt: str | None  # requests with different salts share nothing
    grammar: Grammar | None  # what the draft should obey (chapter 19)

    def sample_seed(self) -> int: ...


@dataclass(frozen=True)
class Draft:
    """Draft tokens for one request, in order. `probs` [len(token_ids), vocab_size] float32 is what each was drawn from,
    where it was drawn by chance that the target does not share: rejection sampling accepts more of such tokens.
    Without, a token is accepted if the target draws the same one, which is exact for any draft;
    greedy and seeded requests do so always."""

    token_ids: list[int] = field(default_factory=list)
    probs: Tensor | None = None


def by_chance(request: DraftedRequest) -> bool:
    """Whether its draft may be drawn and verified at random. With a seed the draft looks at the very noise that the
    target will look at instead, and usually sees the same winner."""
    return request.params.seed is None and not request.params.is_greedy


class Drafter(Protocol):
    """Asked before every step; `forget` comes some time after a request has ended, with the next step at the latest."""

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[Draft]:
        """A draft for each request, of at most as many tokens as its count says; fewer, or none, is always allowed."""
        ...

    def forget(self, request_id: str) -> None: ...


def checked_drafts(
    drafter: Drafter, requests: Sequence[DraftedRequest], counts: Sequence[int], vocab_size: int
) -> list[Draft]:
    """What `drafter` proposes, cut to the counts and to what each request's grammar allows. Raises TypeError or
    ValueError naming the drafter and what is wrong."""
    name = type(drafter).__name__
    drafts = drafter.propose(requests, counts)
    if not isinstance(drafts, list) or len(drafts) != len(requests):
        raise ValueError(
            f"{name}.propose returned {drafts!r:.200} for {len(requests)} requests; "
            "a list with a Draft for each, in their order"
        )
    return [_checked(name, *one, vocab_size) for one in zip(requests, counts, drafts)]


def _checked(name: str, request: DraftedRequest, count: int, draft: Draft, vocab_size: int) -> Draft:
    if not isinstance(draft, Draft) or not isinstance(draft.token_ids, (list, tuple)):
        raise TypeError(f"{name} drafted {draft!r:.200}; allowed: a Draft with a list of token ids")
    token_ids = list(draft.token_ids[:count])
    for token_id in token_ids:
        if type(token_id) is not int:
            raise TypeError(f"{name} drafted token id {token_id!r}; allowed: whole numbers")
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} drafted token id {token_id!r}; the vocabulary has {vocab_size} tokens, "
                f"so 0 to {vocab_size - 1} are allowed"
            )
    wanted = (len(draft.token_ids), vocab_size)
    if draft.probs is not None and tuple(draft.probs.shape) != wanted:
        raise ValueError(
            f"{name} gives probs of shape {tuple(draft.probs.shape)} for {wanted[0]} tokens; allowed: {wanted}"
        )
    probs = draft.probs if by_chance(request) else None  # else the target's own token decides
    if request.grammar is not None and (allowed := request.grammar.validate(token_ids)) < len(token_ids):
        if probs is not None:
            raise ValueError(
                f"{name} gives probs for token {token_ids[allowed]}, which the request's grammar forbids; draft inside "
                f"request.grammar, or leave probs out"
            )
        del token_ids[allowed:]
    return Draft(token_ids, probs)
