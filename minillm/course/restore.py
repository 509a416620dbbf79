"""Submitted notebooks as nbgrader needs them: marks, cells and order that an editor lost are put back.

Colab saves an older format without cell ids, adds metadata and outputs of its own, and drops the marks of cells that
were copied; a student deletes, duplicates, splits and moves cells. What the student wrote is never changed.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable

import nbformat

from minillm.book import exercises, nbfile
from minillm.book.checks import PARTS

_NAMES = re.compile(r"^(?:async +)?(?:def|class)\s+(\w+)", re.MULTILINE)
_CELL_KEYS = {"markdown": ("attachments",), "raw": ("attachments",), "code": ("outputs", "execution_count")}
_KINDS = {
    "a PDF": (b"%pdf",),
    "a zip, a Word or an Excel file": (b"pk\x03\x04", b"\xd0\xcf\x11\xe0"),
    "a web page, as a browser saves it": (b"<!doctype", b"<html"),
    "an image": (b"\x89png", b"\xff\xd8\xff"),
    "a Python script": (b"#!", b"import ", b"from ", b"def ", b"# "),
}


def restored(submitted: nbformat.NotebookNode, released: nbformat.NotebookNode):
    """A submission with the marks of the release put back, and what was mended, one sentence each.

    A read-only cell is known by its text; a solution cell by a name that it defines, else by its place. Of cells with
    the same mark one keeps it. A deleted solution comes back as the stub, a deleted graded line as it was. Marked
    cells stand in the order of the release, each followed by the student's own cells that followed it. Outputs go.
    """
    mended: list[str] = []
    nb = nbfile.clear_outputs(submitted)
    originals = {_grade_id(cell): cell for cell in released.cells if _grade_id(cell)}
    _drop_foreign_marks(nb, originals, mended)
    before = {_grade_id(cell) for cell in nb.cells}
    nb = exercises.restore_marks(nb, released)
    _mark_by_name(nb, originals)
    _mark_by_place(nb, originals)
    for name in [name for cell in nb.cells if (name := _grade_id(cell)) and name not in before]:
        mended.append(f"the mark of {name} was lost")
    _keep_one_of_each(nb, mended)
    _put_back_deleted(nb, originals, mended)
    _in_order(nb, list(originals), mended)
    for cell in nb.cells:
        if name := _grade_id(cell):
            cell.metadata["nbgrader"] = copy.deepcopy(originals[name].metadata.nbgrader)
    nb.metadata["kernelspec"] = copy.deepcopy(released.metadata.get("kernelspec", {}))
    return nbfile.normalise(nb), mended


def read(content: bytes) -> nbformat.NotebookNode:
    """A submitted file as a notebook of the current format, whatever editor wrote it.

    Raises ValueError with what is wrong for a file that is no notebook, or an empty one.
    """
    if not content.strip():
        raise ValueError("the file is empty")
    if kind := _kind_of(content):
        raise ValueError(f"the file is not a notebook but {kind}")
    try:
        text = content.decode("utf-8-sig")
        found = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        is_cut = content.lstrip().startswith(b"{") and not content.rstrip().endswith(b"}")
        why = "it ends in the middle, as if the upload had been cut off" if is_cut else error
        raise ValueError(f"the file is not a notebook: {why}") from error
    if not isinstance(found, dict) or not isinstance(found.get("nbformat"), int):
        raise ValueError("the file is JSON, but not a notebook")
    try:
        if found["nbformat"] != 4:
            return nbformat.reads(text, as_version=4)
        nb = nbformat.from_dict({**found, "cells": [_plain_cell(cell) for cell in found["cells"]]})
        nb.setdefault("metadata", nbformat.from_dict({}))
        nbformat.validate(nbfile.normalise(nb))
    except Exception as error:  # nbformat raises many kinds for a file that is no notebook
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"the file is not a valid notebook: {reason}") from error
    if not nb.cells:
        raise ValueError("the notebook has no cells")
    return nb


def _kind_of(content: bytes) -> str:
    """What a file is that got the name of a notebook; empty for one that may be a notebook."""
    start = content[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for kind, beginnings in _KINDS.items():
        if start.startswith(beginnings):
            return kind
    return ""


def _plain_cell(cell: dict) -> dict:
    """A cell with the fields that its type has: Colab leaves some out and adds others."""
    source = cell.get("source", "")
    kept = {
        "cell_type": cell["cell_type"],
        "metadata": dict(cell.get("metadata") or {}),
        "source": "".join(source) if isinstance(source, list) else source,
    }
    kept |= {key: cell[key] for key in _CELL_KEYS[cell["cell_type"]] if key in cell}
    return kept | ({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {})


def _drop_foreign_marks(nb, originals: dict, mended: list[str]) -> None:
    """Marks that the release does not have, or that stand on a cell of another type."""
    for cell in nb.cells:
        name = _grade_id(cell)
        if "nbgrader" in cell.metadata and (name not in originals or cell.cell_type != originals[name].cell_type):
            del cell.metadata["nbgrader"]
            if name:
                mended.append(f"a mark {name} that the release does not have, or not on such a cell")


def _mark_by_name(nb, originals: dict) -> None:
    """A solution cell by any name that it defines: a helper may stand above the function."""
    _give(nb, originals, lambda cell, original: set(_NAMES.findall(original.source)) & set(_NAMES.findall(cell.source)))


def _mark_by_place(nb, originals: dict) -> None:
    """A solution cell that defines nothing known: the only unmarked code cell between its marked neighbours."""
    names = list(originals)
    for name in _missing(nb, originals):
        if not originals[name].metadata.nbgrader.solution:
            continue
        places = {_grade_id(cell): i for i, cell in enumerate(nb.cells) if _grade_id(cell)}
        at = names.index(name)
        above = max((places[n] for n in names[:at] if n in places), default=-1)
        below = min((places[n] for n in names[at + 1 :] if n in places), default=len(nb.cells))
        between = [cell for cell in nb.cells[above + 1 : below] if cell.cell_type == "code" and cell.source.strip()]
        if len(between) == 1:
            _mark(between[0], originals[name])


def _give(nb, originals: dict, is_same: Callable) -> None:
    for name in _missing(nb, originals):
        if not originals[name].metadata.nbgrader.solution:
            continue
        unmarked = [cell for cell in nb.cells if not _grade_id(cell) and cell.cell_type == originals[name].cell_type]
        if found := [cell for cell in unmarked if is_same(cell, originals[name])]:
            _mark(found[-1], originals[name])


def _keep_one_of_each(nb, mended: list[str]) -> None:
    """Of several cells with one mark: the last that stands above the exercise's first graded line, else the last."""
    places: dict[str, list[int]] = {}
    for i, cell in enumerate(nb.cells):
        if name := _grade_id(cell):
            places.setdefault(name, []).append(i)
    for name, found in places.items():
        if len(found) == 1:
            continue
        exercise = re.sub(r"_\d+$", "", name)
        lines = [min(places[f"{exercise}_{part}"]) for part in PARTS if f"{exercise}_{part}" in places]
        above = [i for i in found if i < min(lines, default=len(nb.cells))]
        keeps = (above or found)[-1]
        for i in found:
            if i != keeps:
                del nb.cells[i].metadata["nbgrader"]
        mended.append(f"{name} was there {len(found)} times")


def _put_back_deleted(nb, originals: dict, mended: list[str]) -> None:
    """Deleted code cells of the release; a statement or a help that is gone is missed by no check."""
    for name in _missing(nb, originals):
        if originals[name].cell_type != "code":
            continue
        nb.cells.append(copy.deepcopy(originals[name]))
        is_solution = originals[name].metadata.nbgrader.solution
        mended.append(f"{name} was deleted" + ("; the stub stands in its place" if is_solution else ""))


def _in_order(nb, names: list[str], mended: list[str]) -> None:
    """The marked cells in the order of the release; a student's own cells stay behind the marked cell above them."""
    groups: list[list] = [[]]
    for cell in nb.cells:
        if _grade_id(cell):
            groups.append([])
        groups[-1].append(cell)
    first, rest = groups[0], groups[1:]
    ordered = sorted(rest, key=lambda group: names.index(_grade_id(group[0])))
    if [id(group) for group in ordered] != [id(group) for group in rest]:
        if not any("was deleted" in sentence for sentence in mended):
            mended.append("cells were moved")
        nb.cells = [cell for group in [first, *ordered] for cell in group]


def _missing(nb, originals: dict) -> list[str]:
    present = {_grade_id(cell) for cell in nb.cells}
    return [name for name in originals if name not in present]


def _mark(cell, original) -> None:
    cell.metadata["nbgrader"] = copy.deepcopy(original.metadata.nbgrader)


def _grade_id(cell) -> str:
    marks = cell.metadata.get("nbgrader")
    name = marks.get("grade_id", "") if isinstance(marks, dict) else ""
    return name if isinstance(name, str) else ""
