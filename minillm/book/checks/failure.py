"""What a check says when it does not pass, in the notebook too: a few lines, and the call to try again.
Built in chapter 00."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.book.checks.snapshot import detached

_FOLDER = str(Path(__file__).resolve().parents[2])  # the package
_STANDARD_LIBRARY = str(Path(os.__file__).resolve().parent)
_CALLS = 3  # how many calls a message shows
_FRAMES = 2  # and how many lines of the answer itself


class CheckFailed(AssertionError):
    """A check did not pass; the message says what was called, what was expected, what came back, and a hint.

    facts: the first lines, without calls and hint; hint: the sentence under them; call: the call that failed.
    """

    def __init__(
        self, facts: str, *, calls: tuple[str, ...] = (), hint: str = "", call: LastCall | None = None
    ) -> None:
        self.facts, self.calls, self.hint, self.call = facts, calls, hint, call
        super().__init__(facts)

    def __str__(self) -> str:
        lines, earlier = [self.facts], len(self.calls) - _CALLS
        shown = [f"... {earlier} earlier call{'s' if earlier > 1 else ''}"] * (earlier > 0)
        for index, text in enumerate([*shown, *self.calls[-_CALLS:]]):
            lines.append(f"  {'called:' if index == 0 else '':<9} {text}")
        return "\n".join(lines + [f"  {'hint:':<9} {self.hint}"] * bool(self.hint))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message and the lines of the answer, none of the checker."""
        cut = self.call is not None and any(sign in self.calls[-1] for sign in ("...", "tensor[", "array["))
        again = (
            [f"  {'again:':<9} from minillm.book.checks import last_call; last_call() has these arguments"]
            if cut
            else []
        )
        return [f"{type(self).__name__}: {self}", *own_lines(self.__cause__), *again]


@dataclass(frozen=True)
class LastCall:
    """The call that a check failed on: `name`, and `args` and `kwargs` as they were before it."""

    name: str
    args: tuple
    kwargs: dict[str, Any]

    def again(self, function: Any) -> Any:
        """`function` with the same arguments, in a copy: `checks.last_call().again(my_function)`."""
        args, kwargs = detached((self.args, self.kwargs))
        return function(*args, **kwargs)


def own_lines(error: BaseException | None) -> list[str]:
    """The last lines of an answer's own code that an exception came through, as a notebook shows them."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if _written_here(frame.filename)]
    return [
        f"  {'at:' if index == 0 else '':<9} line {frame.lineno} of {frame.name}: {(frame.line or '').strip()}"
        for index, frame in enumerate(own[-_FRAMES:])
    ]


def _written_here(filename: str) -> bool:
    """Whether this is a cell of a notebook or a file of the reader's, not the package, a library or Python itself."""
    return not filename.startswith((_FOLDER, _STANDARD_LIBRARY, "<frozen")) and "-packages" not in filename
