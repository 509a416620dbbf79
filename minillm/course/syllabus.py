"""The syllabus of a course, as a page in Markdown: weeks, what is read, what is due, workloads, prerequisites."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from minillm.book.workload import Workload
from minillm.course.settings import Course, local_zone

_POINTS = (
    "An exercise earns a point a minute of its workload. A stretch is voluntary: its minutes are in no sum of work, "
    "and its points are a bonus on top of the full marks."
)


@dataclass(frozen=True)
class Chapter:
    """A chapter of the book as a course needs it; minutes are those of the text, without the exercises."""

    number: int
    notebook: str  # the file's name without .ipynb
    title: str
    minutes: int
    needs: tuple[int, ...]
    objectives: tuple[str, ...]
    exercises: dict[str, Workload]

    @property
    def name(self) -> str:
        return f"{self.number:02d}"

    @property
    def solving(self) -> int:
        """Minutes of the exercises without the stretch, which is voluntary."""
        return sum(work.minutes for work in self.exercises.values() if not work.bonus)

    @property
    def load(self) -> int:
        """Minutes of reading and exercises."""
        return self.minutes + self.solving


def syllabus(course: Course, chapters: list[Chapter], weeks: list[int]) -> str:
    """The page. weeks: the week of each chapter, from 1."""
    zone = course.timezone or local_zone()
    lines = [
        "# Syllabus",
        "",
        f"{course.weeks} weeks from {course.start:%A} {_day(course.start)} {course.start:%Y}. {_POINTS}",
        "",
        f"| week | begins | chapter | read, min | exercises, min | due, {zone} | points | bonus |",
        "|---|---|---|---|---|---|---|---|",
    ]
    loads = dict.fromkeys(range(1, course.weeks + 1), 0)
    for week in loads:
        begins = _day(course.start + dt.timedelta(days=7 * (week - 1)))
        taught = [chapter for chapter, own in zip(chapters, weeks) if own == week]
        loads[week] = sum(chapter.load for chapter in taught)
        lines += [f"| {week} | {begins} | {_row(course, chapter)} |" for chapter in taught]
        if not taught:
            lines.append(f"| {week} | {begins} | no new chapter: questions, projects | | | | | |")
    full, fullest = sum(a.points for a in course.assignments.values()), max(loads, key=loads.get)
    lines += [
        "",
        f"All exercises together: {full:g} points. The fullest week, {fullest}, has {_hours(loads[fullest])} of work.",
        "",
        "## Before the course",
        "",
        "Python, and what a matrix product is. Chapter 00 sets up a machine, or Colab.",
        *_before(chapters),
        "",
        "## Chapters",
    ]
    for chapter in chapters:
        lines += ["", *_about(course, chapter)]
    return "\n".join(lines).rstrip() + "\n"


def _row(course: Course, chapter: Chapter) -> str:
    cells = [f"{chapter.name} {chapter.title}", str(chapter.minutes), str(chapter.solving or "")]
    if assignment := course.assignments.get(chapter.name):
        due = f"{assignment.due:%a} {_day(assignment.due)}, {assignment.due:%H:%M}"
        cells += [due, f"{assignment.points:g}", f"{assignment.bonus:g}" if assignment.bonus else ""]
    return " | ".join(cells + [""] * (6 - len(cells)))


def _before(chapters: list[Chapter]) -> list[str]:
    """What the chosen chapters build on and the course does not teach."""
    taught = {chapter.number for chapter in chapters}
    missing = [
        f"* Chapter {chapter.name} builds on {_listed(others)}, which this course leaves out: read it before."
        for chapter in chapters
        if (others := [need for need in chapter.needs if need not in taught])
    ]
    return ["", *missing] if missing else []


def _about(course: Course, chapter: Chapter) -> list[str]:
    text = f"{course.repository}/blob/{course.tag or course.branch}/chapters/{chapter.notebook}.ipynb"
    links = [f"[Chapter](https://github.com/{text})", f"[on Colab](https://colab.research.google.com/github/{text})"]
    if assignment := course.assignments.get(chapter.name):
        links.append(f"[exercises on Colab]({course.on_colab(assignment)})")
    lines = [f"### {chapter.name} · {chapter.title}", "", " · ".join(links)]
    if chapter.needs:
        lines += ["", f"*Needs {_listed(chapter.needs)}.*"]
    if chapter.objectives:
        lines += ["", "Afterwards you can", "", *(f"* {objective}" for objective in chapter.objectives)]
    if chapter.exercises:
        lines += ["", "| exercise | kind | minutes |", "|---|---|---|"]
        lines += [f"| {work.title} | {work.kind} | {work.minutes} |" for work in chapter.exercises.values()]
    return lines


def _listed(numbers) -> str:
    return ("chapter " if len(numbers) == 1 else "chapters ") + ", ".join(f"{n:02d}" for n in numbers)


def _hours(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _day(day: dt.date) -> str:
    return f"{day.day} {day:%b}"
