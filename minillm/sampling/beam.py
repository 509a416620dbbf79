"""Beam search: keep the few most probable texts instead of one. Built in chapter 01.

It needs nothing of an engine, only a function from sequences to the log-probabilities of their
next token. Chapter 06 lets the beams share their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Beam:
    """One candidate text. `token_ids` holds generated tokens only, the end-of-sequence token included."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    finished: bool = False

    def score(self, length_penalty: float) -> float:
        """Log-probability over length ** length_penalty (Wu et al. 2016); 0 compares whole texts as they are."""
        return self.cumulative_logprob / max(1, len(self.token_ids)) ** length_penalty


def beam_search(
    next_logprobs: Callable[[list[tuple[int, ...]]], Tensor],
    beam_width: int,
    max_tokens: int,
    eos_token_ids: Collection[int] = (),
    length_penalty: float = 1.0,
) -> list[Beam]:
    """The `beam_width` best texts found, best first.

    `next_logprobs` takes the beams' generated tokens and returns [num_beams, vocab_size]. A beam that ends is
    set aside and competes again at the end, as in vLLM. Raises ValueError for a width or length under 1.
    """
    for name, value in (("beam_width", beam_width), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: a whole number from 1 on")
    beams, finished = [Beam()], []
    for _ in range(max_tokens):
        candidates = _extend(beams, next_logprobs([beam.token_ids for beam in beams]), beam_width, eos_token_ids)
        finished += [beam for beam in candidates if beam.finished]
        beams = [beam for beam in candidates if not beam.finished][:beam_width]
        if not beams:
            break
    return sorted(finished + beams, key=lambda beam: -beam.score(length_penalty))[:beam_width]


def _extend(beams: list[Beam], logprobs: Tensor, beam_width: int, eos_token_ids: Collection[int]) -> list[Beam]:
    """The most probable continuations of all beams, best first.

    Twice the width of each: when half of them end, enough still live.
    """
    best, token_ids = logprobs.topk(min(2 * beam_width, logprobs.shape[-1]), dim=-1)  # [num_beams, 2 * beam_width]
    candidates = [
        Beam((*beam.token_ids, token_id), beam.cumulative_logprob + logprob, token_id in eos_token_ids)
        for beam, ids, values in zip(beams, token_ids.tolist(), best.tolist())
        for token_id, logprob in zip(ids, values)
    ]
    return sorted(candidates, key=lambda beam: -beam.cumulative_logprob)
