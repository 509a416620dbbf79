"""Exercises, generated from the solutions with nbgrader's own preprocessors. Built in chapter 00.

In a solution notebook an exercise X is: X_statement and X_help (read-only text), X (the solution cell; a long solution
goes on in X_2, X_3), and the three graded lines X_example, X_edges, X_random.
nbgrader comes with `pip install 'minillm-book[course]'`.
"""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from minillm.book import nbfile
from minillm.book.checks import PARTS
from minillm.book.paths import notebooks, repository_root

RELEASES = ("self-study", "course")
_MARKS = re.compile(r"^[ \t]*#+ (?:BEGIN|END) SOLUTION[ \t]*\n?", re.MULTILINE)
_DEFINES = re.compile(r"^(?:def|class)\s+(\w+)", re.MULTILINE)
_HIDDEN = re.compile(r"\n### BEGIN HIDDEN TESTS.*?### END HIDDEN TESTS", re.DOTALL)
_ANSWER = ("answer",)  # the one line of an exam's question whose answer is a number
_ELSEWHERE = "# Answered in another cell."


def regenerate(release: str = "self-study", *, out: Path | None = None, root: Path | None = None) -> list[Path]:
    """Write the exercise of every solution notebook; returns the files whose content changed.

    The self-study release lies in `exercises/`. A course release (without the folded solutions) needs `out`,
    so that the two are never mixed. Raises ValueError without it.
    """
    root = root or repository_root()
    if release == "course" and out is None:
        raise ValueError("a course release needs a folder of its own: exercises/ holds the self-study release")
    folder = Path(out) if out is not None else root / "exercises"
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for path in notebooks("solutions", root):
        text = nbfile.dumps(generate(nbfile.read(path), release))
        target = folder / path.name
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            changed.append(target)
    return changed


def stale(root: Path | None = None) -> list[Path]:
    """Exercises that differ from what their solution generates: edited by hand, forgotten, or left over."""
    root = root or repository_root()
    wanted = {path.name: nbfile.dumps(generate(nbfile.read(path))) for path in notebooks("solutions", root)}
    there = {path.name: path.read_text(encoding="utf-8") for path in notebooks("exercises", root)}
    return [
        root / "exercises" / name
        for name in sorted(wanted.keys() | there.keys())
        if wanted.get(name) != there.get(name)
    ]


def generate(solution: nbformat.NotebookNode, release: str = "self-study") -> nbformat.NotebookNode:
    """The exercise notebook of a solution notebook.

    release: "self-study" ends each folded help with the solution, "course" does not.
    Raises ValueError for an exercise that is not laid out as the module's docstring says.
    """
    if release not in RELEASES:
        raise ValueError(f"release={release!r}: one of {', '.join(RELEASES)}")
    nb = copy.deepcopy(solution)
    found = exercises_in(nb)
    if release == "self-study":
        for exercise in found:
            _fold_solution(nb, exercise)
    nb = released(nb)
    for cell in nb.cells:
        cell.source = cell.source.replace("/blob/main/solutions/", "/blob/main/exercises/")
    return nbfile.normalise(nb)


def released(source: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy as students get it: nbgrader itself clears solutions, hidden tests and outputs, and locks graded cells."""
    nb = copy.deepcopy(source)
    for preprocessor in _preprocessors():
        nb, _ = preprocessor.preprocess(nb, {})
    return nb


@dataclass(frozen=True)
class Exercise:
    """One exercise of a solution notebook; an exercise without lines is not graded."""

    id: str
    cells: dict[str, str]  # grade id -> source of each solution cell, in order
    lines: dict[str, str] = field(default_factory=dict)  # part -> source of the locked cell
    points: float = 0
    before: tuple[str, ...] = ()  # the locked code cells above it: imports and data, never a student's own cell

    @property
    def solution(self) -> str:
        """All solution cells as one source."""
        return "\n\n\n".join(self.cells.values())


def exercises_in(solution: nbformat.NotebookNode) -> list[Exercise]:
    """The exercises of a solution notebook, in order. Raises ValueError where the layout is broken."""
    cells = {_grade_id(cell): cell for cell in solution.cells if _grade_id(cell)}
    found, before, claimed = [], [], set()
    for cell in solution.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and marks.get("locked") and not marks.get("solution") and not marks.get("grade"):
            before.append(cell.source)
        if cell.cell_type != "code" or not marks.get("solution"):
            continue
        name = marks["grade_id"]
        if found and name == f"{found[-1].id}_{len(found[-1].cells) + 1}":
            found[-1].cells[name] = cell.source
            continue
        lines = {part: cells[f"{name}_{part}"] for part in (*PARTS, *_ANSWER) if f"{name}_{part}" in cells}
        if lines and tuple(lines) not in (PARTS, _ANSWER):
            raise ValueError(f"exercise {name!r} has the graded lines {list(lines)}; it needs {list(PARTS)}")
        if f"{name}_help" not in cells and tuple(lines) != _ANSWER:
            raise ValueError(f"exercise {name!r} has no read-only help cell with the id {name}_help")
        claimed |= {_grade_id(line) for line in lines.values()}
        points = sum(line.metadata.nbgrader.get("points", 0) for line in lines.values())
        found.append(
            Exercise(
                name,
                {name: cell.source},
                {part: _HIDDEN.sub("", line.source) for part, line in lines.items()},
                points,
                tuple(before),
            )
        )
    graded = [c for c in solution.cells if c.cell_type == "code" and c.metadata.get("nbgrader", {}).get("grade")]
    strays = {_grade_id(c) for c in graded} - claimed  # a graded text is read by a person
    if strays:
        raise ValueError(f"graded cells that belong to no exercise: {', '.join(sorted(strays))}")
    return found


def stub_of(exercise: Exercise) -> str:
    """The exercise's solution cells as the student first sees them, as one source."""
    from nbgrader.preprocessors import ClearSolutions

    marks = {"grade": False, "locked": False, "schema_version": 3, "solution": True, "task": False}
    cells = [
        nbformat.v4.new_code_cell(source, metadata={"nbgrader": {**marks, "grade_id": name}})
        for name, source in exercise.cells.items()
    ]
    nb, _ = ClearSolutions().preprocess(nbformat.v4.new_notebook(cells=cells), {})
    return "\n\n\n".join(cell.source for cell in nb.cells)


def restore_marks(submitted: nbformat.NotebookNode, released: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A submission with nbgrader's marks put back where an editor lost them (Colab does, for copied cells).

    A read-only cell is known by its text, a solution cell by the first name that it defines.
    """
    nb = copy.deepcopy(submitted)
    present = {_grade_id(cell) for cell in nb.cells}
    for marked in released.cells:
        if not _grade_id(marked) or _grade_id(marked) in present:
            continue
        name = _DEFINES.search(marked.source)
        for cell in nb.cells:
            same_name = (
                marked.metadata.nbgrader.solution
                and name
                and (own := _DEFINES.search(cell.source))
                and own[1] == name[1]
            )
            if (
                not _grade_id(cell)
                and cell.cell_type == marked.cell_type
                and (same_name or cell.source.strip() == marked.source.strip())
            ):
                cell.metadata["nbgrader"] = copy.deepcopy(marked.metadata.nbgrader)
                break
    _find_answers_elsewhere(nb, released)
    return nb


def _find_answers_elsewhere(nb: nbformat.NotebookNode, released: nbformat.NotebookNode) -> None:
    """Where a stub is as it was released, or gone, and another cell defines all that it defines, that is the answer.

    An unmarked cell takes the stub's mark. One that holds another answer as well keeps its own, and a comment stands
    in the place of the stub, which would define the names anew.
    """
    for number, marked in enumerate(released.cells):
        if marked.cell_type != "code" or not marked.metadata.get("nbgrader", {}).get("solution"):
            continue
        name, names = _grade_id(marked), set(_DEFINES.findall(marked.source))
        stubs = [cell for cell in nb.cells if _grade_id(cell) == name]
        stub = _stub_text(name, marked.source)
        if not names or any(cell.source.split() != stub.split() for cell in stubs):
            continue
        answers = [
            cell for cell in nb.cells if cell.cell_type == "code" and names <= set(_DEFINES.findall(cell.source))
        ]
        answers = [cell for cell in answers if all(cell is not stub for stub in stubs)]
        if not answers:
            continue
        if unmarked := [cell for cell in answers if not _grade_id(cell)]:
            unmarked[-1].metadata["nbgrader"] = copy.deepcopy(marked.metadata.nbgrader)
            nb.cells = [cell for cell in nb.cells if all(cell is not stub for stub in stubs)]
        elif stubs:
            stubs[-1].source = _ELSEWHERE
        else:
            behind = [_grade_id(cell) for cell in released.cells[number + 1 :]]
            place = next((i for i, cell in enumerate(nb.cells) if _grade_id(cell) in behind and _grade_id(cell)), None)
            cell = copy.deepcopy(marked)
            cell.source = _ELSEWHERE
            nb.cells.insert(len(nb.cells) if place is None else place, cell)


def _stub_text(name: str, source: str) -> str:
    """A solution cell as a student gets it: it comes from the lecturer's notebook, or is a stub already."""
    if "### BEGIN SOLUTION" not in source:
        return source
    try:
        return stub_of(Exercise(name, {name: source}))
    except ImportError:  # nbgrader is not installed with a reader who runs no course
        return source


def _grade_id(cell) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def _fold_solution(nb, exercise: Exercise) -> None:
    help_cell = next(cell for cell in nb.cells if _grade_id(cell) == f"{exercise.id}_help")
    code = _MARKS.sub("", exercise.solution).strip("\n")
    folded = f"<details><summary>The solution</summary>\n\n```python\n{code}\n```\n\n</details>"
    help_cell.source = f"{help_cell.source.rstrip()}\n\n{folded}"


def _preprocessors() -> list:
    """nbgrader's own, in the order of `nbgrader generate_assignment`, without those that need its database."""
    try:
        from nbgrader import preprocessors as nbgrader
    except ImportError as error:
        raise ImportError("generating exercises needs nbgrader: pip install 'minillm-book[course]'") from error
    names = (
        "LockCells",
        "ClearSolutions",
        "ClearOutput",
        "CheckCellMetadata",
        "ComputeChecksums",
        "ClearHiddenTests",
        "ClearMarkScheme",
        "ComputeChecksums",
        "CheckCellMetadata",
    )
    made = [getattr(nbgrader, name)() for name in names]
    for preprocessor in made:
        preprocessor.log.setLevel(logging.WARNING)
    return made
