"""Percentiles with their error, and histograms that can be merged. Built in chapter 24.

The p99 of 100 requests rests on one or two of them. Its confidence interval says so: it lies between two of the sorted
values, whose ranks follow from the binomial distribution, whatever the values are distributed like.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Round = TypeVar("Round")


def interval_of_percentile(
    values: Sequence[float], q: float, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """Bounds that enclose the true percentile `q` with at least this confidence; None where too few values give none.

    Of n independent values as many are below the true percentile as a coin of probability q shows heads in n throws.
    Raises ValueError for a q outside 0 to 100, or a confidence outside 0 to 1.
    """
    if not 0 < q < 100 or not 0 < confidence < 1:
        raise ValueError(f"q={q} and confidence={confidence} are not allowed; allowed: 0 < q < 100, 0 < confidence < 1")
    n, share, tail = len(values), q / 100, (1 - confidence) / 2
    ordered = sorted(values)
    low = high = None
    below = 0.0  # the probability that at most `heads` values are below the percentile
    for heads in range(n + 1):
        term = math.lgamma(n + 1) - math.lgamma(heads + 1) - math.lgamma(n - heads + 1)
        before, below = below, below + math.exp(term + heads * math.log(share) + (n - heads) * math.log1p(-share))
        if heads and before <= tail:
            low = ordered[heads - 1]
        if high is None and below >= 1 - tail and heads < n:
            high = ordered[heads]
    return low, high


def interval_of_groups(
    groups: Sequence[Sequence[float]], q: float, confidence: float = 0.95, draws: int = 200, seed: int = 0
) -> tuple[float | None, float | None]:
    """The same for values that come in groups, such as the gaps between the tokens of a request: they are not
    independent, so whole requests are drawn again with replacement (a cluster bootstrap). None for under two groups."""
    import numpy as np

    arrays = [np.asarray(group) for group in groups if len(group)]
    if len(arrays) < 2:
        return None, None
    rng = random.Random(seed)
    found = [np.percentile(np.concatenate(rng.choices(arrays, k=len(arrays))), q) for _ in range(draws)]
    tail = 100 * (1 - confidence) / 2
    return float(np.percentile(found, tail)), float(np.percentile(found, 100 - tail))


def interval_over_rounds(
    rounds: Sequence[Round],
    figure: Callable[[Sequence[Round]], float],
    confidence: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bounds of a figure of what was measured in turns: whole rounds are drawn again with replacement, since the
    machine's pace changes from round to round. Raises ValueError for under two rounds."""
    import numpy as np

    if len(rounds) < 2:
        raise ValueError(f"{len(rounds)} rounds tell nothing of how much they differ; measure two or more")
    rng = random.Random(seed)
    found = [figure(rng.choices(rounds, k=len(rounds))) for _ in range(draws)]
    tail = 100 * (1 - confidence) / 2
    return float(np.percentile(found, tail)), float(np.percentile(found, 100 - tail))


@dataclass
class Histogram:
    """Values above 0, counted in buckets whose limits grow by a constant factor. Histograms of several clients are
    merged by `+`; percentiles are not: the p99 of two clients is not the mean of their p99s.

    A percentile is off by at most `precision` of itself, and by at most `least` for values near 0.
    """

    precision: float = 0.01
    least: float = 1e-6
    counts: Counter[int] = field(default_factory=Counter)  # bucket -> how many values

    def add(self, value: float, times: int = 1) -> None:
        bucket = math.ceil(math.log(max(value, self.least) / self.least) / math.log1p(self.precision))
        self.counts[bucket] += times

    def __add__(self, other: Histogram) -> Histogram:
        """Raises ValueError where the buckets differ."""
        if (self.precision, self.least) != (other.precision, other.least):
            raise ValueError(
                f"histograms with other buckets cannot be merged: precision={self.precision}, least={self.least} "
                f"and precision={other.precision}, least={other.least}"
            )
        return Histogram(self.precision, self.least, self.counts + other.counts)

    def __len__(self) -> int:
        return sum(self.counts.values())

    def percentile(self, q: float) -> float:
        """The upper limit of the bucket in which the value lies that at least `q` percent do not exceed. Raises
        ValueError for an empty histogram."""
        if not self.counts:
            raise ValueError("an empty histogram has no percentile; add a value first")
        buckets = sorted(self.counts)
        cumulated, total = [], 0
        for bucket in buckets:
            total += self.counts[bucket]
            cumulated.append(total)
        rank = max(1, math.ceil(q / 100 * total))
        return self.least * (1 + self.precision) ** buckets[bisect_left(cumulated, rank)]

    @classmethod
    def of(cls, values: Iterable[float], **settings: float) -> Histogram:
        made = cls(**settings)
        for value in values:
            made.add(value)
        return made
