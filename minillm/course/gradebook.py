"""The grades of a course: one plain JSON file for each submission, `grades/STUDENT/NN.json`.

`minillm course grade` writes them and writes over them; what a lecturer gives by hand is in `corrections.csv`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STATUSES = ("graded", "blocked", "failed")


@dataclass
class Part:
    """One graded line of an exercise.

    part: "example", "edges" or "random". message: what the student reads when the line failed, empty when it passed.
    points is what was earned of max_points; seconds is what the line took.
    """

    part: str
    passed: bool
    points: float
    max_points: float
    message: str = ""
    seconds: float = 0.0


@dataclass
class ExerciseGrade:
    """One exercise of a submission. minutes: its workload as the statement gives it. bonus: earned beyond the full
    marks, as a stretch is. correction: who gave its points in place of the checks, and why (see `marks`)."""

    id: str
    title: str
    minutes: int
    points: float
    max_points: float
    parts: list[Part] = field(default_factory=list)
    bonus: bool = False
    correction: str = ""


@dataclass
class Flag:
    """What a person should look at: `code` in line `line` (from 1) of cell `cell` (from 0), and the reason.

    exercise: whose answer it stands in; empty elsewhere in the notebook. refused: the points of that exercise, or of
    the whole notebook, are withheld until a person accepts the flag with `minillm course grade --accept`.
    """

    line: int
    cell: int
    reason: str
    code: str = ""
    exercise: str = ""
    refused: bool = False


@dataclass
class Grade:
    """What one student earned for one notebook.

    notebook: the name of the assignment, the chapter's two digits. submitted: time in ISO 8601, or empty.
    status: "graded"; "blocked" when the machine lacked something (a GPU, an extra): no zero, grade it again elsewhere;
    "failed" when the file could not be graded at all. reason says why, in one sentence.
    """

    student: str
    notebook: str
    submitted: str = ""
    late: bool = False
    exercises: list[ExerciseGrade] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    status: str = "graded"
    reason: str = ""

    @property
    def points(self) -> float:
        """What was earned, bonus included."""
        return sum(exercise.points for exercise in self.exercises)

    @property
    def is_withheld(self) -> bool:
        """Whether points wait for a person's look: a line that passed has not all of its points."""
        return any(
            part.passed and part.points < part.max_points
            for e in self.exercises
            for part in e.parts
            if not e.correction
        )

    @property
    def max_points(self) -> float:
        """Full marks, without any bonus."""
        return sum(exercise.max_points for exercise in self.exercises if not exercise.bonus)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Grade:
        """Raises ValueError with the field that is missing, unknown or out of range."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        grade = _record(Grade, found, "grade")
        grade.exercises = [
            _record(ExerciseGrade, value, f"exercises[{i}]") for i, value in enumerate(_list(grade, "exercises"))
        ]
        for i, exercise in enumerate(grade.exercises):
            exercise.parts = [
                _record(Part, value, f"exercises[{i}].parts[{j}]") for j, value in enumerate(_list(exercise, "parts"))
            ]
        grade.flags = [_record(Flag, value, f"flags[{i}]") for i, value in enumerate(_list(grade, "flags"))]
        if grade.status not in STATUSES:
            raise ValueError(f"status={grade.status!r}: one of {', '.join(STATUSES)}")
        return grade


@dataclass
class Receipt:
    """What `minillm course collect` noted of a submission, `submitted/STUDENT/NN/receipt.json`.

    submitted: time in ISO 8601, empty where the system did not tell. path: the name in the folder or zip as it
    came. file: the name that the student gave. sha256: of the file as it came, which lies in `received/`.
    turn: orders the files of one author (Canvas's attachment id). mended: what `restore` put back, one sentence each.
    problem: why the file is no notebook; empty when it is one.
    """

    student: str
    notebook: str
    path: str
    file: str
    sha256: str
    submitted: str = ""
    late: bool = False
    turn: list[int] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    problem: str = ""


def receipt_of(course: Path, student: str, notebook: str) -> Receipt | None:
    """The receipt of a submission, None for one that was not collected with `minillm course collect`.

    Raises ValueError with the file and the field where it is not a receipt.
    """
    path = Path(course) / "submitted" / student / notebook / "receipt.json"
    if not path.is_file():
        return None
    try:
        return _record(Receipt, json.loads(path.read_text(encoding="utf-8")), "receipt")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def path_of(course: Path, student: str, notebook: str) -> Path:
    """Where the grade of a submission lies, `grades/STUDENT/NN.json` in the folder of the course."""
    return Path(course) / "grades" / student / f"{notebook}.json"


def save(grade: Grade, course: Path) -> Path:
    """Write a grade to its place, whole or not at all; returns the file. Raises ValueError for a wrong field."""
    Grade.from_json(grade.to_json())
    path = path_of(course, grade.student, grade.notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.partial")
    unfinished.write_text(grade.to_json(), encoding="utf-8")
    unfinished.replace(path)
    return path


def load(path: Path) -> Grade:
    """Read a grade. Raises ValueError with the file and the field where it is not one."""
    try:
        grade = Grade.from_json(Path(path).read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; grade this submission again with `minillm course grade`") from error
    place = Path(path).parent.name, Path(path).stem
    if (grade.student, grade.notebook) != place:
        raise ValueError(
            f"{path}: it is the grade of student {grade.student!r} in {grade.notebook!r}, "
            f"and its place is that of {place[0]!r} in {place[1]!r}"
        )
    return grade


def load_all(course: Path, notebook: str | None = None) -> Iterator[Grade]:
    """All grades of a course, or those of one assignment, by student, then by assignment."""
    for path in sorted((Path(course) / "grades").glob(f"*/{notebook or '*'}.json")):
        yield load(path)


_KINDS = {"str": str, "int": int, "float": (int, float), "bool": bool}


def _record(kind: type, value: object, where: str):
    """A dataclass from a JSON object; a field without a default must be there, and each has the type it is declared
    with."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, must be an object")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}; it may have {', '.join(fields)}")
    for name, f in fields.items():
        if name not in value:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{where} has no field {name!r}")
            continue
        wanted = _KINDS.get(f.type)
        is_wrong_bool = isinstance(value[name], bool) and f.type != "bool"
        if wanted and (not isinstance(value[name], wanted) or is_wrong_bool):
            raise ValueError(f"{where}.{name}={value[name]!r}: must be {f.type}")
    return kind(**value)


def _list(record: object, name: str) -> list:
    value = getattr(record, name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, must be a list")
    return value
