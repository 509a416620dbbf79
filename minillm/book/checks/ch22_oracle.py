"""A day of a fleet that an autoscaler sizes, and what it costs. Built in chapter 22."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LATE = 0.1  # the price of a request that waits at the end of an interval; a replica costs 1 an interval


@dataclass
class Day:
    """What one day cost."""

    cost: float = 0.0
    replica_intervals: int = 0
    waiting: int = 0  # requests that waited, summed over the ends of the intervals
    ready: list[int] = field(default_factory=list)
    backlog: list[int] = field(default_factory=list)


def live(desired: Callable[[list[int], int, int, int], int], arrivals: Sequence[int], capacity: int, delay: int) -> Day:
    """Let `desired(arrivals so far, backlog, ready, starting)` size a fleet for a day."""
    day, ready, backlog = Day(), 1, 0
    ordered: list[int] = []  # the interval in which each starting replica becomes ready
    for now, coming in enumerate(arrivals):
        ready += sum(moment <= now for moment in ordered)
        ordered = [moment for moment in ordered if moment > now]
        wanted = max(1, desired(list(arrivals[:now]), backlog, ready, len(ordered)))
        ordered += [now + delay] * (wanted - ready - len(ordered))
        while ready + len(ordered) > wanted and ordered:
            ordered.pop()
        ready = min(ready, wanted)
        backlog = max(0, backlog + coming - ready * capacity)
        day.replica_intervals += ready + len(ordered)
        day.waiting += backlog
        day.ready.append(ready)
        day.backlog.append(backlog)
    day.cost = day.replica_intervals + LATE * day.waiting
    return day


def floor_of(arrivals: Sequence[int], capacity: int) -> float:
    """About what a day costs if everything is known: exactly the replicas that each interval needs."""
    return float(sum(max(1, -(-coming // capacity)) for coming in arrivals))
