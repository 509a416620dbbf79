"""`minillm progress`: a reader's own exercises, graded where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.console import errors_in_one_line, log, out


def progress(
    again: Annotated[bool, typer.Option("--again", help="Run all that was begun, changed or not.")] = False,
) -> None:
    """Which of your exercises pass, what comes next, and the minutes that are left.

    Run it from a clone after you have saved a notebook of `exercises/`. Only notebooks that have changed since the last
    look run again. What it finds is kept in your state folder on this machine; nothing is sent.
    """
    with errors_in_one_line():
        from ..course import progress as found

        root = Path(__file__).resolve().parents[2]
        with log.status("looking") as status:
            standings = found.look(root, again=again, advance=lambda name: status.update(f"running {name}"))
        out.print(found.table(standings))
        out.print("\n✓ passes  ✗ begun, does not pass  · not begun", highlight=False)
        following = found.next_of(standings)
        if following is None:
            out.print("All exercises pass.", highlight=False)
            return
        path, one = following
        text = f"Next: {one.title} ({one.kind}, {one.minutes} minutes) in {path.relative_to(root)}"
        out.print(text, highlight=False, markup=False, soft_wrap=True)
        if one.message:
            out.print(f"      {one.message}", highlight=False, markup=False, soft_wrap=True)
