"""One run of one check: calls the student's code, compares, and says what went wrong first. Built in chapter 00."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from minillm.book.checks.compare import Difference, end_modes, first_difference, modes_on
from minillm.book.checks.draw import Draw
from minillm.book.checks.failure import CheckFailed, LastCall
from minillm.book.checks.snapshot import Given
from minillm.book.checks.wording import kind_of, kind_wanted, of_library, short

__all__ = ["Case", "CheckFailed", "Raised"]

_NEVER_PLURAL = ("bias", "axis", "loss", "mass")


@dataclass(frozen=True)
class Raised:
    """The outcome of a call that raised: of which kind."""

    kind: type[BaseException]


class Case(Draw):
    """Handed to each part of a checker; also draws its random cases.

    student: the object under test; rng: a seeded `random.Random`; comparisons: how many were made.
    diagnose: from what came back (or `Raised`) to a hint, None where it knows none; used if a comparison has no hint.
    """

    def __init__(self, student: Any, title: str, hint: str, seed: int) -> None:
        super().__init__(seed)
        self.student, self.title, self.hint = student, title, hint
        self.comparisons = 0
        self.diagnose: Callable[[Any], str | None] = lambda outcome: None
        self._calls: list[str] = []
        self._last: Callable[[], LastCall] | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """`student(*args, **kwargs)`; fails if it raises, or if it changes an argument."""
        return self.run(self.student, *args, **kwargs)

    def run(self, function: Callable, *args: Any, may_change: bool = False, lend: bool = False, **kwargs: Any) -> Any:
        """Call anything of the student's (`case.run(pool.allocate, 3)`), noted for the message of a failure.

        The function gets copies of numbers, containers, arrays and tensors: what it does to them reaches no oracle.
        may_change: the statement lets it write into its arguments, which are then the caller's own.
        lend: it gets the caller's own objects, so that it can be seen whether it keeps them; it may not change them.
        """
        name, modes = self._note(function, args, kwargs), modes_on()
        given = None if may_change else Given(args, kwargs)
        self._last = lambda: LastCall(name, *(given.as_they_were() if given else (args, kwargs)))
        if lend and given:
            given.swap()
        try:
            result = function(*given.args, **given.kwargs) if given else function(*args, **kwargs)
        except CheckFailed:  # what the check handed in has seen enough
            raise
        except NotImplementedError as error:
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except (Exception, SystemExit) as error:
            hint = self.diagnose(Raised(type(error)))
            self.fail(f"{name} raised {type(error).__name__}: {_text(error)}", cause=error, hint=hint)
        self._refuse_modes(name, modes)
        if given:
            self._refuse_change(name, given)
        return result

    def _refuse_change(self, name: str, given: Given) -> None:
        if changed := given.change():
            self.fail(
                f"{name} changed one of its arguments; it must leave them as they were\n"
                f"  {'before:':<9} {changed.expected}\n  {'after:':<9} {changed.got}",
                hint="Work on a copy." if not self.hint else None,
            )

    def _refuse_modes(self, name: str, before: int) -> None:
        if end_modes(modes_on() - before):
            self.fail(f"{name} left a mode of torch's on, which stands in for torch's operations", hint="")

    def equal(
        self,
        got: Any,
        expected: Any,
        what: str = "the result",
        *,
        hint: str | None = None,
        kinds: bool = True,
        dtypes: bool = False,
    ) -> None:
        """The same values, lengths, shapes and kinds: numbers, strings, lists, tuples, dicts, sets, arrays, tensors.

        kinds, dtypes: as in `compare.first_difference`.
        """
        self.close(got, expected, what, atol=0.0, rtol=0.0, hint=hint, kinds=kinds, dtypes=dtypes)

    def close(
        self,
        got: Any,
        expected: Any,
        what: str = "the result",
        *,
        atol: float = 1e-5,
        rtol: float = 1e-5,
        hint: str | None = None,
        kinds: bool = True,
        dtypes: bool = False,
    ) -> None:
        """As `equal`, with floats within `atol + rtol * |expected|`."""
        self.comparisons += 1
        difference = first_difference(got, expected, atol, rtol, kinds=kinds, dtypes=dtypes)
        if difference is not None:
            self._report(difference, what, self.diagnose(got) if hint is None else hint)

    def is_a(self, got: Any, kind: Any, what: str = "the result", *, of: Any = None, hint: str | None = None) -> None:
        """`got` is of a Python type or of a torch dtype (True is no int, int32 is not int64),
        its elements of type `of`."""
        self.comparisons += 1
        if kind_of(got) != kind_wanted(kind) or (isinstance(kind, type) and type(got) is not kind):
            self.fail(f"{what} must be {kind_wanted(kind)}; got {kind_of(got)}: {short(got)}", hint=hint)
        for index, element in enumerate(got if of else ()):
            self.is_a(element, of, f"{what}, element {index},", hint=hint)

    def true(self, condition: Any, message: str, *, hint: str | None = None) -> None:
        """`condition` holds; `message` says what is wrong where it does not."""
        self.comparisons += 1
        if not of_library(type(condition)) or not bool(condition):  # an answer's own object cannot say that it is true
            self.fail(message, hint=hint)

    def raises(
        self, kind: type[Exception], function: Callable, *args: Any, hint: str | None = None, **kwargs: Any
    ) -> Exception:
        """`function(*args)` raises `kind`, as the statement asks, and leaves its arguments as they were.
        Returns what it raised."""
        self.comparisons += 1
        name, modes = self._note(function, args, kwargs), modes_on()
        given = Given(args, kwargs)
        self._last = lambda: LastCall(name, *given.as_they_were())
        try:
            result = function(*given.args, **given.kwargs)
        except CheckFailed:
            raise
        except kind as error:
            if not (isinstance(error, NotImplementedError) and kind is not NotImplementedError):
                self._refuse_modes(name, modes)
                self._refuse_change(name, given)
                return error
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except NotImplementedError as error:
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except (Exception, SystemExit) as error:
            hint = self.diagnose(Raised(type(error))) if hint is None else hint
            told = f"{name} raised {type(error).__name__}: {_text(error)}; expected {kind.__name__}"
            self.fail(told, cause=error, hint=hint)
        hint = self.diagnose(result) if hint is None else hint
        self.fail(f"{name} returned {short(result)}; expected it to raise {kind.__name__}", hint=hint)

    @contextlib.contextmanager
    def hinting(self, hint: str) -> Iterator[None]:
        """`hint` stands under every failure inside, also where the student's code raises."""
        before, self.hint = self.hint, hint
        try:
            yield
        finally:
            self.hint = before

    def fail(self, message: str, *, hint: str | None = None, cause: BaseException | None = None) -> NoReturn:
        """Raise CheckFailed with the message, the calls that led here and a hint."""
        hint = self.hint if hint is None else hint
        call = self._last() if self._last else None
        raise CheckFailed(f"{self.title}: {message}", calls=tuple(self._calls), hint=hint, call=call) from cause

    def _note(self, function: Callable, args: tuple, kwargs: dict) -> str:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        told = [short(a) for a in args] + [f"{k}={short(v)}" for k, v in kwargs.items()]
        self._calls.append(f"{name}({', '.join(told)})")
        return name

    def _report(self, difference: Difference, what: str, hint: str | None) -> None:
        place = f" at {difference.place}" if difference.place else ""
        wrong = f"{what} {_is_or_are(what)} wrong{place}"
        lines = [
            f"{wrong}: {difference.problem}" if difference.problem else wrong,
            f"  {'expected:':<9} {difference.expected}",
            f"  {'got:':<9} {difference.got}",
        ]
        self.fail("\n".join(lines), hint=hint)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # an exception class of the answer's own
        return f"(its message cannot be read: {type(broken).__name__})"


def _is_or_are(what: str) -> str:
    """The verb for "the logits after an empty output" and for "the mask [row, token]";
    a name such as num_tokens is one thing."""
    head = re.split(
        r"[\[,]| \(| (?:of|in|for|with|after|before|at|where|when|that|to) ", what.rsplit("\n", 1)[-1].strip()
    )[0].strip()
    word = head.rsplit(" ", 1)[-1]
    return (
        "are"
        if word.isalpha() and word.endswith("s") and not word.endswith("ss") and word not in _NEVER_PLURAL
        else "is"
    )
