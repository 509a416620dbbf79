"""Holes in a chapter's text: a function for the reader to write, checked, with the book's answer at hand.
Built in chapter 23."""

from __future__ import annotations

import dis
import html
from collections.abc import Callable

from minillm.book.chips import Html
from minillm.book.style import colour

_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}  # what a body of `...` compiles to


def fill_in(attempt: Callable, answer: Callable, check: Callable[[Callable], str | None]) -> Callable:
    """The reader's function if it is right, the book's otherwise, so that the notebook goes on either way.

    check: says in a sentence what is wrong with a function, or returns None.
    """
    from IPython.display import display

    try:
        wrong = check(attempt)
    except Exception as error:
        wrong = f"it raised {type(error).__name__}: {error}"
    if wrong is None:
        display(_box("good", f"✓ {attempt.__name__} is right, and the notebook goes on with yours."))
        return attempt
    if is_empty(attempt):
        said = f"{attempt.__name__} is still empty. Write it above and run the cell again, or unfold the answer below."
    else:
        said = f"{attempt.__name__} is not right yet: {wrong}."
    display(_box("prediction", f"{said} Until it is right, the notebook goes on with the book's answer."))
    return answer


def is_empty(function: Callable) -> bool:
    """Whether a function's body is nothing but `...` or `pass`, perhaps under a docstring."""
    steps = list(dis.get_instructions(function))
    return all(step.opname in _NOTHING and (step.opname == "RESUME" or step.argval is None) for step in steps)


def _box(role: str, text: str) -> Html:
    style = f"border-left:4px solid {colour(role)};background:#f8f9fa;color:#24292f;padding:6px 12px;margin:4px 0"
    return Html(f'<div style="{style};font:14px sans-serif">{html.escape(text)}</div>', text)
