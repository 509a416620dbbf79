"""`minillm course grade`, `similarity` and `correct`: what students wrote, and what a person gives for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.console import errors_in_one_line, progress
from .course import Chapters, CourseFolder, course, say


@course.command("grade")
def grade_course(
    folder: CourseFolder,
    chapters: Chapters = None,
    student: Annotated[list[str] | None, typer.Option(help="Only this student; may be given several times.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions graded at a time, on a processor core each.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Also what has not changed since it was graded.")] = False,
    accept: Annotated[
        list[str] | None, typer.Option(help="STUDENT/CHAPTER/EXERCISE whose flags you have looked at and accept.")
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB for a submission, beside what the libraries take.")] = 4.0,
    cell_seconds: Annotated[float, typer.Option(help="After which a student's cell is stopped.")] = 60.0,
    line_seconds: Annotated[float, typer.Option(help="After which a graded line is stopped.")] = 60.0,
) -> None:
    """Grade what was handed in and has changed: confined, with pristine checks and seeds that only this course knows.

    `minillm course grade inference-2026 --chapters 06 --jobs 4`

    `minillm course grade inference-2026 --accept jdoe/06/lowest_pool` gives points back that a flag withheld.
    """
    with errors_in_one_line():
        from dataclasses import replace

        from ..course import marks, settings
        from ..course.grading import grade, summary
        from ..course.grading.confine import Limits

        made = settings.load(folder)
        for spec in accept or ():
            say(summary.line(grade.accept(made, spec)))
        if accept:
            return
        limits = Limits(memory, cell_seconds, line_seconds)
        work = grade.find(made, chapters, student or (), again=again, limits=limits)
        with progress("grading", len(work)) as advance:
            results = work.run(jobs, advance)
        counted = {(one.student, one.notebook): one for one in marks.current(made)}  # late by the dates of today
        results = [replace(one, grade=counted[one.grade.student, one.grade.notebook]) for one in results]
        say(*summary.lines(results))
        if waiting := sorted({one.grade.notebook for one in results if marks.waits(one.grade)}):
            say(f"{', '.join(waiting)}: a person reads the texts; `minillm course feedback` writes the list")


@course.command("similarity")
def similarity_course(
    folder: CourseFolder,
    chapters: Chapters = None,
    threshold: Annotated[
        float | None, typer.Option(help="From 0 to 1; by default that of each exercise, from what all answers share.")
    ] = None,
) -> None:
    """Report pairs of answers that are more alike than their exercise explains: a hint, not a verdict.

    `minillm course similarity inference-2026 --chapters 06`
    """
    with errors_in_one_line():
        from ..course import settings, similarity

        made = settings.load(folder)
        found = similarity.compare(made, chapters, threshold)
        files = similarity.write(found, made.folder / "reports")
        say(f"{len(found)} pairs in {files[1]} and {files[0].name}", similarity.NOTE)


@course.command("correct")
def correct_course(
    folder: CourseFolder,
    what: Annotated[str | None, typer.Argument(help="STUDENT/CHAPTER/EXERCISE, as in jdoe/06/slot_mapping.")] = None,
    points: Annotated[
        float | None, typer.Option(help="What the exercise earns in place of what the checks gave.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, in a sentence; the student reads it.")] = "",
    by: Annotated[str, typer.Option(help="Who decides it; the student reads it.")] = "",
    file: Annotated[
        Path | None,
        typer.Option("--from", help="A filled list, such as exam-to-mark.csv of `minillm course feedback`."),
    ] = None,
) -> None:
    """Give points by hand: they are kept in corrections.csv, survive every grading, and stand in feedback and export.

    Without anything it lists what was given.

    `minillm course correct inference-2026 jdoe/06/slot_mapping --points 25 --by "Dr. Lee" --reason "a wrong name"`
    """
    with errors_in_one_line():
        from ..course import corrections, marks, settings

        made = settings.load(folder)
        if file:
            new = corrections.read(made, file, by, reason or "read with the rubric")
        elif what:
            if points is None:
                raise ValueError("points: --points says what the exercise earns")
            new = [corrections.of(made, what, points, by, reason)]
        else:
            say(*corrections.read(made) or [f"no corrections in {made.folder / corrections.FILE}"])
            return
        grades = marks.correct(made, new)
        say(*new, *(f"{g.student} {g.notebook}: {g.points:g} of {g.max_points:g} points" for g in grades))
