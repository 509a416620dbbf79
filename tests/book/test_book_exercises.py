"""Generating exercises from solutions, and the proofs: each of them fails where it should."""

from __future__ import annotations

import pytest

from minillm.book import exercises, nbfile
from minillm.book.proofs import Bench, Mutant, complaints, load_mutants

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")

GOOD_MUTANTS = [
    Mutant("takes the first", replace=("sorted(free)[0]", "free[0]"), expect="lowest: example"),
    Mutant(
        "forgets the error",
        source="def lowest(free):\n    return min(free, default=None)",
        expect="expected it to raise ValueError",
    ),
]


def cell(nb, grade_id):
    return next(c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def test_the_exercise_has_a_stub_locked_lines_and_no_outputs(sample_solution):
    sample_solution.cells[-1].outputs = [nbfile.nbformat.v4.new_output("stream", name="stdout", text="4")]
    made = exercises.generate(sample_solution)
    assert cell(made, "lowest").source == (
        'def lowest(free):\n    """The lowest free id; ValueError when there is none."""\n'
        "    # YOUR CODE HERE\n    raise NotImplementedError()"
    )
    for part, points in (("example", 1), ("edges", 2), ("random", 2)):
        line = cell(made, f"lowest_{part}")
        assert line.source == f'check_lowest(lowest, "{part}")' and line.metadata.nbgrader.points == points
        assert (line.metadata.editable, line.metadata.deletable, line.metadata.nbgrader.locked) == (False, False, True)
        assert len(line.metadata.nbgrader.checksum) == 32
    assert not any(c.get("outputs") for c in made.cells) and "/exercises/06_sample.ipynb" in made.cells[0].source


def test_only_the_self_study_release_folds_the_solution_into_the_help(sample_solution):
    alone, course = (
        cell(exercises.generate(sample_solution, release), "lowest_help").source for release in ("self-study", "course")
    )
    assert "A nudge" in course and "sorted(free)[0]" not in course
    assert (
        alone.startswith(course)
        and alone.count("<details>") == 2
        and "return sorted(free)[0]\n```" in alone
        and "SOLUTION" not in alone
    )
    with pytest.raises(ValueError, match="release='exam'"):
        exercises.generate(sample_solution, "exam")


def test_generating_twice_gives_the_same_bytes_and_leaves_the_solution(sample_solution):
    before = nbfile.dumps(sample_solution)
    assert nbfile.dumps(exercises.generate(sample_solution)) == nbfile.dumps(exercises.generate(sample_solution))
    assert nbfile.dumps(sample_solution) == before


def test_regenerate_writes_and_stale_notices(sample_solution, tmp_path):
    (tmp_path / "solutions").mkdir()
    nbfile.write(sample_solution, tmp_path / "solutions" / "06_sample.ipynb")
    committed = tmp_path / "exercises" / "06_sample.ipynb"
    assert exercises.stale(tmp_path) == [committed]
    assert exercises.regenerate(root=tmp_path) == [committed] and exercises.regenerate(root=tmp_path) == []
    assert exercises.stale(tmp_path) == []
    committed.write_text(committed.read_text().replace("YOUR CODE HERE", "your code here"))
    assert exercises.stale(tmp_path) == [committed]
    with pytest.raises(ValueError, match="needs a folder of its own"):
        exercises.regenerate("course", root=tmp_path)
    assert exercises.regenerate("course", out=tmp_path / "course", root=tmp_path) == [
        tmp_path / "course" / "06_sample.ipynb"
    ]
    assert "return sorted" not in (tmp_path / "course" / "06_sample.ipynb").read_text()


def test_an_exercise_is_read_with_its_lines_points_and_context(sample_solution):
    [found] = exercises.exercises_in(sample_solution)
    assert (found.id, list(found.lines), found.points) == ("lowest", ["example", "edges", "random"], 5)
    assert len(found.before) == 1 and found.before[0].startswith("from minillm.book.checks import Checker")


def test_a_long_solution_goes_on_in_a_second_cell(sample_solution):
    first = cell(sample_solution, "lowest")
    second = nbfile.nbformat.v4.new_code_cell(
        'def first_of(free):\n    """A suggestion."""\n    ### BEGIN SOLUTION\n    return sorted(free)[0]\n    '
        "### END SOLUTION"
    )
    second.metadata["nbgrader"] = {**first.metadata.nbgrader, "grade_id": "lowest_2"}
    first.source = first.source.replace("sorted(free)[0]", "first_of(free)")
    sample_solution.cells.insert(sample_solution.cells.index(first) + 1, second)
    [found] = exercises.exercises_in(sample_solution)
    assert found.cells == {"lowest": first.source, "lowest_2": second.source}
    assert complaints(Bench(found), GOOD_MUTANTS) == []
    made = exercises.generate(sample_solution)
    assert exercises.stub_of(found) == f"{cell(made, 'lowest').source}\n\n\n{cell(made, 'lowest_2').source}"
    assert cell(made, "lowest_2").source.endswith("# YOUR CODE HERE\n    raise NotImplementedError()")
    assert "def lowest(free)" in (told := cell(made, "lowest_help").source) and "return sorted(free)[0]" in told
    second.metadata["nbgrader"]["grade_id"] = "lowest_3"  # a gap: it belongs to nothing
    with pytest.raises(ValueError, match="'lowest_3' has no read-only help cell"):
        exercises.exercises_in(sample_solution)


@pytest.mark.parametrize(
    "lost, said",
    [
        ("lowest_edges", r"has the graded lines \['example', 'random'\]"),
        ("lowest_help", "no read-only help cell"),
        ("lowest", "belong to no exercise: lowest_edges, lowest_example, lowest_random"),
    ],
)
def test_a_broken_layout_is_named(sample_solution, lost, said):
    sample_solution.cells.remove(cell(sample_solution, lost))
    with pytest.raises(ValueError, match=said):
        exercises.exercises_in(sample_solution)


@pytest.fixture
def bench(sample_solution):
    return Bench(exercises.exercises_in(sample_solution)[0])


def test_the_four_proofs_hold_for_a_sound_exercise(bench):
    assert complaints(bench, GOOD_MUTANTS) == []


@pytest.mark.parametrize(
    "mutants, said",
    [
        (GOOD_MUTANTS[:1], "has 1 stored mutants, needs two or more"),
        (
            [*GOOD_MUTANTS, Mutant("harmless", replace=("sorted(free)[0]", "min(free)"), expect="x")],
            "the mutant 'harmless' passes every line",
        ),
        (
            [*GOOD_MUTANTS, Mutant("mumbles", replace=("[0]", "[-1]"), expect="off by one block")],
            "holds 'off by one block'; the first one: lowest: example",
        ),
        (
            [*GOOD_MUTANTS, Mutant("crashes", source="def lowest(free", expect="lowest")],
            "no message about the mutant 'crashes'",
        ),
        ([*GOOD_MUTANTS, Mutant("silent", replace=("[0]", "[-1]"))], "does not say which message it expects"),
    ],
)
def test_a_weak_mutant_is_named(bench, mutants, said):
    found = complaints(bench, mutants)
    assert len(found) == 1 and said in found[0], found


def test_a_wrong_solution_and_a_kind_checker_are_named(sample_solution):
    cell(sample_solution, "lowest").source = cell(sample_solution, "lowest").source.replace("[0]", "[-1]")
    wrong = complaints(Bench(exercises.exercises_in(sample_solution)[0]), GOOD_MUTANTS[1:] * 2)
    assert any("the solution fails example" in said for said in wrong)
    for part in ("example", "edges", "random"):
        cell(sample_solution, f"lowest_{part}").source = "pass"
    kind = complaints(Bench(exercises.exercises_in(sample_solution)[0]), [])
    assert sum("the untouched stub passes" in said for said in kind) == 3


def test_a_mutant_runs_until_it_is_caught(bench):
    first = ("sorted(free)[0]", "free[0]")
    assert list(bench.mutant(Mutant("the first", replace=first, expect="lowest: example"))) == ["example"]
    assert list(bench.mutant(Mutant("the first", replace=first, expect="what no check says"))) == [
        "example",
        "edges",
        "random",
    ]
    assert list(bench.solution()) == list(bench.stub()) == ["example", "edges", "random"]


def test_a_mutant_must_fit_the_solution(bench):
    with pytest.raises(ValueError, match="'teleport' occurs 0 times"):
        bench.mutant(Mutant("lost", replace=("teleport", "")))
    with pytest.raises(ValueError, match="either source or replace"):
        bench.mutant(Mutant("empty"))


def test_mutants_are_read_from_a_file(tmp_path):
    file = tmp_path / "ch06.py"
    assert load_mutants(file) == {}
    file.write_text(
        'from minillm.book.proofs import Mutant\nMUTANTS = {"lowest": [Mutant("a", source="x", expect="y")]}\n'
    )
    assert load_mutants(file)["lowest"][0].name == "a"


CHECK = """
from minillm.book.checks import FunctionChecker


def least(values):
    return min(values)


check_least = FunctionChecker(
    "least",
    least,
    examples=[([2, 1, 3],)],
    edges=[([7, 7],)],
    random=lambda draw: ([draw.randint(0, 99) for _ in range(9)],),
    misconceptions={"Not the first.": lambda values: values[0], "Not the largest.": max, ADDED},
)
"""


@pytest.mark.parametrize(
    "added, said",
    [
        ("", None),
        ('"Harmless.": least', "the misconception 'Harmless.' passes every part with seed None"),
        ('"By luck.": lambda values: values[1]', "the misconception 'By luck.' passes every part with seed"),
        ('"The same again.": lambda values: values[0]', "'The same again.' fails with another hint"),
    ],
)
def test_a_misconception_of_the_checker_is_a_mutant(added, said):
    check = CHECK.replace("ADDED", added).replace(
        "draw.randint(0, 99) for _ in range(9)",
        "draw.randint(5, 9), 0, 9" if "luck" in added else "draw.randint(0, 99), 5, 4",
    )
    lines = {part: f'check_least(least, "{part}")' for part in ("example", "edges", "random")}
    solution = "def least(values):\n    ### BEGIN SOLUTION\n    return sorted(values)[0]\n    ### END SOLUTION"
    found = complaints(Bench(exercises.Exercise("least", {"least": solution}, lines, 5, (check,))), [])
    assert found == [] if said is None else any(said in one for one in found), found
