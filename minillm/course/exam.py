"""An exam from the bank of questions: chosen for chapters and minutes, with numbers drawn from a seed.

    FOLDER/source/exam/    exam.ipynb: with the answers, and what its numbers are drawn from; never for students
    FOLDER/release/exam/   the same for students, and exam.html to print; with --students release/STUDENT/exam/
    FOLDER/key/exam/       exam.html: answers, workings, rubrics; points.csv; never for students

In the folder of a course the exam is an assignment of it: course.toml gets its due date and points, and the exam is
collected, graded, returned and exported by its name.

The seed changes the numbers of the questions, the paper changes the questions. The bank is public, as this book is: the
seed is what has to stay secret. An exam at a machine with this package is an exam with open books.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.book import colab, nbfile
from minillm.book.exercises import released
from minillm.book.paths import chapter_number, notebooks
from minillm.course import exam_notebooks, exam_pages, roster, secret, settings, tables
from minillm.course.questions import Question, of_chapters, question, right

SHARES = {
    "code": 0.3,
    "written": 0.2,
    "computed": 1.0,
}  # of the minutes, at most, in the order in which they are chosen
LEAST_MINUTES = 15


@dataclass(frozen=True)
class Exam:
    """The questions of an exam, in order, and what their numbers are drawn from."""

    name: str
    seed: int
    questions: tuple[Question, ...]
    minutes: int
    objectives: dict[str, str] = field(default_factory=dict)  # of each question's id, in the chapter's own words

    @property
    def points(self) -> int:
        return sum(one.points for one in self.questions)

    def variant(self, one: Question, student: str | None = None) -> Any:
        """The question with its numbers. The rule of a code question is the same for all students."""
        return one.variant(secret.numbers_of(self.seed, student if one.kind == "computed" else None))

    def of_kinds(self, *kinds: str) -> list[tuple[int, Question]]:
        """(number in the exam, question) of some kinds."""
        return [(number, one) for number, one in enumerate(self.questions, 1) if one.kind in kinds]


@dataclass(frozen=True)
class Written:
    """What was written: every file, the exam that it is of, and in a course the assignment that it is there."""

    exam: Exam
    files: tuple[Path, ...]
    course: settings.Course | None = None
    assignment: settings.Assignment | None = None


def choose(chapters: Iterable[int], minutes: int, paper: int = 1) -> list[Question]:
    """Questions that take at most `minutes`, spread over the chapters: about half of the time is for computed ones, a
    third for code, the rest for written ones.

    The same for every seed. Papers 1, 2, 3 ... begin with other questions of the bank. Raises ValueError for chapters
    without questions, or for too little time.
    """
    if minutes < LEAST_MINUTES:
        raise ValueError(f"minutes={minutes} is not allowed; an exam takes at least {LEAST_MINUTES}")
    if paper < 1:
        raise ValueError(f"paper={paper} is not allowed; papers are numbered from 1")
    found = of_chapters(chapters)
    chosen: list[Question] = []

    def take(kind: str, share: float, most: int = len(found)) -> None:
        """Questions of a kind for a share of the minutes, always of the chapter that has got the fewest so far."""
        turn, left = _in_turn([one for one in found if one.kind == kind], paper), share * minutes
        for _ in range(most):
            spent = Counter({one.chapter: 0 for one in found})
            for one in chosen:
                spent[one.chapter] += one.minutes
            fitting = [one for one in turn if one not in chosen and one.minutes <= min(left, minutes - spent.total())]
            if not fitting:
                return
            chosen.append(min(fitting, key=lambda one: (spent[one.chapter], turn.index(one))))
            left -= chosen[-1].minutes

    take("computed", 0.6, most=len({one.chapter for one in found}))
    take("code", 0.3)
    take("written", 0.2)
    take("computed", 1.0)
    return sorted(chosen, key=found.index)


def make(chapters: Sequence[int], seed: int, minutes: int = 90, paper: int = 1, name: str = "exam") -> Exam:
    """An exam over `chapters`. Raises ValueError as `choose` does, and for a name that no folder can have."""
    if not re.fullmatch(r"[^\W\d_][\w -]*(?<! )", name):
        raise ValueError(f"name={name!r} names files and folders; use a letter, then letters, digits, - and _")
    if seed < 1:
        raise ValueError(f"seed={seed} is not allowed; a seed is at least 1")
    chosen = choose(chapters, minutes, paper)
    return Exam(name, seed, tuple(chosen), minutes, {one.id: objective for one, objective in _objectives(chosen)})


def write(
    exam: Exam, folder: Path, students: Sequence[str] = (), again: bool = False, due: dt.datetime | None = None
) -> Written:
    """Write the exam, its key and the table of points; with `students`, other numbers for each of them.

    due: in a course, when it is handed in; a time without a zone is in that of the course. By default the end of the
    course, or what course.toml says already.

    Raises ValueError for a student that occurs twice, or that no folder can have; and for an exam that is there
    already, unless `again` says to write over it.
    """
    folder = Path(folder)
    roster.Roster([roster.Student(one) for one in students])
    if (there := folder / "source" / exam.name).exists() and not again:
        raise ValueError(
            f"{there} exists, and its key with it; give this exam another --name, or write over it with --again"
        )
    course = settings.load(folder) if (folder / settings.FILE).exists() else None
    files = []
    for stem, nb in exam_notebooks.sources(exam, bool(students)).items():
        _pin(nb, course)
        files.append(_write(folder / "source" / exam.name / f"{stem}.ipynb", nbfile.dumps(nb)))
    for student in students or [None]:
        into = folder / "release" / (student or "") / exam.name
        _write(into / ".gitignore", "*\n")  # the releases may be published before the exam, also from a copy of them
        for stem, nb in exam_notebooks.sources(exam, bool(students), student).items():
            _pin(nb, course)
            files.append(_write(into / f"{stem}.ipynb", nbfile.dumps(_for_students(nb))))
        files.append(_write(into / f"{exam.name}.html", exam_pages.paper(exam, student)))
        files.append(_write(folder / "key" / exam.name / f"{student or exam.name}.html", exam_pages.key(exam, student)))
    files.append(_write(folder / "key" / exam.name / "points.csv", points_table(exam)))
    if course:
        course = settings.put(course, _assignment(exam, course, due))
        return Written(exam, tuple(files), course, course.assignments[exam.name])
    return Written(exam, tuple(files))


def _for_students(source):
    """The released notebook, which does not say what its numbers are drawn from."""
    nb = released(source)
    nb.metadata.pop("book")
    return nbfile.normalise(nb)


def _assignment(exam: Exam, course: settings.Course, due: dt.datetime | None) -> settings.Assignment:
    old = course.assignments.get(exam.name)
    end = dt.datetime.combine(course.start + dt.timedelta(days=7 * course.weeks - 1), dt.time(23, 59), course.zone)
    due = due or (old.due if old else end)
    due = due.astimezone(course.zone) if due.tzinfo else due.replace(tzinfo=course.zone)
    title = f"{exam.name[0].upper()}{exam.name[1:]}"
    return settings.Assignment(exam.name, exam.name, title, course.weeks, due, float(exam.points))


def _pin(notebook, course: settings.Course | None) -> None:
    """The set-up cell installs the version that the course has, as in its releases."""
    for cell in notebook.cells if course else ():
        if "setup" in cell.metadata.get("tags", []):
            cell.source = colab.set_up_cell(course.repository, course.tag)


def mark(question_id: str, given: object, seed: int, per_student: bool = False) -> None:
    """Grade the answer to a computed question; raises AssertionError for a wrong one.

    With `per_student` the student is the one whose folder nbgrader works in: `autograded/STUDENT/exam/`.
    """
    one = question(question_id)
    variant = one.variant(secret.numbers_of(seed, Path.cwd().parent.name if per_student else None))
    right(given, variant.answer, one.tolerance, variant.slips)


def points_table(exam: Exam) -> str:
    """The points by chapter and objective, as CSV; the last line is the sum."""
    rows: list[list[object]] = [["number", "question", "kind", "chapter", "objective", "minutes", "points"]]
    for number, one in enumerate(exam.questions, 1):
        objective = exam.objectives.get(one.id, one.objective)
        rows.append([number, one.id, one.kind, f"{one.chapter:02}", objective, one.minutes, one.points])
    return tables.dumps([*rows, ["", "", "", "", "all", sum(one.minutes for one in exam.questions), exam.points]])


def read_students(path: Path) -> list[str]:
    """The ids of a list of students: one a line, or a CSV as the course's `students.csv`, Canvas or Moodle have it.

    Raises ValueError for an empty list, or a file that is neither.
    """
    text = tables.text_of(Path(path).read_bytes(), Path(path))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    is_table = bool(lines) and ("," in lines[0] or ";" in lines[0])
    found = [one.id for one in roster.read(path)] if is_table else [line for line in lines if line != "id"]
    if not found:
        raise ValueError(f"{path}: no student in it; write one id a line, or a CSV with a column named id")
    return found


def objectives_of(chapter: int) -> list[str]:
    """The learning objectives that a chapter's notebook states; none without a checkout of the book."""
    try:
        paths = [path for path in notebooks("chapters") if chapter_number(path) == chapter]
    except FileNotFoundError:
        return []
    return [text for path in paths for text in nbfile.read(path).metadata.get("book", {}).get("objectives", [])]


def _objectives(chosen: Iterable[Question]) -> Iterable[tuple[Question, str]]:
    by_chapter = {chapter: objectives_of(chapter) for chapter in {one.chapter for one in chosen}}
    for one in chosen:
        found = [text for text in by_chapter[one.chapter] if one.objective in text]
        yield one, found[0] if found else one.objective


def _in_turn(questions: list[Question], paper: int) -> list[Question]:
    """One of each chapter, then a second one of each, and so on; a paper begins at another question of a chapter, and
    at another chapter, so that short exams of two papers differ, too."""
    by_chapter = {chapter: list(own) for chapter, own in itertools.groupby(questions, key=lambda one: one.chapter)}
    turned = [own[(paper - 1) % len(own) :] + own[: (paper - 1) % len(own)] for own in by_chapter.values()]
    first = (paper - 1) % len(turned) if turned else 0
    rounds = itertools.zip_longest(*turned[first:], *turned[:first])
    return [one for each in rounds for one in each if one is not None]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
