"""One run of one check: calls the student's code, compares, and says what went wrong first. Built in chapter 00."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from minillm.book.checks.compare import Difference, first_difference, kind_of, kind_wanted, same, short

_NEVER_PLURAL = ("bias", "axis", "loss", "mass")


class CheckFailed(AssertionError):
    """A check did not pass; the message says what was called, what was expected, what came back, and a hint."""


class Case:
    """Handed to each part of a checker.

    student: the object under test; rng: a seeded `random.Random`; comparisons: how many were made.
    """

    def __init__(self, student: Any, title: str, hint: str, seed: int) -> None:
        self.student, self.title, self.hint, self.seed = student, title, hint, seed
        self.rng = random.Random(seed)
        self.comparisons = 0
        self._calls: list[str] = []
        self._generator = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """`student(*args, **kwargs)`; fails if it raises, or if it changes an argument."""
        return self.run(self.student, *args, **kwargs)

    def run(self, function: Callable, *args: Any, may_change: bool = False, **kwargs: Any) -> Any:
        """Call anything of the student's (`case.run(pool.allocate, 3)`), noted for the message of a failure.

        may_change: the statement lets it write into its arguments.
        """
        name = getattr(function, "__qualname__", None) or type(function).__name__
        told = [short(a) for a in args] + [f"{k}={short(v)}" for k, v in kwargs.items()]
        self._calls.append(f"{name}({', '.join(told)})")
        before = None if may_change else copy.deepcopy((_data(args), _data(kwargs)))
        try:
            result = function(*args, **kwargs)
        except NotImplementedError as error:
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except Exception as error:
            self.fail(f"{name} raised {type(error).__name__}: {error}", cause=error)
        if before is not None and not same((_data(args), _data(kwargs)), before):
            self.fail(f"{name} changed one of its arguments; it must leave them as they were")
        return result

    def equal(self, got: Any, expected: Any, what: str = "the result", *, hint: str | None = None) -> None:
        """The same values, lengths and shapes: numbers, strings, lists, tuples, dicts, arrays, tensors."""
        self.comparisons += 1
        self._report(first_difference(got, expected), what, hint)

    def close(
        self,
        got: Any,
        expected: Any,
        what: str = "the result",
        *,
        atol: float = 1e-5,
        rtol: float = 1e-5,
        hint: str | None = None,
    ) -> None:
        """As `equal`, with floats within `atol + rtol * |expected|`."""
        self.comparisons += 1
        self._report(first_difference(got, expected, atol, rtol), what, hint)

    def is_a(self, got: Any, kind: Any, what: str = "the result", *, of: Any = None, hint: str | None = None) -> None:
        """`got` is of a Python type or of a torch dtype (True is no int, int32 is not int64),
        its elements of type `of`."""
        self.comparisons += 1
        if kind_of(got) != kind_wanted(kind):
            self.fail(f"{what} must be {kind_wanted(kind)}; got {kind_of(got)}: {short(got)}", hint=hint)
        for index, element in enumerate(got if of else ()):
            self.is_a(element, of, f"{what}, element {index},", hint=hint)

    def true(self, condition: Any, message: str, *, hint: str | None = None) -> None:
        """`condition` holds; `message` says what is wrong where it does not."""
        self.comparisons += 1
        if not bool(condition):
            self.fail(message, hint=hint)

    def raises(
        self, kind: type[Exception], function: Callable, *args: Any, hint: str | None = None, **kwargs: Any
    ) -> Exception:
        """`function(*args)` raises `kind`, as the statement asks; returns what it raised."""
        self.comparisons += 1
        name = getattr(function, "__qualname__", None) or type(function).__name__
        self._calls.append(f"{name}({', '.join(short(a) for a in args)})")
        try:
            result = function(*args, **kwargs)
        except kind as error:
            if not (isinstance(error, NotImplementedError) and kind is not NotImplementedError):
                return error
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except NotImplementedError as error:
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except Exception as error:
            self.fail(
                f"{name} raised {type(error).__name__}: {error}; expected {kind.__name__}", cause=error, hint=hint
            )
        self.fail(f"{name} returned {short(result)}; expected it to raise {kind.__name__}", hint=hint)

    @contextlib.contextmanager
    def hinting(self, hint: str) -> Iterator[None]:
        """`hint` stands under every failure inside, also where the student's code raises."""
        before, self.hint = self.hint, hint
        try:
            yield
        finally:
            self.hint = before

    def randn(self, *shape: int):
        """Normal random numbers, float32, from this case's seed."""
        import torch

        return torch.randn(*shape, generator=self._torch())

    def randint(self, low: int, high: int, *shape: int):
        """Whole random numbers, int64, low <= x < high; a plain int without a shape."""
        import torch

        return torch.randint(low, high, shape, generator=self._torch()) if shape else self.rng.randrange(low, high)

    def fail(self, message: str, *, hint: str | None = None, cause: Exception | None = None) -> NoReturn:
        """Raise CheckFailed with the message, the calls that led here and a hint."""
        lines = [f"{self.title}: {message}"]
        if self._calls:
            earlier = len(self._calls) - 4
            shown = ([f"... {earlier} earlier call{'s' if earlier > 1 else ''}"] if earlier > 0 else []) + self._calls[
                -4:
            ]
            lines += [f"  {'called:' if i == 0 else '':<9} {call}" for i, call in enumerate(shown)]
        hint = self.hint if hint is None else hint
        lines += [f"  {'hint:':<9} {hint}"] if hint else []
        raise CheckFailed("\n".join(lines)) from cause

    def _report(self, difference: Difference | None, what: str, hint: str | None) -> None:
        if difference is None:
            return
        place = f" at {difference.place}" if difference.place else ""
        wrong = f"{what} {_is_or_are(what)} wrong{place}"
        lines = [
            f"{wrong}: {difference.problem}" if difference.problem else wrong,
            f"  {'expected:':<9} {difference.expected}",
            f"  {'got:':<9} {difference.got}",
        ]
        self.fail("\n".join(lines), hint=hint)

    def _torch(self):
        import torch

        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.seed)
        return self._generator


def _data(value: Any) -> Any:
    """The part of the arguments that can be copied and compared: tensors and plain containers."""
    if isinstance(value, (list, tuple)):
        return [_data(v) for v in value]
    if isinstance(value, dict):
        return {key: _data(v) for key, v in value.items()}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value.detach() if hasattr(value, "detach") else value
    return value if isinstance(value, (int, float, str, bytes, bool, type(None))) else None


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
