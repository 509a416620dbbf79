"""What a server holds: the largest rate that keeps a promise, and the best trade-offs. Built in chapter 24."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Point = TypeVar("Point")


@dataclass(frozen=True)
class Found:
    """The answer of `find_rate`. `rate` is the largest one that was seen to hold, 0 where none did."""

    rate: float
    probes: tuple[tuple[float, bool], ...]  # every rate that was tried, in order, and whether it held


def find_rate(holds: Callable[[float], bool], start: float, precision: float = 0.1, max_probes: int = 12) -> Found:
    """The largest rate that holds, to within a factor of 1 + `precision`, in few probes.

    From `start` the rate doubles while it holds, or halves while it does not; then the geometric mean of the best and
    the worst is tried until they are close. A good `start` saves probes; where it is off by a factor f, it costs
    log2(f) of them. Raises ValueError for a start, a precision or a number of probes that is not above 0.
    """
    for name, value in (("start", start), ("precision", precision), ("max_probes", max_probes)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} is not allowed; allowed: a number above 0")
    probes: list[tuple[float, bool]] = []
    best, worst, rate = 0.0, math.inf, start
    while len(probes) < max_probes and worst > best * (1 + precision):
        held = holds(rate)
        probes.append((rate, held))
        best, worst = (rate, worst) if held else (best, rate)
        rate = math.sqrt(best * worst) if best and worst < math.inf else 2 * best or worst / 2
    return Found(best, tuple(probes))


def pareto_front(points: Mapping[Point, tuple[float, float]]) -> list[Point]:
    """The points that no other one beats, by (throughput, latency): more of the one and less of the other is better.
    In the order of their throughput; of equal points the first one stays."""
    front: list[Point] = []
    for name in sorted(points, key=lambda name: (-points[name][0], points[name][1])):
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front[::-1]


def drift(values: Sequence[float]) -> float:
    """The median of the last third over the median of the first third: about 1 in a steady run. A queue that grows
    makes it larger, and then a longer run would have measured longer latencies."""
    third = len(values) // 3
    if not third:
        return 1.0
    first, last = (sorted(part)[third // 2] for part in (values[:third], values[-third:]))
    return last / first if first else 1.0
