"""What happened, step by step: named spans and counted events. Built in chapter 00.

A `Trace` is handed to the parts of the engine that have something to tell. Switched off
it costs a method call; switched on it feeds the animations, the metrics and a file for
https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

_NOTHING = nullcontext()


@dataclass(frozen=True)
class Span:
    """A named stretch of time inside one step; times in seconds on the trace's clock."""

    step: int
    name: str
    start: float
    duration: float
    args: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something counted at one moment of one step: tokens scheduled, blocks freed."""

    step: int
    name: str
    time: float
    value: float
    args: dict = field(default_factory=dict)


class Trace:
    """Records spans and events of numbered steps.

    `clock` gives seconds; the simulator hands in a virtual one. Step -1 is whatever
    happens before the first `begin_step`.
    """

    def __init__(self, enabled: bool = True, clock: Callable[[], float] = time.perf_counter):
        self.enabled = enabled
        self.clock = clock
        self.clear()

    def clear(self) -> None:
        self.step = -1
        self.spans: list[Span] = []
        self.events: list[Event] = []

    def begin_step(self) -> None:
        self.step += 1

    def span(self, name: str, **args) -> AbstractContextManager:
        """`with trace.span("schedule"): ...` records how long the block took, even when it raises."""
        return self._record(name, args) if self.enabled else _NOTHING

    def count(self, name: str, value: float = 1, **args) -> None:
        """Record that `value` of something happened now."""
        if self.enabled:
            self.events.append(Event(self.step, name, self.clock(), value, args))

    def totals(self, name: str) -> dict[int, float]:
        """Of one counted event, the sum in each step that has it."""
        sums: dict[int, float] = defaultdict(float)
        for event in self.events:
            if event.name == name:
                sums[event.step] += event.value
        return dict(sums)

    def seconds(self, name: str) -> dict[int, float]:
        """Of one span name, the time in each step that has it."""
        sums: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.name == name:
                sums[span.step] += span.duration
        return dict(sums)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the trace in Chrome's trace-event format (microseconds), which Perfetto opens."""
        common = {"pid": 0, "tid": 0}
        records = [
            {
                "ph": "X",
                "name": s.name,
                "ts": s.start * 1e6,
                "dur": s.duration * 1e6,
                "args": {"step": s.step, **s.args},
            }
            for s in self.spans
        ] + [{"ph": "C", "name": e.name, "ts": e.time * 1e6, "args": {e.name: e.value}} for e in self.events]
        records.sort(key=lambda record: record["ts"])
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": [record | common for record in records], "displayTimeUnit": "ms"}))
        return path

    @contextmanager
    def _record(self, name: str, args: dict):
        step, start = self.step, self.clock()
        try:
            yield
        finally:
            self.spans.append(Span(step, name, start, self.clock() - start, args))
