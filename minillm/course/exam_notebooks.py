"""An exam as a notebook with nbgrader's marks, laid out as the book's exercises are.

Code and computed answers are graded by their checks, working and texts by a person with the rubric (see `marks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from minillm.book import colab, nbfile
from minillm.course.questions import Question
from minillm.course.questions.checks import checker_name
from minillm.course.questions.question import shown

if TYPE_CHECKING:
    from minillm.course.exam import Exam

LINES = ("example", "edges", "random")


def sources(exam: Exam, per_student: bool = False, student: str | None = None) -> dict[str, nbformat.NotebookNode]:
    """The lecturer's notebook by its name, with answers and hidden tests.

    Its metadata says what the numbers are drawn from, which the released copy does not (see `exam.write`).
    """
    asked = list(enumerate(exam.questions, 1))
    cells = [_title(exam), colab.set_up_nbcell(), _locked("imports", _imports(exam))]
    for number, one in asked:
        if one.kind == "computed":
            cells += _computed(exam, number, one, per_student, student)
        else:
            cells += _text(exam, number, one) if one.kind == "written" else _function(exam, number, one)
    notebook = new_notebook(cells=cells)
    notebook.metadata["book"] = {"exam": {"seed": exam.seed, "per_student": per_student}}
    return {exam.name: nbfile.normalise(notebook)}


def _imports(exam: Exam) -> str:
    """The checks of the questions; none where all are answered in words."""
    names = [checker_name(one, exam.variant(one)) for one in exam.questions if one.kind != "written"]
    listed = "".join(f"    {name},\n" for name in names)
    return f"from minillm.course.questions.checks import (\n{listed})" if names else "import math"


def heading(number: int, one: Question) -> str:
    """The first lines of a question. `minillm course grade` reads title, kind and minutes from them."""
    return (
        f"## {number} · {one.title}  ·  core, {one.minutes} minutes\n*Chapter {one.chapter:02}, {one.points} points.*"
    )


def _title(exam: Exam) -> nbformat.NotebookNode:
    return new_markdown_cell(
        f"# {exam.name[0].upper()}{exam.name[1:]}\n\n{exam.minutes} minutes, {exam.points} points, about one a "
        "minute. Save the notebook, and hand it in under its name.\n\nName:"
    )


def _computed(exam: Exam, number: int, one: Question, per_student: bool, student: str | None) -> list:
    variant = exam.variant(one, student)
    name, rubric = f"q{number}", one.graded_rubric
    a_list, unit = isinstance(variant.answer, list), f"  # {one.unit}" if one.unit else ""
    told = (
        f"Assign a list to `answer_{number}`."
        if a_list
        else f"Assign {f'the number of {one.unit}' if one.unit else 'a number'} to `answer_{number}`."
    )
    working = "\n".join(f"* {line}" for line in variant.working)
    earns = "\n".join(f"* {points} points: {item}" for points, item in rubric[:-1])
    value = variant.answer if a_list or isinstance(variant.answer, int) else float(f"{variant.answer:.6g}")
    hidden = (  # for nbgrader itself; `minillm course grade` hands the seed to the check
        f'from minillm.course.exam import mark\n\nmark("{one.id}", answer_{number}, '
        f"seed={exam.seed}, per_student={per_student})"
    )
    statement = f"{heading(number, one)}\n\n{variant.text}\n\nShow your working in the next cell. {told}"
    cells = [_locked(f"{name}_statement", statement, markdown=True)]
    if len(rubric) > 1:
        points = sum(points for points, _ in rubric[:-1])
        cells.append(_marked(new_markdown_cell(f"{working}\n\n{earns}"), f"{name}_working", points, solution=True))
    cells.append(
        _marked(
            new_code_cell(f"### BEGIN SOLUTION\nanswer_{number} = {value!r}{unit}\n### END SOLUTION"),
            name,
            solution=True,
        )
    )
    line = f'{checker_name(one, variant)}(answer_{number}, "answer")'
    test = f"{line}\n### BEGIN HIDDEN TESTS\n{hidden}\n### END HIDDEN TESTS"
    cells.append(_marked(new_code_cell(test), f"{name}_answer", rubric[-1][0]))
    return cells


def _text(exam: Exam, number: int, one: Question) -> list:
    variant = exam.variant(one)
    earns = "\n".join(f"* {points} points: {item}" for points, item in one.graded_rubric)
    statement = _locked(f"q{number}_statement", f"{heading(number, one)}\n\n{variant.text}", markdown=True)
    answer = _marked(new_markdown_cell(f"{variant.answer}\n\n{earns}"), f"q{number}_text", one.points, solution=True)
    return [statement, answer]


def _function(exam: Exam, number: int, one: Question) -> list:
    variant = exam.variant(one)
    name, checker = f"q{number}", checker_name(one, variant)
    help_text = "A failing line says what was called, what was expected and what came back."
    cells = [
        _locked(f"{name}_statement", f"{heading(number, one)}\n\n{variant.text}", markdown=True),
        _locked(f"{name}_help", help_text, markdown=True),
        _marked(new_code_cell(variant.marked_solution), name, solution=True),
    ]
    for part, (points, _) in zip(LINES, one.graded_rubric):
        cells.append(_marked(new_code_cell(f'{checker}({variant.name}, "{part}")'), f"{name}_{part}", points))
    return cells


def _locked(name: str, source: str, markdown: bool = False) -> nbformat.NotebookNode:
    cell = new_markdown_cell(source) if markdown else new_code_cell(source)
    return _mark(cell, name, {"locked": True})


def _marked(
    cell: nbformat.NotebookNode, name: str, points: int | None = None, solution: bool = False
) -> nbformat.NotebookNode:
    given = {"grade": points is not None, "solution": solution, "locked": not solution}
    return _mark(cell, name, given | ({"points": points} if points is not None else {}))


def _mark(cell: nbformat.NotebookNode, name: str, marks: dict) -> nbformat.NotebookNode:
    plain = {"grade": False, "grade_id": name, "locked": False, "schema_version": 3, "solution": False, "task": False}
    cell.metadata["nbgrader"] = plain | marks
    return cell


def answer_of(exam: Exam, one: Question, student: str | None = None) -> str:
    """The answer as the key prints it."""
    variant = exam.variant(one, student)
    return f"{shown(variant.answer)} {one.unit}".rstrip()
