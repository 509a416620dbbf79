"""The contract of the exercises: no statement, stub or number of points changes without an entry in the changelog."""

from __future__ import annotations

import datetime
import shutil
import subprocess

import pytest

from minillm.book import exercises, nbfile
from minillm.book.paths import notebooks
from minillm.course import statements

BEFORE, AFTER = datetime.date(2026, 11, 1), datetime.date(2030, 1, 2)


def test_every_change_of_a_statement_is_recorded():
    left = statements.unrecorded()
    assert not left, "\n".join([*left.values(), statements.what_to_do()])


@pytest.fixture
def course(root, tmp_path, sample_solution):
    """A repository with one exercise, `06.lowest`, whose contract has begun; `edit` changes the released notebook."""
    pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[course]'")
    (tmp_path / "exercises").mkdir()
    (tmp_path / ".github").mkdir()
    shutil.copy(root / statements.CHANGELOG, tmp_path / ".github")
    head = (root / statements.CHANGELOG).read_text().partition("|---|---|---|---|---|\n")
    (tmp_path / statements.CHANGELOG).write_text(head[0] + head[1])
    (tmp_path / statements.BASELINE).write_text("# In force from 2027-03-01.\n")
    file = tmp_path / "exercises" / "06_sample.ipynb"
    nbfile.write(exercises.generate(sample_solution), file)
    assert statements.refresh(root=tmp_path, today=BEFORE) == 1

    def edit(change) -> None:
        nb = nbfile.read(file)
        change({cell.metadata.get("nbgrader", {}).get("grade_id"): cell for cell in nb.cells}, nb)
        nbfile.write(nb, file)

    edit.root, edit.file = tmp_path, file
    return edit


def record(course, what="The list may be empty.", old_answers="pass", exercise="06.lowest"):
    return statements.record(exercise, what, old_answers, root=course.root, today=AFTER)


def test_a_fingerprint_has_the_statement_the_stub_and_the_points(course):
    (print_,) = statements.fingerprints(course.root).values()
    statement, stub, points = print_.split("-")
    assert points == "1+2+2" and len(statement) == len(stub) == 10 and statement != stub
    assert statements.recorded(course.root) == statements.fingerprints(course.root)
    assert statements.unrecorded(course.root) == {}


CHANGES = {
    "another statement": lambda cells, nb: cells["lowest_statement"].update(source="### Lowest\n\nAnother text."),
    "another stub": lambda cells, nb: cells["lowest"].update(source="def lowest(free, default): ..."),
    "another points (1+2+2 before, 1+2+7 now)": lambda cells, nb: cells["lowest_random"].metadata.nbgrader.update(
        points=7
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_each_part_of_the_contract_is_watched(course, said):
    course(CHANGES[said])
    assert statements.unrecorded(course.root) == {"06.lowest": f"06.lowest has {said}"}
    assert "minillm course changes --record" in statements.what_to_do(course.root, AFTER)
    entry = record(course)
    assert statements.unrecorded(course.root) == {}
    assert statements.entries(course.root) == [entry] and entry.date == AFTER


def test_a_task_below_the_broken_code_is_part_of_the_statement():
    notebook = nbfile.read(next(path for path in notebooks("exercises") if path.name.startswith("23")))
    before = statements._of_notebook(notebook, "23")
    spec = next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "repair_service_spec")
    spec.source += "\n* One more rule."
    after = statements._of_notebook(notebook, "23")
    assert {name for name in before if before[name] != after[name]} == {"23.repair_service"}


def test_help_hints_and_trailing_spaces_are_no_part_of_the_contract(course):
    course(lambda cells, nb: cells["lowest_help"].update(source="<details><summary>Help</summary>\n\nNew\n</details>"))
    course(
        lambda cells, nb: cells["lowest_statement"].update(
            source=cells["lowest_statement"].source.replace("\n", "  \n") + "\n"
        )
    )
    assert statements.unrecorded(course.root) == {}


def test_a_change_back_is_a_change_too(course):
    course(CHANGES["another stub"])
    record(course)
    course(lambda cells, nb: cells["lowest"].update(source="def lowest(free): ..."))
    assert statements.unrecorded(course.root) == {"06.lowest": "06.lowest has another stub"}


def test_an_exercise_may_come_and_go(course):
    text = course.file.read_text().replace("lowest", "highest")
    course.file.write_text(text)
    assert statements.unrecorded(course.root) == {
        "06.highest": "06.highest is new", "06.lowest": "06.lowest is gone",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"06\.highest is new, so it must be new"):
        record(course, exercise="06.highest")
    record(course, "It asks for the other end now.", "new", "06.highest")
    record(course, "Replaced by 06.highest.", "fail")
    assert statements.unrecorded(course.root) == {}
    assert [entry.fingerprint == statements.REMOVED for entry in statements.entries(course.root)] == [False, True]


@pytest.mark.parametrize(
    "fields, message",
    [
        (("The list may be empty.", "perhaps"), "--old-answers 'perhaps': one of pass, fail, some fail, new"),
        (("short", "pass"), "a sentence of 10 characters or more"),
        (("a | b is a column", "pass"), "without | and `"),
        (("The list may be empty.", "new"), "it must be pass, fail or some fail"),
        (("The list may be empty.", "pass", "07.lowest"), "exercises with one: 06.lowest"),
    ],
)
def test_an_entry_without_use_is_refused_and_nothing_is_written(course, fields, message):
    course(CHANGES["another stub"])
    before = (course.root / statements.CHANGELOG).read_text()
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        record(course, *fields)
    assert (course.root / statements.CHANGELOG).read_text() == before


def test_the_baseline_is_fixed_once_the_contract_has_begun(course):
    course(CHANGES["another stub"])
    with pytest.raises(ValueError, match="the contract began on 2027-03-01"):
        statements.refresh(root=course.root, today=AFTER)
    assert statements.refresh(root=course.root, today=BEFORE) == 1
    assert statements.unrecorded(course.root) == {}


def test_a_conflict_in_the_baseline_is_mended_by_the_command_that_writes_it(course):
    file = course.root / statements.BASELINE
    text = file.read_text()
    line = text.splitlines()[-1]
    file.write_text(text.replace(line, f"<<<<<<< HEAD\n{line}\n=======\n{line[:-1]}9\n>>>>>>> graders"))
    with pytest.raises(ValueError, match="'<<<<<<< HEAD' is no fingerprint"):
        statements.unrecorded(course.root)
    statements.refresh(root=course.root, today=BEFORE)
    assert file.read_text() == text.replace(text.splitlines()[0], file.read_text().splitlines()[0])


def test_entries_since_a_day_or_a_tag(course):
    course(CHANGES["another stub"])
    entry = record(course)
    assert (
        statements.entries(course.root, "2030-01-02") == [entry] and statements.entries(course.root, "2030-01-03") == []
    )
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(course.root)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x", "--date", "2029-01-01T00:00:00"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    assert statements.entries(course.root, "v1") == [entry], "the tag's commit is older than the entry"
    with pytest.raises(ValueError, match="--since 'v2': neither a date as"):
        statements.entries(course.root, "v2")


def test_a_row_that_is_no_entry_is_named_with_its_line(course):
    with (course.root / statements.CHANGELOG).open("a") as file:
        file.write("| yesterday | 06.lowest | something | pass | `x` |\n")
    with pytest.raises(ValueError, match=r"STATEMENTS\.md line \d+: no entry"):
        statements.recorded(course.root)
