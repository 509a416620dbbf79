"""Judges one exercise in three parts, and knows its mistakes by name. Built in chapter 00."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minillm.book.checks import case as _case, compare, draw, failure, origin, snapshot, wording
from minillm.book.checks.case import Case
from minillm.book.checks.draw import Draw
from minillm.book.checks.failure import CheckFailed, LastCall
from minillm.book.checks.origin import refuse_reference
from minillm.book.checks.seal import Seal

PARTS = ("example", "edges", "random")
_DECIMAL = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
_last: list[LastCall] = []


class Checker:
    """Judges one exercise in three parts: the example, the edges, random trials.

    name:   the exercise's id.
    hint:   one sentence that stands under every failure of this checker, unless the comparison brings its own.
    misconceptions: hint -> a wrong answer, known by its failure. An answer that fails with the same words gets this
            hint, and the proofs (`minillm.book.proofs`) hold every one of them to fail with it.
    forbid: dotted names of the package's functions that the student's code must not call.
    allow:  dotted names of the package's classes that the student's class may derive from (a protocol, say).
    """

    recognises_first = False  # whether a misconception's hint goes before the hint of a comparison

    def __init__(
        self,
        name: str,
        *,
        hint: str = "",
        misconceptions: Mapping[str, Any] | None = None,
        forbid: tuple[str, ...] = (),
        allow: tuple[str, ...] = (),
    ) -> None:
        self.name, self.hint, self.forbid, self.allow = name, hint, forbid, allow
        self.misconceptions = dict(misconceptions or {})
        self.parts: dict[str, Callable[[Case], None]] = {}
        self._seal()

    def part(self, name: str) -> Callable:
        """Decorator: the function that judges part `name`; it gets a `Case`."""
        if name not in PARTS:
            raise ValueError(f"part {name!r}: one of {', '.join(PARTS)}")
        if name in self.parts:
            raise ValueError(f"{self.name} has its part {name!r} already")

        def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
            self.parts[name] = function
            self._seal()
            return function

        return register

    def __call__(self, student: object, part: str, seed: int | None = None) -> None:
        """Judge `student`; prints one line when it passes, raises CheckFailed when it does not.

        seed: other random cases, of other sizes; without one they are the same in every run.
        """
        rebound = SEAL.broken() or (None if self._marks() == self._sealed else f"the check {self.name} itself")
        if rebound:
            raise CheckFailed(f"{self.name}: {rebound} was rebound. Restart the kernel, and leave it as it is.")
        if part in self.parts:
            refuse_reference(student, self.name, self.forbid, self.allow)
        try:
            self.judge(student, part, seed)
        except CheckFailed as failed:
            _last[:] = [failed.call] * (failed.call is not None)
            raise
        print(f"✓ {self.name}: {part}")

    def _seal(self) -> None:
        self._sealed = self._marks()

    def _marks(self) -> dict[str, Any]:
        """What this checker consists of, by identity: changed marks are a changed check."""
        return {name: _mark(value) for name, value in vars(self).items() if name != "_sealed"}

    def judge(self, student: object, part: str, seed: int | None = None) -> None:
        """As a call, but silent when it passes, and for the book's own answers too, which the proofs judge."""
        if part not in self.parts:
            raise ValueError(f"{self.name} has no part {part!r}; it has {', '.join(self.parts) or 'none'}")
        try:
            self._run(student, part, seed)
        except CheckFailed as failed:
            if failed.hint == self.hint or self.recognises_first:  # no comparison knew better
                failed.hint = self._recognised(failed, student, part, seed) or failed.hint
            raise

    def _run(self, student: object, part: str, seed: int | None) -> None:
        case = Case(student, f"{self.name}: {part}", self.hint, 0 if seed is None else seed)
        self._guarded(case, lambda: self.parts[part](case))
        if seed is not None and part != "random":
            self._guarded(case, lambda: self._check_other_cases(case))
        if not case.comparisons:
            raise RuntimeError(f"the checker {self.name}: {part} compared nothing")

    def _guarded(self, case: Case, act: Callable[[], object]) -> None:
        """Whatever goes wrong as the student's object is judged, the check has failed."""
        student = case.student
        try:
            act()
        except CheckFailed:
            raise
        except AttributeError as error:
            if isinstance(student, type) and isinstance(error.obj, student):
                case.fail(f"{student.__name__} has no {error.name!r}; the statement asks for it", cause=error)
            case.fail(_cannot_go_on(error), cause=error)
        except Exception as error:  # the checker tripped over what the student's code returned
            case.fail(_cannot_go_on(error), cause=error)

    def _check_other_cases(self, case: Case) -> None:
        """Fixed cases can be learnt by heart; a checker that can make others looks at some where a seed is given."""

    def _recognised(self, failed: CheckFailed, student: object, part: str, seed: int | None) -> str | None:
        """The hint of the misconception that fails with the same words."""
        title = f"{self.name}: {part}: "  # which may have the function's name in it, and stays
        return self._known_by(failed, student, title, lambda wrong: self._run(wrong, part, seed))

    def _known_by(self, failed: CheckFailed, student: object, title: str, again: Callable[[Any], object]) -> str | None:
        said = _without_names(failed, student, title)
        for hint, wrong in self.misconceptions.items():
            try:
                again(wrong)
            except CheckFailed as known:
                if _same_words(_without_names(known, wrong, title), said):
                    return hint
        return None


def last_call() -> LastCall:
    """The call that the last failed check was about: `last_call().args`, `last_call().again(my_function)`.

    Raises LookupError if no check has failed.
    """
    if not _last:
        raise LookupError("no check has failed yet, so there is no call to look at")
    return _last[0]


def noted(table: Any, draw: Draw) -> Iterable[tuple[str, Any]]:
    """(note, case) of a table of cases, or of a mapping with a note on each, or of a function of a `Draw` that gives
    either. The note is empty where there is none."""
    table = table(draw) if callable(table) else table
    return table.items() if isinstance(table, Mapping) else (("", one) for one in table)


def switched(reference: Any, misconceptions: Mapping[str, Any] | None) -> dict[str, Any]:
    """hint -> wrong answer, where a dictionary of switches stands for the reference with these."""
    return {
        hint: functools.partial(reference, **wrong) if isinstance(wrong, dict) else wrong
        for hint, wrong in (misconceptions or {}).items()
    }


def _mark(value: Any) -> Any:
    if isinstance(value, dict):
        return [(name, id(one), len(one) if isinstance(one, list) else 0) for name, one in value.items()]
    return id(value), len(value) if isinstance(value, list) else 0


def _without_names(failed: CheckFailed, student: object, title: str) -> str:
    """A message in which the answer has no name of its own, so that two answers can be compared."""
    return failed.facts.removeprefix(title).replace(getattr(student, "__qualname__", type(student).__name__), "_")


def _same_words(left: str, right: str) -> bool:
    """Whether two messages are one, up to what rounding changes in their numbers."""
    texts, numbers = zip(*((_DECIMAL.split(text), map(float, _DECIMAL.findall(text))) for text in (left, right)))
    return texts[0] == texts[1] and all(math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-4) for pair in zip(*numbers))


def _cannot_go_on(error: Exception) -> str:
    return f"the check could not go on with what it was given: {type(error).__name__}: {error}"


SEAL = Seal(compare, wording, draw, failure, snapshot, origin, _case, sys.modules[__name__])
