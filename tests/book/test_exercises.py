"""The proofs of every exercise: its solution passes, its stub and mutants fail and say why,
the committed one is generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from minillm.book import exercises, nbfile
from minillm.book.paths import chapter_number, notebooks
from minillm.book.proofs import Bench, complaints, load_mutants
from minillm.kernels import language
from tests.helpers.submitted import through_colab, with_answers, without_marks

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
pytestmark = pytest.mark.filterwarnings("ignore:Object of type:Warning")  # nbgrader's own use of its database

SOLUTIONS = notebooks("solutions")
# One notebook a Part goes through nbgrader itself.
ROUND_TRIPS = [path for path in SOLUTIONS if chapter_number(path) in (1, 4, 10, 15, 18, 20, 22, 23)]


def graded(path):
    return [exercise for exercise in exercises.exercises_in(nbfile.read(path)) if exercise.lines]


def where_kernels_are_interpreted(find: Callable[[Path], list[str]], path: Path) -> list[str]:
    """find(path); in a process of its own if the exercises are judged in Triton's interpreter and this process compiles
    kernels, as it does on a machine with a GPU. A reader's notebook is such a process:
    its first cell asks for the interpreter."""
    if language.MODE != "compiled" or "TRITON_INTERPRET" not in path.read_text(encoding="utf-8"):
        return find(path)
    with (
        pytest.MonkeyPatch.context() as environment,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
    ):
        environment.setenv("TRITON_INTERPRET", "1")
        return process.submit(find, path).result()


def broken_proofs(path: Path) -> list[str]:
    mutants = load_mutants(Path(__file__).parents[1] / "mutants" / f"ch{path.name[:2]}.py")
    found = [said for exercise in graded(path) for said in complaints(Bench(exercise), mutants.get(exercise.id, []))]
    return found + [
        f"mutants of {name!r}, which is no graded exercise" for name in set(mutants) - {e.id for e in graded(path)}
    ]


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: f"ch{p.name[:2]}")
def test_the_proofs_hold(path):
    assert where_kernels_are_interpreted(broken_proofs, path) == []


def misjudged_by_hidden_seeds(path: Path) -> list[str]:
    found = []
    for exercise in graded(path):
        line = exercise.lines["random"].rstrip()
        assert line.endswith(")"), f"{exercise.id}: the random line must be one call"
        hidden = {str(seed): f"{line[:-1]}, seed={seed})" for seed in (1, 20_000_003)}
        bench = Bench(dataclasses.replace(exercise, lines=hidden))
        found += [
            f"{exercise.id}: the solution fails seed {seed}: {error!r}"
            for seed, error in bench.solution().items()
            if error
        ]
        found += [
            f"{exercise.id}: the stub passes seed {seed}" for seed, error in bench.stub().items() if error is None
        ]
    return found


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: f"ch{p.name[:2]}")
def test_hidden_seeds_judge_alike(path):
    """Another seed for the random trials, as a lecturer's hidden tests have it:
    the solution passes, the stub does not."""
    assert where_kernels_are_interpreted(misjudged_by_hidden_seeds, path) == []


def test_the_committed_exercises_are_the_generated_ones():
    assert [path.name for path in exercises.stale()] == [], "run `minillm check --release self-study`"


@pytest.mark.parametrize("path", ROUND_TRIPS or [None], ids=lambda p: f"ch{p.name[:2]}" if p else "sample")
def test_nbgrader_round_trip(path, sample_solution, tmp_path):
    # That a line that fails earns nothing, and what nbgrader puts back in a notebook that Colab wrote, do not depend on
    # the exercise: once is enough.
    round_trip(nbfile.read(path) if path else sample_solution, tmp_path, once=path in (*ROUND_TRIPS[:1], None))


def round_trip(solution, course, once: bool) -> None:
    """Through `nbgrader generate_assignment` and `nbgrader autograde`, as a course would,
    and `once` also untouched and through Colab."""
    full = sum(exercise.points for exercise in exercises.exercises_in(solution))
    stub = exercises.generate(solution, "course")
    solved = with_answers(stub, solution)
    assert exercises.restore_marks(without_marks(solved), stub) == solved
    students, expected = {"solver": solved}, {"solver": full}
    # Locked lines that a student broke are put back: this submission is right, and would score nothing as it stands.
    if once:
        students |= {"untouched": stub, "colab_editor": edited_on_colab(solved)}
        expected |= {"untouched": 0, "colab_editor": full}
    scores, released = autograde(solution, students, course)
    assert [cell.source for cell in released.cells] == [
        cell.source.replace("/exercises/", "/solutions/") if i == 0 else cell.source
        for i, cell in enumerate(stub.cells)
    ]
    assert full > 0
    assert scores == expected


def edited_on_colab(notebook):
    nb = through_colab(notebook)
    for cell in nb.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.source = "raise SystemError('edited')"
    return nb


def autograde(solution, students, course):
    """Student -> score, and the notebook that nbgrader itself released."""
    from nbgrader.api import Gradebook
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    config = Config()
    config.CourseDirectory.root = str(course)
    config.CourseDirectory.db_url = f"sqlite:///{course / 'gradebook.db'}"
    config.Application.log_level = "ERROR"
    config.Execute.timeout = config.Execute.iopub_timeout = config.Execute.startup_timeout = 300
    api = NbGraderAPI(config=config)

    def put(nb, *parts):
        file = course.joinpath(*parts, "homework.ipynb")
        file.parent.mkdir(parents=True)
        file.write_text(nbfile.nbformat.writes(nb, version=nbfile.nbformat.NO_CONVERT))

    put(solution, "source", "ps1")
    made = api.generate_assignment("ps1")
    assert made["success"], made
    scores = {}
    for student, nb in students.items():
        put(nb, "submitted", student, "ps1")
        graded_run = api.autograde("ps1", student)
        assert graded_run["success"], graded_run
        with Gradebook(config.CourseDirectory.db_url) as gradebook:
            scores[student] = gradebook.find_submission("ps1", student).score
    return scores, nbfile.nbformat.read(course / "release" / "ps1" / "homework.ipynb", as_version=4)
