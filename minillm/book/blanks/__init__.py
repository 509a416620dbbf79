"""Blanks in a chapter's text: the reader fills in a number, and is told whether it is right. Built in chapter 24."""

from __future__ import annotations

import math
import pkgutil
from importlib import import_module

from minillm.book.blanks.asked import Blank
from minillm.book.chips import Html
from minillm.book.style import colour

BLANKS: dict[str, Blank] = {}
for _module in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name.startswith("ch")):
    BLANKS |= import_module(f"{__name__}.{_module}").BLANKS


def blank(name: str, given: object) -> Html:
    """Whether `given`, which the reader put in the place of `...`, is the answer to the blank `name`.

    Raises KeyError for a name that is no blank, and TypeError for what is no number.
    """
    asked = BLANKS[name]
    if given is ...:
        return _told(asked, "Put your number in the place of the three dots and run the cell again.", "limit")
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"given={given!r}: put one number in the place of the three dots")
    said = f"{given:,.6g} {asked.unit}".rstrip()
    if math.isclose(given, asked.answer, rel_tol=asked.within):
        return _told(asked, f"✓ {said}", "good")
    return _told(asked, f"{said}: too {'large' if given > asked.answer else 'small'}.", "wasted")


def _told(asked: Blank, verdict: str, role: str) -> Html:
    style = f"border-left:4px solid {colour(role)};background:#f6f8fa;color:#24292f;padding:6px 12px;margin:4px 0"
    text = f"{asked.question}\n{verdict}"
    return Html(f'<div style="{style};font:14px sans-serif">{text.replace(chr(10), "<br>")}</div>', text)
