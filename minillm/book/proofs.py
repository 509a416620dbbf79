"""What is proved of every exercise: its solution passes, its stub and its mutants fail and say why.
Built in chapter 00."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.book.checks import CheckFailed
from minillm.book.exercises import Exercise, stub_of

_SEEDS = (None, 1, 20_000_003)  # a misconception is noticed under each of them


@dataclass(frozen=True)
class Mutant:
    """A plausible mistake: the solution cell with one fragment replaced, or another cell altogether.

    expect: a fragment of the message by which the checker must give it away.
    """

    name: str
    source: str | None = None
    replace: tuple[str, str] | None = None
    expect: str = ""

    def applied_to(self, exercise: Exercise) -> str:
        if (self.source is None) == (self.replace is None):
            raise ValueError(f"mutant {self.name!r} needs either source or replace")
        if self.source is not None:
            return self.source
        old, new = self.replace
        if exercise.solution.count(old) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {old!r} occurs {exercise.solution.count(old)} times in the solution "
                f"of {exercise.id!r}, must be once"
            )
        return exercise.solution.replace(old, new)

    def is_caught_by(self, error: Exception | None) -> bool:
        """Whether a checker raised this, with the message that is expected."""
        return isinstance(error, CheckFailed) and self.expect in str(error)


def edited(name: str, old: str, new: str, expect: str) -> Mutant:
    """The mutant whose solution has `new` in the place of `old`."""
    return Mutant(name, replace=(old, new), expect=expect)


class Bench:
    """Runs one exercise's three lines on any version of its cell, in this process, without a kernel."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self._context: dict | None = None

    def solution(self) -> dict[str, Exception | None]:
        return self.outcomes(self.exercise.solution)

    def stub(self) -> dict[str, Exception | None]:
        return self.outcomes(stub_of(self.exercise))

    def mutant(self, mutant: Mutant) -> dict[str, Exception | None]:
        """As `outcomes`, up to the line that catches it."""
        return self.outcomes(mutant.applied_to(self.exercise), mutant.is_caught_by)

    def outcomes(self, source: str, ends: Callable[..., bool] = lambda error: False) -> dict[str, Exception | None]:
        """part -> what its line raised, None where it passed. No line is run after an outcome that `ends` it."""
        with self._in_context() as module:
            failed = _raised(source, f"<{self.exercise.id}>", module)
            found = {}
            for part, line in self.exercise.lines.items():
                found[part] = failed or _raised(line, f"<{self.exercise.id}_{part}>", module)
                if ends(found[part]):
                    break
            return found

    def misconceptions(self) -> dict[str, Any]:
        """hint -> wrong answer, as the exercise's checker knows them."""
        return getattr(self._checker(), "misconceptions", {})

    def notices(self, hint: str, seed: int | None) -> list[CheckFailed]:
        """What the checker says of its own misconception: every part, up to the one that has the hint."""
        checker, said = self._checker(), []
        with self._in_context():
            for part in self.exercise.lines:
                try:
                    checker.judge(checker.misconceptions[hint], part, seed)
                except CheckFailed as error:
                    said.append(error)
                    if error.hint == hint:
                        break
        return said

    def seeds_for(self, hint: str) -> tuple[int | None, ...]:
        """A slow answer is stopped by the clock, whatever the seed: once is enough."""
        slow = {timed.hint for timed in getattr(self._checker(), "timed", ())}
        return _SEEDS[:1] if hint in slow else _SEEDS

    def _checker(self) -> Any:
        with self._in_context() as module:
            called = re.match(r"(\w+)\(", next(iter(self.exercise.lines.values()), ""))
            return module.__dict__.get(called[1]) if called else None

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[types.ModuleType]:
        """The cells above have run; what is printed is dropped."""
        with _as_main_module() as module, contextlib.redirect_stdout(io.StringIO()):
            if self._context is None:
                for cell in self.exercise.before:
                    exec(compile(cell, "<cell above>", "exec"), module.__dict__)
                self._context = dict(module.__dict__)
            module.__dict__.update(self._context)
            yield module


def complaints(bench: Bench, mutants: list[Mutant]) -> list[str]:
    """What the proofs of one exercise found wrong, one sentence each; empty when all of it holds."""
    name, found = bench.exercise.id, []
    found += [f"{name}: the solution fails {part}: {error!r}" for part, error in bench.solution().items() if error]
    found += [f"{name}: the untouched stub passes {part}" for part, error in bench.stub().items() if error is None]
    if len(mutants) + len(bench.misconceptions()) < 2:
        found.append(f"{name}: has {len(mutants)} stored mutants, needs two or more")
    found += [f"{name}: {said}" for hint in bench.misconceptions() for said in _overlooked(bench, hint)]
    for mutant in mutants:
        errors = [error for error in bench.mutant(mutant).values() if error]
        if not errors:
            found.append(f"{name}: the mutant {mutant.name!r} passes every line")
        elif not any(map(mutant.is_caught_by, errors)):
            found.append(
                f"{name}: no message about the mutant {mutant.name!r} holds {mutant.expect!r}; "
                f"the first one: {errors[0]}"
            )
        if not mutant.expect:
            found.append(f"{name}: the mutant {mutant.name!r} does not say which message it expects")
    return found


def _overlooked(bench: Bench, hint: str) -> Iterator[str]:
    for seed in bench.seeds_for(hint):
        said = bench.notices(hint, seed)
        if not said:
            yield f"the misconception {hint!r} passes every part with seed {seed}"
        elif said[-1].hint != hint:
            yield f"the misconception {hint!r} fails with another hint with seed {seed}; the first one: {said[0]}"


def load_mutants(file: Path) -> dict[str, list[Mutant]]:
    """MUTANTS of a file such as tests/mutants/ch01.py; none when there is no such file."""
    if not Path(file).is_file():
        return {}
    spec = importlib.util.spec_from_file_location(f"mutants_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTANTS


@contextlib.contextmanager
def _as_main_module() -> Iterator[types.ModuleType]:
    """A module for the cells to run in, known to Python, so that dataclasses and pickling work as in a notebook."""
    module = types.ModuleType("exercise_under_proof")
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        del sys.modules[module.__name__]


def _raised(source: str, name: str, module: types.ModuleType) -> Exception | None:
    # A notebook's cells can be looked up by their file name, which is how Triton reads a kernel.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    try:
        exec(compile(source, name, "exec"), module.__dict__)
    except Exception as error:  # the outcome is the result; the caller judges it
        return error
    return None
