"""The key of a course: the solutions of chapters, executed and rendered as pages, for the lecturer only."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from pathlib import Path

import nbformat

from minillm.book import nbfile
from minillm.book.notebooks import CELL_TIMEOUT
from minillm.book.paths import chapter_number, notebooks

BANNER = "> **For lecturers only.** This page holds the solutions of the exercises, with their output."


def write(
    folder: Path,
    chapters: Iterable[int] | None = None,
    report: Callable[[str], None] = lambda line: None,
    timeout: int = CELL_TIMEOUT,
) -> list[Path]:
    """One page a chapter in `folder`, and an index of them; returns the pages.

    report gets a line for each chapter. A cell that fails stands in its page with its error, and in the report.
    Raises ValueError for chapters without solutions.
    """
    paths = {chapter_number(path): path for path in notebooks("solutions")}
    wanted = sorted(set(chapters)) if chapters is not None else sorted(paths)
    if missing := [number for number in wanted if number not in paths]:
        raise ValueError(
            f"chapters={missing} have no solutions; there are solutions of {min(paths):02} to {max(paths):02}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    for number in wanted:
        nb, failed = executed(paths[number], timeout)
        pages.append(folder / f"{paths[number].stem}.html")
        pages[-1].write_text(page(nb, paths[number].stem), encoding="utf-8")
        report(f"{pages[-1].name}: {'; '.join(failed) or f'{_num_lines(nb)} graded lines pass'}")
    (folder / "index.html").write_text(_index(pages), encoding="utf-8")
    return pages


def executed(path: Path, timeout: int = CELL_TIMEOUT) -> tuple[nbformat.NotebookNode, list[str]]:
    """A copy of a solution notebook after it ran in a fresh kernel, and what failed, a sentence each."""
    from nbclient import NotebookClient

    nb = nbfile.clear_outputs(nbfile.read(path))
    NotebookClient(
        nb, timeout=timeout, kernel_name="python3", allow_errors=True, store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()  # fmt: skip
    failed = [
        f"cell {index} raised {output.ename}: {output.evalue.splitlines()[0] if output.evalue else ''}".rstrip(": ")
        for index, cell in enumerate(nb.cells)
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    return nbfile.normalise(nb), failed


def page(nb: nbformat.NotebookNode, title: str) -> str:
    """An executed notebook as HTML: with a banner, without the set-up cell."""
    from nbconvert import HTMLExporter

    shown = [cell for cell in nb.cells if "setup" not in cell.metadata.get("tags", [])]
    banner = nbformat.v4.new_markdown_cell(BANNER)
    nb = nbformat.v4.new_notebook(cells=[banner, *shown], metadata=nb.metadata)
    body, _ = HTMLExporter().from_notebook_node(nb, {"metadata": {"name": f"{title}: solutions"}})
    return body


def _num_lines(nb: nbformat.NotebookNode) -> int:
    return sum(bool(cell.metadata.get("nbgrader", {}).get("grade")) for cell in nb.cells)


def _index(pages: list[Path]) -> str:
    items = "".join(f'<li><a href="{html.escape(path.name)}">{html.escape(path.stem)}</a></li>' for path in pages)
    head = '<meta charset="utf-8"><title>Solutions</title>'
    return (
        f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><h1>Solutions, for lecturers '
        f"only</h1><ul>{items}</ul></body></html>\n"
    )
