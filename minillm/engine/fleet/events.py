"""The fleet's clock: events in one heap, ordered by time, then by the order in which they were added.
Built in chapter 22."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from minillm.engine.fleet.replica import SimulatedReplica


class EventQueue:
    """Calls at moments, and ends of replicas' runs. `now` is the time of the last event, in seconds."""

    def __init__(self):
        self.now = 0.0
        self._heap: list[tuple] = []
        self._order = itertools.count()
        self._num_ticks = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    @property
    def only_ticks(self) -> bool:
        """Whether nothing will happen but periodic looks at the fleet."""
        return len(self._heap) <= self._num_ticks

    def at(self, moment: float, call: Callable, *arguments) -> None:
        """Call it at that moment."""
        heapq.heappush(self._heap, (moment, next(self._order), call, arguments))

    def tick(self, interval: float, call: Callable) -> None:
        """Call it after `interval` seconds, as one of the periodic looks at the fleet."""
        self._num_ticks += 1
        self.at(self.now + interval, self._tick, call)

    def run_of(self, replica: SimulatedReplica) -> None:
        """Note the end of the replica's run, unless it is known already."""
        if replica.ends is not None and replica.scheduled != replica.version:
            replica.scheduled = replica.version
            heapq.heappush(self._heap, (replica.ends, next(self._order), replica, replica.version))

    def step(self) -> SimulatedReplica | None:
        """Go on to the next event. Returns the replica whose run has ended, None where a call was made or a run was
        cut in the meantime."""
        self.now, _, target, argument = heapq.heappop(self._heap)
        if isinstance(target, SimulatedReplica):
            return target if target.version == argument else None
        target(*argument)
        return None

    def _tick(self, call: Callable) -> None:
        self._num_ticks -= 1
        call()
