"""Every chapter's notebook: the lint finds nothing, and running it again gives what is saved."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.book import nbfile, notebooks
from minillm.book.paths import notebooks as find

CHAPTERS = find("chapters")
EVERYTHING = [path for folder in ("chapters", "solutions", "exercises") for path in find(folder)]

# Colours in highlighted source differ between versions of pygments; what is quoted must not.
SANITIZE = """[colours of highlighted source]
regex: </?span[^>]*>
replace:
"""


def nbval(path: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    sanitize = tmp_path / "sanitize.cfg"
    sanitize.write_text(SANITIZE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval-lax",
        "--nbval-current-env",
        "--nbval-sanitize-with",
        str(sanitize),
        "--nbval-cell-timeout",
        "300",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-q",
        "--rootdir",
        str(path.parent),
        str(path),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent)


def name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_lint(path):
    assert [str(problem) for problem in notebooks.lint(path)] == []


@pytest.mark.parametrize("path", CHAPTERS, ids=name)
def test_running_it_again_gives_what_is_saved(path, tmp_path):
    result = nbval(path, tmp_path)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_nbval_compares_checked_cells_and_not_measured_ones(sample_chapter, tmp_path):
    checked = sample_chapter.cells[2]
    for tag, saved in (("nbval-check-output", "5\n"), ("measured", "5\n")):
        cell = copy.deepcopy(checked)
        cell.metadata.tags, cell.outputs[0].text, cell.execution_count = [tag], saved, len(sample_chapter.cells)
        sample_chapter.cells.append(cell)
    path = tmp_path / "06_sample.ipynb"
    nbfile.write(nbfile.normalise(sample_chapter), path)
    result = nbval(path, tmp_path)
    assert "1 failed, 3 passed" in result.stdout and "Cell 2: Cell outputs differ" in result.stdout, result.stdout
