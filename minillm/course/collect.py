"""Collecting submissions: from folders or an LMS's zip into `submitted/`, nothing lost.

Of several files of a student the newest that came in time counts, else the newest. Every file is kept as it came, in
`received/STUDENT/NN/`, or in `unknown/` where its author or its chapter is not known. What counts is put, with its
marks restored, where nbgrader looks for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from minillm.book import exercises, nbfile
from minillm.course import restore, roster as rosters
from minillm.course.arrivals import Arrival, arrivals, participant_of
from minillm.course.authors import Authors, assignment_of, fingerprint
from minillm.course.choosing import Choice
from minillm.course.gradebook import receipt_of
from minillm.course.settings import Assignment, Course


@dataclass
class Report:
    """What `collect` did, for a lecturer: pairs of a submission ("jdoe 06") or a file, and a sentence."""

    collected: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    replaced: list[tuple[str, str]] = field(default_factory=list)
    passed_over: list[tuple[str, str]] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    mended: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"{len(self.collected)} collected, {len(self.unchanged)} as before, {len(self.unknown)} put aside"]
        for title, pairs in (
            ("several files, the newest in time counts", self.replaced),
            ("late, and not taken", self.passed_over),
            ("read as a notebook", self.renamed),
            ("put back", self.mended),
            ("problem", self.problems),
            ("put aside in unknown/", self.unknown),
        ):
            lines += [f"{title}: {name}: {sentence}" for name, sentence in pairs]
        lines += [f"no longer in unknown/: {', '.join(self.resolved)}"] if self.resolved else []
        lines += [f"late: {', '.join(self.late)}"] if self.late else []
        return lines + ([f"nothing yet from: {', '.join(self.missing)}"] if self.missing else [])


def collect(
    course: Course, source: Path, chapter: str | None = None, worksheet: Path | None = None, last: bool = False
) -> Report:
    """Collect the files of a folder or a zip.

    chapter: the assignment that the files belong to; else each notebook is known by its cells, or its name.
    worksheet: Moodle's grading worksheet of the assignment, which tells who a participant is, and who was late.
    last: a student's last file counts, also where it is late and another came in time.
    Raises ValueError for a chapter that was not released, FileNotFoundError or ValueError for a source that is none.
    """
    released = {a.name: nb for a in course.assignments.values() if (nb := released_of(course, a))}
    chapter = course.assignment(chapter).name if chapter else None
    if not released or (chapter and chapter not in released):
        what = f"chapter {chapter} is" if chapter else "no chapter is"
        raise ValueError(f"{what} released yet: run `minillm course release` first")
    roster = rosters.load(course.folder)
    files = arrivals(source, lambda name: bool(roster and roster.find(any_key=name, full_name=name)), course.zone)
    authors, report, groups = Authors(files, roster, worksheet), Report(), {}
    texts = {name: fingerprint(nb) for name, nb in released.items()}
    for arrival in files:
        author = authors.of(arrival)
        name, reason = assignment_of(arrival, texts, chapter)
        reason = author.reason or reason
        if not reason and not author.by_number:
            reason = _other_participant(course, author.student, name, arrival)
        if reason:
            where = _keep(course.folder / "unknown" / (name or ""), _flat(arrival), arrival.content)
            report.unknown.append((arrival.path, f"{reason} ({where.relative_to(course.folder)})"))
            continue
        _keep(course.folder / "received" / author.student / name, arrival.file, arrival.content)
        report.resolved += _leaves_unknown(course, arrival)
        groups.setdefault((author.student, name), []).append(replace(arrival, late=author.late))
    for (student, name), own in sorted(groups.items()):
        assignment = course.assignments[name]
        nb = released_of(course, assignment, student) or released[name]
        Choice(course, assignment, student, report, last).take(own, nb)
    if roster:
        handed_in = {(path.parent.parent.name, path.parent.name) for path in _receipts(course)}
        touched = {name for _, name in groups}
        wanted = [(student, name) for name in sorted(touched) for student in roster.students]
        report.missing = [" ".join(pair) for pair in wanted if pair not in handed_in]
    return report


def released_of(course: Course, assignment: Assignment, student: str = "."):
    """The notebook that students got, or this one where an exam has other numbers for each; None for none."""
    path = course.notebook_in("release", assignment, student)
    if path.is_file():
        return nbfile.read(path)
    source = course.notebook_in("source", assignment)
    return exercises.released(nbfile.read(source)) if assignment.is_exam and source.is_file() else None


def restore_submissions(course: Course, assignments: list[Assignment]) -> list[tuple[str, str]]:
    """Put marks back in every submission of these assignments, also where a lecturer put the files there by hand.

    The file as it was is kept in `received/`. Returns pairs of a submission and what was mended or is wrong.
    """
    found = []
    for assignment in assignments:
        for path in sorted(course.folder.glob(f"submitted/*/{assignment.name}/{assignment.notebook}.ipynb")):
            student, content = path.parent.parent.name, path.read_bytes()
            released = released_of(course, assignment, student) or released_of(course, assignment)
            if released is None:
                raise ValueError(f"chapter {assignment.name} is not released: run `minillm course release` first")
            try:
                nb, mended = restore.restored(restore.read(content), released)
            except ValueError as error:
                found.append((f"{student} {assignment.name}", str(error)))
                continue
            text = nbfile.dumps(nb).encode()
            if text != content:
                _keep(course.folder / "received" / student / assignment.name, path.name, content)
                path.write_bytes(text)
            found += [(f"{student} {assignment.name}", sentence) for sentence in mended]
    return found


def _other_participant(course: Course, student: str, name: str, arrival: Arrival) -> str:
    """Why a file known by its name alone is not this student's: another participant's was taken for that before."""
    old, number = receipt_of(course.folder, student, name), arrival.keys.get("participant", "")
    before = participant_of(old.path) if old else ""
    if not (number and before) or number == before:
        return ""
    return (
        f"{arrival.author!r} is participant {number}, and participant {before}'s file was collected for {student}: "
        "give Moodle's grading worksheet with --worksheet"
    )


def _flat(arrival: Arrival) -> str:
    return arrival.path.replace("/", "__")


def _leaves_unknown(course: Course, arrival: Arrival) -> list[str]:
    """Remove the copies in `unknown/` of a file whose author and chapter are known now."""
    found, (stem, suffix) = [], _parts(_flat(arrival))
    for path in sorted((course.folder / "unknown").rglob("*")):
        is_same = path.is_file() and path.suffix == suffix and re.fullmatch(rf"{re.escape(stem)}( \d+)?", path.stem)
        if is_same and path.read_bytes() == arrival.content:
            path.unlink()
            found.append(path.name)
            if path.parent.name != "unknown" and not any(path.parent.iterdir()):
                path.parent.rmdir()
    return found


def _receipts(course: Course) -> list[Path]:
    return sorted(course.folder.glob("submitted/*/*/receipt.json"))


def _keep(folder: Path, name: str, content: bytes) -> Path:
    """Keep a file under its name; another of this name and other content gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    (stem, suffix), number = _parts(name), 1
    path = folder / f"{stem}{suffix}"
    while path.exists() and path.read_bytes() != content:
        number += 1
        path = folder / f"{stem} {number}{suffix}"
    path.write_bytes(content)
    return path


def _parts(name: str) -> tuple[str, str]:
    """Stem and suffix; some names are longer than a file's may be."""
    return Path(name).stem[-100:], Path(name).suffix[:20]
