"""Self-consistency: ask several times, keep the answer most samples agree on. Built in chapter 01."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Vote:
    """What a vote found. `tally` counts every answer, the winner first; None when there was none."""

    answer: Hashable | None
    votes: int
    num_samples: int
    tally: dict[Hashable, int]

    @property
    def agreement(self) -> float:
        """Share of all samples that gave the winning answer, from 0 to 1."""
        return self.votes / self.num_samples if self.num_samples else 0.0


def self_consistency(texts: Iterable[str], extract: Callable[[str], Hashable | None]) -> Vote:
    """Majority vote over samples of one prompt (Wang et al. 2022); of equal counts the answer seen first wins.

    `extract` reads the answer out of a text, or returns None: such a sample does not vote. The texts are those
    of `llm.generate(prompt, SamplingParams(n=16, temperature=0.8))[0].outputs`.
    """
    answers = [extract(text) for text in texts]
    tally = dict(Counter(answer for answer in answers if answer is not None).most_common())
    winner, votes = next(iter(tally.items()), (None, 0))
    return Vote(winner, votes, len(answers), tally)
