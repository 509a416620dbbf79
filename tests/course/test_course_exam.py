"""Exams: the bank of questions, what a seed may change, and the exam through nbgrader's own grading."""

from __future__ import annotations

import csv
import html
import math
import re
import subprocess
from collections import Counter
from functools import cache

import nbformat
import pytest

from minillm.book import nbfile
from minillm.book.checks import CheckFailed
from minillm.book.exercises import exercises_in
from minillm.book.workload import headings
from minillm.course import collect, corrections, exam, export, feedback, gradebook, marks, roster as rosters, settings
from minillm.course.grading import grade as grading
from minillm.course.questions import answered, bank, checks, question, right
from minillm.course.questions.coding import function_of
from minillm.course.questions.question import is_same
from tests.helpers.submitted import through_colab

SEEDS = 200
KINDS = Counter((one.chapter, one.kind) for one in bank())
CODE = re.compile(r"`[^`]*`")
NUMBER_SIGNED = re.compile(r"-?\d+(?:\.\d+)?")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def of_kind(kind):
    return [pytest.param(one, id=one.id) for one in bank() if one.kind == kind]


@cache
def variants_of(question_id):
    return [question(question_id).variant(seed) for seed in range(SEEDS)]


def size_of(answer):
    return sum(answer) if isinstance(answer, list) else answer


def features(variant):
    """What must not change from seed to seed: steps of working, numbers of the text, form and case of the answer."""
    answer = variant.answer
    form = "list" if isinstance(answer, list) else type(answer).__name__
    return len(variant.working), len(variant.slips), form, variant.case


def test_every_chapter_has_three_computed_questions_and_a_written_one():
    for chapter in range(1, 26):
        assert KINDS[chapter, "computed"] >= 3, f"chapter {chapter} has {KINDS[chapter, 'computed']} computed questions"
        assert KINDS[chapter, "written"] >= 1, f"chapter {chapter} has no written question"
    assert sum(one.kind == "code" for one in bank()) >= 12
    assert len({one.id for one in bank()}) == len(bank())


@pytest.mark.parametrize("one", of_kind("computed"))
def test_seeds_differ_in_the_answer_and_not_in_difficulty(one):
    variants = variants_of(one.id)
    low, high = one.within
    for seed, variant in enumerate(variants):
        told = f"{one.id} with seed {seed}: {variant.answer}"
        assert all(map(math.isfinite, variant.answer if isinstance(variant.answer, list) else [variant.answer])), told
        assert low <= size_of(variant.answer) <= high, f"{told} is outside of {one.within}"
        options = [variant.answer, *variant.slips.values()]
        for place, option in enumerate(options):
            for other in options[:place]:
                assert not is_same(option, other, one.tolerance), f"{told}: two of {options} coincide"
    assert len({features(variant) for variant in variants}) == 1, {features(variant) for variant in variants}
    assert len({str(variant.answer) for variant in variants}) >= 6, "the answer hardly varies"
    numbers = [len(NUMBER.findall(CODE.sub("", variant.text))) for variant in variants]
    assert max(numbers) - min(numbers) <= 2, f"a text has {min(numbers)} to {max(numbers)} numbers"
    assert high <= 11 * low or low < 0, f"{one.id}: {one.within} is more than one order of magnitude"


@pytest.mark.parametrize("one", of_kind("code"))
def test_every_rule_of_a_code_question_tells_right_from_wrong(one, capsys):
    rules = checks.rules(one.id)
    assert len(rules) >= 2, f"{one.id} has one rule only"
    for variant in rules.values():
        check = variant.checker()
        for part in check.parts:
            check(function_of(variant.solution, "student"), part)
        assert variant.mistakes, "no mistake is known"
        for source, mistake in [(variant.stub, "the stub"), *variant.mistakes.items()]:
            failed = []
            for part in check.parts:
                try:
                    check(function_of(source, "student"), part, seed=1)
                except CheckFailed as error:
                    failed.append((part, str(error)))
            assert failed, f"{one.id}, {variant.rule}: a wrong answer passes ({mistake})"
        with pytest.raises(CheckFailed, match="Write your own"):
            check(variant.function, "example")
    capsys.readouterr()


@pytest.mark.parametrize("one", of_kind("computed"))
def test_the_last_step_of_the_working_is_the_answer(one):
    """The working is written by hand, the answer comes from the package: they agree."""
    for variant in variants_of(one.id):
        last = variant.working[-1].replace(",", "") if not isinstance(variant.answer, list) else variant.working[-1]
        if isinstance(variant.answer, list):
            wanted = [str(number) for number in variant.answer]
            found = NUMBER_SIGNED.findall(last)
            assert str(variant.answer) in last or all(number in found for number in wanted), f"{last}: {variant.answer}"
        else:
            found = [float(number) for number in NUMBER_SIGNED.findall(last)]
            assert any(math.isclose(number, variant.answer, rel_tol=0.006) for number in found), (
                f"{last}: {variant.answer}"
            )


def test_every_question_tests_an_objective_that_its_chapter_states():
    for chapter in range(1, 26):
        stated = exam.objectives_of(chapter)
        for one in bank():
            if one.chapter == chapter:
                found = [text for text in stated if one.objective in text]
                assert len(found) == 1, f"{one.id}: {one.objective!r} is in {len(found)} objectives of {stated}"


def test_a_rubric_shares_all_points():
    for one in bank():
        points = [points for points, _ in one.graded_rubric]
        assert sum(points) == one.points and min(points) >= 1, one.id


def test_answers_are_graded_by_form_value_and_known_mistake():
    answered(3)
    answered([1, 2.0], True)
    for wrong, is_list in ((..., False), ("3", False), (math.nan, False), (True, False), (3, True), ([1.5], True)):
        with pytest.raises(AssertionError):
            answered(wrong, is_list)
    right(10.05, 10.0, 0.01)
    right((1, 2), [1, 2])
    with pytest.raises(AssertionError, match="keys alone"):
        right(5, 10, 0.0, {"keys alone were counted": 5})
    with pytest.raises(AssertionError, match=r"not the answer$"):
        right([2, 1], [1, 2])


def test_an_exam_keeps_to_its_minutes_and_covers_its_chapters():
    made = exam.make(range(1, 10), seed=1, minutes=90)
    assert 80 <= sum(one.minutes for one in made.questions) <= 90
    assert {one.chapter for one in made.questions} == set(range(1, 10))
    assert {one.kind for one in made.questions} == {"computed", "code", "written"}
    assert made.questions == exam.make(range(1, 10), seed=2, minutes=90).questions
    assert made.questions != exam.make(range(1, 10), seed=1, minutes=90, paper=2).questions
    assert [one.chapter for one in made.questions] == sorted(one.chapter for one in made.questions)
    short = exam.choose([24], 15)
    assert sum(one.minutes for one in short) <= 15


@pytest.mark.parametrize(
    "wrong, told",
    [
        (dict(chapters=[1], minutes=5), "minutes=5"), (dict(chapters=[90]), r"chapters=\[90\]"),
        (dict(chapters=[1], paper=0), "paper=0"), (dict(chapters=[1], name="../x"), "name="),
        (dict(chapters=[1], name="06"), "name="),
        (dict(chapters=[]), "chapters"),
        (dict(chapters=[1], seed=0), "seed=0"),
    ],
)  # fmt: skip
def test_impossible_exams_are_refused_by_name(wrong, told):
    with pytest.raises(ValueError, match=told):
        exam.make(**{"seed": 1} | wrong)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """An exam with other numbers for two students, in a folder with a space and an umlaut."""
    folder = tmp_path_factory.mktemp("Prüfung im Herbst")
    made = exam.make([3, 5, 6], seed=7, minutes=60)
    return folder, made, exam.write(made, folder, ["ada", "jürgen"])


def test_a_folder_that_is_published_too_early_holds_no_exam_and_installs_the_courses_version(tmp_path):
    course = settings.Course(tmp_path, repository="uni/fork", tag="v3")
    (tmp_path / settings.FILE).write_text(settings.dumps(course), encoding="utf-8")
    exam.write(exam.make([3], seed=7, minutes=20), tmp_path, ["ada"])
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    told = subprocess.run(
        ["git", "-C", tmp_path, "ls-files", "--others", "--exclude-standard", "release"], capture_output=True, text=True
    )
    assert told.returncode == 0 and told.stdout == ""
    notebook = nbfile.read(tmp_path / "release/ada/exam/exam.ipynb")
    assert any("git+https://github.com/uni/fork@v3" in cell.source for cell in notebook.cells)


def test_what_students_get_holds_no_answer(written):
    folder, _, _ = written
    for path in (folder / "release").rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for leak in ("SOLUTION", "HIDDEN", "seed", "mark(", "Known mistakes", "points: the"):
                assert leak not in text, f"{path} holds {leak!r}"
    for path in (folder / "release").rglob("exam.ipynb"):
        nbformat.validate(nbfile.read(path))
        assert all(
            "YOUR" in cell.source
            for cell in nbfile.read(path).cells
            if cell.metadata.get("nbgrader", {}).get("solution")
        )


def test_students_have_other_numbers_and_the_same_questions(written):
    folder, _, _ = written
    ada, juergen = (nbfile.read(folder / "release" / name / "exam" / "exam.ipynb") for name in ("ada", "jürgen"))
    assert [cell.metadata.get("nbgrader") and cell.metadata.nbgrader.grade_id for cell in ada.cells] == [
        cell.metadata.get("nbgrader") and cell.metadata.nbgrader.grade_id for cell in juergen.cells
    ]
    assert ada.cells != juergen.cells
    codes = [[c.source for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade")] for nb in (ada, juergen)]
    assert codes[0] == codes[1], "the rule of a code question is the same for all"


def test_the_key_has_workings_rubrics_and_the_table(written):
    folder, made, _ = written
    key = (folder / "key" / "exam" / "ada.html").read_text(encoding="utf-8")
    for number, one in made.of_kinds("computed"):
        variant = made.variant(one, "ada")
        assert f"{number} · {one.title}" in key
        assert all(html.escape(mistake) in key for mistake in variant.slips)
    assert "<script" not in key and "http" not in key, "the key needs no network"
    points = (folder / "key" / "exam" / "points.csv").read_text(encoding="utf-8").splitlines()
    assert points[-1].endswith(f",{made.points}") and len(points) == len(made.questions) + 2


def test_the_notebook_is_laid_out_like_exercises(written):
    folder, made, _ = written
    source = nbfile.read(folder / "source" / "exam" / "exam.ipynb")
    found = exercises_in(source)
    kinds = {"code": ("example", "edges", "random"), "computed": ("answer",)}
    assert [tuple(one.lines) for one in found] == [kinds[one.kind] for one in made.questions if one.kind != "written"]
    assert [(work.title, work.minutes) for work in headings(source).values()] == [
        (one.title, one.minutes) for one in made.questions
    ]
    for one in found:
        namespace: dict = {"__name__": "student"}
        exec(one.before[0], namespace)
        exec(one.solution, namespace)
        for line in one.lines.values():
            exec(line, namespace)


def test_a_released_answer_is_graded_for_the_student_of_the_folder(written, tmp_path, monkeypatch):
    """The hidden tests of the source, run as nbgrader runs them: in autograded/STUDENT/exam."""
    folder, made, _ = written
    source = nbfile.read(folder / "source" / "exam" / "exam.ipynb")
    tests = {cell.metadata.nbgrader.grade_id: cell.source for cell in source.cells
             if cell.metadata.get("nbgrader", {}).get("grade_id", "").endswith("_answer")}  # fmt: skip
    assert len(tests) == len(made.of_kinds("computed"))
    passed = Counter()
    for student in ("ada", "jürgen"):
        place = tmp_path / "autograded" / student / "exam"
        place.mkdir(parents=True)
        monkeypatch.chdir(place)
        for number, one in made.of_kinds("computed"):
            for author in ("ada", "jürgen"):
                namespace = {f"answer_{number}": made.variant(one, author).answer}
                name = checks.checker_name(one, None)
                namespace[name] = getattr(checks, name)
                try:
                    exec(tests[f"q{number}_answer"], namespace)
                    passed[student, author] += 1
                except AssertionError:
                    pass
    num = len(tests)
    assert passed["ada", "ada"] == passed["jürgen", "jürgen"] == num
    assert passed["ada", "jürgen"] + passed["jürgen", "ada"] < num, "another student's numbers pass"


def test_a_list_of_students_is_read_in_both_forms(tmp_path):
    (tmp_path / "ids.txt").write_text("ada\n\n jürgen \n", encoding="utf-8")
    (tmp_path / "students.csv").write_text("\ufeffid,last_name\nada,Lovelace\nbob,\n", encoding="utf-8")
    assert exam.read_students(tmp_path / "ids.txt") == ["ada", "jürgen"]
    assert exam.read_students(tmp_path / "students.csv") == ["ada", "bob"]
    (tmp_path / "empty.csv").write_text("id\n")
    with pytest.raises(ValueError, match="no student"):
        exam.read_students(tmp_path / "empty.csv")
    (tmp_path / "latin.csv").write_bytes("jürgen".encode("latin-1"))
    assert exam.read_students(tmp_path / "latin.csv") == ["jürgen"]
    made = exam.make([3], seed=1, minutes=15)
    for wrong in (["a/b"], ["ada", "ada"], [""], ["..x"]):
        with pytest.raises(ValueError, match="student"):
            exam.write(made, tmp_path, wrong)
    assert not (tmp_path / "source").exists(), "a refused list leaves nothing behind"
    exam.write(made, tmp_path)
    with pytest.raises(ValueError, match="--again"):
        exam.write(made, tmp_path)
    exam.write(made, tmp_path, again=True)


def test_a_checker_that_there_is_not_is_named():
    with pytest.raises(AttributeError, match="check_06_pool_99"):
        checks.check_06_pool_99  # noqa: B018
    with pytest.raises(AttributeError, match="no question"):
        checks.check_06_nothing_1  # noqa: B018
    with pytest.raises(KeyError, match=r"03\.cache_bytes"):
        question("03.nothing")


@pytest.fixture(scope="module")
def sat(course):
    """The exam of a course with other numbers for each student, handed in, collected and graded by its name: Jane knows
    everything, Sam hands in Jane's numbers, Käthe a notebook with nothing in it."""
    exam.write(exam.make([3, 5, 6], seed=7, minutes=45), course.folder, list(rosters.load(course.folder).students))
    course = settings.load(course.folder)
    made, folder = exam.make([3, 5, 6], seed=7, minutes=45), course.folder / "in"
    for student, author in (("jdoe", "jdoe"), ("lee", "jdoe"), ("mueller", None)):
        nb = nbfile.read(course.folder / "release" / student / "exam" / "exam.ipynb")
        answers = exam.exam_notebooks.sources(made, True, author)["exam"] if author else nb
        key = {c.metadata.nbgrader.grade_id: c.source for c in answers.cells if "nbgrader" in c.metadata}
        for cell in nb.cells:
            if cell.metadata.get("nbgrader", {}).get("solution"):
                cell.source = key[cell.metadata.nbgrader.grade_id]
        (folder / student).mkdir(parents=True)
        (folder / student / "exam.ipynb").write_text(nbfile.dumps(through_colab(nb)), encoding="utf-8")
    report = collect.collect(course, folder, "exam")
    grading.find(course, "exam").run()
    return course, made, report


def test_an_exam_is_collected_graded_and_marked_by_its_name(sat):
    course, made, report = sat
    assert len(report.collected) == 3 and not report.problems
    assert course.assignments["exam"].points == made.points
    stored = {grade.student: grade for grade in gradebook.load_all(course.folder, "exam")}
    points = {
        student: {e.id: e.points for e in grade.exercises if [p.part for p in e.parts] == ["answer"]}
        for student, grade in stored.items()
    }
    assert all(points["jdoe"].values()) and len(points["jdoe"]) == len(made.of_kinds("computed"))
    assert not all(points["lee"].values()), "another student's numbers pass"
    assert stored["jdoe"].status == stored["lee"].status == "graded" and not stored["jdoe"].flags
    assert stored["mueller"].points == 0
    code = [e for e in stored["lee"].exercises if len(e.parts) == 3]
    assert code and all(e.points == e.max_points for e in code)


def test_a_person_marks_the_texts_from_a_list_and_then_the_exam_counts(sat):
    course, made, _ = sat
    empty = export.export(course, "csv", "exam")
    assert all(row[4] == "" for row in csv.reader(empty.text.splitlines()[1:]))
    assert any("jdoe exam has an empty cell until a person has marked q" in note for note in empty.notes)
    feedback.write(course, "exam")
    [listed] = feedback.to_mark(course)
    page = listed.with_suffix(".html").read_text()
    assert "to mark" in page and html.escape(made.of_kinds("written")[0][1].title) in page
    head, *lines = listed.read_text(encoding="utf-8-sig").splitlines()
    assert head.startswith("student,chapter,exercise,points,author,reason")
    full = [",".join([*line.split(",")[:3], line.split(",")[-1]]) for line in lines]  # all earn what there is
    listed.write_text("student,chapter,exercise,points,author,reason\n" + "".join(f"{x},,\n" for x in full))
    marks.correct(course, corrections.read(course, listed, "Dr. Lee", "read with the rubric"))
    grades = {grade.student: grade for grade in marks.current(course, "exam")}
    assert grades["jdoe"].points == grades["jdoe"].max_points == made.points
    assert not marks.waits(grades["lee"]) and feedback.to_mark(course) == []
    pages = {path.parent.name: path.read_text() for path in feedback.write(course, "exam")}
    assert "given by Dr. Lee: read with the rubric" in pages["jdoe"] and "colab" not in pages["jdoe"]
    assert export.export(course, "canvas", "exam").text.splitlines()[0].endswith(",Exam")
