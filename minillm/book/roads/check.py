"""Serves random roads one after the other, and shrinks those that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from minillm.book.roads.draw import draw, draw_parallel
from minillm.book.roads.models import write_models
from minillm.book.roads.plain import PlainEngine, difference
from minillm.book.roads.road import Road, simpler
from minillm.book.roads.serve import Refused, serve

MOST_TRIES = 300  # roads that shrinking serves


@dataclass
class Fault:
    """A road on which the engine generated something else, held on to something, or raised."""

    seed: int | None  # None for one that was given
    problem: str
    shrunk: Road
    shrunk_problem: str

    def __str__(self) -> str:
        parallel = " --parallel" if self.shrunk.tensor_parallel * self.shrunk.stages > 1 else ""
        first = (
            ""
            if self.seed is None
            else f"seed {self.seed}: {self.problem}\n  minillm check --roads 1 --seed {self.seed}{parallel}\n"
        )
        return f"{first}shrunk: {self.shrunk_problem}\n  minillm check --road '{self.shrunk.line()}'"


@dataclass
class Report:
    num_roads: int = 0
    num_undecided: int = 0  # requests of which rounding decides: compared with nothing
    refused: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # how many roads did what
    faults: list[Fault] = field(default_factory=list)

    def lines(self) -> list[str]:
        happened = ", ".join(f"{name} {count}" for name, count in self.counts.most_common() if count)
        refused = [f"  refused {count}: {why}" for why, count in self.refused.most_common()]
        first = f"{self.num_roads} roads, {self.refused.total()} refused, {len(self.faults)} failed"
        return [f"{first}, {self.num_undecided} requests undecided", f"  {happened}", *refused]


class RoadCheck:
    """Roads over the models in one folder, which is written when it is entered and removed at the end."""

    def __init__(self):
        self.report = Report()

    def __enter__(self) -> Self:
        self._folder = TemporaryDirectory()
        self.models = Path(self._folder.name)
        write_models(self.models)
        self.plain = PlainEngine(self.models)
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.cleanup()

    def run(
        self,
        count: int,
        seed: int = 0,
        on_fault: Callable[[Fault], None] = lambda fault: None,
        advance: Callable[[str], None] = lambda what: None,
        most_faults: int | None = None,
        parallel: bool = False,
    ) -> Report:
        """Serve the roads of `count` seeds from `seed` on, with `parallel` in several processes each. Ends early after
        `most_faults`."""
        for number in range(seed, seed + count):
            self.run_one(draw_parallel(number) if parallel else draw(number), on_fault, number)
            advance(f"{len(self.report.faults)} failed")
            if len(self.report.faults) == most_faults:
                break
        return self.report

    def run_one(
        self, road: Road, on_fault: Callable[[Fault], None] = lambda fault: None, seed: int | None = None
    ) -> None:
        """Serve a road, and shrink it if it fails."""
        self.report.num_roads += 1
        if (problem := self.problem(road, count_it=True)) is not None:
            self.report.faults.append(Fault(seed, problem, *self.shrink(road, problem)))
            on_fault(self.report.faults[-1])

    def problem(self, road: Road, count_it: bool = False) -> str | None:
        """What is wrong on this road, in a sentence; None if nothing is, or if the engine refuses the settings."""
        counts: Counter[str] = Counter()
        try:
            rounds = serve(road, self.models, counts)
        except Refused as refusal:
            if count_it:
                self.report.refused[str(refusal)[:100]] += 1
            return None
        except Exception as error:  # the road is printed with it
            return f"{type(error).__name__}: {error}"
        if count_it:
            self.report.counts.update(counts)
        for number, outputs in enumerate(rounds):
            for index, (arrival, served) in enumerate(zip(road.requests, outputs)):
                if not arrival.is_compared:
                    continue
                problem = difference(road, served, self.plain.answer(road, arrival))
                if problem is None:
                    continue
                if not self.plain.is_undecided(road, arrival):
                    return f"round {number}, request {index}: {problem}"
                self.report.num_undecided += count_it
        return None

    def shrink(self, road: Road, problem: str) -> tuple[Road, str]:
        """The road with as little as possible in it, and what is wrong on that one."""
        tries, smaller = 0, True
        while smaller:  # until a whole pass over everything that could go has taken nothing away
            smaller, place = False, 0
            while place < len(options := list(simpler(road))) and tries < MOST_TRIES:
                tries += 1
                found = self.problem(options[place])
                if found is not None and _kind(found) == _kind(problem):
                    road, problem, smaller = options[place], found, True
                else:
                    place += 1
        return road, problem


def _kind(problem: str) -> str:
    """Another output, or the name of what was raised: shrinking does not lead from one fault to another."""
    return problem.split(":")[0].split()[0]
