"""The students of a course: `students.csv` with nbgrader's columns, read from there or from an LMS's own export."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from minillm.course import tables

FILE = "students.csv"
_UNSAFE = r"/\\*?\[\]:\"<>|"
_SAFE_ID = re.compile(rf"[^\s._{_UNSAFE}-][^{_UNSAFE}]*")


@dataclass(frozen=True)
class Student:
    """One student. id names the folders; lms_user_id is Canvas's number, empty for Moodle, which has none that lasts.

    The five columns are those of `nbgrader db student import`; it passes over the others.
    """

    id: str
    last_name: str = ""
    first_name: str = ""
    email: str = ""
    lms_user_id: str = ""
    sis_user_id: str = ""  # Canvas's "SIS User ID", Moodle's "ID number"
    login: str = ""  # Canvas's "SIS Login ID", Moodle's "Username"
    section: str = ""

    @property
    def name(self) -> str:
        return f"{self.first_name} {self.last_name}".strip() or self.id


class Roster:
    """Finds students by what a submission says of its author."""

    def __init__(self, students: list[Student]) -> None:
        """Raises ValueError for an id that occurs twice, or that no folder can have."""
        self.students: dict[str, Student] = {}
        for student in students:
            if not _SAFE_ID.fullmatch(student.id):
                raise ValueError(
                    f"student id {student.id!r}: it names a folder, so it begins with a letter or digit and has no "
                    'slash and none of * ? [ ] : " < > |'
                )
            if student.id in self.students:
                raise ValueError(f"student id {student.id!r} occurs twice")
            self.students[student.id] = student

    @staticmethod
    def fits(student: Student, kind: str, value: str) -> bool:
        """Whether a student has this key; the kinds are those of `find`."""
        return bool(value) and _KEYS[kind](student, value)

    def find(self, **keys: str) -> Student | None:
        """The one student with any of these keys, tried in order; None where it is none or several.

        canvas_id: Canvas's user id. sortable: a name as Canvas writes it in a file name, "doejane".
        full_name: a name as Moodle writes it, "Jane Doe". email: the whole address.
        any_key: an id, login, email or number, as a folder has it.
        """
        for kind, value in keys.items():
            if len(found := [s for s in self.students.values() if self.fits(s, kind, value)]) == 1:
                return found[0]
        return None


def squeezed(name: str) -> str:
    """A name in lower case, composed, without what Moodle and Canvas drop from file names."""
    composed = unicodedata.normalize("NFC", name).casefold().replace("_", " ")
    return " ".join(re.sub(r"[&<>\"`|':\\/,.]", "", composed).split())


def sortable(student: Student) -> str:
    """The name as Canvas writes it before a submission: "Doe, Jane" is "doejane"."""
    return _canvas(f"{student.last_name}{student.first_name}")


def _canvas(name: str) -> str:
    return re.sub(r"\W", "", unicodedata.normalize("NFC", name).lower())


def _full(student: Student, value: str) -> bool:
    orders = (f"{student.first_name} {student.last_name}", f"{student.last_name} {student.first_name}")
    return squeezed(value) in map(squeezed, orders)


def _any(student: Student, value: str) -> bool:
    value = unicodedata.normalize("NFC", value).casefold()
    own = (student.id, student.login, student.email, student.sis_user_id, student.email.partition("@")[0])
    return value in [key.casefold() for key in own if key]


_KEYS = {
    "canvas_id": lambda student, value: student.lms_user_id == value,
    # A name decides only where Canvas's number is not known: another Jane Doe may have joined the course.
    "sortable": lambda student, value: not student.lms_user_id and sortable(student) == _canvas(value),
    "exact": lambda student, value: student.id == value,
    "email": lambda student, value: student.email.casefold() == value.casefold(),
    "any_key": _any,
    "full_name": _full,
}


def load(folder: Path) -> Roster | None:
    """The roster of a course; None when it has none, or an empty one."""
    path = Path(folder) / FILE
    students = read(path) if path.is_file() else []
    return Roster(students) if students else None


def read(path: Path) -> list[Student]:
    """Students from nbgrader's CSV, Canvas's exported gradebook, or Moodle's participants, grades or worksheet.

    Any encoding and separator that `tables.read` knows. A student without login and email is named by number or name.
    Raises ValueError with the line and the way out for a row that names no student, and for two rows with one id; with
    the columns where they are those of none of them.
    """
    table = tables.read(path)
    if table.has("Student", "ID"):
        take = _from_canvas
    elif table.has("id"):
        take = _from_nbgrader
    elif table.has("Email address") or table.has("First name", "Last name") or table.has("Full name"):
        take = _from_moodle
    else:
        raise ValueError(
            f"{path}: the columns are {', '.join(table.columns) or 'none'}; they must be nbgrader's (id, last_name, "
            "first_name, email, lms_user_id), a Canvas gradebook's (Student, ID, SIS Login ID, Section) or Moodle's in "
            "English (First name and Last name, or Full name; Email address): change the first line accordingly"
        )
    found = []
    for line, record in table.records():
        if made := take(record):
            student, names = made[0], [name for name in made[1] if name]
            if not names:
                raise ValueError(f"{path} line {line}: it has no id, email, number or name; give this student an id")
            found.append((line, student, names))
    return _with_ids(path, found)


def dumps(students: list[Student]) -> str:
    """students.csv as text; only its header for no students."""
    return tables.dumps([[f.name for f in fields(Student)], *map(astuple, students)])


_Named = tuple[Student, list[str]]  # without its id, and what may become its id, the best first


def _from_nbgrader(row: dict[str, str]) -> _Named:
    return Student(**{f.name: row.get(f.name, "") for f in fields(Student)} | {"id": ""}), [row["id"]]


def _from_canvas(row: dict[str, str]) -> _Named | None:
    login, sis, canvas_id = row.get("sis login id", ""), row.get("sis user id", ""), row["id"]
    if not canvas_id.isdigit() or (row["student"] == "Student, Test" and not (login or sis)):
        return None  # "Points Possible", and Canvas's own Test Student
    last, _, first = row["student"].partition(",")
    email = login if "@" in login else ""
    student = Student("", last.strip(), first.strip(), email, canvas_id, sis, login, row.get("section", ""))
    return student, [_safe(name) for name in (login.partition("@")[0], sis, canvas_id)]


def _from_moodle(row: dict[str, str]) -> _Named:
    email, login, number = (row.get(column, "") for column in ("email address", "username", "id number"))
    first, last = row.get("first name", ""), row.get("last name") or row.get("surname") or ""
    if not (first or last):
        first, _, last = row.get("full name", "").rpartition(" ")
    student = Student("", last, first, email, "", number, login, row.get("groups", ""))
    return student, [_safe(n) for n in (login, email.partition("@")[0], number, email, f"{first} {last}".strip())]


def _safe(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(f"[{_UNSAFE}]", "", name).lstrip("._- ").strip()


def _with_ids(path: Path, found: list[tuple[int, Student, list[str]]]) -> list[Student]:
    """Each student with the first of their names that no other student has; some file systems know no upper case."""
    count = Counter(names[0].casefold() for *_, names in found)
    taken, students = set(), []
    for line, student, names in found:
        own = [name for name in names if not count[name.casefold()]]
        free = [name for name in names[: count[names[0].casefold()] == 1] + own if name.casefold() not in taken]
        if not free:
            same = names[0].casefold()
            others = [str(other) for other, _, their in found if their[0].casefold() == same and other != line]
            raise ValueError(
                f"{path} line {line}: student id {names[0]!r} occurs twice"
                f"{f' (line {others[0]})' if others else ''}; delete one of the lines if they are one person, else "
                "give each another id, email or number"
            )
        taken.add(free[0].casefold())
        students.append(replace(student, id=free[0]))
    return students
