"""The releases of a course: what a chapter's exercises become in `source/`, and from there in `release/`.

A source notebook is the book's solution with the course's badge, its pinned set-up cell, its points and its cut help;
so nbgrader's own `generate_assignment` makes the release from it, today and after the lecturer has edited it.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from pathlib import Path

from minillm.book import colab, exercises, nbfile, workload
from minillm.course.settings import Assignment, Course

_BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")
_FOLDED = re.compile(r"<details>\s*<summary>(.*?)</summary>.*?</details>[ \t]*\n?", re.DOTALL)
_NUDGES = ("A nudge", "The next nudge")
_ANSWERS = ("In words", "The solution", "What we think")  # never in the release of a graded exercise


def source_of(solution, course: Course, assignment_name: str, notebook: str):
    """A chapter's solution notebook as the source of an assignment: badge, set-up cell, points and help of the course.

    Raises ValueError where the exercises' layout or their workloads are broken.
    """
    nb = copy.deepcopy(solution)
    work = workload.workloads(nb)
    path = f"{course.releases}/{assignment_name}/{notebook}.ipynb"
    badge = colab.badge(path, course.repository, course.branch)
    for cell in nb.cells:
        cell.source = _BADGE.sub(lambda _: badge, cell.source)
        if "setup" in cell.metadata.get("tags", []):
            cell.source = colab.set_up_cell(course.repository, course.tag)
    marked = {cell.metadata.nbgrader.grade_id: cell for cell in nb.cells if "nbgrader" in cell.metadata}
    for exercise in exercises.exercises_in(nb):
        lines = [marked[f"{exercise.id}_{part}"] for part in exercise.lines]
        weights = [line.metadata.nbgrader.points for line in lines]
        for line, points in zip(lines, shares(work[exercise.id].minutes, weights)):
            line.metadata.nbgrader["points"] = points
        help_cell = marked[f"{exercise.id}_help"]
        help_cell.source = cut_help(help_cell.source, course.until, graded=bool(lines))
    return nbfile.normalise(nb)


def shares(minutes: int, weights: list[float]) -> list[int]:
    """A point a minute, shared over the graded lines of an exercise in proportion to the book's own points.

    The sum is `minutes`; what rounding leaves goes to the lines with the largest remainders, later ones first.
    """
    exact = [minutes * weight / sum(weights) for weight in weights]
    points = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (points[i] - exact[i], -i))
    for i in by_remainder[: minutes - sum(points)]:
        points[i] += 1
    return points


def cut_help(source: str, until: str, graded: bool) -> str:
    """The folded help up to a rung.

    "nudge" keeps the nudges. "words" also keeps what must hold and the messages explained, and the exercise in words
    where it is not graded.
    """

    def keep(match: re.Match) -> str:
        summary = match[1].strip()
        if summary in _NUDGES:
            return match[0]
        return "" if until == "nudge" or (graded and summary.startswith(_ANSWERS)) else match[0]

    return _FOLDED.sub(keep, source).strip()


def release(course: Course, assignments: list[Assignment]) -> list[Path]:
    """Make the release of each assignment with nbgrader, and note its due date in nbgrader's gradebook.

    Returns the released notebooks. Raises RuntimeError with nbgrader's own words where it refuses, and ValueError for
    a release that would give an answer away.
    """
    api = nbgrader_api(course)
    made = []
    for assignment in assignments:
        if assignment.is_exam:
            continue  # `minillm course exam` has made its release, which is not published with the others
        if not course.notebook_in("source", assignment).is_file():
            raise FileNotFoundError(f"no {course.notebook_in('source', assignment)}: it is the source of this release")
        outcome = api.generate_assignment(assignment.name)
        if not outcome["success"]:
            raise RuntimeError(f"nbgrader refuses to release {assignment.name}: {_last_words(outcome)}")
        with api.gradebook as gradebook:
            gradebook.update_or_create_assignment(assignment.name, duedate=assignment.due.isoformat())
        path = course.notebook_in("release", assignment)
        if leaks := given_away(nbfile.read(path)):
            path.unlink()
            raise ValueError(f"{path.name} is not released: {'; '.join(leaks)}; edit its notebook in source/")
        made.append(path)
    return made


def given_away(nb) -> list[str]:
    """What a release must not hold: solutions, their marks, links to `solutions/`, answers in the help."""
    found = []
    for number, cell in enumerate(nb.cells):
        marks = cell.metadata.get("nbgrader", {})
        if "BEGIN SOLUTION" in cell.source or "END SOLUTION" in cell.source:
            found.append(f"cell {number} holds a solution")
        if "/solutions/" in cell.source:
            found.append(f"cell {number} links to solutions/")
        if cell.get("outputs"):
            found.append(f"cell {number} has outputs")
        name = marks.get("grade_id", "").removesuffix("_help")
        graded = any(c.metadata.get("nbgrader", {}).get("grade_id") == f"{name}_example" for c in nb.cells)
        if graded and any(f"<summary>{answer}" in cell.source for answer in _ANSWERS):
            found.append(f"cell {number} tells the answer of {name!r}")
    return found


def nbgrader_api(course: Course):
    """nbgrader's API on the folder of the course, with the lecturer's own `nbgrader_config.py`."""
    try:
        from nbgrader.apps import NbGraderAPI
    except ImportError as error:
        raise ImportError("a course needs nbgrader: pip install 'minillm-book[course]'") from error
    from traitlets.config import Config, PyFileConfigLoader

    config = Config()
    if (course.folder / "nbgrader_config.py").is_file():
        config = PyFileConfigLoader("nbgrader_config.py", path=str(course.folder)).load_config()
    config.CourseDirectory.root = str(course.folder)
    config.Application.log_level = "ERROR"
    if shutil.which("alembic") is None:  # nbgrader calls it by name, also where the environment is not activated
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return NbGraderAPI(config=config)


def _last_words(outcome: dict) -> str:
    lines = (outcome.get("log") or outcome.get("error") or "it says nothing").strip().splitlines()
    return lines[-1]
