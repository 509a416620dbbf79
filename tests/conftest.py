"""What all tests share: this checkout on the path of child processes, no network, sample notebooks."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: workers side by side have a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # until all is imported: see pytest_collection

import nbformat
import pytest

from minillm.kernels import language
from tests.helpers.scheduling import file_scheduler

if language.MODE == "interpreted":
    from triton.runtime import interpreter

    from tests.helpers.quick_interpreter import quicken

    quicken(interpreter)

ROOT = Path(__file__).resolve().parents[1]

# Kernels and child processes test this checkout, and nothing here may reach for the network.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# nbgrader calls alembic by name, also when the environment was not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """A worker that dies ends the run, with the name of its test; with a new worker in its place the run may hang."""
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """What stands by the end, modules above all, stays: garbage is collected neither meanwhile nor among it later.
    Full collections looked at half a million of these objects again and again."""
    gc.disable()
    try:
        result = yield
        gc.collect()
        gc.freeze()
        return result
    finally:
        gc.enable()


def pytest_unconfigure(config):
    gc.unfreeze()  # or extension modules report at the end what they take for leaks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return file_scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


def marks(grade_id: str, **flags) -> dict:
    """nbgrader's metadata of one cell."""
    return {
        "nbgrader": {
            "grade": False,
            "grade_id": grade_id,
            "locked": False,
            "schema_version": 3,
            "solution": False,
            "task": False,
            **flags,
        }
    }


CHECKER_CELL = """from minillm.book.checks import Checker

check_lowest = Checker("lowest", hint="An empty list has no lowest free id.")

@check_lowest.part("example")
def _example(case):
    case.equal(case.call([3, 1, 2]), 1)

@check_lowest.part("edges")
def _edges(case):
    case.equal(case.call([5]), 5)
    case.raises(ValueError, case.student, [])

@check_lowest.part("random")
def _random(case):
    for _ in range(10):
        free = [case.rng.randrange(100) for _ in range(case.rng.randrange(1, 9))]
        case.equal(case.call(free), min(free))"""

SOLUTION_CELL = '''def lowest(free):
    """The lowest free id; ValueError when there is none."""
    ### BEGIN SOLUTION
    if not free:
        raise ValueError("no free id")
    return sorted(free)[0]
    ### END SOLUTION'''


@pytest.fixture
def sample_solution() -> nbformat.NotebookNode:
    return sample_solution_notebook()


def sample_solution_notebook() -> nbformat.NotebookNode:
    """A small but complete solution notebook: one graded exercise, `lowest`, worth 5 points."""
    from minillm.book import colab, nbfile, workload

    new_code, new_text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    cells = [
        new_text(f"# 06 · Sample\n\n{colab.badge('solutions/06_sample.ipynb')}"),
        colab.set_up_nbcell(),
        new_code(CHECKER_CELL, metadata=marks("imports", locked=True)),
        new_text(
            "## 1 · Lowest free id  ·  warm-up, 10 minutes\n\nWrite `lowest(free)`.",
            metadata=marks("lowest_statement", locked=True),
        ),
        new_text(
            "<details><summary>A nudge</summary>\n\nSort.\n\n</details>", metadata=marks("lowest_help", locked=True)
        ),
        new_code(SOLUTION_CELL, metadata=marks("lowest", solution=True)),
        *(
            new_code(
                f'check_lowest(lowest, "{part}")',
                metadata=marks(f"lowest_{part}", grade=True, locked=True, points=points),
            )
            for part, points in (("example", 1), ("edges", 2), ("random", 2))
        ),
        new_code("free_ids = [4, 7]\nlowest(free_ids)"),
    ]
    nb = nbfile.normalise(nbformat.v4.new_notebook(cells=cells))
    workload.stamp(nb)
    return nb


@pytest.fixture
def sample_chapter() -> nbformat.NotebookNode:
    """A small chapter, executed by hand, that the lint finds nothing in when saved as chapters/06_sample.ipynb."""
    from minillm.book import colab, nbfile

    cells = [
        nbformat.v4.new_markdown_cell(f"# 06 · Sample\n\n{colab.badge('chapters/06_sample.ipynb')}"),
        colab.set_up_nbcell(),
        nbformat.v4.new_code_cell("print(2 + 2)", metadata={"tags": ["nbval-check-output"]}),
    ]
    cells[1].execution_count, cells[2].execution_count = 1, 2
    cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="4\n")]
    book = {"objectives": ["add two numbers"], "needs": ["05"], "minutes": 5}
    return nbfile.normalise(nbformat.v4.new_notebook(cells=cells, metadata={"book": book}))
