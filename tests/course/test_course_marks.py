"""What counts beside the checks: the due dates of today, and points that a person gives."""

from __future__ import annotations

import datetime as dt

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.course import corrections, export, feedback, gradebook, marks, settings
from tests.course.test_course_export import graded, rows

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")


def run(course, *arguments):
    return CliRunner().invoke(cli.app, ["course", "correct", str(course.folder), *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def graded_course(course):
    """Jane came on 8 February at 20:00 UTC, three hours before chapter 06 was due."""
    (course.folder / corrections.FILE).unlink(missing_ok=True)
    lines = {"lowest": (True, False, False), "highest": (False, False, False)}
    gradebook.save(graded("jdoe", lines, submitted="2026-02-08T20:00:00+00:00"), course.folder)
    return course


def test_a_changed_due_date_reaches_what_is_graded(graded_course):
    path = graded_course.folder / "course.toml"
    text = path.read_text()
    notes = lambda: export.export(settings.load(graded_course.folder), "csv").notes
    assert not any("late" in note for note in notes())
    try:
        path.write_text(text.replace("2026-02-08T23:59:00", "2026-02-08T12:00:00"))
        assert "jdoe 06 was late; its points stand as earned" in notes()
        [page] = feedback.write(settings.load(graded_course.folder))
        assert "came after the due date, 2026-02-08 12:00" in page.read_text()
    finally:
        path.write_text(text)
    [page] = feedback.write(graded_course)
    assert "after the due date" not in page.read_text()


def test_points_given_by_hand_survive_grading_and_are_told(graded_course):
    given = run(graded_course, "jdoe/6/lowest", "--points", "7.5", "--by", "Dr. Lee", "--reason", "a wrong name only")
    assert given.exit_code == 0 and "jdoe 06: 7.5 of 10 points" in given.output, given.output
    gradebook.save(graded("jdoe", {"lowest": (0, 0, 0), "highest": (0, 0, 0)}), graded_course.folder)  # graded again
    [grade] = marks.current(graded_course)
    assert grade.points == 7.5
    [page] = feedback.write(graded_course)
    assert "7.5 points given by Dr. Lee: a wrong name only." in page.read_text()
    assert "lowest: 7.5 points given by Dr. Lee" in (graded_course.folder / "reports/overview.html").read_text()
    made = export.export(graded_course, "csv")
    assert rows(made.text)[1][4] == "7.5"
    assert "jdoe 06 lowest: 7.5 points given by Dr. Lee: a wrong name only" in made.notes
    assert "jdoe/06/lowest: 7.5 points, Dr. Lee" in run(graded_course).output


def test_a_list_that_excel_has_saved_is_read(graded_course):
    path = graded_course.folder / corrections.FILE
    path.write_text(
        "sep=;\r\nStudent;Chapter;Exercise;Points;Author;Reason;Date\r\njdoe;6;lowest;7,5;Dr. Müller;für den Weg;\r\n"
        "jdoe;6;highest;;;;\r\njdoe;6;lowest;8;Dr. Müller;nach dem Gespräch;\r\n",
        encoding="cp1252",
    )
    [grade] = marks.current(graded_course)
    assert grade.points == 8 and grade.exercises[0].correction.endswith("nach dem Gespräch")
    assert run(graded_course, "jdoe/06/highest", "--points", "1", "--by", "L", "--reason", "r").exit_code == 0
    assert path.read_bytes().startswith(b"\xef\xbb\xbf") and marks.current(graded_course)[0].points == 9


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["jdoe/06/lowest", "--points", "11", "--by", "L", "--reason", "r"], "points=11: lowest has from 0 to 10"),
        (["jdoe/06/lowest", "--points", "1", "--by", "L"], "reason is empty"),
        (["jdoe/06/middle", "--points", "1", "--by", "L", "--reason", "r"], "no exercise 'middle'; it has lowest"),
        (["lee/06/lowest", "--points", "1", "--by", "L", "--reason", "r"], "no graded submission of 'lee' in 06"),
        (["jdoe/06", "--points", "1"], "must be STUDENT/CHAPTER/EXERCISE"),
        (["jdoe/09/lowest", "--points", "1", "--by", "L", "--reason", "r"], "chapter '09' is not in this course"),
        (["--from", "nowhere.csv"], "nowhere.csv: no such list"),
    ],
)
def test_a_correction_that_cannot_be_is_refused_and_nothing_written(graded_course, arguments, said):
    result = run(graded_course, *arguments)
    assert result.exit_code == 1 and said in result.stderr
    assert not (graded_course.folder / corrections.FILE).exists()


def test_a_course_has_one_time_zone(graded_course):
    path = graded_course.folder / "course.toml"
    text = path.read_text()
    zone = graded_course.timezone
    try:
        path.write_text(text.replace(f'timezone = "{zone}"', 'timezone = "Europe/Berlin"'))
        berlin = settings.load(graded_course.folder)
        assert berlin.assignments["06"].due == dt.datetime(2026, 2, 8, 22, 59, tzinfo=dt.UTC)
        [page] = feedback.write(berlin)
        assert "submitted 2026-02-08 21:00 CET" in page.read_text()
        path.write_text(text.replace(f'timezone = "{zone}"', 'timezone = "Berlin"'))
        with pytest.raises(ValueError, match="timezone='Berlin': the name of a time zone, such as Europe/Berlin"):
            settings.load(graded_course.folder)
    finally:
        path.write_text(text)
