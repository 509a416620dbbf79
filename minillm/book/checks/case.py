"""One run of one check: calls the student's code, compares, and says what went wrong first. Built in chapter 00."""
from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NoReturn

from minillm.book.checks.compare import Difference, first_difference, same, short


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

    def close(self, got: Any, expected: Any, what: str = "the result", *, atol: float = 1e-5, rtol: float = 1e-5,
              hint: str | None = None) -> None:
        """As `equal`, with floats within `atol + rtol * |expected|`."""
        self.comparisons += 1
        self._report(first_difference(got, expected, atol, rtol), what, hint)

    def true(self, condition: Any, message: str, *, hint: str | None = None) -> None:
        """`condition` holds; `message` says what is wrong where it does not."""
        self.comparisons += 1
        if not bool(condition):
            self.fail(message, hint=hint)

    def raises(self, kind: type[Exception], function: Callable, *args: Any, hint: str | None = None, **kwargs: Any) -> None:
        """`function(*args)` raises `kind`, as the statement asks."""
        self.comparisons += 1
        name = getattr(function, "__qualname__", None) or type(function).__name__
        self._calls.append(f"{name}({', '.join(short(a) for a in args)})")
        try:
            result = function(*args, **kwargs)
        except kind as error:
            if not (isinstance(error, NotImplementedError) and kind is not NotImplementedError):
                return
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except NotImplementedError as error:
            self.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except Exception as error:
            self.fail(f"{name} raised {type(error).__name__}: {error}; expected {kind.__name__}", cause=error, hint=hint)
        self.fail(f"{name} returned {short(result)}; expected it to raise {kind.__name__}", hint=hint)

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
            shown = ([f"... {earlier} earlier calls"] if earlier > 0 else []) + self._calls[-4:]
            lines += [f"  {'called:' if i == 0 else '':<9} {call}" for i, call in enumerate(shown)]
        hint = self.hint if hint is None else hint
        lines += [f"  {'hint:':<9} {hint}"] if hint else []
        raise CheckFailed("\n".join(lines)) from cause

    def _report(self, difference: Difference | None, what: str, hint: str | None) -> None:
        if difference is None:
            return
        place = f" at {difference.place}" if difference.place else ""
        lines = [f"{what} is wrong{place}: {difference.problem}" if difference.problem else f"{what} is wrong{place}",
                 f"  {'expected:':<9} {difference.expected}", f"  {'got:':<9} {difference.got}"]
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
