"""Selection: which of several texts the model finds more probable. Built in chapter 19.

A choice's score is the sum of the log-probabilities of its tokens: the logarithm of how likely the model is to go on
with just this. Every further token makes the sum smaller, and no choice beats one that it begins with.
Divided by the number of tokens, as SGLang does it, the score is what an average token is worth. That favours long
choices instead: tokens that are sure to follow from what the choice began with raise the mean.

    " yes"           -1.2                  sum -1.2    mean -1.2      the sum's choice
    " no, never"     -1.6  -0.2  -0.1      sum -1.9    mean -0.63     the mean's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    choices: Sequence[str]
    logprobs: Sequence[Sequence[float]]  # of each choice, one a token
    normalize: bool = False  # by the number of tokens

    @property
    def scores(self) -> list[float]:
        return [sum(row) / (len(row) if self.normalize else 1) for row in self.logprobs]

    @property
    def index(self) -> int:
        """Of the best choice; the first of equals."""
        return max(range(len(self.choices)), key=self.scores.__getitem__)

    @property
    def choice(self) -> str:
        return self.choices[self.index]


def check_choices(name: str, choices: Sequence[str]) -> None:
    """Raises TypeError or ValueError where `choices` is no list of different strings."""
    told = f"select({name!r}): choices={choices!r} is not allowed; allowed: "
    strings = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not strings or not all(isinstance(one, str) for one in choices):
        raise TypeError(f"{told}a list of strings")
    if not choices or not all(choices) or len(set(choices)) < len(choices):
        raise ValueError(f"{told}at least one, none empty, each once")
