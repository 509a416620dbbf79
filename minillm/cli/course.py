"""`minillm course`: what a lecturer does with the book, one command a task."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ..bench.console import errors_in_one_line, out

course = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run a course with this book: set up, release, collect, grade, give feedback, export.",
)

CourseFolder = Annotated[Path, typer.Argument(help="Folder of the course, as `minillm course init` made it.")]
Chapters = Annotated[str | None, typer.Option(help="Chapters such as 01-03,06; all by default.")]


@course.callback()
def _course() -> None:
    pass


def say(*lines: object) -> None:
    for line in lines:
        out.print(str(line), highlight=False, markup=False, soft_wrap=True)


@course.command("init")
def init_course(
    folder: Annotated[Path, typer.Argument(help="A new folder for the course.")],
    chapters: Annotated[str, typer.Option(help="Chapters such as 01-09 or 01-03,06.")] = "01-09",
    weeks: Annotated[
        int, typer.Option(min=1, help="Over how many weeks; a chapter is due at the end of its week.")
    ] = 10,
    start: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="First day; the next Monday by default.")
    ] = None,
    repository: Annotated[str | None, typer.Option(help="owner/name of your fork on GitHub.")] = None,
    tag: Annotated[str, typer.Option(help="Tag of the fork that students install; the newest state by default.")] = "",
    branch: Annotated[str, typer.Option(help="Branch on which you publish the releases, for the badges.")] = "main",
    releases: Annotated[str, typer.Option(help="Folder of the releases in that branch, for the badges.")] = "release",
    until: Annotated[
        str, typer.Option(help="Last rung of help: nudge, or words (never in words where it is graded).")
    ] = "nudge",
    students: Annotated[
        Path | None, typer.Option(help="CSV of the students, as Canvas, Moodle or nbgrader write it.")
    ] = None,
    timezone: Annotated[
        str, typer.Option(help="Of all due dates and times, such as Europe/Berlin; that of this machine by default.")
    ] = "",
) -> None:
    """Set up a course: sources, settings, a syllabus with due dates; nbgrader works in its folder.

    `minillm course init inference-2026 --chapters 01-09 --weeks 10 --start 2026-10-05 --repository you/fork --tag v1`
    """
    with errors_in_one_line():
        from ..book.colab import REPOSITORY
        from ..course import setup

        made = setup.init(
            folder,
            chapters,
            weeks,
            start.date() if start else None,
            repository or REPOSITORY,
            tag,
            branch,
            releases,
            until,
            students,
            timezone=timezone,
        )
        for assignment in made.assignments.values():
            bonus = f", bonus {assignment.bonus:g}" if assignment.bonus else ""
            say(
                f"week {assignment.week:2}  {assignment.name} {assignment.title}, due {made.shown(assignment.due)}, "
                f"{assignment.points:g} points{bonus}"
            )
        if not tag:
            say("Not pinned: students install the newest state of the repository; --tag pins it.")
        say(f"Dates and times are those of {made.timezone}; timezone in course.toml or --timezone changes it.")
        say(f"{made.folder}: edit course.toml and students.csv, then `minillm course release {folder}`")


@course.command("release")
def release_course(folder: CourseFolder, chapters: Chapters = None) -> None:
    """Make the notebooks for the students in release/, as `nbgrader generate_assignment` does.

    `minillm course release inference-2026 --chapters 01-02`
    """
    with errors_in_one_line():
        from ..course import releases, settings

        made = settings.load(folder)
        for path in releases.release(made, made.chosen(chapters)):
            say(path.relative_to(made.folder))


@course.command("collect")
def collect_course(
    folder: CourseFolder,
    source: Annotated[Path, typer.Argument(help="A folder of student folders, or a zip from Canvas or Moodle.")],
    chapter: Annotated[
        str | None, typer.Option(help="The chapter of all files, such as 06; known by their cells by default.")
    ] = None,
    worksheet: Annotated[
        Path | None, typer.Option(help="Moodle's grading worksheet: who a participant is, and who was late.")
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Take a student's last file, also where it is late and another is in time.")
    ] = False,
) -> None:
    """Bring submissions in: the newest in time of each student, marks restored, nothing lost, unknown names reported.

    `minillm course collect inference-2026 ~/Downloads/submissions.zip --chapter 06`
    """
    with errors_in_one_line():
        from ..course import collect, settings

        say(*collect.collect(settings.load(folder), source, chapter, worksheet, last).lines())


@course.command("restore")
def restore_course(folder: CourseFolder, chapters: Chapters = None) -> None:
    """Put marks back that an editor lost, in submissions that were put into submitted/ by hand.

    `minillm course collect` does this by itself.
    """
    with errors_in_one_line():
        from ..course import collect, settings

        made = settings.load(folder)
        found = collect.restore_submissions(made, made.chosen(chapters))
        say(*(f"{submission}: {sentence}" for submission, sentence in found), f"{len(found)} put back or wrong")


@course.command("feedback")
def feedback_course(
    folder: CourseFolder,
    chapter: Annotated[str | None, typer.Option(help="One chapter such as 06; all by default.")] = None,
    pack: Annotated[
        Path | None, typer.Option("--zip", help="Also a zip that Canvas and Moodle hand back; with --chapter.")
    ] = None,
) -> None:
    """Write a page for each graded submission, and an overview for yourself, in reports/.

    `minillm course feedback inference-2026 --chapter 06 --zip feedback-06.zip`
    """
    with errors_in_one_line():
        from ..course import feedback, settings

        made = settings.load(folder)
        if pack and not chapter:
            raise ValueError("--zip holds the pages of one chapter: name it with --chapter")
        chapter = made.assignment(chapter).name if chapter else None
        pages, lists = feedback.write(made, chapter), feedback.to_mark(made)
        for one in lists:
            say(f"answers to read: {one.with_suffix('.html')}; {one} takes the points (correct --from)")
        say(f"{len(pages)} pages and the overview in {made.folder / feedback.FOLDER}")
        if pack and (without := feedback.pack(made, chapter, pages, pack)):
            say(f"not in {pack}, since their files came from no LMS: {', '.join(without)}")


@course.command("export")
def export_course(
    folder: CourseFolder,
    to: Annotated[str, typer.Option(help="canvas, moodle or csv.")],
    file: Annotated[Path, typer.Option("--out", help="The CSV to write.")],
    chapters: Chapters = None,
    into: Annotated[
        Path | None, typer.Option(help="Canvas's exported gradebook or Moodle's worksheet, to be filled in.")
    ] = None,
) -> None:
    """Write the grades as Canvas or Moodle import them.

    `minillm course export inference-2026 --to canvas --into gradebook.csv --out upload.csv`
    """
    with errors_in_one_line():
        from ..course import export, settings

        made = export.export(settings.load(folder), to, chapters, into)
        file.write_text(made.text, encoding="utf-8")
        say(*made.notes, f"{made.text.count(chr(10))} lines in {file}")


@course.command("exam")
def make_exam(
    folder: Annotated[Path, typer.Argument(help="Folder for the exam; that of the course, or a new one.")],
    seed: Annotated[int, typer.Option(min=1, help="Draws the numbers; keep it secret.")],
    chapters: Annotated[str, typer.Option(help="Chapters such as 01-09 or 01-03,06.")] = "01-09",
    minutes: Annotated[int, typer.Option(min=15, help="Of the whole exam; a point a minute.")] = 90,
    paper: Annotated[int, typer.Option(min=1, help="Which questions of the bank; every seed has the same ones.")] = 1,
    students: Annotated[
        Path | None, typer.Option(help="Ids, one a line, or a CSV of students: other numbers for each of them.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the exam, as an assignment.")] = "exam",
    again: Annotated[bool, typer.Option("--again", help="Write over an exam of this name.")] = False,
    due: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M"], help="In the course's time zone; else its last day."
        ),
    ] = None,
) -> None:
    """Make an exam: notebooks for nbgrader, a page to print, and the key with workings and rubrics.

    Two seeds differ in the numbers, not in the difficulty. Everything under `source/` and `key/` is for lecturers only.

    `minillm course exam inference-2026 --seed 20261130 --chapters 01-09 --minutes 90 --students students.csv`
    """
    with errors_in_one_line():
        from ..course import exam
        from ..course.settings import chapter_range

        made = exam.make(chapter_range(chapters), seed, minutes, paper, name)
        written = exam.write(made, folder, exam.read_students(students) if students else (), again, due)
        for number, one in enumerate(made.questions, 1):
            say(f"{number:2}  {one.id}, {one.kind}: {one.title}, {one.points} points")
        say(f"{made.points} points for {minutes} minutes; {len(written.files)} files in {folder}")
        if written.assignment:
            say(f"{name} is an assignment of the course now, due {written.course.shown(written.assignment.due)}")


@course.command("key")
def make_key(
    folder: Annotated[Path, typer.Argument(help="Folder for the pages; never where students can read.")],
    chapters: Chapters = None,
) -> None:
    """Run the solutions and render them, one page a chapter: for the lecturer only.

    `minillm course key inference-2026/key --chapters 01-09`
    """
    with errors_in_one_line():
        from ..course import key
        from ..course.settings import chapter_range

        key.write(folder, chapter_range(chapters) if chapters else None, say)


@course.command("slides")
def make_slides(
    to: Annotated[Path, typer.Option("--to", help="Folder for the decks.")],
    chapters: Chapters = None,
    reveal_url: Annotated[
        str | None, typer.Option(help="Where reveal.js already is; by default npm fetches it, beside the decks.")
    ] = None,
) -> None:
    """One deck of slides a chapter: its objectives, figures, code and takeaways, to be shown without a network.

    Press `s` for the speaker's notes, which hold the chapter's text; add `?print-pdf` to the address to print.

    `minillm course slides --chapters 06 --to slides`
    """
    with errors_in_one_line():
        from ..course import decks
        from ..course.settings import chapter_range

        for path in decks.write(to, chapter_range(chapters) if chapters else None, reveal_url):
            say(path)


@course.command()
def leaderboard(
    folder: Annotated[Path, typer.Argument(help="The leaderboard's folder; made by the first `--add`.")],
    add: Annotated[Path | None, typer.Option(help="Score this .py file or notebook, and add it.")] = None,
    project: Annotated[str, typer.Option(help="scheduler, kernel or router: what `--add` is for.")] = "",
    name: Annotated[str, typer.Option(help="Whose entry `--add` is.")] = "",
    seed: Annotated[list[int] | None, typer.Option(help="Seeds in place of the stated ones; may be repeated.")] = None,
    verify: Annotated[bool, typer.Option(help="Score every entry again from its source.")] = False,
) -> None:
    """The projects of chapter 25: entries by how many times better than the baseline they are, in counted work."""
    from minillm.book.projects import leaderboard as board

    wrong = 0
    with errors_in_one_line():
        if add is not None:
            entry = board.add(folder, project, name, add, seed)
            typer.echo(f"{entry.name}: " + (f"gain {entry.gain:.3f}" if entry.is_valid else f"not valid: {entry.why}"))
        for entry in board.read(folder) if verify else ():
            said = board.disagreement(entry, board.again(folder, entry))
            wrong += bool(said)
            typer.echo(f"{entry.project} {entry.name} {entry.source[:12]}: {said or 'the same again'}")
        typer.echo(board.table(folder))
    if wrong:
        raise typer.Exit(1)
