"""What all projects share: a score of counted figures, and the refusal of an answer that breaks a rule.
Built in chapter 25."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache


class Refused(Exception):
    """A submission broke a rule of its project; the message says where, and which one."""


@dataclass(frozen=True)
class Score:
    """One submission on one seed. `value` is what counts; `figures` says how it came about, all of it counted."""

    value: float
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Project:
    """A project of chapter 25.

    name:     as the command line and the leaderboard call it.
    defines:  the name that a submission's source has to define.
    value:    what `Score.value` is, with its unit.
    more:     whether a larger value is better.
    seeds:    the stated seeds; a lecturer scores with others.
    score:    (submission, seed) -> Score. Raises Refused where the submission breaks a rule.
    baseline: the submission to beat.
    imports:  module -> names that a source may import from it; None allows all that the module offers.
    """

    name: str
    defines: str
    value: str
    more: bool
    seeds: tuple[int, ...]
    score: Callable[[object, int], Score]
    baseline: object
    imports: dict[str, tuple[str, ...] | None]

    def gain(self, scores: Sequence[Score], seeds: Sequence[int]) -> float:
        """The geometric mean, over the seeds, of how many times better than the baseline; above 1 beats it."""
        if len(scores) != len(seeds) or not seeds:
            raise ValueError(f"{len(scores)} scores for {len(seeds)} seeds; one score for each seed, and at least one")
        ratios = [self.ratio(score, seed) for score, seed in zip(scores, seeds)]
        return 0.0 if min(ratios) <= 0 else math.exp(sum(map(math.log, ratios)) / len(ratios))

    def ratio(self, score: Score, seed: int) -> float:
        """How many times better than the baseline on this seed."""
        baseline = baseline_score(self, seed).value
        better, worse = (score.value, baseline) if self.more else (baseline, score.value)
        return better / worse


@cache
def _baseline(score: Callable[[object, int], Score], baseline: object, seed: int) -> Score:
    return score(baseline, seed)


def baseline_score(project: Project, seed: int) -> Score:
    """The baseline's score on a seed; computed once."""
    return _baseline(project.score, project.baseline, seed)


def is_int(value: object) -> bool:
    """A Python int that is no bool: what a submission may return where a whole number is asked for."""
    return type(value) is int


def called(what: str, function: Callable, *args: object) -> object:
    """The submission's answer. Raises Refused where it raises."""
    try:
        return function(*args)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{what} raised {type(error).__name__}: {error}".rstrip(": ")) from error
