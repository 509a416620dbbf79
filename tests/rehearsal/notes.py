"""What the rehearsal sees: waits of the host, faults, operations and launches, each with the line that asked."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Notes:
    """Of one scenario. `phase` is what the engine is doing; see `scenarios.watched`."""

    phase: str = "start"
    capture: list[str] | None = None  # the operations of the graph that is being captured
    graphs: list[list[str]] = field(default_factory=list)  # those of every captured graph
    waits: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))  # phase -> (what, where)
    faults: Counter = field(default_factory=Counter)  # (what, where): would crash, hang or go wrong on a GPU
    compiled: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))  # phase -> (kernel, where)
    operations: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))  # phase -> name
    steps: Counter = field(default_factory=Counter)  # phase -> steps

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.waits[self.phase][what, where()] += 1
        if self.capture is not None:
            self.fault(f"{what} in a capture")

    def fault(self, what: str) -> None:
        self.faults[what, where()] += 1

    def operation(self, name: str) -> None:
        """Something is launched on the device."""
        self.operations[self.phase][name] += 1
        if self.capture is not None:
            self.capture.append(name)

    def compile(self, kernel: str) -> None:
        self.compiled[self.phase][kernel, where()] += 1
        if self.capture is not None:
            self.fault(f"{kernel} is compiled in a capture")

    @contextmanager
    def during(self, phase: str):
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def where(depth: int = 2) -> str:
    """The lines of minillm that led here, the innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < depth:
        name = frame.f_code.co_filename
        if "/minillm/" in name:
            found.append(f"{name.rsplit('/minillm/', 1)[1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "outside of minillm"


NOTES = Notes()  # of the scenario that runs


def start_notes() -> Notes:
    """Forget the last scenario. The one object stays, since everything else holds it."""
    NOTES.__init__()
    return NOTES
