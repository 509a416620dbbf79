"""A course is an nbgrader course: nbgrader's own commands work in its folder, on a notebook that Colab rewrote."""

from __future__ import annotations

import pytest

from minillm.book import nbfile
from minillm.course import collect, releases
from tests.course.small_book import as_bytes, cell, make_course, solved
from tests.helpers.submitted import through_colab

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
pytestmark = pytest.mark.filterwarnings("ignore:Object of type:Warning")  # nbgrader's own use of its database


def rewritten(course):
    """Right answers that went through Colab: marks of a copied solution lost, a graded line and a solution deleted, a
    line that gives full marks edited in, cells moved, outputs added."""
    nb = through_colab(solved(course))
    del cell(nb, "lowest").metadata["nbgrader"]
    cell(nb, "lowest_random").source = "raise SystemError('edited')"
    nb.cells.remove(cell(nb, "lowest_edges"))
    nb.cells.remove(cell(nb, "highest"))
    nb.cells.insert(0, nb.cells.pop(nb.cells.index(cell(nb, "lowest_example"))))
    nb.cells.insert(2, nbfile.nbformat.v4.new_code_cell("1 / 0  # scratch", metadata={"id": "Zz"}))
    for c in nb.cells:
        if c.cell_type == "code":
            c.outputs = [nbfile.nbformat.v4.new_output("stream", text="old")]
        c.pop("id", None)
    return nb


def nbgrader(name: str) -> None:
    """One of nbgrader's commands on chapter 06, as its command line runs it in the working folder."""
    from nbgrader import apps

    app = getattr(apps, name)()
    app.initialize(["06", "--log-level=ERROR"])
    app.start()


def test_nbgraders_own_commands_grade_what_colab_rewrote(book, tmp_path, monkeypatch):
    course = make_course(tmp_path / "Kurs für alle", book, release=False)
    monkeypatch.chdir(course.folder)
    nbgrader("GenerateAssignmentApp")
    file = tmp_path / "in" / "lee" / "06_sample.ipynb"
    file.parent.mkdir(parents=True)
    file.write_bytes(as_bytes(rewritten(course)))
    report = collect.collect(course, tmp_path / "in")
    assert {sentence for _, sentence in report.mended} == {
        "the mark of lowest was lost",
        "lowest_edges was deleted",
        "highest was deleted; the stub stands in its place",
    }
    nbgrader("AutogradeApp")
    nbgrader("GenerateFeedbackApp")
    with releases.nbgrader_api(course).gradebook as gradebook:
        submission = gradebook.find_submission("06", "lee")
        assert (submission.score, submission.max_score) == (10, 70)  # `lowest` whole, the deleted `highest` nothing
        assert submission.timestamp is not None
    assert "lowest" in (course.folder / "feedback/lee/06/06_sample.html").read_text()
