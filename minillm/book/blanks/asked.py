"""One blank of a chapter: a question whose answer is a number. Built in chapter 24."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blank:
    """A question with a number for an answer; the chapter's text has the answer folded."""

    question: str
    answer: float
    unit: str = ""
    within: float = 0.01  # share of the answer by which a number may be off
