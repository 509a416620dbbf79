"""`minillm course similarity`: pairs of answers whose shape is more alike than the exercise explains. A hint only."""

from __future__ import annotations

import csv
import html
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minillm.book import nbfile
from minillm.course.grading import plan
from minillm.course.grading.grade import submissions
from minillm.course.settings import Assignment, Course
from minillm.course.shapes import fingerprints

FLOOR = 0.5  # no pair below it is listed, however few answers there are
SMALLEST = 12  # fingerprints beside the stub's: shorter answers are alike by necessity
COMMON = 0.4  # of the class: what so many have written is an idiom of the exercise

NOTE = (
    "This is a hint, not a verdict. Everyone solves the same exercise, starts from the same stub and may have read the "
    "same help, so honest answers can be alike, and copied ones can be rewritten until they are not. Read both answers "
    "and talk to both students before you conclude anything."
)


@dataclass(frozen=True)
class Pair:
    """Two answers to one exercise. alike: the share of the smaller one's own fingerprints that the other has, 0 to 1.

    expected: the threshold of this exercise. of_reference: how much the closer of the two resembles the published
    solution, which explains that they resemble each other.
    """

    notebook: str
    exercise: str
    first: str
    second: str
    alike: float
    expected: float
    of_reference: float


def compare(course: Course, chapters: str | None = None, threshold: float | None = None) -> list[Pair]:
    """The pairs at or above the threshold, most alike first.

    threshold: 0 to 1; by default that of each exercise: FLOOR, or how much the answers of the class resemble the
    published solution (the upper quartile), which is what solving the same exercise brings, if that is more.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}: above 0, at most 1")
    found = [pair for assignment in course.chosen(chapters) for pair in _assignment(course, assignment, threshold)]
    return sorted(found, key=lambda pair: (-pair.alike, pair.notebook, pair.exercise, pair.first))


def _assignment(course: Course, assignment: Assignment, threshold: float | None) -> Iterable[Pair]:
    source = plan.Source.read(course.notebook_in("source", assignment))
    answers: dict[str, dict[str, str]] = {}
    for submission in submissions(course, assignment):
        try:
            nb = plan.prepared(nbfile.read(submission.path), source)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # `grade` reports files that are no notebooks
        for exercise, text in answers_in(nb, source).items():
            answers.setdefault(exercise, {})[submission.student] = text
    for exercise in source.exercises.values():
        yield from pairs(assignment.name, exercise, answers.get(exercise.id, {}), threshold)


def answers_in(nb, source: plan.Source) -> dict[str, str]:
    """Exercise -> the answer's cells, and the cells that the student added below them, as one source."""
    found: dict[str, list[str]] = {}
    for step in plan.steps_of(nb, source):
        if step.kind == "cell" and step.exercise in source.exercises and step.source.strip() not in source.own:
            found.setdefault(step.exercise, []).append(plan.python_of(step.source))
    return {exercise: "\n\n".join(cells) for exercise, cells in found.items()}


def pairs(
    notebook: str, exercise: plan.Exercise, answers: dict[str, str], threshold: float | None = None
) -> list[Pair]:
    """The pairs of one exercise. answers: student -> source."""
    stub, reference = fingerprints(exercise.stub), fingerprints(exercise.solution)
    shapes = {student: fingerprints(text) - stub for student, text in sorted(answers.items())}
    reference -= stub
    of_reference = {student: alike(shape, reference) for student, shape in shapes.items()}
    ranked = sorted(of_reference.values())
    expected = max(FLOOR, ranked[3 * len(ranked) // 4] if len(ranked) >= 4 else 0.0)
    expected = min(expected, 0.95) if threshold is None else threshold
    holders = Counter(mark for shape in shapes.values() for mark in shape)
    idioms = {mark for mark, count in holders.items() if count > max(2, COMMON * len(shapes))}
    own = {s: Counter({m: n for m, n in shape.items() if m not in idioms}) for s, shape in shapes.items()}
    found = []
    for first, second in itertools.combinations(shapes, 2):
        if min(own[first].total(), own[second].total()) < SMALLEST:
            continue
        value = alike(own[first], own[second])
        if value >= expected:
            closest = max(of_reference[first], of_reference[second])
            found.append(Pair(notebook, exercise.id, first, second, value, expected, closest))
    return found


def alike(first: Counter[int], second: Counter[int]) -> float:
    """The share of the smaller one's fingerprints that the larger one has; 0 where one is empty."""
    return (first & second).total() / min(first.total(), second.total()) if first and second else 0.0


def write(found: list[Pair], folder: Path) -> tuple[Path, Path]:
    """The report as similarity.csv and similarity.html in a folder; returns both files."""
    folder.mkdir(parents=True, exist_ok=True)
    table, page = folder / "similarity.csv", folder / "similarity.html"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["chapter", "exercise", "student", "other student", "alike", "threshold", "like the solution"])
        for p in found:
            numbers = (f"{n:.2f}" for n in (p.alike, p.expected, p.of_reference))
            writer.writerow([p.notebook, p.exercise, *map(_plain, (p.first, p.second)), *numbers])
    rows = "\n".join(_row(pair) for pair in found) or '<tr><td colspan="6">No pair is above its threshold.</td></tr>'
    page.write_text(_PAGE.format(note=NOTE, rows=rows), encoding="utf-8")
    return table, page


def _row(p: Pair) -> str:
    cells = [
        p.notebook,
        p.exercise,
        p.first,
        p.second,
        f"{p.alike:.0%} (from {p.expected:.0%})",
        f"{p.of_reference:.0%}",
    ]
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _plain(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Similar answers</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ccc; }}
</style>
<h1>Similar answers</h1>
<p><strong>{note}</strong></p>
<p>Compared is the shape of the code: names, literals, docstrings, comments and the order of definitions are taken away,
and so is what the stub has and what two fifths of the class have written. "Alike" is the share of the shorter answer
that the other one has. "Like the solution" says how close the closer of the two is to the published solution: where it
is high, both may have read it, and need not have read each other.</p>
<table>
<tr><th>chapter</th><th>exercise</th><th>student</th><th>other student</th><th>alike</th><th>like the solution</th></tr>
{rows}
</table>
</html>
"""
