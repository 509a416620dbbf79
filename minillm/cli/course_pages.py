"""`minillm course site` and `changes`: the book as static pages, and what changed in its exercises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.console import errors_in_one_line, log, out


def site(
    to: Annotated[Path, typer.Option("--to", help="Folder for the site: new, empty, or a site built before.")],
) -> None:
    """Build the book as a static site: search, cross-references, dark mode, pages that print.

    `minillm course site --to build/site`, then open `build/site/index.html`. It needs the extra `site` and nothing from
    the network, runs no notebook, and fails where a link leads nowhere.
    """
    with errors_in_one_line():
        from ..course import site as static

        try:
            built = static.build(to)
        except static.Problems as problems:
            for line in problems.lines:
                log.print(line, style="red", soft_wrap=True, highlight=False, markup=False)
            raise typer.Exit(1) from None
        out.print(f"{built.pages} pages, {built.figures} figures: {built.folder / 'index.html'}", highlight=False)


def changes(
    since: Annotated[
        str | None, typer.Option(help="A date such as 2026-12-01, or a git tag: from that day on.")
    ] = None,
    record: Annotated[str | None, typer.Option(help="Record the change of an exercise: NN.exercise.")] = None,
    what: Annotated[str, typer.Option(help="What changed, in a sentence for those who have solved it.")] = "",
    old_answers: Annotated[str, typer.Option(help="What old answers do now: pass, fail, some fail, or new.")] = "",
    refresh: Annotated[bool, typer.Option("--refresh", help="Before the contract begins: store what stands.")] = False,
) -> None:
    """List the changes of released statements, or record one.

    `minillm course changes --record 06.slot_mapping --what "Positions may be negative." --old-answers fail`
    """
    with errors_in_one_line():
        from ..course import statements

        if refresh and record:
            raise ValueError(
                "--refresh and --record exclude each other: a change is recorded once the contract has begun"
            )
        if refresh:
            out.print(f"{statements.refresh()} exercises stored in {statements.BASELINE}", highlight=False)
        elif record:
            out.print(str(statements.record(record, what, old_answers)), highlight=False, markup=False, soft_wrap=True)
        else:
            for entry in statements.entries(since=since):
                out.print(f"{entry.date}  {entry.exercise}: {entry.what} Old answers: {entry.old_answers}.",
                          highlight=False, markup=False, soft_wrap=True)  # fmt: skip
            if left := statements.unrecorded():
                for line in [*left.values(), statements.what_to_do()]:
                    log.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
                raise typer.Exit(1)
