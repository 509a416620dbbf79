"""Checkers: the same judge in the notebook, in pytest, in nbgrader and on Colab. Built in chapter 00.

A chapter's checkers are in `minillm.book.checks.chNN`:

    check_top_p = Checker("top_p", hint="The token that crosses the threshold stays in.")

    @check_top_p.part("example")
    def _example(case):
        case.close(case.call(torch.tensor([0.5, 0.3, 0.2]), 0.7), torch.tensor([0.5, 0.3, 0.0]))

and a graded cell says `check_top_p(top_p_filter, "example")`.
"""

from __future__ import annotations

from collections.abc import Callable

from minillm.book.checks.case import Case, CheckFailed
from minillm.book.checks.origin import refuse_reference

__all__ = ["PARTS", "Case", "CheckFailed", "Checker"]

PARTS = ("example", "edges", "random")


class Checker:
    """Judges one exercise in three parts: the example, the edges, random trials.

    name:   the exercise's id.
    hint:   one sentence that stands under every failure of this checker, unless the comparison brings its own.
    forbid: dotted names of the package's functions that the student's code must not call.
    allow:  dotted names of the package's classes that the student's class may derive from (a protocol, say).
    """

    def __init__(self, name: str, *, hint: str = "", forbid: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> None:
        self.name, self.hint, self.forbid, self.allow = name, hint, forbid, allow
        self.parts: dict[str, Callable[[Case], None]] = {}

    def part(self, name: str) -> Callable:
        """Decorator: the function that judges part `name`; it gets a `Case`."""
        if name not in PARTS:
            raise ValueError(f"part {name!r}: one of {', '.join(PARTS)}")

        def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
            self.parts[name] = function
            return function

        return register

    def __call__(self, student: object, part: str, seed: int | None = None) -> None:
        """Judge `student`; prints one line when it passes, raises CheckFailed when it does not.

        seed changes the random trials; hidden tests bring their own.
        """
        if part not in self.parts:
            raise ValueError(f"{self.name} has no part {part!r}; it has {', '.join(self.parts) or 'none'}")
        refuse_reference(student, self.name, self.forbid, self.allow)
        case = Case(student, f"{self.name}: {part}", self.hint, 0 if seed is None else seed)
        try:
            self.parts[part](case)
        except CheckFailed:
            raise
        except AttributeError as error:
            if isinstance(student, type) and isinstance(error.obj, student):
                case.fail(f"{student.__name__} has no {error.name!r}; the statement asks for it", cause=error)
            case.fail(_cannot_go_on(error), cause=error)
        except Exception as error:  # the checker tripped over what the student's code returned
            case.fail(_cannot_go_on(error), cause=error)
        if not case.comparisons:
            raise RuntimeError(f"the checker {self.name}: {part} compared nothing")
        print(f"✓ {self.name}: {part}")


def _cannot_go_on(error: Exception) -> str:
    return f"the check could not go on with what it was given: {type(error).__name__}: {error}"
