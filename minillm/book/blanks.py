"""Blanks in a chapter's text: the reader fills in a number, and is told whether it is right. Built in chapter 24."""

from __future__ import annotations

import math

from minillm.book.chips import Html
from minillm.book.style import colour


def fill_in(question: str, given: object, answer: float, *, within: float = 0.01, unit: str = "") -> Html:
    """Whether `given`, which the reader put in the place of `...`, is the answer, to a share of `within`.

    The answer is not shown: it is folded away in the text below. Raises TypeError for what is no number.
    """
    if given is ...:
        return _told(question, "Put your number in the place of the three dots and run the cell again.", "limit")
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"given={given!r}: put one number in the place of the three dots")
    if math.isclose(given, answer, rel_tol=within, abs_tol=1e-12):
        return _told(question, f"✓ {given:,g} {unit}".rstrip(), "good")
    hint = "too large" if given > answer else "too small"
    return _told(question, f"{given:,g} {unit}".rstrip() + f" is {hint}.", "wasted")


def _told(question: str, verdict: str, role: str) -> Html:
    style = f"border-left:4px solid {colour(role)};background:#f6f8fa;color:#24292f;padding:6px 12px;margin:4px 0"
    return Html(f'<div style="{style};font:14px sans-serif">{question}<br>{verdict}</div>', f"{question}\n{verdict}")
