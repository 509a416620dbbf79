"""Rejection sampling: draft tokens drawn from q become draws from p. Built in chapter 18.

    accept a draft token x with probability min(1, p(x) / q(x));  at the first that is not, draw from max(p - q, 0)

Leviathan et al. 2023 (https://arxiv.org/abs/2211.17192) and Chen et al. 2023 (https://arxiv.org/abs/2302.01318) prove
that what comes out is distributed as p. Where the target's own noise is known to the drafter (a seeded request) or the
draft token was not drawn at random (an n-gram, a greedy request), none of this is needed: the target draws its own
token, and a draft token that is the same is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.sampling.metadata import SamplingMetadata
from minillm.sampling.noise import gumbel_noise, random_bits
from minillm.sampling.sampler import Sampler
from minillm.staging import upload

DRAFT, ACCEPT = 2**32, 2**32 + 1  # streams of chance of a request's own, beside those of its samples


class Drafted(NamedTuple):
    """Draft tokens that were drawn from a distribution of their own, in the batch that verifies them."""

    rows: Tensor  # [num_draft_tokens] int64, the row of the batch that each is a draft for
    token_ids: Tensor  # [num_draft_tokens] int64
    probs: Tensor  # [num_draft_tokens, vocab_size] float32, what each was drawn from

    @classmethod
    def of(
        cls, drafts: Iterable[tuple[int, Sequence[int], Tensor | None]], device: torch.device | str
    ) -> Drafted | None:
        """Of each row of a step: how many samples it draws, its draft, and what that was drawn from [at least
        len(draft), vocab_size]; None where it was not drawn, and where no draft of all rows was."""
        at, token_ids, probs, first = [], [], [], 0
        for samples, draft, drawn_from in drafts:
            if draft and drawn_from is not None:
                at += range(first, first + len(draft))
                token_ids += draft
                probs.append(drawn_from[: len(draft)])
            first += samples + len(draft)
        return cls(*upload(at, token_ids, device=device), torch.cat(probs)) if at else None


class RejectionSampler(Sampler):
    """A sampler that, in rows with a draft token drawn at random, keeps it if it is accepted and redraws it if not.

    So a row's token equals its draft token exactly where that is accepted, as in all other rows. What comes after a
    rejected token is drawn again in a later step, with the same noise of its positions. That is no bias, since
    the first draw was discarded unseen.
    """

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        token_ids = super().choose(logits, metadata)
        if metadata.drafted is None:
            return token_ids
        rows, draft_ids, q = metadata.drafted
        p = metadata.probs(logits)[rows]
        seeds, positions = metadata.seeds[rows], metadata.positions[rows]
        accepted = accept(p, q, draft_ids, uniform(derive(seeds, ACCEPT), positions))
        redrawn = residual(p, q).log().add_(gumbel_noise(seeds, positions, metadata.vocabulary)).argmax(dim=-1)
        return token_ids.index_copy(0, rows, torch.where(accepted, draft_ids, redrawn))


def accept(p: Tensor, q: Tensor, draft_ids: Tensor, chance: Tensor) -> Tensor:
    """Which draft tokens are accepted, bool [num_draft_tokens]. p and q [num_draft_tokens, vocab_size];
    chance [num_draft_tokens] uniform in [0, 1)."""
    p, q = (x.gather(-1, draft_ids[:, None])[:, 0] for x in (p, q))
    return chance * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What to draw from after a rejection, not normalised: the part of p that q does not cover,
    [num_draft_tokens, vocab_size].

    Where rounding leaves nothing of it, p itself: then the two are equal, and a rejection has no probability.
    """
    rest = (p - q).clamp_(min=0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, output position), float32 [num_rows], the same wherever it is asked for."""
    return (random_bits(seeds, positions) >> 40 & 0xFFFFFF).float() * 2.0**-24


def derive(seeds: Tensor, stream: int) -> Tensor:
    """`derive_seed` for a whole column."""
    return random_bits(seeds, stream) >> 1 & (2**63 - 1)
