"""Grades as a student's page and as the CSV of an LMS."""

from __future__ import annotations

import csv
import io
import shutil
import zipfile

import pytest

from minillm.course import collect, export, feedback, gradebook, roster as rosters
from minillm.course.gradebook import ExerciseGrade, Flag, Grade, Part
from minillm.course.grading.submission import NOT_BEGUN
from tests.course.small_book import as_bytes, solved

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
WRONG = "lowest: edges\nlowest([5, 5]) is 4, expected 5 <b>"


def graded(student: str, earned: dict[str, tuple[bool, bool, bool]], **more) -> Grade:
    """A grade of chapter 06: `lowest` of 10 points, `highest` of 60 bonus; which of their lines passed."""
    exercises = []
    for name, passed in earned.items():
        whole = {"lowest": (2, 4, 4), "highest": (12, 24, 24)}[name]
        parts = [
            Part(part, bool(ok), points * ok, points, "" if ok else WRONG)
            for part, ok, points in zip(("example", "edges", "random"), passed, whole)
        ]
        minutes, title = sum(whole), f"{name.title()} free id"
        points = sum(part.points for part in parts)
        exercises.append(ExerciseGrade(name, title, minutes, points, minutes, parts, bonus=name == "highest"))
    return Grade(student, "06", exercises=exercises, **more)


FLAG = Flag(3, 5, "it looks at frames", "sys._getframe(1)", "lowest", refused=True)
GRADES = [
    graded("jdoe", {"lowest": (1, 1, 1), "highest": (1, 1, 1)}, submitted="2026-02-03T12:00:00+00:00"),
    graded("mueller", {"lowest": (1, 0, 0), "highest": (0, 0, 0)}, late=True, flags=[FLAG]),
    Grade("lee", "06", status="blocked", reason="no GPU on this machine"),
    Grade("stranger", "06", status="failed", reason="the file is empty"),
]


@pytest.fixture(scope="module", autouse=True)
def grades(course):
    for grade in GRADES:
        gradebook.save(grade, course.folder)


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_a_grade_is_read_as_it_was_written(course):
    assert {g.student: g for g in gradebook.load_all(course.folder, "06")} == {g.student: g for g in GRADES}
    assert (GRADES[0].points, GRADES[0].max_points) == (70, 10)


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"late": false', '"late": 0', "grade.late=0: must be bool"),
        ('"minutes": 10,', "", r"exercises\[0\] has no field 'minutes'"),
        ('"seconds"', '"secs"', r"parts\[0\] has an unknown field 'secs'"),
        ('"status": "graded"', '"status": "good"', "status='good': one of graded, blocked, failed"),
        ('"student": "jdoe"', '"student": "lee"', "it is the grade of student 'lee' in '06', and its place"),
        ("{", "", "not JSON"),
    ],
)
def test_a_grade_that_was_edited_wrongly_is_named(tmp_path, old, new, said):
    path = gradebook.save(GRADES[0], tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=said):
        list(gradebook.load_all(tmp_path))


def test_a_page_says_what_a_student_needs(course):
    pages = {path.parent.name: path.read_text() for path in feedback.write(course)}
    good, wrong = pages["jdoe"], pages["mueller"]
    assert "Jane Doe" in good and "70 of 10 points" in good and "with 60 of them bonus" in good
    assert "Everything that counts passes." in good and "✗" not in good
    assert (
        "Käthe Müller-Lüdenscheidt" in wrong and "2 of 10" in wrong and "after the due date, 2026-02-08 23:59" in wrong
    )
    assert "expected 5 &lt;b&gt;" in wrong and wrong.count("lowest([5, 5])") == 2  # once an exercise
    assert "the edge cases failed: 0 of 4" in wrong and "one of them is about this case" in wrong
    assert "Begin with “Lowest free id”." in wrong
    assert "you/fork/blob/term/kurs/release/06/06_sample.ipynb" in wrong and "/solutions/" not in wrong
    assert "Not graded yet: No GPU on this machine. This is not a zero" in pages["lee"]
    assert "could not be graded. The file is empty. Hand in the\nnotebook" in pages["stranger"]


def test_flags_are_for_the_lecturer_alone(course):
    pages = feedback.write(course)
    assert not any("_getframe" in path.read_text() or "frames" in path.read_text() for path in pages)
    overview = (course.folder / "reports/overview.html").read_text()
    assert (
        "line 3 of cell 6: it looks at frames" in overview
        and "points withheld" not in overview  # a person has given them back
        and 'href="mueller/06.html"' in overview
    )


def test_points_that_are_withheld_are_explained(course, monkeypatch):
    grade = graded("jdoe", {"lowest": (True, True, True)})
    for part in grade.exercises[0].parts:
        part.points, part.message = 0, "withheld until the lecturer has looked at a flag"
    grade.exercises[0].points = 0
    text = feedback.page(grade, course, "Jane Doe")
    assert "0 of 10 points" in text and text.count("withheld until the lecturer") == 1
    assert "your lecturer looks at this answer" in text and "Everything that counts passes" not in text
    grade.flags = [FLAG]
    monkeypatch.setattr(gradebook, "load_all", lambda folder, notebook=None: iter([grade]))
    feedback.write(course)
    assert "<strong>points withheld</strong>, line 3" in (course.folder / "reports/overview.html").read_text()
    assert any("jdoe 06 has withheld points" in note for note in export.export(course, "csv").notes)


def test_what_is_not_begun_gets_its_nudge():
    empty = Part("example", False, 0, 2, NOT_BEGUN)
    assert "The statement gives it 10 minutes" in feedback.next_step(ExerciseGrade("a", "A", 10, 0, 2, [empty]))
    assert feedback.number(2.50) == "2.5" and feedback.number(10.0) == "10"


def test_pages_go_back_under_the_names_that_the_lms_knows(course, tmp_path):
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("doejane_101_5001_06_sample.ipynb", as_bytes(solved(course)))
        archive.writestr("Käthe Müller-Lüdenscheidt_78_assignsubmission_file/06_sample.ipynb", as_bytes(solved(course)))
    collect.collect(course, tmp_path / "in.zip")
    left = feedback.pack(course, "06", feedback.write(course, "06"), tmp_path / "out.zip")
    assert sorted(left) == ["lee", "stranger"]
    assert sorted(zipfile.ZipFile(tmp_path / "out.zip").namelist()) == [
        "Käthe Müller-Lüdenscheidt_78_assignsubmission_file/feedback.html",
        "doejane_101_5001_06_sample.html",
    ]
    blind = tmp_path / "blind.csv"  # hides the names: the number of the collected file tells who it is
    blind.write_text("Identifier;Status;Grade;Maximum grade;Last modified (grade)\nParticipant 78;;;100,00;-\n")
    assert rows(export.export(course, "moodle", "06", blind).text)[1][2] == "20"
    shutil.rmtree(course.folder / "submitted")


def test_canvas_takes_points_by_its_own_ids_with_points_possible_in_the_second_row(course):
    made = export.export(course, "canvas")
    header, possible, jane, kaethe, lee = rows(made.text)
    assert header == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Chapter 06 Sample 6"]
    assert possible == ["    Points Possible", "", "", "", "", "10"]
    assert jane == ["Doe, Jane", "101", "", "jdoe", "", "70"] and kaethe[-1] == "2" and lee[-1] == ""
    assert "lee 06 is blocked and has an empty cell: no GPU on this machine" in made.notes
    assert "mueller 06 was late; its points stand as earned" in made.notes
    assert "stranger 06 is left out: students.csv has no such student" in made.notes


def test_canvas_own_gradebook_is_filled_in(course, tmp_path):
    own = tmp_path / "gradebook.csv"
    own.write_text(
        "Student,ID,SIS Login ID,Section,Chapter 06 Sample 6 (88),Final Score\n"
        "    Points Possible,,,,10,(read only)\n"
        '"Doe, Jane",101,jd,A,1,50\n"Sample Lee",103,,A,5,50\n"Guest",900,,A,3,50\n',
        encoding="utf-8",
    )
    made = export.export(course, "canvas", "06", own)
    filled = rows(made.text)
    assert [row[4] for row in filled[2:]] == ["70", "5", "3"]  # a blocked one keeps what is there
    assert [row[5] for row in filled[1:]] == ["(read only)", "50", "50", "50"]
    assert "mueller is not in gradebook.csv" in made.notes
    own.write_text('Student,ID,SIS Login ID,Section\n    Points Possible,,,\n"Doe, Jane",101,jd,A\n')
    assert rows(export.export(course, "canvas", "06", own).text)[1:] == [
        ["    Points Possible", "", "", "", "10"],
        ["Doe, Jane", "101", "jd", "A", "70"],
    ]


def test_moodle_takes_percentages_up_to_100_and_the_bonus_apart(course):
    header, jane, kaethe, lee = rows(export.export(course, "moodle").text)
    assert header[:4] == ["First name", "Last name", "ID number", "Email address"]
    assert header[4:] == ["Assignment: Chapter 06 Sample 6", "Chapter 06 Sample 6 bonus"]
    assert jane == ["Jane", "Doe", "", "jdoe@uni.example", "100", "100"]
    assert kaethe[4:] == ["20", "0"] and lee[4:] == ["", ""]


def test_moodles_own_import_takes_every_line(course, monkeypatch):
    """The rules of Moodle's grade/import/csv: a line without its user goes to the one above, a grade is a number within
    the item's maximum, and an empty cell is no grade."""
    students = [*rosters.load(course.folder).students.values(), rosters.Student("nomail", "Ångström", "Åsa")]
    monkeypatch.setattr(rosters, "load", lambda folder: rosters.Roster(students))
    made = export.export(course, "moodle")
    assert "nomail is left out: Moodle finds students by Email address; add it to students.csv" in made.notes
    header, *lines = rows(made.text)
    assert len(set(header)) == len(header) and all(len(line) == len(header) for line in lines)
    assert all(line[header.index("Email address")] for line in lines)
    cells = [cell for line in lines for cell in line[4:] if cell]
    assert cells and all(0 <= float(cell) <= export.MOODLE_MAXIMUM for cell in cells)
    assert any(
        "map from Email address to Email address; grades and bonus are out of 100" in note for note in made.notes
    )


def test_moodles_worksheet_gets_the_same_share_of_its_maximum(course, tmp_path):
    sheet = tmp_path / "sheet.csv"
    head = "Identifier,Full name,Email address,Status,Grade,Maximum grade,Last modified (grade),Feedback comments\n"
    sheet.write_text(
        f"\ufeff{head}Participant 7,Jane Doe,jdoe@uni.example,,,20.00,-,\n"
        "Participant 8,Käthe Müller-Lüdenscheidt,,,3,20.00,-,\nParticipant 9,Sam Lee,lee@uni.example,,4,20.00,-,\n",
        encoding="utf-8",
    )
    made = export.export(course, "moodle", "06", sheet)
    filled = rows(made.text.removeprefix("\ufeff"))
    assert [row[4] for row in filled[1:]] == ["20", "4", "4"] and filled[1][7] == "10 of 10 points, bonus 60 of 60"
    assert filled[1][6] == "-"
    assert "stranger has a grade and no row in sheet.csv" in made.notes


def test_a_plain_table(course):
    header, jane, *_ = rows(export.export(course, "csv").text)
    assert header == ["id", "last_name", "first_name", "email", "06", "total"]
    assert jane == ["jdoe", "Doe", "Jane", "jdoe@uni.example", "70", "70"]


@pytest.mark.parametrize(
    "points, text", [(12.345, "12.35"), (7.0, "7"), (0, "0"), (2.5, "2.5"), (100, "100"), (0.004, "0")]
)
def test_points_are_rounded_half_up(points, text):
    assert export.rounded(points) == text


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("blackboard",), "to='blackboard': one of canvas, moodle, csv"),
        (("canvas", "07"), "no grades of 07"),
        (("csv", "06", "x.csv"), "a plain csv is filled into nothing"),
        (("canvas", "06", "empty.csv"), "Canvas's exported gradebook begins with"),
        (("moodle", "06", "empty.csv"), "Moodle's grading worksheet has the columns"),
    ],
)
def test_an_export_that_cannot_be_is_refused(course, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match=said):
        export.export(course, *arguments)
    with pytest.raises(ValueError, match="run `minillm course grade` first"):
        feedback.write(course, "07")
