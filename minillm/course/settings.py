"""The settings of a course: `course.toml` in its folder, which `minillm course init` writes and a lecturer edits."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import re
import tomllib
import zoneinfo
from dataclasses import dataclass, field
from pathlib import Path

FILE = "course.toml"
RUNGS = ("nudge", "words")
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True)
class Assignment:
    """One chapter's exercises as an assignment of nbgrader.

    name: the chapter's two digits. notebook: the file's name without `.ipynb`. week: from 1.
    due: with its time zone. points: full marks; bonus: what the stretch adds.
    """

    name: str
    notebook: str
    title: str
    week: int
    due: dt.datetime
    points: float
    bonus: float = 0

    @property
    def is_exam(self) -> bool:
        """Whether it is an exam, which has a name; a chapter has its two digits."""
        return not self.name.isdigit()


@dataclass(frozen=True)
class Course:
    """A course: where it lies, where its releases are published, its help, its assignments by name.

    repository: owner/name on GitHub. tag: of the package that students install; empty is the newest state.
    branch and releases: the branch and the folder in the repository where the released notebooks lie.
    until: the last rung of help in a release, one of RUNGS.
    timezone: of all its dates and times, such as "Europe/Berlin"; empty is that of the machine.
    """

    folder: Path
    repository: str
    tag: str = ""
    branch: str = "main"
    releases: str = "release"
    until: str = "nudge"
    start: dt.date = dt.date(2000, 1, 3)
    weeks: int = 1
    timezone: str = ""
    assignments: dict[str, Assignment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.until not in RUNGS:
            raise ValueError(f"until={self.until!r}: one of {', '.join(RUNGS)}")
        zone_of(self.timezone)
        for name in ("tag", "branch", "releases"):
            value = getattr(self, name)
            if not (_REFERENCE.fullmatch(value) or (name == "tag" and not value)) or ".." in value:
                raise ValueError(f"{name}={value!r}: letters, digits and . _ / - only, as in v1 or course/release")

    def assignment(self, name: str) -> Assignment:
        """The assignment "06", also by "6", or "exam". Raises ValueError with the names that there are."""
        name = name.strip().zfill(2)
        if name not in self.assignments:
            what = f"chapter {name!r}" if name.isdigit() else f"{name!r}"
            raise ValueError(f"{what} is not in this course; it has {', '.join(self.assignments)}")
        return self.assignments[name]

    def chosen(self, chapters: str | None) -> list[Assignment]:
        """The assignments of a list such as "01-03,06,exam", or all. Raises ValueError for one that is missing."""
        if not chapters:
            return list(self.assignments.values())
        names = set()
        for piece in chapters.split(","):
            is_range = re.fullmatch(r"[\d\s-]*", piece)
            names.update([f"{n:02d}" for n in chapter_range(piece)] if is_range else [piece])
        wanted = {self.assignment(name).name for name in sorted(names)}
        return [assignment for name, assignment in self.assignments.items() if name in wanted]

    @property
    def zone(self) -> dt.tzinfo:
        """The time zone of the course."""
        return zone_of(self.timezone)

    def shown(self, when: dt.datetime) -> str:
        """A moment as a person reads it: "2026-02-08 23:59 CET"."""
        return f"{when.astimezone(self.zone):%Y-%m-%d %H:%M %Z}"

    def is_late(self, name: str, submitted: str, told: bool = False) -> bool:
        """Whether a submission came after the due date that the course has today.

        submitted: in ISO 8601; where the LMS gave no time it is empty, and `told` is what the LMS says.
        """
        return dt.datetime.fromisoformat(submitted) > self.assignment(name).due if submitted else told

    def on_colab(self, assignment: Assignment) -> str:
        """The address at which Colab opens the released notebook, once it is published."""
        path = f"{self.releases}/{assignment.name}/{assignment.notebook}.ipynb"
        return f"https://colab.research.google.com/github/{self.repository}/blob/{self.branch}/{path}"

    def notebook_in(self, step: str, assignment: Assignment, student: str = ".") -> Path:
        """The notebook of an assignment in one of nbgrader's folders: source, release, submitted, autograded."""
        return self.folder / step / student / assignment.name / f"{assignment.notebook}.ipynb"


def chapter_range(text: str) -> list[int]:
    """ "01-03,06" -> [1, 2, 3, 6]. Raises ValueError for anything else."""
    found = set()
    for piece in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,2})(?:-(\d{1,2}))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"chapters={text!r}: numbers and ranges such as 01-09 or 01-03,06")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def load(folder: Path) -> Course:
    """The course in a folder. Raises FileNotFoundError without one, ValueError with the setting that is wrong."""
    folder = Path(folder).resolve()
    path = folder / FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {FILE} in {folder}: `minillm course init FOLDER` makes a course")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        listed = found.pop("assignments", {})
        zone = zone_of(found.get("timezone", ""))
        assignments = {name: _assignment(name, values, zone) for name, values in listed.items()}
        return Course(folder=folder, assignments=assignments, **_typed(found, Course, ("folder", "assignments")))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def dumps(course: Course) -> str:
    """A course as the text of course.toml."""
    lines = [
        "# The settings of this course. A due date may be changed at any time: lateness follows it.",
        "# Dates and times are those of the time zone below, where they have no offset of their own.",
        *_lines(course, ("folder", "assignments")),
    ]
    return "\n".join(lines) + "\n" + "".join(map(_section, course.assignments.values()))


def put(course: Course, assignment: Assignment) -> Course:
    """Write one assignment into course.toml, in the place of one of its name; all else stays as it was written."""
    path = course.folder / FILE
    text = path.read_text(encoding="utf-8")
    start = re.escape(f'[assignments."{assignment.name}"]')
    text = re.sub(rf"\n*^{start}[ \t]*\n(?:(?!\[).*\n?)*", "\n", text, flags=re.MULTILINE)
    path.write_text(text.rstrip() + "\n" + _section(assignment), encoding="utf-8")
    return load(course.folder)


def zone_of(name: str) -> dt.tzinfo:
    """A time zone by its name; that of this machine for no name. Raises ValueError for a name that is none."""
    name = name or local_zone()
    if name == "UTC":
        return dt.UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError) as error:
        raise ValueError(f"timezone={name!r}: the name of a time zone, such as Europe/Berlin or UTC") from error


def local_zone() -> str:
    """The name of this machine's time zone, "UTC" where it states none."""
    name = os.environ.get("TZ", "").lstrip(":") or os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    try:
        return zoneinfo.ZoneInfo(name).key if name else "UTC"
    except (KeyError, ValueError, OSError):
        return "UTC"


def _section(assignment: Assignment) -> str:
    return "\n".join(["", f'[assignments."{assignment.name}"]', *_lines(assignment, ("name",))]) + "\n"


def _assignment(name: str, values: dict, zone: dt.tzinfo) -> Assignment:
    try:
        typed = _typed(values, Assignment, ("name",))
    except ValueError as error:
        raise ValueError(f"assignments.{name}: {error}") from error
    due = typed["due"]
    due = due.astimezone(zone) if due.tzinfo else due.replace(tzinfo=zone)
    return Assignment(name=name, **{**typed, "due": due})


_TYPES = {"str": str, "int": int, "float": (int, float), "dt.datetime": dt.datetime, "dt.date": dt.date}


def _typed(values: dict, kind: type, without: tuple[str, ...]) -> dict:
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in without}
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"unknown setting {unknown[0]!r}; there are {', '.join(fields)}")
    for name, f in fields.items():
        if name not in values:
            if f.default is dataclasses.MISSING:
                raise ValueError(f"{name} is missing")
        elif not isinstance(values[name], _TYPES[f.type]) or isinstance(values[name], bool):
            raise ValueError(f"{name}={values[name]!r}: must be {f.type.removeprefix('dt.')}")
    return values


def _lines(record: object, without: tuple[str, ...]) -> list[str]:
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in without}
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: object) -> str:
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None).isoformat(timespec="seconds")
    if isinstance(value, dt.date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False)
