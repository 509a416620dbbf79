"""Notebooks as students hand them in: answered, saved by Colab, without the marks that an editor dropped."""

from __future__ import annotations

import copy

from minillm.book import exercises, nbfile


def with_answers(exercise, solution):
    """The exercise as a student hands it in who knows every answer."""
    answers = {name: source for e in exercises.exercises_in(solution) for name, source in e.cells.items()}
    nb = copy.deepcopy(exercise)
    for cell in nb.cells:
        cell.source = answers.get(cell.metadata.get("nbgrader", {}).get("grade_id"), cell.source)
    return nb


def through_colab(notebook):
    """What saving on Colab does: an older minor format, no cell ids, its own metadata, editor flags gone."""
    nb = copy.deepcopy(notebook)
    nb.nbformat_minor = 0
    nb.metadata = nbfile.nbformat.from_dict(
        {
            "colab": {"provenance": [], "toc_visible": True},
            "accelerator": "GPU",
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "language_info": {"name": "python"},
        }
    )
    for i, cell in enumerate(nb.cells):
        cell.pop("id", None)
        for key in ("deletable", "editable", "jupyter"):
            cell.metadata.pop(key, None)
        cell.metadata["id"] = f"xK3_{i:08d}"
        if cell.cell_type == "code":
            cell.metadata.update(
                {
                    "outputId": f"0f-{i}",
                    "colab": {"base_uri": "https://localhost:8080/"},
                    "executionInfo": {"status": "ok", "timestamp": 1700000000000 + i, "elapsed": 7},
                }
            )
    return nb


def without_marks(notebook):
    nb = copy.deepcopy(notebook)
    for cell in nb.cells:
        cell.metadata.pop("nbgrader", None)
    return nb
