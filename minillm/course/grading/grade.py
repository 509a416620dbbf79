"""`minillm course grade`: every submission that has changed, graded in parallel; flags, and what a person accepted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from minillm.course import gradebook, secret
from minillm.course.gradebook import Grade
from minillm.course.grading.confine import Limits
from minillm.course.grading.plan import Source
from minillm.course.grading.submission import Grader, Submission, beyond_this_machine, withhold
from minillm.course.grading.worker import Worker
from minillm.course.settings import Assignment, Course

ACCEPTED = "accepted.json"
_FOLDERS = ("source", "submitted", "received", "release", "autograded", "feedback", "grades", "gradebook.db")


@dataclass(frozen=True)
class Result:
    """A grade. is_new: it was graded now. walls: what shut the submission in, empty where it did not run."""

    grade: Grade
    is_new: bool
    walls: str = ""


@dataclass(frozen=True)
class Work:
    """What there is to grade. known: grades of submissions that have not changed; waiting: the others, each with the
    stamp of all that its grade will follow from."""

    course: Course
    limits: Limits
    known: list[Result]
    waiting: dict[Assignment, list[tuple[Submission, str]]]

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def run(self, jobs: int = 1, advance: Callable[[str], object] = lambda told: None) -> list[Result]:
        """Grade, write `grades/STUDENT/NN.json`; all results, by chapter and student. advance: told of each."""
        if jobs < 1:
            raise ValueError(f"jobs={jobs}: at least 1")
        results, accepted = [*self.known], read_accepted(self.course.folder)
        for assignment, waiting in self.waiting.items():
            results += _grade_assignment(self, assignment, waiting, jobs, accepted, advance)
        return sorted(results, key=lambda result: (result.grade.notebook, result.grade.student))


def find(
    course: Course,
    chapters: str | None = None,
    students: Iterable[str] = (),
    *,
    again: bool = False,
    limits: Limits | None = None,
) -> Work:
    """What was handed in, and of it what has changed since it was graded, or all of it `again`.

    Raises ValueError for an unknown student or chapter, FileNotFoundError where nothing was handed in.
    """
    work, key = Work(course, limits or Limits(), [], {}), secret.read(course.folder)
    found = {assignment: submissions(course, assignment, students) for assignment in course.chosen(chapters)}
    if not any(found.values()):
        raise FileNotFoundError(
            f"nothing to grade in {course.folder / 'submitted'}: `minillm course collect` puts submissions there, as "
            "submitted/STUDENT/06/06_the_paged_kv_cache.ipynb"
        )
    for assignment, handed_in in found.items():
        for one in handed_in:
            stamp = _stamp(course, assignment, one, key, work.limits)
            if not again and (old := _known(course, one, stamp)):
                work.known.append(Result(old, False))
            else:
                work.waiting.setdefault(assignment, []).append((one, stamp))
    return work


def submissions(course: Course, assignment: Assignment, students: Iterable[str] = ()) -> list[Submission]:
    """What was handed in for an assignment, by student."""
    students, found = set(students), []
    there = {path.name for path in (course.folder / "submitted").glob("*") if path.is_dir()}
    if unknown := sorted(students - there):
        raise ValueError(
            f"student {unknown[0]!r} has handed nothing in; there are {', '.join(sorted(there)) or 'none'}"
        )
    for student in sorted(students or there):
        path = course.notebook_in("submitted", assignment, student)
        others = sorted(path.parent.glob("*.ipynb"))
        if not path.is_file() and len(others) == 1:  # renamed, as downloads are: "06_the_paged_kv_cache (1).ipynb"
            path = others[0]
        if path.parent.is_dir():
            found.append(
                Submission(student, assignment.name, path, *_handed_in(course, student, assignment, path.parent))
            )
    return found


def _handed_in(course: Course, student: str, assignment: Assignment, folder: Path) -> tuple[str, bool, str]:
    """When, in ISO 8601, and whether that was late, and what is wrong with the file.

    From the receipt of `collect`, else from nbgrader's `timestamp.txt`.
    """
    if receipt := gradebook.receipt_of(course.folder, student, assignment.name):
        return receipt.submitted, receipt.late, receipt.problem
    file = folder / "timestamp.txt"
    if not file.is_file():
        return "", False, ""
    import datetime as dt

    from nbgrader.utils import parse_utc

    when = parse_utc(file.read_text(encoding="utf-8").strip()).replace(tzinfo=dt.UTC)
    return when.isoformat(timespec="seconds"), when > assignment.due, ""


def _grade_assignment(
    work: Work,
    assignment: Assignment,
    waiting: list[tuple[Submission, str]],
    jobs: int,
    accepted: set[tuple[str, str, str]],
    advance: Callable[[str], object],
) -> list[Result]:
    course, limits, key = work.course, work.limits, secret.read(work.course.folder)
    source = Source.read(course.notebook_in("source", assignment))
    hidden = hidden_from_students(course.folder)
    try:
        first = Worker(source, limits, hidden)
        beyond = beyond_this_machine(first.scout(), source.exercises)
    except RuntimeError as error:  # an import that this machine cannot do
        blocked = [
            Grade(s.student, s.notebook, s.submitted, s.late, status="blocked", reason=str(error)) for s, _ in waiting
        ]
        for grade in blocked:
            gradebook.save(grade, course.folder)
            advance(f"{grade.student} {grade.notebook}")
        return [Result(grade, True) for grade in blocked]
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    for one in waiting:
        tasks.put(one)

    def grade_some(number: int) -> list[Result]:
        done = []
        with Worker(source, limits, hidden, first.modules) if number else first as worker:
            grader = Grader(worker, key, beyond)
            while True:
                try:
                    submission, stamp = tasks.get_nowait()
                except queue.Empty:
                    return done
                ours = {e for s, n, e in accepted if (s, n) == (submission.student, submission.notebook)}
                try:
                    grade = grader.grade(submission, ours)
                except Exception as error:  # one submission disturbs no other; the reason is in its grade
                    why = f"grading stopped: {type(error).__name__}: {error}"
                    grade = Grade(submission.student, submission.notebook, status="blocked", reason=why)
                gradebook.save(grade, course.folder)
                if grade.status != "blocked":
                    _remember(course, submission, stamp)
                done.append(Result(grade, True, grader.walls))
                advance(f"{grade.student} {grade.notebook}")

    with ThreadPoolExecutor(min(jobs, len(waiting))) as pool:
        try:
            return [result for results in pool.map(grade_some, range(min(jobs, len(waiting)))) for result in results]
        finally:
            with contextlib.suppress(queue.Empty):  # after Ctrl-C the rest is not waited for
                while True:
                    tasks.get_nowait()


def hidden_from_students(course: Path) -> list[Path]:
    """What no submission may open: the course, the book's solutions and their history; not the Python that runs it."""
    course, package = course.resolve(), Path(__file__).resolve().parents[2]
    needed = [package, *(Path(p).resolve() for p in (sys.prefix, sys.base_prefix))]
    inside = any(path.is_relative_to(course) for path in needed)
    found = [course / name for name in (*_FOLDERS, secret.FILE)] if inside else [course]
    found += [package.parent / name for name in ("solutions", "tests", ".git")]
    found += histories(package.parent / ".git")
    return [path for path in found if path.exists() and not any(n.is_relative_to(path) for n in needed)]


def histories(git: Path) -> list[Path]:
    """The folders that a `.git` file points to, as in a work tree of its own: commits hold the solutions, too."""
    if not git.is_file():
        return []
    place = (git.parent / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()).resolve()
    common = place / "commondir"
    shared = (place / common.read_text(encoding="utf-8").strip()).resolve() if common.is_file() else place
    return list(dict.fromkeys((shared, place)))


def accept(course: Course, spec: str) -> Grade:
    """Note that a person accepts the flags of `STUDENT/NN/EXERCISE` (or of `STUDENT/NN`), and give its points back.

    Raises ValueError where there is no such grade, exercise or flag.
    """
    student, _, rest = spec.partition("/")
    notebook, _, exercise = rest.partition("/")
    path = gradebook.path_of(course.folder, student, notebook)
    if not (student and notebook) or not path.is_file():
        raise ValueError(f"--accept {spec}: STUDENT/CHAPTER/EXERCISE of a graded submission; there is no {path}")
    grade = gradebook.load(path)
    names = [e.id for e in grade.exercises]
    if exercise and exercise not in names:
        raise ValueError(f"--accept {spec}: {notebook} has no exercise {exercise!r}; it has {', '.join(names)}")
    flags = [flag for flag in grade.flags if flag.refused and (not exercise or flag.exercise in ("", exercise))]
    if not flags:
        raise ValueError(f"--accept {spec}: nothing is withheld there")
    accepted = read_accepted(course.folder) | {(student, notebook, exercise)}
    file = course.folder / "grades" / ACCEPTED
    file.write_text(json.dumps(sorted("/".join(one) for one in accepted), indent=1) + "\n", encoding="utf-8")
    withhold(grade, {e for s, n, e in accepted if (s, n) == (student, notebook)})
    gradebook.save(grade, course.folder)
    return grade


def read_accepted(course: Path) -> set[tuple[str, str, str]]:
    """(student, notebook, exercise) of every accepted flag; the exercise "" is the whole notebook."""
    file = course / "grades" / ACCEPTED
    listed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return {tuple([*line.split("/"), ""][:3]) for line in listed}


def _stamp(course: Course, assignment: Assignment, one: Submission, key: str, limits: Limits) -> str:
    """Of all that a grade follows from."""
    digest = hashlib.sha256(f"{key}{astuple(limits)}{one.submitted}{one.late}{_code()}".encode())
    for path in (course.notebook_in("source", assignment), one.path):
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@cache
def _code() -> str:
    """Of the package's own source, which has the checkers in it."""
    package, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _known(course: Course, one: Submission, stamp: str) -> Grade | None:
    file = _stamp_file(course, one)
    if not file.is_file() or file.read_text(encoding="ascii", errors="replace") != stamp:
        return None
    with contextlib.suppress(OSError, ValueError):
        return gradebook.load(gradebook.path_of(course.folder, one.student, one.notebook))
    return None


def _remember(course: Course, one: Submission, stamp: str) -> None:
    file = _stamp_file(course, one)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(stamp, encoding="ascii")


def _stamp_file(course: Course, one: Submission) -> Path:
    return course.folder / "grades" / ".graded" / one.student / one.notebook
