"""Points that a person gives: `corrections.csv` of a course, which no grading writes over.

    student,chapter,exercise,points,author,reason,date
    jdoe,06,slot_mapping,25,Dr. Lee,"right, but for a name in the statement",2026-02-12

`minillm course correct` adds a line; any editor of tables may change the file. The last line of an exercise counts.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import astuple, dataclass
from pathlib import Path

from minillm.course import tables
from minillm.course.gradebook import Grade
from minillm.course.settings import Course

FILE = "corrections.csv"
COLUMNS = ("student", "chapter", "exercise", "points", "author", "reason", "date")


@dataclass(frozen=True)
class Correction:
    """What a person gives one student for an exercise in place of what the checks gave; `line` is that of the file."""

    student: str
    chapter: str
    exercise: str
    points: float
    author: str
    reason: str
    date: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.student}/{self.chapter}/{self.exercise}: {self.points:g} points, {self.author}: {self.reason}"


def read(course: Course, path: Path | None = None, author: str = "", reason: str = "") -> list[Correction]:
    """The corrections in a file, that of the course by default; none where there is no file.

    A line without points is left out, so that a list may be filled in bit by bit. author and reason: of the lines that
    have none. Raises ValueError with file and line for a number that is none, a chapter that the course does not have,
    and a line without author or reason.
    """
    if path and not path.is_file():
        raise FileNotFoundError(f"{path}: no such list of corrections")
    path = path or course.folder / FILE
    if not path.is_file():
        return []
    table, needed = tables.read(path), COLUMNS[:6]
    if table.columns and not table.has(*needed):
        raise ValueError(f"{path}: the columns are {', '.join(table.columns)}; they must be {', '.join(needed)}, date")
    found = []
    for line, record in table.records():
        if record["points"]:
            record["author"], record["reason"] = record["author"] or author, record["reason"] or reason
            try:
                found.append(_correction(course, record, line))
            except ValueError as error:
                raise ValueError(f"{path} line {line}: {error}") from error
    return found


def append(course: Course, corrections: list[Correction]) -> None:
    """Add lines to the file of the course, in UTF-8 with the mark that Excel asks for."""
    path = course.folder / FILE
    kept = tables.read(path).records() if path.is_file() else ()
    rows = [COLUMNS, *([record.get(column, "") for column in COLUMNS] for _, record in kept)]
    rows += [[*astuple(one)[:3], f"{one.points:g}", *astuple(one)[4:-1]] for one in corrections]
    path.write_text(tables.dumps(rows), encoding="utf-8-sig")


def of(course: Course, spec: str, points: float, author: str, reason: str) -> Correction:
    """What a person gives today for `STUDENT/CHAPTER/EXERCISE`. Raises ValueError for another form, or no reason."""
    if spec.count("/") != 2:
        raise ValueError(f"{spec!r}: must be STUDENT/CHAPTER/EXERCISE, as in jdoe/06/slot_mapping")
    student, chapter, exercise = spec.split("/")
    today = f"{dt.datetime.now(course.zone):%Y-%m-%d}"
    values = (student, chapter, exercise, f"{points}", author, reason, today)
    return _correction(course, dict(zip(COLUMNS, values)))


def apply(grades: list[Grade], corrections: list[Correction], where: Path) -> None:
    """Give the exercises of these grades the points of the corrections.

    Raises ValueError with the line for an exercise that a grade does not have, and for points beyond its own.
    """
    by_place = {(grade.student, grade.notebook): grade for grade in grades}
    for one in corrections:
        if (grade := by_place.get((one.student, one.chapter))) is None:
            continue
        exercises = {exercise.id: exercise for exercise in grade.exercises}
        told = f"{where} line {one.line}" if one.line else f"{one.student}/{one.chapter}/{one.exercise}"
        if one.exercise not in exercises:
            raise ValueError(f"{told}: {one.chapter} has no exercise {one.exercise!r}; it has {', '.join(exercises)}")
        exercise = exercises[one.exercise]
        if not 0 <= one.points <= exercise.max_points:
            raise ValueError(f"{told}: points={one.points:g}: {one.exercise} has from 0 to {exercise.max_points:g}")
        exercise.points = one.points
        exercise.correction = f"{one.points:g} points given by {one.author}: {one.reason}"


def _correction(course: Course, record: dict[str, str], line: int = 0) -> Correction:
    try:
        points = float(record["points"].replace(",", "."))  # as a German Excel writes it
    except ValueError:
        raise ValueError(f"points={record['points']!r}: must be a number") from None
    for name in ("student", "exercise", "author", "reason"):
        if not record[name].strip():
            raise ValueError(f"{name} is empty; a correction names its student, exercise, author and reason")
    chapter = course.assignment(record["chapter"]).name  # Excel makes 6 of 06
    return Correction(
        record["student"], chapter, record["exercise"], points, record["author"], record["reason"],
        record.get("date", ""), line,
    )  # fmt: skip
