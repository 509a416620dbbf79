"""The workload of each exercise: its kind and its minutes, as the heading and the notebook's metadata state them.
Built in chapter 00.

The heading of a statement is what a student reads: `## 2 · Copy on write  ·  core, 30 minutes`. The notebook's
metadata has the same for programs: `book: {"exercises": {"forked_tables": {"kind": "core", "minutes": 30}}}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("warm-up", "core", "debugging", "stretch")
BONUS = ("stretch",)  # what is earned there comes on top of the full marks
_HEADING = re.compile(r"^## \d+ · (.+?) +· +(\S+), (\d+) minutes(?:, not graded)?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Workload:
    """What one exercise asks of a student: its title, its kind (one of KINDS) and its minutes."""

    title: str
    kind: str
    minutes: int

    @property
    def bonus(self) -> bool:
        return self.kind in BONUS


def headings(nb) -> dict[str, Workload]:
    """Exercise id -> workload, from the headings of the statements, in their order."""
    found = {}
    for cell in nb["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name.endswith("_statement") and (match := _HEADING.search("".join(cell["source"]))):
            found[name.removesuffix("_statement")] = Workload(match[1].strip(), match[2], int(match[3]))
    return found


def workloads(nb) -> dict[str, Workload]:
    """Exercise id -> workload, from the notebook's metadata; the title is the heading's.

    Raises ValueError for an exercise whose metadata is missing, differs from its heading, or names no known kind.
    """
    if problems := complaints(nb):
        raise ValueError("; ".join(problems))
    return headings(nb)


def stamp(nb) -> None:
    """Write the workloads of the headings into the notebook's metadata."""
    listed = {name: {"kind": work.kind, "minutes": work.minutes} for name, work in headings(nb).items()}
    nb["metadata"].setdefault("book", {})["exercises"] = listed


def complaints(nb) -> list[str]:
    """One sentence for each exercise whose metadata does not say what its heading says; empty when all agree."""
    read, stated = headings(nb), nb["metadata"].get("book", {}).get("exercises", {})
    found = [f"metadata book.exercises has {name!r}, and no statement has its heading" for name in stated.keys() - read]
    for name, work in read.items():
        wanted = {"kind": work.kind, "minutes": work.minutes}
        if work.kind not in KINDS:
            found.append(f"exercise {name!r} is of the kind {work.kind!r}; the kinds are {', '.join(KINDS)}")
        elif stated.get(name) != wanted:
            found.append(f"metadata book.exercises[{name!r}]={stated.get(name)!r}: its heading says {wanted}")
    return sorted(found)
