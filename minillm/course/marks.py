"""Grades as they count today: late by the due dates of today, with what a person has given, questions by hand included.

`minillm course grade` writes what the checks gave. Feedback and export read it through here, so that a changed date or
a correction needs no second grading, and a second grading loses none of them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from minillm.book import nbfile, workload
from minillm.course import corrections, gradebook
from minillm.course.corrections import Correction
from minillm.course.gradebook import ExerciseGrade, Grade, Part
from minillm.course.settings import Assignment, Course

BY_HAND = "by hand"  # the part of an exercise that a person marks
NOT_MARKED = "not marked yet"


def current(course: Course, notebook: str | None = None) -> list[Grade]:
    """All grades of the course, or those of one assignment, by student, then by assignment.

    Raises ValueError for a grade that was edited wrongly, or a correction that fits none.
    """
    grades = [g for g in gradebook.load_all(course.folder, notebook) if g.notebook in course.assignments]
    return _as_they_count(course, grades, corrections.read(course))


def correct(course: Course, new: list[Correction]) -> list[Grade]:
    """Add corrections to those of the course; the grades that they change, as they count now.

    Raises ValueError, and adds none, where one is of no graded submission, of no exercise, or beyond its points.
    """
    new = [replace(one, line=0) for one in new]
    stored = {(g.student, g.notebook): g for g in gradebook.load_all(course.folder)}
    if unknown := [one for one in new if (one.student, one.chapter) not in stored]:
        raise ValueError(f"{unknown[0]}: no graded submission of {unknown[0].student!r} in {unknown[0].chapter}")
    touched = list(dict.fromkeys((one.student, one.chapter) for one in new))
    grades = _as_they_count(course, [stored[place] for place in touched], [*corrections.read(course), *new])
    corrections.append(course, new)
    return grades


def by_hand(course: Course, assignment: Assignment) -> list[ExerciseGrade]:
    """The questions of an exam that a person marks, without points yet, in the order of the exam."""
    path = course.notebook_in("source", assignment)
    if not assignment.is_exam or not path.is_file():
        return []
    nb, found = nbfile.read(path), []
    titles = workload.headings(nb)
    for cell in nb.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and marks.get("grade"):
            question = titles.get(re.sub(r"_\w+$", "", marks.grade_id))
            title = question.title if question else marks.grade_id
            title = f"{title}: working" if marks.grade_id.endswith("_working") else title
            part = Part(BY_HAND, False, 0.0, float(marks.points), NOT_MARKED)
            found.append(ExerciseGrade(marks.grade_id, title, 0, 0.0, part.max_points, [part]))
    return found


def waits(grade: Grade) -> list[ExerciseGrade]:
    """The exercises of a grade that a person has still to mark."""
    hands = [e for e in grade.exercises if any(part.part == BY_HAND for part in e.parts)]
    return [] if grade.status == "failed" else [exercise for exercise in hands if not exercise.correction]


def _as_they_count(course: Course, grades: list[Grade], given: list[Correction]) -> list[Grade]:
    hands = {name: by_hand(course, assignment) for name, assignment in course.assignments.items()}
    for grade in grades:
        receipt = gradebook.receipt_of(course.folder, grade.student, grade.notebook)
        grade.late = course.is_late(grade.notebook, grade.submitted, receipt.late if receipt else grade.late)
        if receipt and receipt.problem and grade.status == "failed":
            grade.reason = receipt.problem
        there = {exercise.id for exercise in grade.exercises}
        for exercise in hands[grade.notebook]:
            if exercise.id not in there:
                parts = [Part(**vars(part)) for part in exercise.parts]
                grade.exercises.append(ExerciseGrade(**{**vars(exercise), "parts": parts}))
        if hands[grade.notebook]:
            grade.exercises.sort(key=_place)
    corrections.apply(grades, given, course.folder / corrections.FILE)
    for grade in grades:
        for exercise in grade.exercises:
            for part in exercise.parts:
                if part.part == BY_HAND and exercise.correction:
                    part.points, part.passed, part.message = exercise.points, exercise.points > 0, ""
    return grades


def _place(exercise: ExerciseGrade) -> tuple[int, bool]:
    """Question 2 before question 10, its working before its answer."""
    number = re.match(r"q(\d+)", exercise.id)
    return int(number[1]) if number else 0, not exercise.id.endswith("_working")
