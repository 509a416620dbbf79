"""What a person has to read of an exam: all answers to a question below each other, and a list that takes the points.

reports/exam-to-mark.html   each question with its model answer and rubric, then what each student wrote
reports/exam-to-mark.csv    a line for each; filled in, `minillm course correct --from` takes it
"""

from __future__ import annotations

import html
from pathlib import Path

from nbformat import ValidationError

from minillm.book import nbfile
from minillm.course import corrections, marks, tables
from minillm.course.gradebook import Grade
from minillm.course.settings import Assignment, Course

_STYLE = (
    "body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; "
    "color-scheme: light dark; } h3 { margin-bottom: 0; } pre { white-space: pre-wrap; border: 1px solid #8888; "
    "padding: .6rem; } .key { border-left: 4px solid #0b5394; padding-left: 1rem; }"
)


def write(course: Course, grades: list[Grade], folder: Path) -> list[Path]:
    """Write both files for each exam of which answers have still to be read; returns the lists."""
    made = []
    for assignment in course.assignments.values():
        left = {g.student: {e.id for e in marks.waits(g)} for g in grades if g.notebook == assignment.name}
        if any(left.values()):
            made.append(folder / f"{assignment.name}-to-mark.csv")
            rows, page = _lists(course, assignment, left)
            made[-1].write_text(tables.dumps(rows), encoding="utf-8-sig")
            made[-1].with_suffix(".html").write_text(page, encoding="utf-8")
    return made


def _lists(course: Course, assignment: Assignment, left: dict[str, set[str]]) -> tuple[list[list[str]], str]:
    source = nbfile.read(course.notebook_in("source", assignment))
    asked = {cell.metadata.get("nbgrader", {}).get("grade_id"): cell.source for cell in source.cells}
    given = {student: _texts(course.notebook_in("submitted", assignment, student)) for student in left}
    rows, parts = [[*corrections.COLUMNS, "out of"]], []
    for exercise in marks.by_hand(course, assignment):
        question = asked.get(f"{exercise.id.partition('_')[0]}_statement", "").partition("\n\n")[2]
        key = f'<div class="key">{_shown(asked[exercise.id])}</div>'
        title = f"{exercise.id}: {html.escape(exercise.title)}, {exercise.max_points:g} points"
        parts.append(f"<h2>{title}</h2>{_shown(question)}{key}")
        for student in sorted(name for name, waiting in left.items() if exercise.id in waiting):
            rows.append([student, assignment.name, exercise.id, "", "", "", "", f"{exercise.max_points:g}"])
            text = given[student].get(exercise.id, "(nothing was found)")
            parts.append(f"<h3>{html.escape(student)}</h3><pre>{html.escape(text)}</pre>")
    head = f'<meta charset="utf-8"><title>{html.escape(assignment.title)}: to mark</title><style>{_STYLE}</style>'
    told = f"<h1>{html.escape(assignment.title)}: to mark</h1><p>With other numbers for each student their key is in "
    told += f"<code>key/{html.escape(assignment.name)}/STUDENT.html</code>.</p>"
    return rows, f'<!doctype html><html lang="en"><head>{head}</head><body>{told}{"".join(parts)}</body></html>\n'


def _texts(path: Path) -> dict[str, str]:
    """Grade id -> what a student wrote there."""
    try:
        nb = nbfile.read(path)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ValidationError):  # graded as a failed file
        return {}
    return {name: cell.source for cell in nb.cells if (name := cell.metadata.get("nbgrader", {}).get("grade_id"))}


def _shown(text: str) -> str:
    from nbconvert.filters import markdown2html

    return markdown2html(text)
