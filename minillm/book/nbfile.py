"""Notebooks as files: read, normalised so that the same content is the same bytes, written. Built in chapter 00."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import nbformat

_NOTEBOOK_METADATA = ("book", "kernelspec", "language_info")
_CELL_METADATA = ("tags", "nbgrader", "deletable", "editable", "jupyter")
_IMAGE_METADATA = ("alt", "width", "height")
_WIDGET = "application/vnd.jupyter.widget"


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook in the current format, whatever minor version it was saved in."""
    return nbformat.read(path, as_version=4)


def write(nb: nbformat.NotebookNode, path: Path) -> None:
    nbformat.validate(nb)
    Path(path).write_text(dumps(nb), encoding="utf-8")


def dumps(nb: nbformat.NotebookNode) -> str:
    return nbformat.writes(nb, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def normalise(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy without what changes from run to run: timings, widget state, editor metadata, random cell ids."""
    nb = copy.deepcopy(nb)
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = nbformat.from_dict({key: nb.metadata[key] for key in _NOTEBOOK_METADATA if key in nb.metadata})
    nb.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nb.metadata["language_info"] = {"name": "python"}
    seen: dict[str, int] = {}
    for cell in nb.cells:
        cell.source = cell.source.rstrip()
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in _CELL_METADATA if cell.metadata.get(key) not in (None, [], {})}
        )
        cell["id"] = _cell_id(cell, seen)
        if cell.cell_type == "code":
            cell.outputs = [
                clean for output in _merge_streams(cell.outputs) if (clean := _clean_output(output, cell)) is not None
            ]
    return nb


def clear_outputs(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy as it was before it ran."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def _cell_id(cell, seen: dict[str, int]) -> str:
    """An id that follows from the content, so that rewriting a notebook does not change its untouched cells."""
    name = (
        cell.metadata.get("nbgrader", {}).get("grade_id")
        or hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
    )
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:56]
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def _merge_streams(outputs: list) -> list:
    """Neighbouring pieces of one stream as one: how print was flushed is chance."""
    merged: list = []
    for output in outputs:
        if merged and output.output_type == "stream" == merged[-1].output_type and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(copy.deepcopy(output))
    return merged


def _clean_output(output, cell):
    """An output without its live half; None when nothing is left to read."""
    if output.output_type not in ("display_data", "execute_result"):
        return output
    lived = any(mime.startswith(_WIDGET) for mime in output.data)
    output.data = nbformat.from_dict(
        {mime: value for mime, value in output.data.items() if not mime.startswith(_WIDGET)}
    )
    if lived and set(output.data) <= {"text/plain"}:
        return None  # a bare widget leaves nothing on the page but its address in memory
    output.metadata = nbformat.from_dict(
        {
            mime: kept
            for mime, value in output.metadata.items()
            if mime in output.data
            and isinstance(value, dict)
            and (kept := {k: v for k, v in value.items() if k in _IMAGE_METADATA})
        }
    )
    if output.output_type == "execute_result":
        output.execution_count = cell.execution_count
    return output
