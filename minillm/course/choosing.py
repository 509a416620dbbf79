"""Which of a student's files counts: the newest that came in time, else the newest, and what is told of the others."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minillm.book import nbfile
from minillm.course import restore
from minillm.course.arrivals import Arrival, is_notebook
from minillm.course.gradebook import Receipt, receipt_of
from minillm.course.settings import Assignment, Course

if TYPE_CHECKING:
    from minillm.course.collect import Report

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass
class _Judged:
    file: Arrival
    content: bytes
    mended: list[str]
    problem: str
    receipt: Receipt


@dataclass
class Choice:
    """One student's files of one assignment."""

    course: Course
    assignment: Assignment
    student: str
    report: Report
    last: bool

    @property
    def label(self) -> str:
        return f"{self.student} {self.assignment.name}"

    def take(self, files: list[Arrival], released) -> None:
        """Put the file that counts where nbgrader looks for it, unless a better one is there."""
        judged = sorted((self._judged(file, released) for file in files), key=self._rank)
        best, report = ([one for one in judged if not one.problem] or judged)[-1], self.report
        if len(judged) > 1:
            report.replaced.append((self.label, f"{best.file.path}, of {len(judged)}"))
        for other in judged:
            if other.problem and not best.problem and _turn(other) > _turn(best):
                report.problems.append((self.label, f"{other.file.path}: {other.problem}; the one before it counts"))
            elif other.receipt.late and not best.receipt.late:
                self._pass_over(other)
        if not re.fullmatch(r"[^()]*\.ipynb", best.file.file) and is_notebook(best.file.file) and not best.problem:
            report.renamed.append((self.label, best.file.path))
        old = receipt_of(self.course.folder, self.student, self.assignment.name)
        if old and (why := self._keeps(old, best)):
            report.unchanged.append(self.label)
            if why == "late":
                self._pass_over(best)
            elif why == "broken":
                report.problems.append(
                    (self.label, f"{best.file.path}: {best.problem}; the one collected before counts")
                )
        else:
            self._put(best)
            report.collected.append(self.label)
            report.mended += [(self.label, sentence) for sentence in best.mended]
            if best.problem:
                report.problems.append((self.label, f"{best.file.path}: {best.problem}"))
        now = receipt_of(self.course.folder, self.student, self.assignment.name)
        if self._is_late(now):
            report.late.append(self.label)

    def _judged(self, file: Arrival, released) -> _Judged:
        content, mended, problem = file.content, [], file.problem
        if not problem and not is_notebook(file.file):
            problem = f"{file.file!r} is not a notebook (.ipynb)"
        if not problem:
            try:
                nb, mended = restore.restored(restore.read(file.content), released)
                content = nbfile.dumps(nb).encode()
            except ValueError as error:
                problem = str(error)
            except Exception as error:  # one hostile file must not keep the others from being collected
                problem = f"the notebook cannot be restored: {type(error).__name__}: {error}"
        receipt = Receipt(
            self.student,
            self.assignment.name,
            file.path,
            file.file,
            hashlib.sha256(file.content).hexdigest(),
            file.submitted.isoformat(timespec="seconds") if file.submitted else "",
            bool(file.late),
            list(file.turn),
            mended,
            problem,
        )
        return _Judged(file, content, mended, problem, replace(receipt, late=self._is_late(receipt)))

    def _is_late(self, receipt: Receipt) -> bool:
        return self.course.is_late(self.assignment.name, receipt.submitted, receipt.late)

    def _rank(self, one: _Judged) -> tuple:
        """Notebooks after other files, those in time after late ones, then by time and turn."""
        return is_notebook(one.file.file), self.last or not one.receipt.late, *_turn(one)

    def _keeps(self, old: Receipt, best: _Judged) -> str:
        """Why the file that was collected before stays; empty where the new one takes its place."""
        new, was_late = best.receipt, self._is_late(old)
        if old.sha256 == new.sha256:
            self._note_what_is_new(old, new)
            return "the same"
        if new.problem and not old.problem:
            return "broken"
        if not self.last and not old.problem and new.late != was_late:
            return "late" if new.late else ""
        return "older" if _is_older(new, old) else ""

    def _note_what_is_new(self, old: Receipt, new: Receipt) -> None:
        """The same file again: its earliest time, and what the LMS says of it today."""
        submitted = min(filter(None, (old.submitted, new.submitted)), key=dt.datetime.fromisoformat, default="")
        late = self.course.is_late(self.assignment.name, submitted, new.late)
        if (submitted, late) != (old.submitted, old.late):
            self._write(replace(old, submitted=submitted, late=late))

    def _pass_over(self, one: _Judged) -> None:
        due = self.course.shown(self.assignment.due)
        came = f" ({self.course.shown(one.file.submitted)})" if one.file.submitted else ""
        told = f"{one.file.path} came after {due}{came}; the one in time counts, and --last takes the last"
        self.report.passed_over.append((self.label, told))

    def _put(self, best: _Judged) -> None:
        path = self.course.notebook_in("submitted", self.assignment, self.student)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(best.content)
        self._write(best.receipt)

    def _write(self, receipt: Receipt) -> None:
        """The receipt, and nbgrader's file with the time."""
        folder = self.course.notebook_in("submitted", self.assignment, self.student).parent
        timestamp = folder / "timestamp.txt"
        timestamp.unlink(missing_ok=True)
        if receipt.submitted:
            utc = dt.datetime.fromisoformat(receipt.submitted).astimezone(dt.UTC)
            timestamp.write_text(f"{utc:%Y-%m-%d %H:%M:%S} UTC\n", encoding="utf-8")
        text = json.dumps(dataclasses.asdict(receipt), indent=1, ensure_ascii=False) + "\n"
        (folder / "receipt.json").write_text(text, encoding="utf-8")


def _turn(one: _Judged) -> tuple:
    return one.file.submitted or _EPOCH, one.file.turn


def _is_older(new: Receipt, old: Receipt) -> bool:
    """Whether a file collected now is older than the one there; without times and turns, what comes now is newer."""
    if new.submitted and old.submitted:
        times = dt.datetime.fromisoformat(new.submitted), dt.datetime.fromisoformat(old.submitted)
        return (times[0], new.turn) < (times[1], old.turn)
    return bool(new.turn and old.turn and new.turn < old.turn)
