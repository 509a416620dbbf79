"""Grades as the CSV that an LMS imports: Canvas's gradebook, Moodle's gradebook or grading worksheet, a plain table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from minillm.course import gradebook, marks, roster as rosters, tables
from minillm.course.arrivals import participant_of
from minillm.course.gradebook import Grade
from minillm.course.roster import Student
from minillm.course.settings import Assignment, Course

SYSTEMS = ("canvas", "moodle", "csv")
MOODLE_MAXIMUM = 100  # Moodle's import refuses a file that holds a larger grade


@dataclass
class Export:
    """The text of a CSV, and what a lecturer should know about it, one sentence each."""

    text: str
    notes: list[str] = field(default_factory=list)


@dataclass
class _Table:
    """Grades by student and assignment, and the students in the order of the roster."""

    course: Course
    assignments: list[Assignment]
    students: list[Student]
    grades: dict[tuple[str, str], Grade]
    notes: list[str] = field(default_factory=list)

    def grade(self, student: str, assignment: Assignment) -> Grade | None:
        """The grade where there is one to export: one that is blocked or not wholly marked has none, a failed one is a
        zero."""
        found = self.grades.get((student, assignment.name))
        return None if found is None or found.status == "blocked" or marks.waits(found) else found


def export(course: Course, system: str, chapters: str | None = None, into: Path | None = None) -> Export:
    """The grades of some or all chapters for one of SYSTEMS.

    into: the LMS's own export, which is filled in: Canvas's gradebook, or Moodle's grading worksheet of the one chapter
    that is named. Without it the columns are those that both imports map by themselves.
    A submission that is missing or blocked has an empty cell, never a zero.
    Raises ValueError for an unknown system, for no grades, or for a file that is not such an export.
    """
    if system not in SYSTEMS:
        raise ValueError(f"to={system!r}: one of {', '.join(SYSTEMS)}")
    table = _table(course, chapters)
    if into is None:
        text = {"canvas": _canvas, "moodle": _moodle, "csv": _plain}[system](table)
    elif system == "csv":
        raise ValueError("into: a plain csv is filled into nothing; leave it out, or export to canvas or moodle")
    else:
        text = (_into_canvas if system == "canvas" else _into_worksheet)(table, Path(into))
    return Export(text, table.notes)


def rounded(points: float) -> str:
    """Two decimals at most, halves up, as both systems show a grade: 12.345 -> "12.35", 7.0 -> "7"."""
    exact = Decimal(repr(float(points))).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return f"{exact:f}".rstrip("0").rstrip(".") or "0"


def column(assignment: Assignment) -> str:
    """The name of an assignment in an LMS."""
    title = assignment.title if assignment.is_exam else f"Chapter {assignment.name} {assignment.title}"
    return title.replace(",", " ")


def _table(course: Course, chapters: str | None) -> _Table:
    grades = {(g.student, g.notebook): g for g in marks.current(course)}
    chosen = course.chosen(chapters)
    if not chapters:
        graded = {notebook for _, notebook in grades}
        chosen = [assignment for assignment in chosen if assignment.name in graded]
    names = {assignment.name for assignment in chosen}
    here = {key: grade for key, grade in grades.items() if key[1] in names}
    if not here:
        raise ValueError(f"no grades of {', '.join(names) or 'any chapter'}: run `minillm course grade` first")
    roster = rosters.load(course.folder)
    students = list(roster.students.values()) if roster else [Student(s) for s in sorted({s for s, _ in here})]
    table = _Table(course, chosen, students, here)
    listed = {student.id for student in students}
    for (student, notebook), grade in here.items():
        if grade.status != "graded":
            what = "has an empty cell" if grade.status == "blocked" else "counts as zero"
            table.notes.append(f"{student} {notebook} is {grade.status} and {what}: {grade.reason}")
        if grade.is_withheld:
            table.notes.append(
                f"{student} {notebook} has withheld points, which count as zero until you accept its flag"
            )
        if grade.late:
            table.notes.append(f"{student} {notebook} was late; its points stand as earned")
        if waiting := marks.waits(grade):
            listed_ones = ", ".join(exercise.id for exercise in waiting)
            table.notes.append(f"{student} {notebook} has an empty cell until a person has marked {listed_ones}")
        table.notes += [f"{student} {notebook} {e.id}: {e.correction}" for e in grade.exercises if e.correction]
        if student not in listed:
            table.notes.append(f"{student} {notebook} is left out: {rosters.FILE} has no such student")
    return table


def _canvas(table: _Table) -> str:
    """Canvas's gradebook: students by ID, "Points Possible" in the second row; points beyond it are allowed."""
    header = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *map(column, table.assignments)]
    rows = [header, ["    Points Possible", "", "", "", "", *(rounded(a.points) for a in table.assignments)]]
    for s in table.students:
        name = f"{s.last_name}, {s.first_name}" if s.last_name else s.name
        rows.append([name, s.lms_user_id, s.sis_user_id, s.login or s.id, s.section, *_cells(table, s, _points)])
    if any(not s.lms_user_id for s in table.students):
        table.notes.append("some students have no lms_user_id: Canvas finds them by SIS ids or by name")
    return tables.dumps(rows)


def _moodle(table: _Table) -> str:
    """Moodle's gradebook import: one column that names the user in every line, grades out of 100, the bonus apart.

    A line without that name is left out: Moodle's import would give its grades to the student of the line above.
    """
    by_email = sum(bool(s.email) for s in table.students) >= sum(bool(s.sis_user_id) for s in table.students)
    name = "Email address" if by_email else "ID number"
    header = ["First name", "Last name", "ID number", "Email address"]
    for assignment in table.assignments:
        header += [f"Assignment: {column(assignment)}"] + [f"{column(assignment)} bonus"] * bool(assignment.bonus)
    rows = [header]
    for s in table.students:
        if not (s.email if by_email else s.sis_user_id):
            table.notes.append(f"{s.id} is left out: Moodle finds students by {name}; add it to {rosters.FILE}")
            continue
        row = [s.first_name, s.last_name, s.sis_user_id, s.email]
        for assignment in table.assignments:
            grade = table.grade(s.id, assignment)
            row.append(_out_of(MOODLE_MAXIMUM, grade, assignment) if grade else "")
            row += [_bonus(grade, assignment) if grade else ""] * bool(assignment.bonus)
        rows.append(row)
    table.notes.append(
        f"in Moodle map from {name} to {name}; grades and bonus are out of {MOODLE_MAXIMUM}, Moodle's maximum grade of "
        "an assignment, and a bonus needs a grade item of its own that is extra credit"
    )
    return tables.dumps(rows)


def _plain(table: _Table) -> str:
    header = ["id", "last_name", "first_name", "email", *(a.name for a in table.assignments), "total"]
    rows = [header]
    for s in table.students:
        total = sum(grade.points for a in table.assignments if (grade := table.grade(s.id, a)))
        rows.append([s.id, s.last_name, s.first_name, s.email, *_cells(table, s, _points), rounded(total)])
    return tables.dumps(rows)


def _into_canvas(table: _Table, into: Path) -> str:
    """Canvas's exported gradebook with the columns of these assignments filled, added where they are not there."""
    rows = _read(into)
    if rows[0][:2] != ["Student", "ID"]:
        raise ValueError(f"{into}: Canvas's exported gradebook begins with the columns Student, ID")
    header, known = rows[0], {s.lms_user_id: s for s in table.students if s.lms_user_id}
    width = len(header)
    places = []
    for assignment in table.assignments:
        # Canvas writes its own number behind the name: "Chapter 06 The paged KV cache (8812)".
        own = [
            i
            for i, name in enumerate(header)
            if name.rpartition(" (")[0] == column(assignment) or name == column(assignment)
        ]
        places.append(own[0] if own else width)
        if not own:
            header.append(column(assignment))
            width += 1
    for row in rows[1:]:
        row += [""] * (width - len(row))
        if "Points Possible" in row[0]:
            for place, assignment in zip(places, table.assignments):
                row[place] = row[place] or rounded(assignment.points)
        elif student := known.pop(row[1].strip(), None):
            for place, cell in zip(places, _cells(table, student, _points)):
                row[place] = cell or row[place]
    table.notes += [f"{s.id} is not in {into.name}" for s in known.values()]
    return tables.dumps(rows)


def _into_worksheet(table: _Table, into: Path) -> str:
    """Moodle's grading worksheet with Grade and Feedback comments; its last-modified column stays, Moodle checks it.

    The grade is the same share of the maximum as in the gradebook's import; the comment has points and bonus.
    """
    if len(table.assignments) != 1:
        raise ValueError(f"into: a worksheet is of one assignment, and {len(table.assignments)} are exported; name one")
    [assignment] = table.assignments
    header, *rows = _read(into)
    lower = [name.lower() for name in header]
    if not {"identifier", "grade"} <= set(lower):
        raise ValueError(f"{into}: Moodle's grading worksheet has the columns Identifier and Grade")
    place = {name: lower.index(name) for name in lower}
    roster, missing = rosters.Roster(table.students), {s for s, _ in table.grades}
    handed_in = {
        number: student
        for student in missing
        if (receipt := gradebook.receipt_of(table.course.folder, student, assignment.name))
        and (number := participant_of(receipt.path))
    }
    for row in rows:
        cells = {name: row[i] for name, i in place.items()}
        student = handed_in.get(cells["identifier"].split()[-1]) if cells["identifier"].strip() else None
        if student is None:
            keys = {"any_key": cells.get("email address", ""), "full_name": cells.get("full name", "")}
            found = roster.find(**keys)
            student = found.id if found else None
        if student is None or not (grade := table.grade(student, assignment)):
            continue
        missing.discard(student)
        maximum = _number(cells.get("maximum grade", "")) or float(MOODLE_MAXIMUM)
        row[place["grade"]] = _out_of(maximum, grade, assignment)
        if "feedback comments" in place:
            bonus = f", bonus {rounded(grade.points - _plain_points(grade))} of {rounded(assignment.bonus)}"
            told = f"{rounded(_plain_points(grade))} of {rounded(assignment.points)} points"
            row[place["feedback comments"]] = told + bonus * bool(assignment.bonus)
    table.notes += [f"{student} has a grade and no row in {into.name}" for student in sorted(missing)]
    return "\ufeff" + tables.dumps([header, *rows])


def _cells(table: _Table, student: Student, text: Callable[[Grade], str]) -> list[str]:
    found = [table.grade(student.id, assignment) for assignment in table.assignments]
    return [text(grade) if grade else "" for grade in found]


def _points(grade: Grade) -> str:
    return rounded(grade.points)


def _plain_points(grade: Grade) -> float:
    """Points without any bonus."""
    return sum(exercise.points for exercise in grade.exercises if not exercise.bonus)


def _out_of(maximum: float, grade: Grade, assignment: Assignment) -> str:
    """The points without the bonus, as a share of the maximum."""
    return rounded(min(maximum * _plain_points(grade) / (assignment.points or 1), maximum))


def _bonus(grade: Grade, assignment: Assignment) -> str:
    """The bonus that was earned, out of MOODLE_MAXIMUM."""
    return rounded(MOODLE_MAXIMUM * (grade.points - _plain_points(grade)) / assignment.bonus)


def _number(text: str) -> float:
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return 0.0


def _read(path: Path) -> list[list[str]]:
    table = tables.read(path)
    return [table.columns, *(cells for _, cells in table.rows)]
