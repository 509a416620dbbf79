"""`minillm course grade` on a course: what is graded again, what a person accepts, what is printed and written."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.course import gradebook, secret
from minillm.course.grading import grade as grading
from tests.course.small_book import cell, solved

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")

CHEAT = "def highest(free):\n    return 3\ncheck_highest = lambda *a, **k: print('passed')\n"


def run(*arguments):
    return CliRunner().invoke(cli.app, ["course", *map(str, arguments)], env={"COLUMNS": "200"})


def hand_in(course, student, nb, when=""):
    path = course.notebook_in("submitted", course.assignments["06"], student)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nb if isinstance(nb, str) else json.dumps(nb), encoding="utf-8")
    if when:
        (path.parent / "timestamp.txt").write_text(when)


@pytest.fixture(scope="module")
def graded(course):
    """Three students, one of them late and dishonest in one exercise, one with a file that is no notebook."""
    cheating = solved(course)
    cell(cheating, "highest").source = CHEAT
    hand_in(course, "jdoe", solved(course), "2026-02-03 10:00:00 UTC")
    hand_in(course, "Käthe Müller", cheating, "2026-12-24 10:00:00 UTC")
    hand_in(course, "lee", "{}")
    return course, run("grade", course.folder, "--chapters", "06", "--jobs", "2")


def test_every_student_gets_a_grade_and_the_lecturer_a_line_for_each_flag(graded):
    course, result = graded
    assert result.exit_code == 0, result.output
    grades = {grade.student: grade for grade in gradebook.load_all(course.folder, "06")}
    honest, cheat, broken = grades["jdoe"], grades["Käthe Müller"], grades["lee"]
    assert (honest.points, honest.flags, honest.late, honest.status) == (70, [], False, "graded")
    assert (cheat.points, cheat.late) == (10, True)
    assert {(flag.exercise, flag.refused) for flag in cheat.flags} == {("highest", True)}
    assert broken.status == "failed" and broken.points == 0
    assert "jdoe 06: 70 of 10 points\n" in result.output
    assert (
        "check_highest = lambda *a, **k: print('passed')  (to accept: --accept Käthe Müller/06/highest)"
        in result.output
    )
    assert "3 graded, 0 unchanged" in result.output


def test_only_what_has_changed_is_graded_again(graded, monkeypatch):
    course, _ = graded
    monkeypatch.setattr(grading, "Worker", None)  # nothing may run
    assert "0 graded, 3 unchanged" in run("grade", course.folder, "--chapters", "06").output
    work = grading.find(course, "06")
    assert len(work) == 0 and len(grading.find(course, "06", again=True)) == 3
    nb = solved(course)
    nb.cells[-1].source += "\n# looked at again"
    hand_in(course, "jdoe", nb)
    assert [one.student for one, _ in grading.find(course, "06").waiting[course.assignments["06"]]] == ["jdoe"]


def test_a_person_accepts_a_flag_and_the_points_come_back(graded, monkeypatch):
    course, _ = graded
    monkeypatch.setattr(grading, "Worker", None)
    wrong = run("grade", course.folder, "--accept", "jdoe/06/nothing")
    assert wrong.exit_code == 1 and "06 has no exercise 'nothing'; it has lowest, highest" in wrong.stderr
    assert "nothing is withheld there" in run("grade", course.folder, "--accept", "jdoe/06/lowest").stderr
    accepted = run("grade", course.folder, "--accept", "Käthe Müller/06/highest")
    assert accepted.exit_code == 0, accepted.output
    grade = gradebook.load(gradebook.path_of(course.folder, "Käthe Müller", "06"))
    passed = sum(part.max_points for exercise in grade.exercises for part in exercise.parts if part.passed)
    assert grade.points == passed > 10
    assert grading.read_accepted(course.folder) == {("Käthe Müller", "06", "highest")}


def test_mistakes_of_the_lecturer_end_in_one_line(graded, tmp_path):
    course, _ = graded
    for arguments, words in (
        (("--student", "nobody"), "student 'nobody' has handed nothing in"),
        (("--chapters", "23"), "chapter '23' is not in this course"),
        (("--chapters", "07"), "nothing to grade"),
        (("--memory", "0"), "memory=0.0: must be more than 0"),
    ):
        result = run("grade", course.folder, *arguments)
        assert result.exit_code == 1 and words in result.stderr, result.output + result.stderr
    (tmp_path / secret.FILE).write_text("short")
    with pytest.raises(ValueError, match="at least 32 hexadecimal digits"):
        secret.read(tmp_path)


def test_the_secret_is_made_once_kept_private_and_in_no_release(graded, monkeypatch):
    course, _ = graded
    key = secret.read(course.folder)
    assert secret.read(course.folder) == key and (course.folder / secret.FILE).stat().st_mode & 0o077 == 0
    assert not any(key in path.read_text() for path in (course.folder / "release").rglob("*") if path.is_file())
    monkeypatch.setenv(secret.VARIABLE, "ab" * 20)
    assert secret.read(course.folder) == "ab" * 20
