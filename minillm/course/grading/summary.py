"""What `minillm course grade` prints: points, what was flagged, what could not be graded, how it was confined."""

from __future__ import annotations

from minillm.course.gradebook import Flag, Grade
from minillm.course.grading.grade import Result
from minillm.course.grading.submission import withheld

_WEAKER = {
    "landlock": (
        "This machine lets no namespaces be made. The kernel (Landlock) hid the course and protected other processes; "
        "the network and other programs were refused in Python only."
    ),
    "none": (
        "This machine lets no namespaces be made and has no Landlock, so files, processes and the network were refused "
        "in Python only. A machine with user namespaces (Linux) shuts submissions off; TEACHING.md says how far to "
        "trust this one."
    ),
}


def lines(results: list[Result]) -> list[str]:
    """A line for each submission, one for each of its flags, and the count of all."""
    new = [result for result in results if result.is_new]
    said = []
    for result in results:
        said.append(f"{line(result.grade)}{'' if result.is_new else ', as before'}")
        said += [_flag(result.grade, flag) for flag in result.grade.flags]
    said.append(f"{len(new)} graded, {len(results) - len(new)} unchanged")
    walls = {result.walls for result in new}
    return said + [text for name, text in _WEAKER.items() if name in walls]


def line(grade: Grade) -> str:
    """One submission: who, which chapter, what it earned, what is withheld, and why it was not graded."""
    said = f"{grade.student} {grade.notebook}: {grade.points:g} of {grade.max_points:g} points"
    if grade.late:
        said += ", late"
    if stopped := [e.id for e in grade.exercises if any("withheld" in part.message for part in e.parts)]:
        said += f", withheld: {', '.join(stopped)}"
    if grade.status != "graded":
        said += f", {grade.status}: {grade.reason}"
    return said


def _flag(grade: Grade, flag: Flag) -> str:
    where = f"cell {flag.cell + 1}" if flag.cell >= 0 else f"the check of {flag.exercise}"
    where += f" line {flag.line}" if flag.line else ""
    said = f"    {where}: {flag.reason}{f': {flag.code}' if flag.code else ''}"
    if flag.refused and (not flag.exercise or flag.exercise in withheld(grade)):
        place = "/".join(filter(None, (grade.student, grade.notebook, flag.exercise)))
        return f"{said}  (to accept: --accept {place})"
    return said
