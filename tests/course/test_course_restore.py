"""Submissions that an editor or a student rearranged get their marks, cells and order back."""

from __future__ import annotations

import copy
import json

import pytest

from minillm.book import nbfile
from minillm.course import restore
from tests.course.small_book import as_bytes, cell, released, solved
from tests.helpers.submitted import through_colab, without_marks

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
new_code = nbfile.nbformat.v4.new_code_cell


@pytest.fixture
def answered(course):
    return solved(course)


def marks_of(nb):
    return [name for c in nb.cells if (name := c.metadata.get("nbgrader", {}).get("grade_id"))]


def mend(course, nb):
    """The submission, as a file that an editor wrote, restored."""
    return restore.restored(restore.read(as_bytes(nb)), released(course))


def test_an_untouched_submission_stays_as_it_is(course, answered):
    nb, mended = mend(course, answered)
    assert mended == [] and [c.source for c in nb.cells] == [c.source for c in answered.cells]
    assert marks_of(nb) == marks_of(answered)
    again, mended = mend(course, nb)
    assert (nbfile.dumps(again), mended) == (nbfile.dumps(nb), [])


def test_what_colab_saves_is_a_valid_notebook_again(course, answered):
    saved = through_colab(answered)
    for c in saved.cells:
        if c.cell_type == "code":
            c.outputs = [nbfile.nbformat.v4.new_output("stream", text="✓")]
            del c["execution_count"]  # Colab leaves fields out
        else:
            c["outputs"] = []  # and puts some where they do not belong
    saved.cells.insert(4, new_code("2 + 2", metadata={"id": "scratch", "cellView": "form"}))
    del saved.cells[4]["outputs"]
    nb, mended = mend(course, saved)
    nbfile.nbformat.validate(nb)
    assert mended == [] and marks_of(nb) == marks_of(answered)
    assert "2 + 2" in [c.source for c in nb.cells] and not any(c.get("outputs") for c in nb.cells)
    assert nb.nbformat_minor == 5 and len({c.id for c in nb.cells}) == len(nb.cells)


def test_lost_marks_come_back(course, answered):
    stripped = without_marks(answered)
    lowest = next(c for c in stripped.cells if c.source.startswith("def lowest"))
    lowest.source = f"def helper(free):\n    return free\n\n\n{lowest.source}"  # another name stands first
    nb, mended = mend(course, stripped)
    assert marks_of(nb) == marks_of(answered) and "the mark of lowest was lost" in mended
    assert "def helper" in cell(nb, "lowest").source


def test_a_solution_without_a_known_name_is_known_by_its_place(course, answered):
    stripped = without_marks(answered)
    for c in stripped.cells:
        c.source = c.source.replace("def lowest(free):", "lowest = lambda free: min(free)\ndef unused(free):")
    nb, _ = mend(course, stripped)
    assert cell(nb, "lowest").source.startswith("lowest = lambda")


def test_of_copies_the_last_above_the_lines_keeps_the_mark(course, answered):
    place = answered.cells.index(cell(answered, "lowest"))
    better, scratch = copy.deepcopy(answered.cells[place]), copy.deepcopy(answered.cells[place])
    answered.cells[place].source = "def lowest(free):\n    return 0"
    scratch.source = "def lowest(free):\n    return 1"
    answered.cells.insert(place + 1, better)
    answered.cells.append(scratch)
    nb, mended = mend(course, answered)
    assert cell(nb, "lowest").source == better.source and "lowest was there 3 times" in mended
    assert marks_of(nb).count("lowest") == 1 and scratch.source in [c.source for c in nb.cells]


def test_deleted_cells_come_back_at_their_place(course, answered):
    whole = marks_of(answered)
    gone = ("imports", "lowest_edges", "highest", "lowest_statement")
    answered.cells = [c for c in answered.cells if c.metadata.get("nbgrader", {}).get("grade_id") not in gone]
    nb, mended = mend(course, answered)
    assert marks_of(nb) == [name for name in whole if name != "lowest_statement"]  # no check needs the text
    assert "raise NotImplementedError" in cell(nb, "highest").source
    assert "highest was deleted; the stub stands in its place" in mended and "lowest_edges was deleted" in mended


def test_moved_cells_go_back_and_take_the_students_own_along(course, answered):
    whole = marks_of(answered)
    edges = answered.cells.pop(answered.cells.index(cell(answered, "lowest_edges")))
    own = new_code("print('mine')")
    answered.cells[0:0] = [edges, own]
    nb, mended = mend(course, answered)
    assert marks_of(nb) == whole and mended == ["cells were moved"]
    assert nb.cells[nb.cells.index(cell(nb, "lowest_edges")) + 1].source == own.source


def test_marks_that_a_student_edited_are_the_released_ones(course, answered):
    cell(answered, "lowest_random").metadata.nbgrader.update(points=1000, grade=False, locked=False)
    answered.cells.append(new_code("pass", metadata={"nbgrader": {"grade_id": "extra", "grade": True, "points": 99}}))
    answered.cells.append(new_code("pass", metadata={"nbgrader": {}}))
    nb, mended = mend(course, answered)
    assert cell(nb, "lowest_random").metadata.nbgrader == cell(released(course), "lowest_random").metadata.nbgrader
    assert "extra" not in marks_of(nb) and any("extra" in sentence for sentence in mended)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "the file is empty"),
        (b"\x50\x4b\x03\x04 zip", "the file is not a notebook"),
        (b'{"cells": [', "the file is not a notebook"),
        (b"[1, 2]", "JSON, but not a notebook"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}', "the notebook has no cells"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [7]}', "not a valid notebook"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "not a valid notebook"),
        (b"\xff\xfe{", "the file is not a notebook"),
    ],
)
def test_a_file_that_is_no_notebook_is_named(content, said):
    with pytest.raises(ValueError, match=said):
        restore.read(content)


def test_an_older_format_is_read(course):
    old = {"cell_type": "code", "input": "def lowest(free):\n    return min(free)", "language": "python", "outputs": []}
    sheet = {"cells": [{**old, "collapsed": False}], "metadata": {}}
    content = {"nbformat": 3, "nbformat_minor": 0, "metadata": {"name": ""}, "worksheets": [sheet]}
    nb, _ = restore.restored(restore.read(json.dumps(content).encode()), released(course))
    assert cell(nb, "lowest").source == old["input"]
