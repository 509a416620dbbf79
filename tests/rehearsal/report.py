"""What a scenario came to: figures that can be compared with what is expected, and text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .notes import Notes

PHASES = ("prompt", "changed", "steady", "between")


@dataclass
class Report:
    """Of one scenario, in what JSON can hold."""

    name: str
    gpu: str
    error: str | None = None
    facts: dict = field(default_factory=dict)  # what the scenario measured itself
    figures: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    graphs: list[dict[str, int]] = field(default_factory=list)  # of every captured graph its operations
    variants: dict[str, int] = field(default_factory=dict)  # of every kernel
    waits: dict[str, list[str]] = field(default_factory=dict)  # phase -> lines
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    def take(self, notes: Notes) -> None:
        self.figures = figures(notes)
        self.faults = lines(notes.faults)
        self.steps = dict(notes.steps)
        self.graphs = [dict(Counter(graph).most_common()) for graph in notes.graphs]
        self.operations = {phase: dict(found.most_common()) for phase, found in notes.operations.items()}
        self.waits = {phase: lines(found) for phase, found in notes.waits.items()}
        self.variants = {}
        for phase, found in notes.compiled.items():
            for (kernel, _), count in found.items():
                self.variants[kernel] = self.variants.get(kernel, 0) + count
            if phase != "start":
                self.waits.setdefault("compiled", []).extend(f"in {phase}: {line}" for line in lines(found))

    def text(self, verbose: bool) -> str:
        if "seen" in self.facts:  # a toy: it goes wrong on purpose
            return f"{'ok  ' if self.facts['seen'] else 'FAIL'} {self.gpu} {self.name}: {self.facts['said']}"
        ended = "FAIL" if self.error or self.faults else "ok  "
        counts = f"{len(self.graphs)} graphs, steps {self.steps}, {self.figures}, {self.facts}"
        said = [f"{ended} {self.gpu} {self.name:<16} {self.seconds:5.1f} s  {counts}"]
        said += [f"     {self.error}"] if self.error else []
        said += [f"     FAULT {line}" for line in self.faults]
        if verbose:
            said += [f"     the first captured graph: {self.graphs[0]}"] if self.graphs else []
            said += [f"     variants: {self.variants}"]
            for phase in (*PHASES, "tokens", "compiled"):
                said += [f"     operations, {phase}: {self.operations[phase]}"] if phase in self.operations else []
                said += [f"     {phase}: {line}" for line in self.waits.get(phase, ())]
        return "\n".join(said)


def lines(found: Counter) -> list[str]:
    return [f"{count} x {what} at {at}" for (what, at), count in found.most_common()]


def figures(notes: Notes) -> dict[str, int]:
    """Waits in each phase; waits for tokens beyond one a step; kernels compiled after the start. None is not named."""
    found = {phase: sum(notes.waits[phase].values()) for phase in PHASES}
    found["tokens"] = max(0, sum(notes.waits["tokens"].values()) - notes.steps["tokens"])
    found["compiled"] = sum(sum(kernels.values()) for phase, kernels in notes.compiled.items() if phase != "start")
    return {name: count for name, count in found.items() if count}
