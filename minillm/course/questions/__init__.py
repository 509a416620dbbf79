"""The bank of exam questions: every question is a template, and a seed draws its numbers.

There are three kinds. A computed question has a number or a list for an answer, computed by the package itself; a code
question is a function with a drawn rule, graded by a checker that follows from the same reference; a written question
has a rubric. `bank()` lists them, `minillm course exam` makes an exam of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module

from minillm.course.questions.question import KINDS, Question, answered, right

CHAPTERS = range(1, 26)  # each with a module of its own, chNN

__all__ = ["KINDS", "Question", "answered", "bank", "question", "right"]


@cache
def bank() -> tuple[Question, ...]:
    """All questions, by chapter; within a chapter computed ones first, then code, then written ones."""
    modules = (import_module(f"{__name__}.ch{chapter:02}") for chapter in CHAPTERS)
    return tuple(sorted((one for module in modules for one in module.BANK.questions), key=_place))


def question(question_id: str) -> Question:
    """The question of an id such as "03.cache_bytes". Raises KeyError with the ids of its chapter otherwise."""
    found = {one.id: one for one in bank()}
    if question_id not in found:
        near = [name for name in found if name[:2] == question_id[:2]] or list(found)[:5]
        raise KeyError(f"no question {question_id!r}; there are {', '.join(near)}")
    return found[question_id]


def of_chapters(chapters: Iterable[int]) -> list[Question]:
    """The questions of these chapters. Raises ValueError for a chapter without one."""
    wanted = sorted(set(chapters))
    if not wanted:
        raise ValueError("chapters: an exam needs at least one")
    missing = [chapter for chapter in wanted if not any(one.chapter == chapter for one in bank())]
    if missing:
        known = sorted({one.chapter for one in bank()})
        raise ValueError(
            f"chapters={missing} have no questions; there are questions of {known[0]:02} to {known[-1]:02}"
        )
    return [one for one in bank() if one.chapter in wanted]


def _place(one: Question) -> tuple[int, int]:
    return one.chapter, KINDS.index(one.kind)
