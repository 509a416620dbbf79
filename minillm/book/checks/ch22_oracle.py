"""What happens to the students' streams and fleets of chapter 22: a failing fleet, a day. Built in chapter 22."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class History:
    """What the replicas of a failing fleet send for one request whose output is `truth`: messages
    ("tokens", flight, position, tokens), and ("lost", flight). After a "lost" that counts, a new flight begins."""

    truth: list[int]
    events: list[tuple] = field(default_factory=list)
    needs: list[bool] = field(default_factory=list)  # what `lost` has to answer, in order


def history(rng: random.Random, truth: list[int]) -> History:
    """Random chunks, repeated ones, late messages of dead replicas, kills; ends when the output is complete."""
    made, flight, have, old = History(truth), 1, 0, []
    while have < len(truth):
        kind = rng.random()
        if kind < 0.6:
            begin = rng.randint(max(0, have - 2), have)
            end = rng.randint(have, min(len(truth), have + 4))
            if end > begin:
                made.events.append(("tokens", flight, begin, truth[begin:end]))
                old.append(made.events[-1])
                have = max(have, end)
        elif kind < 0.75 and old:
            late = rng.choice(old)
            if late[1] != flight:
                made.events.append(late)
        elif kind < 0.9:
            made.events.append(("lost", flight))
            made.needs.append(True)
            # The dead replica had sent more than the client took: it comes late, and is dropped.
            more = truth[have : have + rng.randint(1, 3)]
            flight += 1
            if rng.random() < 0.7:
                made.events.append(("tokens", flight - 1, have, more))
        elif flight > 1:
            made.events.append(("lost", rng.randint(1, flight - 1)))
            made.needs.append(False)
    made.events.append(("lost", flight))
    made.needs.append(False)
    return made


# ---- the day ------------------------------------------------------------------------------------------------------

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
