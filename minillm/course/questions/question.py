"""A question of an exam: a template, and a seed that draws its numbers.

Two seeds differ in the answer and not in the difficulty: every variant of a question has as many numbers in its text
and as many steps of working, falls into the same case, and has an answer of the same size. Tests draw 200 seeds of
every question and compare these features.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

KINDS = ("computed", "code", "written")
MOST_DRAWS = 10_000  # until a condition holds
T = TypeVar("T")


class Draw:
    """What a question draws from; the same seed and name give the same draws on every machine."""

    def __init__(self, seed: object, name: str = ""):
        self.rng = random.Random(f"{seed}\n{name}")

    def of(self, *options: T) -> T:
        """One of several."""
        return self.rng.choice(options)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A whole number, low <= x <= high, a multiple of `step` away from `low`."""
        return self.rng.randrange(low, high + 1, step)

    def numbers(self, count: int, low: int, high: int, step: int = 1) -> list[int]:
        """`count` different whole numbers, in random order."""
        return self.rng.sample(range(low, high + 1, step), count)

    def until(self, make: Callable[[], T], holds: Callable[[T], bool]) -> T:
        """Call `make` until what it made satisfies `holds`. Raises RuntimeError if that takes too long."""
        for _ in range(MOST_DRAWS):
            if holds(made := make()):
                return made
        raise RuntimeError(f"no draw of {MOST_DRAWS:,} satisfies the question's condition; widen its ranges")


@dataclass(frozen=True)
class Variant:
    """One drawn question.

    text:    Markdown, with LaTeX between dollar signs.
    answer:  a number, or a list of whole numbers; a model answer in words for a written question.
    working: the steps of the key, one operation each.
    slips:   what a known mistake makes of the answer -> the mistake; none equals the answer or another.
    case:    the case that the numbers fall into (such as "memory-bound"), the same for every seed.
    """

    text: str
    answer: Any
    working: tuple[str, ...] = ()
    slips: Mapping[str, Any] = field(default_factory=dict)
    case: str = ""


@dataclass(frozen=True)
class Question:
    """A template. One point a minute, so that an exam of 90 minutes has 90 points.

    objective: words that stand in exactly one of the chapter's objectives, which this question tests.
    rubric:    what earns points, in order; the last item is the result.
    within:    bounds of the answer, or of the sum of a list; at most a factor of 10 apart.
    tolerance: share by which a number may be off; 0 for what is counted.
    """

    id: str
    kind: str
    chapter: int
    objective: str
    title: str
    minutes: int
    rubric: tuple[str, ...]
    make: Callable[[Draw], Any]
    unit: str = ""
    tolerance: float = 0.0
    within: tuple[float, float] | None = None

    def variant(self, seed: object) -> Any:
        """A `Variant`, or a `CodeVariant` of a code question. Numbers are drawn again until `is_fair` holds."""
        draw = Draw(seed, self.id)
        return draw.until(lambda: self.make(draw), self.is_fair) if self.kind == "computed" else self.make(draw)

    def is_fair(self, variant: Variant) -> bool:
        """Whether the answer has the size that it should have, and differs from every known mistake."""
        size = sum(variant.answer) if isinstance(variant.answer, list) else variant.answer
        options = [variant.answer, *variant.slips.values()]
        pairs = itertools.combinations(options, 2)
        return self.within[0] <= size <= self.within[1] and not any(
            is_same(*pair, 2 * self.tolerance) for pair in pairs
        )

    @property
    def points(self) -> int:
        return self.minutes

    @property
    def graded_rubric(self) -> list[tuple[int, str]]:
        """(points, what earns them): shared evenly; what does not divide goes to the last items."""
        each, over = divmod(self.points, len(self.rubric))
        return [(each + (place >= len(self.rubric) - over), item) for place, item in enumerate(self.rubric)]


class Bank:
    """The questions of one part of the book, in order. Its decorators take the fields of a `Question`."""

    def __init__(self):
        self.questions: list[Question] = []

    def computed(self, chapter: int, objective: str, **fields: Any) -> Callable:
        """A question whose answer is a number or a list of whole numbers."""
        return self._adds("computed", chapter, objective, fields)

    def code(self, chapter: int, objective: str, **fields: Any) -> Callable:
        """A question whose answer is a function; `make` returns a `CodeVariant`."""
        return self._adds("code", chapter, objective, {"rubric": CODE_RUBRIC} | fields)

    def written(self, chapter: int, objective: str, title: str, text: str, answer: str, **fields: Any) -> None:
        """A question that is answered in a few sentences and graded by a person."""
        make = lambda draw: Variant(text, answer)
        self._adds("written", chapter, objective, {"title": title, "minutes": 8} | fields)(make, _name(title))

    def _adds(self, kind: str, chapter: int, objective: str, fields: dict[str, Any]) -> Callable:
        def register(make: Callable[[Draw], Any], name: str = "") -> Callable[[Draw], Any]:
            name = f"{chapter:02}.{name or make.__name__}"
            self.questions.append(Question(name, kind, chapter, objective, make=make, **fields))
            return make

        return register


CODE_RUBRIC = ("the examples of the statement pass", "the edge cases pass", "the random cases pass")


def answered(given: object, answer_is_a_list: bool = False) -> None:
    """Whether a student's answer has the right form, not whether it is right; raises AssertionError otherwise."""
    if given is ...:
        raise AssertionError("no answer yet: put yours in the place of the three dots")
    if answer_is_a_list:
        whole = isinstance(given, (list, tuple)) and all(_is_number(one) and one == int(one) for one in given)
        if not whole:
            raise AssertionError(f"{given!r} is not a list of whole numbers such as [3, 1, 4]")
    elif not _is_number(given):
        raise AssertionError(f"{given!r} is not one finite number")


def right(given: object, answer: Any, tolerance: float = 0.0, slips: Mapping[str, Any] | None = None) -> None:
    """Grade one answer; raises AssertionError that names the mistake where it is a known one."""
    answered(given, isinstance(answer, list))
    if is_same(given, answer, tolerance):
        return
    known = [mistake for mistake, value in (slips or {}).items() if is_same(given, value, tolerance)]
    raise AssertionError(f"{given} is not the answer" + (f": {known[0]}" if known else ""))


def is_same(given: Any, answer: Any, tolerance: float = 0.0) -> bool:
    """Equal, for lists element by element; numbers within the share `tolerance`."""
    if isinstance(answer, list) or isinstance(given, (list, tuple)):
        return isinstance(answer, list) and isinstance(given, (list, tuple)) and list(given) == answer
    return math.isclose(given, answer, rel_tol=tolerance + 1e-12)


def shown(value: Any) -> str:
    """An answer as the key prints it."""
    if isinstance(value, list):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def each_of(values: Iterable[object]) -> str:
    """Values as a sentence lists them."""
    return ", ".join(str(value) for value in values)


def rows_of(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(header), ["---"] * len(list(header)), *map(list, rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _name(title: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
