"""How many tokens to draft: as many as pay, by what was accepted so far and what a step costs.
Built in chapter 18.

A draft token is worth the chance that it and all before it are accepted; it costs what one more token adds to a step.
With few requests a step is as long as reading the weights takes, and more tokens are nearly free; with many,
every token is paid for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

PRIOR_RIGHT, PRIOR_TRIED = 3.0, 4.0  # before anything is known: 3 of 4 draft tokens are accepted
MEMORY = 0.9  # what a draft's outcome weighs when the next one comes
RECOVERY = 0.02  # a request that is not drafted for drifts back to the prior, to be tried again


class Acceptance:
    """The measured chance that a request's next draft token is accepted, given that those before it were."""

    def __init__(self):
        self.right, self.tried = PRIOR_RIGHT, PRIOR_TRIED

    @property
    def rate(self) -> float:
        return self.right / self.tried

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A draft was checked, or (of no tokens) not made."""
        if not num_drafted:
            self.right += RECOVERY * (PRIOR_RIGHT - self.right)
            self.tried += RECOVERY * (PRIOR_TRIED - self.tried)
            return
        tried = num_accepted + (num_accepted < num_drafted)  # those after the first rejection were not checked
        self.right = MEMORY * self.right + num_accepted
        self.tried = MEMORY * self.tried + tried


class StepCost:
    """Seconds of a step by how many tokens it computes, on straight lines between measured points."""

    def __init__(self, seconds: Mapping[int, float]):
        if not seconds:
            raise ValueError("seconds is empty; measure a step of at least one size")
        self.sizes = sorted(seconds)
        # A step of more tokens is never cheaper; where it was measured so, that was chance.
        self.seconds = np.maximum.accumulate([seconds[size] for size in self.sizes])

    def __call__(self, num_tokens: int | np.ndarray) -> np.ndarray:
        beyond = np.maximum(np.asarray(num_tokens) / self.sizes[-1], 1.0)  # past the last point in proportion
        return np.interp(num_tokens, self.sizes, self.seconds) * beyond


class AdaptiveLength:
    """Chooses the lengths that make the most tokens a second, as SmartSpec does (Liu et al. 2024,
    https://arxiv.org/abs/2406.14066).

    `step` gives the target's seconds by number of tokens, `draft` the drafter's seconds for one more token of every
    draft.
    """

    def __init__(self, step: StepCost, draft: StepCost | None = None):
        self.step, self.draft = step, draft
        self.acceptance: dict[str, Acceptance] = {}

    def choose(self, request_ids: Sequence[str], limits: Sequence[int], num_others: int = 0) -> list[int]:
        """A length for each request, up to its limit. `num_others` tokens are computed in the same step anyway."""
        rates = [self.acceptance.setdefault(request_id, Acceptance()).rate for request_id in request_ids]
        most = max(limits, default=0)
        # All draft tokens in order of their worth: the chance that one and all before it are accepted.
        owners, places = np.nonzero(np.arange(most) < np.array(limits)[:, None])
        chances = np.array(rates)[owners] ** (places + 1)
        order = np.argsort(-chances, kind="stable")
        owners, places, chances = owners[order], places[order], chances[order]
        best, lengths = 0.0, [0] * len(rates)
        # Drafting takes as long as the longest draft.
        for longest in range(most + 1) if self.draft is not None else [most]:
            within = places < longest
            worth = len(rates) + np.cumsum(np.concatenate([[0.0], chances[within]]))
            seconds = self.step(num_others + len(rates) + np.arange(len(worth)))
            if self.draft is not None:
                seconds = seconds + longest * self.draft(len(rates))
            rate = worth / seconds
            count = int(rate.argmax())  # so many of them are worth their token
            if rate[count] > best:
                best = float(rate[count])
                lengths = np.bincount(owners[within][:count], minlength=len(rates)).tolist()
        return lengths

    def add(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        if request_id in self.acceptance:
            self.acceptance[request_id].add(num_drafted, num_accepted)

    def forget(self, request_id: str) -> None:
        self.acceptance.pop(request_id, None)
