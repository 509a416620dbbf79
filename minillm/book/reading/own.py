"""minillm's own source, read as the other projects' is. Built in chapter 25."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from minillm.book.reading.names import code_lines, names_of

PACKAGE = Path(__file__).resolve().parents[2]


@cache
def read(path: str) -> str:
    """The source of a file such as "engine/scheduler.py"."""
    return (PACKAGE / path).read_text(encoding="utf-8")


def find(reference: str) -> tuple[int, int]:
    """The first and the last line of `path::Name`, or of a whole file. Raises LookupError for a lost name."""
    path, _, name = reference.partition("::")
    names = names_of(read(path))
    if not name:
        return 1, len(read(path).splitlines())
    if name not in names:
        raise LookupError(f"minillm/{path} has no {name}")
    return names[name]


def num_code_lines(reference: str) -> int:
    """How many lines of a reference hold code: no comment, docstring or empty line."""
    first, last = find(reference)
    return sum(first <= line <= last for line in code_lines(read(reference.partition("::")[0])))
