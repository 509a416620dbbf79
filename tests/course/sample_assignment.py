"""A small assignment of two exercises, with the zygote that grades it."""

from __future__ import annotations

import copy

import nbformat

from minillm.book import colab, exercises, nbfile
from minillm.course.grading.plan import Source
from minillm.course.grading.submission import Grader, Submission
from minillm.course.grading.worker import Worker
from tests.conftest import CHECKER_CELL, SOLUTION_CELL, marks

SECRET = "5e" * 32
TWICE_CHECKER = """import torch
from minillm.book.checks import FunctionChecker

examples, random = [([3, 1],)], lambda draw: ([draw.randint(0, 9)],)
check_least = FunctionChecker("least", min, examples=examples, random=random, seconds=0.2)  # of no exercise
check_twice = Checker("twice", hint="Every element, also the negative ones.")

@check_twice.part("example")
def _twice_example(case):
    case.equal(case.call(torch.tensor([1.0, -2.0])), torch.tensor([2.0, -4.0]))

@check_twice.part("edges")
def _twice_edges(case):
    case.equal(case.call(torch.zeros(0)), torch.zeros(0))

@check_twice.part("random")
def _twice_random(case):
    x = case.randn(case.randint(1, 9))
    case.close(case.call(x), 2 * x)"""
TWICE = '''def twice(x):
    """Every element doubled."""
    ### BEGIN SOLUTION
    return x + x
    ### END SOLUTION'''
ANSWERS = {"lowest": SOLUTION_CELL, "twice": TWICE}


def source_notebook():
    """The lecturer's notebook: `lowest` and `twice`, 5 points each."""
    code, text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    cells = [text(f"# 06 · Sample\n\n{colab.badge('solutions/06_sample.ipynb')}"), colab.set_up_nbcell()]
    cells.append(code(f"{CHECKER_CELL}\n\n{TWICE_CHECKER}", metadata=marks("imports", locked=True)))
    for number, (name, answer) in enumerate(ANSWERS.items(), 1):
        heading = f"## {number} · The {name}  ·  core, 30 minutes\n\nWrite `{name}`."
        cells.append(text(heading, metadata=marks(f"{name}_statement", locked=True)))
        help_cell = "<details><summary>A nudge</summary>\n\nThink.\n\n</details>"
        cells.append(text(help_cell, metadata=marks(f"{name}_help", locked=True)))
        cells.append(code(answer, metadata=marks(name, solution=True)))
        for part, points in (("example", 1), ("edges", 2), ("random", 2)):
            line = f'check_{name}({name}, "{part}")'
            metadata = marks(f"{name}_{part}", grade=True, locked=True, points=points)
            cells.append(code(line, metadata=metadata))
        cells.append(code(f"print({name})"))
    return nbfile.normalise(nbformat.v4.new_notebook(cells=cells))


def answered(release, **answers):
    """A submission: the release with these answers, by grade id."""
    nb = copy.deepcopy(release)
    for cell in nb.cells:
        cell.source = answers.get(grade_id(cell), cell.source)
    return nb


def grade_id(cell) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


class Assignment:
    """One assignment with its zygote: `grade(nb)` grades a notebook as a student's."""

    def __init__(self, folder, limits, hidden=()):
        self.folder, nb = folder, source_notebook()
        self.path = folder / "06_sample.ipynb"
        nbfile.write(nb, self.path)
        self.release = exercises.generate(nb, "course")
        self.right = {name: source.replace("    ### BEGIN SOLUTION\n", "") for name, source in ANSWERS.items()}
        self.worker = Worker(Source.read(self.path), limits, hidden)
        self.grader = Grader(self.worker, SECRET)

    def grade(self, nb, student="anna", accepted=()):
        path = self.folder / f"{student}.ipynb"
        path.write_text(nbformat.writes(nb), encoding="utf-8")
        return self.grader.grade(Submission(student, "06", path), accepted)

    def grade_answers(self, **answers):
        return self.grade(answered(self.release, **{**self.right, **answers}))
