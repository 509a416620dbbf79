"""Whose a submission is, and of which assignment: by numbers, emails and names, never by half of them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from minillm.course import tables
from minillm.course.arrivals import Arrival
from minillm.course.roster import FILE, Roster, squeezed


@dataclass(frozen=True)
class Author:
    """student: the id, None where it is not known, and then `reason` says why. late: None where nothing tells.

    by_number: an LMS's own number or an email told who it is, not only a name.
    """

    student: str | None
    late: bool | None = None
    reason: str = ""
    by_number: bool = False


class Authors:
    """Finds the authors of the files of one source."""

    def __init__(self, files: list[Arrival], roster: Roster | None, worksheet: Path | None = None) -> None:
        """worksheet: Moodle's grading worksheet. Raises ValueError where it is none."""
        self.roster, self.participants = roster, _participants(worksheet)
        self._numbers = defaultdict(set)  # of each name, those under which it came
        for file in files:
            self._numbers[squeezed(file.author)].add(_number(file))

    def of(self, arrival: Arrival) -> Author:
        """The author of one file."""
        keys, late = dict(arrival.keys), arrival.late
        row, name = self.participants.get(keys.pop("participant", "")), arrival.author
        if row:
            name = row["name"] or keys.get("full_name", "")
            if self.roster:
                found = self.roster.find(email=row["email"], any_key=row["number"])
                if found:
                    return Author(found.id, row["late"], by_number=True)
                keys, late = {"full_name": name}, row["late"]
        if not self.roster:
            return self._by_name_alone(arrival)
        student = self.roster.find(**keys)
        if not arrival.author:
            return Author(None, late, "its name tells no student")
        if student is None:
            fits, everybody = self.roster.fits, self.roster.students.values()
            same = [s.id for s in everybody if any(fits(s, kind, value) for kind, value in keys.items())]
            told = f"{FILE} has no student {name!r}: add the student there, and collect again"
            if len(same) > 1:
                told = f"{name!r} may be {' or '.join(same)}: {_way_out(arrival)}"
            return Author(None, late, told)
        by_number = student.lms_user_id != "" and student.lms_user_id == keys.get("canvas_id")
        others = self._numbers[squeezed(arrival.author)]
        if row:  # an anonymous file has no name of its own
            others = {n for n, other in self.participants.items() if squeezed(other["name"]) == squeezed(name)}
        if len(others) > 1 and not by_number:
            told = f"several are called {name!r} (numbers {', '.join(sorted(others))}): {_way_out(arrival)}"
            return Author(None, late, told)
        return Author(student.id, late, by_number=by_number)

    def _by_name_alone(self, arrival: Arrival) -> Author:
        """Without a roster the name is the student; a number tells students of one name apart."""
        is_shared = len(self._numbers[squeezed(arrival.author)]) > 1
        number = arrival.keys.get("canvas_id", "") or (_number(arrival) if is_shared else "")
        plain = re.sub(r"[/\\*?\[\]:\"<>|]", "", arrival.author).lstrip("._- ")
        row = self.participants.get(arrival.keys.get("participant", ""))
        late = row["late"] if row else arrival.late
        student = f"{plain} {number}".strip() or None
        return Author(student, late, "" if student else "its name tells no student", by_number=True)


def _number(file: Arrival) -> str:
    return file.keys.get("participant", "") or file.keys.get("canvas_id", "")


def _way_out(arrival: Arrival) -> str:
    if "participant" in arrival.keys:
        return "give Moodle's grading worksheet with --worksheet, which has emails and ID numbers"
    if "canvas_id" in arrival.keys:
        return f"put Canvas's user ids into lms_user_id of {FILE}"
    return f"name the folder after the id in {FILE}"


def _participants(worksheet: Path | None) -> dict[str, dict]:
    """Participant number -> name, email, ID number and lateness, from Moodle's grading worksheet."""
    if worksheet is None:
        return {}
    table = tables.read(worksheet)
    if not table.has("Identifier", "Status"):
        raise ValueError(
            f"{worksheet}: the columns are {', '.join(table.columns) or 'none'}; Moodle's grading worksheet has "
            "Identifier and Status"
        )
    return {
        row["identifier"].split()[-1]: {
            "name": row.get("full name", ""),
            "email": row.get("email address", ""),
            "number": row.get("id number", ""),
            "late": " late" in row["status"],
        }
        for _, row in table.records()
        if row["identifier"]
    }


def assignment_of(arrival: Arrival, texts: dict[str, set[str]], chapter: str | None) -> tuple[str, str]:
    """The assignment of a file, and why it is put aside; one of both is empty.

    texts: assignment -> `fingerprint` of its release; a notebook belongs to the one with which it shares most.
    """
    try:
        cells = json.loads(arrival.content)["cells"]
        own = {_mark(cell) for cell in cells} | {"".join(cell["source"]).strip() for cell in cells}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        own = set()
    shared = {name: len(own & text) for name, text in texts.items()}
    best = max(shared, key=shared.get)
    if chapter:
        is_other = shared[best] > shared[chapter] and 4 * shared[chapter] < len(texts[chapter])
        return chapter, f"it holds the exercises of {best}, and was handed in for {chapter}" if is_other else ""
    if shared[best] and list(shared.values()).count(shared[best]) == 1:
        return best, ""
    for name in texts:
        if re.search(rf"(?<![a-zA-Z0-9]){re.escape(name)}[_.]", arrival.file):
            return name, ""
    return "", "its chapter is not known: collect it with --chapter"


def fingerprint(nb) -> set[str]:
    """Marks of the graded lines and read-only texts of a release."""
    locked = [cell for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("locked")]
    return {_mark(cell) for cell in locked} | {cell.source.strip() for cell in locked} - {""}


def _mark(cell) -> str:
    return ((cell.get("metadata") or {}).get("nbgrader") or {}).get("grade_id", "")
