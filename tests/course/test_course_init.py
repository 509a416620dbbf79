"""A new course: its sources, settings, syllabus and releases, on a small book and on the real one."""

from __future__ import annotations

import datetime as dt

import pytest

from minillm.book import nbfile, workload
from minillm.book.paths import notebooks
from minillm.course import releases, roster, settings, setup
from tests.course.small_book import cell, make_course, released

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")


def test_every_exercise_of_the_book_states_its_workload_for_programs_too():
    found = {path.name: workload.complaints(nbfile.read(path)) for path in notebooks("solutions")}
    assert not {name: said for name, said in found.items() if said}


def test_an_exercise_earns_a_point_a_minute_and_a_stretch_is_a_bonus(course):
    nb = released(course)
    points = [cell(nb, f"lowest_{part}").metadata.nbgrader.points for part in ("example", "edges", "random")]
    assert points == [2, 4, 4]
    assert cell(nb, "highest_example").metadata.nbgrader.points == 12
    assert (course.assignments["06"].points, course.assignments["06"].bonus) == (10, 60)


@pytest.mark.parametrize(
    "minutes, weights, shared",
    [(30, [1, 2, 2], [6, 12, 12]), (35, [1, 2, 3], [6, 12, 17]), (10, [1, 1, 1], [3, 3, 4]), (1, [1, 2, 2], [0, 0, 1])],
)
def test_points_are_whole_and_sum_to_the_minutes(minutes, weights, shared):
    assert releases.shares(minutes, weights) == shared and sum(shared) == minutes


def test_the_badge_and_the_set_up_cell_are_those_of_the_course(course):
    text = course.notebook_in("release", course.assignments["06"]).read_text()
    assert "github/you/fork/blob/term/kurs/release/06/06_sample.ipynb" in text
    set_up = next(c for c in released(course).cells if "setup" in c.metadata.get("tags", []))
    assert 'git+https://github.com/you/fork@v1"' in set_up.source
    assert "solutions/" not in text and "blob/main" not in text


def test_the_help_is_cut_at_the_rung(course, book, tmp_path):
    nudge = cell(released(course), "lowest_help").source
    assert "A nudge" in nudge and "What must hold" not in nudge and "I see" not in nudge
    words = make_course(tmp_path / "words", book, until="words", release=False)
    source = nbfile.read(words.notebook_in("source", words.assignments["06"]))
    told = cell(source, "lowest_help").source
    assert "What must hold" in told and "I see" in told and "In words" not in told
    ungraded = releases.cut_help(told.replace("What must hold", "In words"), "words", graded=False)
    assert "In words" in ungraded
    with pytest.raises(ValueError, match="until='solution': one of nudge, words"):
        setup.init(tmp_path / "other", until="solution", root=book)


def test_an_answer_is_never_released(course):
    path, release = (course.notebook_in(step, course.assignments["07"]) for step in ("source", "release"))
    whole, nb = path.read_text(), nbfile.read(path)
    cell(nb, "smallest_help").source += "\n<details><summary>In words</summary>\n\nSort.\n</details>"
    nbfile.write(nb, path)
    with pytest.raises(ValueError, match="tells the answer of 'smallest'; edit its notebook in source/"):
        releases.release(course, course.chosen("07"))
    assert not release.exists()
    path.write_text(whole)
    assert releases.release(course, course.chosen("07")) == [release] and release.is_file()


def test_the_settings_are_read_as_they_were_written_and_edited(course):
    path = course.folder / "course.toml"
    assert settings.load(course.folder) == course
    assert course.assignments["07"].due.replace(tzinfo=None) == dt.datetime(2026, 2, 15, 23, 59)
    text = path.read_text()
    try:
        path.write_text(text.replace("2026-02-15T23:59:00", "2026-02-20T12:00:00+02:00"))
        due = settings.load(course.folder).assignments["07"].due
        assert due == dt.datetime(2026, 2, 20, 10, tzinfo=dt.UTC)
        for old, new, said in (
            ("week = 1", 'week = "one"', "assignments.06: week='one': must be int"),
            ("weeks = 3", "weeks = 3\ncolour = 1", "unknown setting 'colour'"),
            ('until = "nudge"', 'until = "all"', "until='all': one of nudge, words"),
            ("weeks = 3", "weeks = ", "course.toml: Invalid value"),
        ):
            path.write_text(text.replace(old, new, 1))
            with pytest.raises(ValueError, match=said):
                settings.load(course.folder)
    finally:
        path.write_text(text)


def test_the_due_date_is_in_nbgraders_gradebook(course):
    with releases.nbgrader_api(course).gradebook as gradebook:
        due = gradebook.find_assignment("06").duedate.replace(tzinfo=dt.UTC)
        assert gradebook.find_assignment("06").max_score == 70
    assert due == course.assignments["06"].due


def test_the_syllabus_has_weeks_workloads_and_prerequisites(course):
    text = (course.folder / "syllabus.md").read_text()
    assert f"| due, {course.timezone} |" in text
    assert "| 1 | 2 Feb | 06 Sample 6 | 90 | 10 | Sun 8 Feb, 23:59 | 10 | 60 |" in text
    assert "| 3 | 16 Feb | no new chapter: questions, projects |" in text
    assert "* Chapter 06 builds on chapter 05, which this course leaves out" in text
    assert "Chapter 07 builds on" not in text and "* find a free id" in text
    assert "| Highest free id | stretch | 60 |" in text
    assert "(https://github.com/you/fork/blob/v1/chapters/06_sample.ipynb)" in text
    assert "github/you/fork/blob/term/kurs/release/07/07_sample.ipynb)" in text


@pytest.mark.parametrize(
    "loads, weeks, planned",
    [
        ([90, 30], 3, [1, 2]),
        ([90, 30, 60, 60], 2, [1, 1, 2, 2]),
        ([10, 10, 10], 1, [1, 1, 1]),
        ([100, 10, 10, 10], 2, [1, 2, 2, 2]),
    ],
)
def test_chapters_are_spread_so_that_the_fullest_week_is_as_light_as_can_be(loads, weeks, planned):
    assert setup.weeks_of(loads, weeks) == planned


def test_the_real_book_makes_a_course(tmp_path):
    made = setup.init(tmp_path / "all", chapters="00-24", weeks=14, start=dt.date(2026, 10, 5), until="words")
    assert list(made.assignments) == [f"{n:02d}" for n in range(1, 25)]
    assert max(a.week for a in made.assignments.values()) <= 14
    for assignment in made.assignments.values():
        nb = nbfile.read(made.notebook_in("source", assignment))
        marks = [c.metadata.nbgrader for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade")]
        assert sum(m.points for m in marks) == assignment.points + assignment.bonus
        assert all(isinstance(m.points, int) and m.points > 0 for m in marks)
        assert "<summary>In words" not in nbfile.dumps(nb) or assignment.name == "10"  # its stretch is not graded
        assert "<summary>A nudge" in nbfile.dumps(nb) and "/solutions/" not in nbfile.dumps(nb)
    # Chapter 06: 10 + 30 + 30 minutes, and a stretch of 60.
    assert (made.assignments["06"].points, made.assignments["06"].bonus) == (70, 60)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"chapters": "6-x"}, "chapters='6-x': numbers and ranges such as 01-09"),
        ({"chapters": "09-06"}, "chapters='09-06': numbers and ranges"),
        ({"chapters": "06,40"}, "chapter 40 is not in this book; it has 06, 07"),
        ({"repository": "https://github.com/a/b"}, "must be owner/name"),
        ({"tag": "v1 && rm"}, "tag='v1 && rm': letters, digits"),
        ({"releases_folder": "../out"}, "releases='../out': letters"),
        ({"weeks": 0}, "weeks=0: at least 1"),
    ],
)
def test_what_makes_no_course_writes_nothing(book, tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        setup.init(tmp_path / "new", root=book, **{"chapters": "06-07", **options})
    assert not (tmp_path / "new").exists()


def test_a_course_is_not_overwritten(course, book):
    with pytest.raises(FileExistsError, match="holds a course already"):
        setup.init(course.folder, chapters="06", root=book)
    with pytest.raises(FileNotFoundError, match=r"no course\.toml"):
        settings.load(book)
    with pytest.raises(ValueError, match="chapter '09' is not in this course; it has 06, 07"):
        course.chosen("06,09")


CANVAS = 'Student,ID,SIS User ID,SIS Login ID,Section,Old (7)\n    Points Possible,,,,,9\n"Doe, Jane",101,s7,jdoe,A,1\n'
MOODLE = "\ufeffIdentifier,Full name,Email address,Status,Grade\nParticipant 9,Käthe Müller,k.m@uni.example,,\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (CANVAS, roster.Student("jdoe", "Doe", "Jane", "", "101", "s7", "jdoe", "A")),
        (MOODLE, roster.Student("k.m", "Müller", "Käthe", "k.m@uni.example")),
        ("id;first_name\nlee;Sam\n", roster.Student("lee", "", "Sam")),
    ],
    ids=["canvas", "moodle", "nbgrader"],
)
def test_students_come_from_an_lms(tmp_path, text, expected):
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    assert roster.read(tmp_path / "list.csv") == [expected]
    (tmp_path / "students.csv").write_text(roster.dumps([expected]), encoding="utf-8")
    assert roster.load(tmp_path).students == {expected.id: expected}


@pytest.mark.parametrize(
    "text, said",
    [
        ("a,b\n1,2\n", "the columns are a, b; they must be"),
        ("id\nlee\nlee\n", "student id 'lee' occurs twice"),
        ("id\n../lee\n", "student id '../lee': it names a folder"),
    ],
)
def test_a_roster_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "students.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        roster.load(tmp_path)


def test_an_assignment_takes_the_place_of_one_of_its_name_and_all_else_stays(course):
    path = course.folder / "course.toml"
    text = path.read_text()
    try:
        path.write_text(text.replace("weeks = 3", "weeks = 3  # and a holiday"))
        due = dt.datetime(2026, 2, 20, 9, tzinfo=course.zone)
        for points in (30.0, 45.0):
            made = settings.put(course, settings.Assignment("exam", "exam", "Exam", 3, due, points))
        assert [a.name for a in made.chosen("exam,6")] == ["06", "exam"] and made.assignment("exam").points == 45
        assert path.read_text().count('[assignments."exam"]') == 1 and "# and a holiday" in path.read_text()
        moved = settings.put(made, settings.Assignment("06", "06_sample", "Sample 6", 1, due, 10.0, 60.0))
        assert moved.assignments["06"].due == due and set(moved.assignments) == {"06", "07", "exam"}
        with pytest.raises(ValueError, match="'oral' is not in this course; it has 07, exam, 06"):
            moved.chosen("06,oral")
        assert releases.release(moved, moved.chosen("exam")) == []  # `minillm course exam` makes its release
    finally:
        path.write_text(text)
