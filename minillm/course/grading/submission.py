"""One submission, graded: what its source says, what it did when it ran, and what it earns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import nbformat

from minillm.book import nbfile, workload
from minillm.course import secret as seeds
from minillm.course.gradebook import ExerciseGrade, Flag, Grade, Part
from minillm.course.grading import plan
from minillm.course.grading.look import checkers_and_imports, look, names_given
from minillm.course.grading.talk import Outcome, clean
from minillm.course.grading.worker import Worker

NOT_BEGUN = "not begun: the answer is still the empty one of the exercise"
NOT_FOUND = (
    "no cell with the answer was found: it was deleted, or its mark was lost; `minillm course restore` puts marks back"
)
WITHHELD = "withheld until the lecturer has looked at a flag"


@dataclass(frozen=True)
class Submission:
    """A student's notebook as it was handed in, for the assignment `notebook` (the chapter's two digits)."""

    student: str
    notebook: str
    path: Path
    submitted: str = ""
    late: bool = False
    problem: str = ""  # why the file is no notebook, as it was found when it was collected


class Grader:
    """Grades the submissions of one assignment, one after the other, with one worker."""

    def __init__(self, worker: Worker, secret: str, beyond: dict[str, str] | None = None) -> None:
        """beyond: exercises that no answer can pass on this machine, and why; see `beyond_this_machine`."""
        self.worker, self.source, self.secret, self.beyond = worker, worker.source, secret, dict(beyond or {})
        for name, exercise in self.source.exercises.items():
            if exercise.needs_gpu and not worker.gpu:
                self.beyond[name] = "it needs a GPU, and this machine has none"
        self.checkers, self.imports = checkers_and_imports(self.source.given.values())
        self.work = workload.headings(self.source.notebook)
        self.walls = ""  # what shut the last submission in, as `Outcome` has it

    def grade(self, submission: Submission, accepted: Iterable[str] = ()) -> Grade:
        """The grade of a submission. accepted: exercises whose flags a person has accepted; "" is all of them."""
        grade = Grade(submission.student, submission.notebook, submission.submitted, submission.late)
        try:
            if submission.problem:
                raise ValueError(submission.problem)
            handed_in = nbfile.read(submission.path)
            nb = plan.prepared(handed_in, self.source)
        except (OSError, ValueError, KeyError, AttributeError, TypeError, nbformat.ValidationError) as error:
            grade.status, grade.reason = "failed", f"{submission.path.name} is not a notebook: {_line(error)}"
            grade.exercises = [self._exercise(name, {}) for name in self.source.exercises]
            return grade
        steps, idle = plan.steps_of(nb, self.source), plan.untouched(nb, self.source)
        lost = plan.missing(nb, self.source)
        blocked = {name: why for name, why in self.beyond.items() if name not in idle and name not in lost}
        skipped = {*idle, *lost, *blocked}
        steps = [step for step in steps if step.kind != "grade" or step.exercise not in skipped]

        def seed(exercise: str, part: str) -> int:
            if part == "answer":  # the numbers of an exam, all of them or those of this student
                drawn = self.source.notebook.metadata["book"]["exam"]
                return seeds.numbers_of(drawn["seed"], submission.student if drawn["per_student"] else None)
            return seeds.seed_of(self.secret, submission.student, submission.notebook, exercise, part)

        outcome = self.worker.run(steps, seed) if any(s.kind == "grade" for s in steps) else Outcome()
        self.walls = outcome.walls if outcome.verdicts else ""
        for names, why in ((idle, NOT_BEGUN), (lost, NOT_FOUND)):
            for name in names:
                outcome.fail_rest(name, list(self.source.exercises[name].lines), why)
        grade.flags = self._flags(nb, steps, outcome)
        grade.exercises = [self._exercise(n, self._parts(n, outcome, steps)) for n in self.source.exercises]
        if outcome.broken:
            grade.status, grade.reason = "blocked", outcome.broken
        else:
            blocked |= self._not_solvable(grade, skipped | withheld(grade, accepted), seed)
            if blocked:
                grade.status, grade.reason = "blocked", "; ".join(f"{name}: {why}" for name, why in blocked.items())
        withhold(grade, accepted)
        return grade

    def _parts(self, name: str, outcome: Outcome, steps: list[plan.Step]) -> dict[str, tuple[bool, str, float]]:
        """part -> (passed, message, seconds), with what the answer's own cell raised before the check's message."""
        cells = [step.cell for step in steps if step.answers and step.exercise == name]
        raised = [(cell, *outcome.errors[cell]) for cell in cells if cell in outcome.errors]
        before = [f"cell {cell + 1} stopped{f' in line {line}' if line else ''}: {why}\n" for cell, why, line in raised]
        before += [f"a locked cell of this notebook stopped: {why}\n" for why in outcome.given_errors[:1]]
        found = {}
        for part in self.source.exercises[name].lines:
            verdict = outcome.verdicts.get((name, part))
            if verdict is None:
                found[part] = (False, "the check did not run", 0.0)
            else:
                message = "" if verdict.passed else "".join([*before, verdict.message])
                found[part] = (verdict.passed, message, verdict.seconds)
        return found

    def _exercise(self, name: str, parts: dict[str, tuple[bool, str, float]]) -> ExerciseGrade:
        exercise, work = self.source.exercises[name], self.work.get(name)
        listed = []
        for part, most in exercise.points.items():
            passed, message, seconds = parts.get(part, (False, "", 0.0))
            listed.append(Part(part, passed, most if passed else 0.0, most, message, round(seconds, 3)))
        return ExerciseGrade(
            name,
            work.title if work else name,
            work.minutes if work else 0,
            sum(part.points for part in listed),
            sum(exercise.points.values()),
            listed,
            work.bonus if work else False,
        )

    def _flags(self, nb: nbformat.NotebookNode, steps: list[plan.Step], outcome: Outcome) -> list[Flag]:
        found: dict[tuple[int, int, str, str], Flag] = {}

        def add(cell: int, line: int, reason: str, refused: bool, exercise: str) -> None:
            lines = nb.cells[cell].source.splitlines() if 0 <= cell < len(nb.cells) else []
            code = clean(lines[line - 1].strip()[:160]) if 0 < line <= len(lines) else ""
            key = (cell, line, reason, exercise)
            if refused or key not in found:
                found[key] = Flag(line, cell, clean(reason), code, exercise, refused)

        answers = {step.cell: step.exercise for step in steps if step.answers}
        own = names_given(step.source for step in steps if step.kind == "cell")
        for step in steps:
            if step.kind == "cell":
                for seen in look(step.source, step.answers, self.checkers, self.imports, own):
                    add(step.cell, seen.line, seen.reason, seen.refused, step.exercise if step.answers else "")
        for event in outcome.events:
            exercise = answers.get(event.cell, event.exercise if event.cell < 0 else "")
            add(event.cell, event.line, event.reason, event.refused, exercise)
        return sorted(found.values(), key=lambda flag: (flag.cell, flag.line, not flag.refused))

    def _not_solvable(self, grade: Grade, skipped: set[str], seed: Callable[[str, str], int]) -> dict[str, str]:
        """The exercises, and why, of which the reference fails a line that the answer failed, with the same seed.

        A machine that is too slow, or lacks something, is not the student's fault; nor is a check that is wrong.
        """
        failed = {
            exercise.id: {part.part for part in exercise.parts if not part.passed}
            for exercise in grade.exercises
            if exercise.id not in skipped
            and not all(part.passed or part.part == "answer" for part in exercise.parts)  # numbers fit any machine
        }
        if not failed:
            return {}
        reference = self.worker.run(plan.reference_steps(self.source, failed), seed)
        beyond = beyond_this_machine(reference, failed)
        if reference.broken:
            return beyond
        return {
            name: why for name, why in beyond.items() if any((name, part) in reference.failed for part in failed[name])
        }


def beyond_this_machine(reference: Outcome, exercises: Iterable[str]) -> dict[str, str]:
    """The exercises of which the reference answer did not pass a line when it ran here, and what it was told."""
    said = {name: reference.broken for name in exercises if reference.broken}
    said |= {name: reference.verdicts[name, part].message for name, part in reversed(reference.failed)}
    return {
        name: f"the reference answer does not pass on this machine either: {_line(why)}" for name, why in said.items()
    }


def withhold(grade: Grade, accepted: Iterable[str] = ()) -> None:
    """Take the points of exercises with a refused flag, and give those back that a person has accepted.

    A refused flag that belongs to no exercise (in a cell of exploration, say) withholds the whole notebook.
    """
    stopped_ones = withheld(grade, accepted)
    for exercise in grade.exercises:
        stopped = exercise.id in stopped_ones
        for part in exercise.parts:
            part.points = part.max_points if part.passed and not stopped else 0.0
            if part.passed:
                part.message = WITHHELD if stopped else ""
        exercise.points = sum(part.points for part in exercise.parts)


def withheld(grade: Grade, accepted: Iterable[str] = ()) -> set[str]:
    """The exercises with a refused flag that no person has accepted."""
    accepted, names = set(accepted), {exercise.id for exercise in grade.exercises}
    refused = {flag.exercise for flag in grade.flags if flag.refused}
    return set() if "" in accepted else (names if "" in refused else refused & names) - accepted


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
