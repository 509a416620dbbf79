"""The pointers of the chapters: the files of another project that they link to. Built in chapter 25."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from minillm.book import nbfile
from minillm.book.paths import chapter_number, notebooks

LAST = 24  # chapter 25 has the guide


@cache
def pointers(repository: str, root: Path | None = None) -> tuple[tuple[str, str], ...]:
    """(path, commit) of each file of `repository` that chapters 01 to 24 link to, sorted."""
    return tuple(sorted({(path, commit) for _, path, commit in links(repository, root)}))


def links(repository: str, root: Path | None = None) -> Iterator[tuple[int, str, str]]:
    """(chapter, path, commit) of every link to a file of `repository` in the chapters' text."""
    pattern = re.compile(rf"github\.com/{re.escape(repository)}/blob/([0-9a-f]{{40}})/([^)\s\"#]+)")
    for path in notebooks("chapters", root):
        if (chapter := chapter_number(path)) <= LAST:
            for cell in nbfile.read(path).cells:
                if cell.cell_type == "markdown":
                    yield from ((chapter, file, commit) for commit, file in pattern.findall(cell.source))
