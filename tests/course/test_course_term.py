"""A whole term, as the lecturer's page has it: its commands, read from the page, on ten made submissions."""

from __future__ import annotations

import copy
import csv
import re
import shlex
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minillm.book import nbfile
from minillm.book.paths import repository_root
from minillm.cli import app
from minillm.course import gradebook, settings
from tests.course.small_book import as_bytes, cell
from tests.helpers.submitted import through_colab, with_answers, without_marks

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
pytest.importorskip("minillm.course.grading", reason="needs `minillm course grade`")
ROOT = repository_root()
PAGE = ROOT / ".github" / "TEACHING.md"
NOTEBOOKS = {"06": "06_the_paged_kv_cache", "07": "07_prefix_caching"}
# Ten students, named after what they hand in: six through Canvas for chapter 06, four through Moodle for chapter 07.
SIX, SEVEN = "honest wrong cheat late broken twice".split(), "colab empty deleted moved".split()


def commands() -> list[list[str]]:
    """The `minillm` lines of the page's bash blocks, in order."""
    fences = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for fence in fences for line in fence.splitlines() if line.startswith("minillm ")]
    return [shlex.split(line)[1:] for line in lines]


def made(kind: str, stub, solved) -> bytes:
    """The file that a student of this kind hands in."""
    nb = copy.deepcopy(solved)
    if kind == "wrong":  # counts positions from the start of the chunk
        source = cell(nb, "slot_mapping").source
        assert "divmod(position, block_size)" in source
        cell(nb, "slot_mapping").source = source.replace("divmod(position, ", "divmod(position - start, ")
    elif kind == "cheat":  # solves nothing and rebinds the checks
        nb = copy.deepcopy(stub)
        at = nb.cells.index(cell(nb, "slot_mapping"))
        rebound = "check_slot_mapping = check_lowest_pool = check_forked_tables = lambda *a, **k: None"
        nb.cells.insert(at, nbfile.nbformat.v4.new_code_cell(rebound))
    elif kind == "broken":
        return as_bytes(nb)[:5000]
    elif kind == "colab":
        nb = without_marks(through_colab(nb))
    elif kind == "empty":
        nb = copy.deepcopy(stub)
    elif kind == "deleted":
        gone = ("vote", "vote_edges", "prefix_hasher_example", "imports")
        nb.cells = [c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") not in gone]
    elif kind == "moved":
        nb.cells.insert(3, nb.cells.pop(nb.cells.index(cell(nb, "prefix_hasher_edges"))))
        nb.cells.append(copy.deepcopy(cell(nb, "vote")))
    return as_bytes(nb)


def hand_in(course: Path) -> None:
    """What the LMSs give: Canvas's zip of chapter 06, Moodle's zip and worksheet of chapter 07."""
    stubs = {name: nbfile.read(course / "release" / name / f"{stem}.ipynb") for name, stem in NOTEBOOKS.items()}
    solved = {
        name: with_answers(stubs[name], nbfile.read(ROOT / "solutions" / f"{stem}.ipynb"))
        for name, stem in NOTEBOOKS.items()
    }
    with zipfile.ZipFile("canvas-06.zip", "w") as archive:
        for number, student in enumerate(SIX, 1):
            late = "_LATE" if student == "late" else ""
            name = f"{student}pat{late}_{number}_{500 + number}_{NOTEBOOKS['06']}.ipynb"
            archive.writestr(name, made(student, stubs["06"], solved["06"]))
            if student == "twice":  # an earlier file, with a mistake
                archive.writestr(name.replace("_50", "_40"), made("wrong", stubs["06"], solved["06"]))
    with zipfile.ZipFile("moodle-07.zip", "w") as archive:
        for number, student in enumerate(SEVEN, 901):
            folder = f"Pat {student.title()}_{number}_assignsubmission_file"
            archive.writestr(f"{folder}/{NOTEBOOKS['07']}.ipynb", made(student, stubs["07"], solved["07"]))
    sheet = [
        f"Participant {n},Pat {s.title()},{s}@uni.example,Submitted for grading," for n, s in enumerate(SEVEN, 901)
    ]
    Path("moodle-07.csv").write_text(
        "\n".join(["\ufeffIdentifier,Full name,Email address,Status,Grade", *sheet]) + "\n", encoding="utf-8"
    )


def sit_exam(course: Path) -> None:
    """Canvas's zip of the exam: one student knows everything, one hands in what they got."""
    stub, source = (nbfile.read(course / step / "exam" / "exam.ipynb") for step in ("release", "source"))
    solved, key = copy.deepcopy(stub), {c.metadata.get("nbgrader", {}).get("grade_id"): c.source for c in source.cells}
    for c in solved.cells:
        if c.metadata.get("nbgrader", {}).get("solution"):
            c.source = key[c.metadata.nbgrader.grade_id]
    with zipfile.ZipFile("canvas-exam.zip", "w") as archive:
        for student, nb in (("honest", solved), ("wrong", stub)):
            archive.writestr(f"{student}pat_{SIX.index(student) + 1}_701_exam.ipynb", as_bytes(through_colab(nb)))


def mark(listed: Path) -> None:
    """Read the texts: the one who knows everything earns all of their points, the other none; saved as Excel does."""
    table = list(csv.DictReader(listed.read_text(encoding="utf-8-sig").splitlines()))
    for row in table:
        row["points"] = row["out of"] if row["student"] == "honest" else "0"
    lines = [";".join(table[0]), *(";".join(row.values()) for row in table)]
    listed.write_text("\r\n".join(lines) + "\r\n", encoding="cp1252")


@pytest.fixture(scope="module")
def term(tmp_path_factory):
    """The folder after the term, and what each command printed."""
    folder, printed = tmp_path_factory.mktemp("term"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        students = [f'"{s.title()}, Pat",{n},,{s}@uni.example,A' for n, s in enumerate([*SIX, *SEVEN], 1)]
        Path("students.csv").write_text("\n".join(["Student,ID,SIS User ID,SIS Login ID,Section", *students]) + "\n")
        for command in commands():
            if command[1] == "correct" and "--from" in command:
                mark(Path(command[command.index("--from") + 1]))
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 0, f"minillm {shlex.join(command)}: {result.output}"
            printed[command[1]] = printed.get(command[1], "") + result.output
            if command[1] == "release":
                hand_in(folder / "inference")
            if command[1] == "exam":
                sit_exam(folder / "inference")
    return folder, printed


@pytest.fixture(scope="module")
def grades(term):
    found = gradebook.load_all(term[0] / "inference")
    return {grade.student: grade for grade in found if grade.notebook != "exam"}


def test_the_page_names_every_step_of_a_term():
    term = ["init", "release", "collect", "grade", "correct", "feedback", "export", "exam"]
    steps = list(dict.fromkeys(command[1] for command in commands()))
    assert all(command[0] == "course" for command in commands())
    assert [step for step in steps if step in term] == term


def test_the_honest_get_what_they_deserve(term, grades):
    assignments = settings.load(term[0] / "inference").assignments
    for student in ("honest", "late", "twice", "colab", "moved"):
        grade = grades[student]
        full, bonus = assignments[grade.notebook].points, assignments[grade.notebook].bonus
        assert (grade.status, grade.max_points, grade.points) == ("graded", full, full + bonus), grade
        assert not grade.flags
    assert grades["late"].late and not grades["honest"].late
    # Where the first exercise was deleted, the others keep theirs.
    earned = {exercise.id: exercise.points for exercise in grades["deleted"].exercises}
    assert earned.pop("vote") == 0 and sum(earned.values()) == assignments["07"].points + assignments["07"].bonus - 10


def test_a_mistake_costs_its_exercise_and_is_explained(term, grades):
    wrong = {exercise.id: exercise for exercise in grades["wrong"].exercises}
    assert wrong["slot_mapping"].points < 10 and grades["wrong"].points >= 120
    page = (term[0] / "inference/reports/wrong/06.html").read_text()
    assert "slot_mapping" in page and "5 points given by Dr. Lee: Right but for the start of the chunk." in page


def test_what_is_dishonest_empty_or_broken_earns_nothing_and_a_person_hears_of_it(term, grades):
    assert grades["cheat"].points == grades["empty"].points == grades["broken"].points == 0
    assert any("check_slot_mapping" in flag.code for flag in grades["cheat"].flags) and not grades["empty"].flags
    assert grades["broken"].status == "failed" and grades["broken"].reason
    assert "check_slot_mapping" in (term[0] / "inference/reports/overview.html").read_text()


def test_the_collection_is_reported(term):
    said = term[1]["collect"]
    assert "late: late 06" in said and "twice 06" in said and "not a notebook" in said
    assert "the mark of vote was lost" in said and "vote was deleted" in said and "cells were moved" in said


def test_the_lms_gets_every_grade(term):
    with open(term[0] / "canvas.csv", encoding="utf-8") as file:
        canvas = {row["SIS Login ID"].partition("@")[0]: row for row in csv.DictReader(file)}
    assert (
        canvas["honest"]["Chapter 06 The paged KV cache"] == "130"
        and canvas["cheat"]["Chapter 06 The paged KV cache"] == "0"
    )
    with open(term[0] / "moodle.csv", encoding="utf-8") as file:
        moodle = {row["Email address"]: row for row in csv.DictReader(file)}
    assert moodle["colab@uni.example"]["Assignment: Chapter 07 Prefix caching"] == "100"
    assert settings.load(term[0] / "inference").until == "nudge"


def test_the_exam_goes_the_way_of_a_chapter(term):
    course = settings.load(term[0] / "inference")
    assert f"{course.assignments['exam'].due:%Y-%m-%d %H:%M}" == "2026-12-15 11:30"
    with open(term[0] / "canvas-exam.csv", encoding="utf-8") as file:
        canvas = {row["SIS Login ID"].partition("@")[0]: row["Exam"] for row in csv.DictReader(file)}
    assert float(canvas["honest"]) == course.assignments["exam"].points and canvas["wrong"] == "0"
    assert canvas["late"] == "", "no exam is no zero"
    pages = zipfile.ZipFile(term[0] / "feedback-exam.zip").namelist()
    assert pages == ["honestpat_1_701_exam.html", "wrongpat_2_701_exam.html"]
