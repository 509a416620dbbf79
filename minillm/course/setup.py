"""A new course: an nbgrader folder with the sources of the chosen chapters, settings, a roster and a syllabus."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path

from minillm.book import colab, nbfile, workload
from minillm.book.paths import chapter_number, notebooks, repository_root
from minillm.course import releases, roster, secret, settings
from minillm.course.settings import Assignment, Course, chapter_range
from minillm.course.syllabus import Chapter, syllabus

_CONFIG = """\
# nbgrader's settings of this course; every `nbgrader` command run in this folder reads them.
c = get_config()

c.CourseDirectory.course_id = "minillm"
c.OverwriteCells.add_missing_cells = True  # a graded line that a student deleted is put back
c.Execute.timeout = 300  # seconds a cell; the slowest check takes far less
c.Execute.startup_timeout = 300
"""

_IGNORED = """\
# What must not be published with the releases.
/source/
/submitted/
/received/
/unknown/
/autograded/
/grades/
/reports/
/feedback/
/release/exam*/
/key/
/gradebook.db
/.grading-secret
*.csv
"""


def init(
    folder: Path,
    chapters: str = "01-09",
    weeks: int = 10,
    start: dt.date | None = None,
    repository: str = colab.REPOSITORY,
    tag: str = "",
    branch: str = "main",
    releases_folder: str = "release",
    until: str = "nudge",
    students: Path | None = None,
    root: Path | None = None,
    timezone: str = "",
) -> Course:
    """Make a course in a folder that holds none yet; nothing is written unless all of it can be.

    start: the day on which the first week begins; the next Monday by default.
    students: a CSV of the students, as `minillm.course.roster.read` takes it. root: the clone of the book.
    timezone: of all dates and times, such as "Europe/Berlin"; that of this machine by default.
    Raises FileExistsError where there is a course already, ValueError for settings that make no course.
    """
    folder, root = Path(folder).expanduser().resolve(), root or repository_root()
    if (folder / settings.FILE).exists() or (folder / "source").exists():
        raise FileExistsError(f"{folder} holds a course already: choose another folder, or edit its {settings.FILE}")
    colab.check_repository(repository)
    if weeks < 1:
        raise ValueError(f"weeks={weeks}: at least 1")
    listed = roster.read(students) if students else []
    roster.Roster(listed)
    start = start or _next_monday(dt.date.today())
    timezone = timezone or settings.local_zone()
    course = Course(folder, repository, tag, branch, releases_folder, until, start, weeks, timezone)
    chosen = [_chapter(number, root) for number in chapter_range(chapters)]
    planned = weeks_of([chapter.load for chapter in chosen], weeks)
    files, assignments = {}, {}
    for chapter, week in zip(chosen, planned):
        if not chapter.exercises:
            continue
        path = _notebook("solutions", chapter.number, root)
        nb = releases.source_of(nbfile.read(path), course, chapter.name, path.stem)
        files[f"source/{chapter.name}/{path.name}"] = nbfile.dumps(nb)
        full, bonus = _points(nb, chapter.exercises)
        assignments[chapter.name] = Assignment(
            chapter.name, path.stem, chapter.title, week, due_of(start, week, course.zone), full, bonus
        )
    if not assignments:
        raise ValueError(f"chapters={chapters!r}: none of them has exercises")
    course = replace(course, assignments=assignments)
    files |= {
        settings.FILE: settings.dumps(course),
        roster.FILE: roster.dumps(listed),
        "syllabus.md": syllabus(course, chosen, planned),
        "nbgrader_config.py": _CONFIG,
        ".gitignore": _IGNORED,
    }
    folder.mkdir(parents=True, exist_ok=True)
    secret.make(folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return course


def weeks_of(loads: list[int], weeks: int) -> list[int]:
    """The week (from 1) of each chapter, in order, so that the fullest week has as few minutes as possible.

    With more weeks than chapters each chapter has a week of its own, and the last weeks stay free.
    """
    if weeks >= len(loads):
        return list(range(1, len(loads) + 1))
    limit = max(loads)
    while (found := _filled(loads, limit))[-1] > weeks:
        limit += 5  # the workloads are multiples of five minutes
    return found


def _filled(loads: list[int], limit: int) -> list[int]:
    """Chapters taken in order into weeks of at most `limit` minutes."""
    week, room, found = 1, limit, []
    for load in loads:
        if load > room:
            week, room = week + 1, limit
        room -= load
        found.append(week)
    return found


def due_of(start: dt.date, week: int, zone: dt.tzinfo) -> dt.datetime:
    """The last minute of a week, in the time zone of the course."""
    return dt.datetime.combine(start + dt.timedelta(days=7 * week - 1), dt.time(23, 59), zone)


def _next_monday(day: dt.date) -> dt.date:
    return day + dt.timedelta(days=7 - day.weekday())


def _points(nb, work: dict[str, workload.Workload]) -> tuple[float, float]:
    """Full marks and bonus of a source notebook."""
    full = bonus = 0
    for cell in nb.cells:
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("grade"):
            if work[marks["grade_id"].rpartition("_")[0]].bonus:
                bonus += marks["points"]
            else:
                full += marks["points"]
    return full, bonus


def _notebook(kind: str, number: int, root: Path) -> Path | None:
    return next((path for path in notebooks(kind, root) if chapter_number(path) == number), None)


def _chapter(number: int, root: Path) -> Chapter:
    text, solution = _notebook("chapters", number, root), _notebook("solutions", number, root)
    if text is None:
        there = ", ".join(path.name[:2] for path in notebooks("chapters", root))
        raise ValueError(f"chapter {number:02d} is not in this book; it has {there}")
    # A chapter's saved figures make it large; its metadata and title need no validation.
    read = json.loads(text.read_text(encoding="utf-8"))
    book = read["metadata"].get("book", {})
    title = "".join(read["cells"][0]["source"]).splitlines()[0].partition("·")[2].strip()
    work = workload.workloads(nbfile.read(solution)) if solution else {}
    needs = tuple(int(need) for need in book.get("needs", ()))
    return Chapter(
        number, text.stem, title, int(book.get("minutes", 0)), needs, tuple(book.get("objectives", ())), work
    )
