"""Notebooks run with a GPU's defaults on a CPU, and compared with what is saved in them. Built in chapter 00.

Three defaults differ on a GPU: steps are scheduled ahead, attention and the fused layers run in Triton,
and decode steps are recorded. `MINILLM_LIKE_A_GPU` gives an engine on a CPU the same ones
(`minillm.device.like_a_gpu`), Triton in its interpreter and a recorded step as the same step on fixed buffers.
What remains for a real GPU to tell: the device of every tensor, bfloat16, and speed.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from nbformat import NotebookNode

from minillm.book.lint import CHECKED, Problem
from minillm.book.nbfile import clear_outputs, normalise, read
from minillm.book.notebooks import CELL_TIMEOUT
from minillm.book.paths import chapter_number, notebooks, repository_root
from minillm.device import GPU_DEFAULTS, LIKE_A_GPU

# These chapters are scheduled ahead only. Their engines compute from 40 to thousands of tokens with the default
# attention, and Triton's interpreter takes about 0.7 s of a CPU for each (a step of tinyworld 0.9 s with one request,
# 5.6 s with eight): chapters 01 and 03 had not ended after a minute, chapter 05 not after six. (Chapter 02 asks for the
# CPU itself, so on a GPU it attends as it does here.) The engines of the other chapters name their attention backend.
AHEAD_ONLY = {0, 1, 2, 3, 5, 6, 7, 8, 9, *range(14, 20)}
_COLOURS = re.compile(r"</?span[^>]*>")  # of highlighted source: they differ between versions of pygments


def defaults_for(path: Path) -> tuple[str, ...]:
    """Which of a GPU's defaults this notebook is run with: all, but for the chapters in AHEAD_ONLY."""
    return ("ahead",) if chapter_number(path) in AHEAD_ONLY else GPU_DEFAULTS


def check(
    paths: Iterable[Path] | None = None,
    *,
    root: Path | None = None,
    report: Callable[[str], None] = print,
    advance: Callable[[str], None] = lambda what: None,
) -> list[Problem]:
    """Run notebooks (all chapters by default) with a GPU's defaults; nothing is saved. Returns the cells that fail.

    `report` gets one line for each notebook, `advance` the name of a notebook after each of its code cells.
    """
    problems = []
    for path in [Path(p).resolve() for p in paths] if paths else notebooks("chapters", root or repository_root()):
        defaults = defaults_for(path)
        found = run(path, defaults, lambda name=path.name: advance(name))
        left_out = "" if "triton" in defaults else " (not Triton: see AHEAD_ONLY)"
        outcome = f"{len(found)} problems" if found else "as saved"
        report(f"{path.parent.name}/{path.name} with {' and '.join(defaults)}{left_out}: {outcome}")
        problems += found
    return problems


def run(
    path: Path, defaults: Iterable[str] = GPU_DEFAULTS, advance: Callable[[], None] = lambda: None
) -> list[Problem]:
    """Run one notebook to its end in a fresh kernel with these defaults, and list the cells that raise or that print
    something else than is saved where the output is compared."""
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    saved, nb = read(path), clear_outputs(read(path))
    client = NotebookClient(
        nb,
        KernelManager(kernel_name="python3"),
        timeout=CELL_TIMEOUT,
        allow_errors=True,
        store_widget_state=False,
        on_cell_executed=lambda **_: advance(),
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute(env={**os.environ, LIKE_A_GPU: ",".join(defaults)})
    except (CellTimeoutError, DeadKernelError) as error:
        return [Problem(path, None, f"did not end: {' '.join(str(error).split())[:300]}")]
    return compare(saved, normalise(nb), path)


def compare(saved: NotebookNode, ran: NotebookNode, path: Path) -> list[Problem]:
    """The cells of `ran` that raised, and the checked ones whose output is not that of `saved`."""
    problems = []
    for index, (before, after) in enumerate(zip(saved.cells, ran.cells, strict=True)):
        tags = after.metadata.get("tags", [])
        errors = [output for output in after.get("outputs", []) if output.output_type == "error"]
        if errors and "raises-exception" not in tags:
            problems.append(Problem(path, index, f"{_first_line(after)} raises {errors[0].ename}: {errors[0].evalue}"))
        elif CHECKED in tags and _texts(before) != _texts(after):
            problems.append(Problem(path, index, f"{_first_line(after)} {_difference(_texts(before), _texts(after))}"))
    return problems


def num_code_cells(path: Path) -> int:
    return sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in read(path).cells)


def _texts(cell: NotebookNode) -> dict[str, list[str]]:
    """What is compared of a cell's outputs: for each stream and kind of text what was printed, without its colours."""
    texts = defaultdict(list)
    for output in cell.outputs:
        shown = {output.name: output.text} if output.output_type == "stream" else output.get("data", {})
        for kind, text in shown.items():
            if not kind.startswith("image/"):
                texts[kind].append(_COLOURS.sub("", str(text)))
    return dict(texts)


def _difference(saved: dict[str, list[str]], ran: dict[str, list[str]]) -> str:
    """The first line in which two outputs differ."""
    if saved.keys() != ran.keys():
        return f"shows {', '.join(ran) or 'nothing'}; saved is {', '.join(saved) or 'nothing'}"
    kind = next(kind for kind in saved if saved[kind] != ran[kind])
    before, after = ("\n".join(texts[kind]).splitlines() for texts in (saved, ran))
    for old, new in zip(before, after):
        if old != new:
            start = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
            first = max(0, start - 40)
            return f"shows {new[first : first + 120]!r}; saved is {old[first : first + 120]!r}"
    return f"shows {len(after)} lines; saved are {len(before)}"


def _first_line(cell: NotebookNode) -> str:
    return f"[{cell.execution_count}] `{cell.source.strip().splitlines()[0][:60]}`"
