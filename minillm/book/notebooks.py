"""Notebooks: run them, save them in their stable form, check them. Built in chapter 00."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from minillm.book.lint import Problem, lint
from minillm.book.nbfile import clear_outputs, normalise, read, write
from minillm.book.paths import notebooks, repository_root

__all__ = ["Problem", "check", "clear_outputs", "execute", "lint", "normalise", "read", "write"]

CELL_TIMEOUT = 300  # seconds


def check(
    paths: Iterable[Path] | None = None,
    *,
    execute_first: bool = False,
    root: Path | None = None,
    report: Callable[[str], None] = print,
) -> list[Problem]:
    """Lint notebooks (all three folders by default), after executing and normalising the chapters if asked.

    Returns the problems; `report` gets one line for each notebook as it is dealt with.
    """
    root = root or repository_root()
    everything = [path for folder in ("chapters", "solutions", "exercises") for path in notebooks(folder, root)]
    problems = []
    for path in [Path(p) for p in paths] if paths else everything:
        if execute_first and path.resolve().parent.name == "chapters":
            report(f"executing {path.name}")
            execute(path)
        elif execute_first:
            write(normalise(read(path)), path)
        found = lint(path)
        report(f"{path.parent.name}/{path.name}: {f'{len(found)} problems' if found else 'clean'}")
        problems += found
    return problems


def execute(path: Path, *, timeout: int = CELL_TIMEOUT) -> None:
    """Run a notebook from top to bottom in a fresh kernel, in its own folder, and save it normalised.

    Raises nbclient's CellExecutionError where a cell fails; the file is left as it was.
    """
    from nbclient import NotebookClient

    path = Path(path).resolve()
    nb = clear_outputs(read(path))
    client = NotebookClient(
        nb,
        timeout=timeout,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    write(normalise(nb), path)
