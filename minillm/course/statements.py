"""The contract of the exercises: a fingerprint of each statement, and the changelog of what changed since.

A released exercise is a promise to those who solved it. `.github/statements.txt` holds the fingerprint of every
exercise on the day the contract began; `.github/STATEMENTS.md` records each change after it, with the new fingerprint.
A person who changes a statement, a stub or the points runs `minillm course changes --record`, or a test fails.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..book import nbfile
from ..book.checks import PARTS
from ..book.paths import notebooks, repository_root

BASELINE = Path(".github", "statements.txt")
CHANGELOG = Path(".github", "STATEMENTS.md")
OLD_ANSWERS = ("pass", "fail", "some fail", "new")  # what answers to the old statement do now; new: there are none
REMOVED = "removed"
_HEAD = """\
# The exercises as they stood when the contract began: chapter.exercise, then statement, stub and points.
# Written by `minillm course changes --refresh`, which works until that day and no longer.
# In force from {begins}.
"""
_BEGINS = re.compile(r"^# In force from (\d{4}-\d\d-\d\d)\.$", re.MULTILINE)
_LINE = re.compile(r"(\d\d\.\w+) +(\S+)")
_ROW = re.compile(r"\| (\d{4}-\d\d-\d\d) \| (\d\d\.\w+) \| (.*?) \| ([\w ]+) \| `(\S+)` \|")


@dataclass(frozen=True)
class Entry:
    """One row of the changelog."""

    date: datetime.date
    exercise: str
    what: str
    old_answers: str
    fingerprint: str

    def __str__(self) -> str:
        return f"| {self.date} | {self.exercise} | {self.what} | {self.old_answers} | `{self.fingerprint}` |"


def fingerprints(root: Path | None = None) -> dict[str, str]:
    """ "06.slot_mapping" -> "statement-stub-points" of every exercise as it stands in `exercises/`, in order.

    The first two are hashes of the text without trailing spaces; the points are those of the graded lines, as 1+2+2,
    or 0 where an exercise is not graded.
    """
    return {
        name: print_
        for path in notebooks("exercises", root or repository_root())
        for name, print_ in _of_notebook(nbfile.read(path), path.name[:2]).items()
    }


def recorded(root: Path | None = None) -> dict[str, str]:
    """What each exercise's fingerprint must be: the baseline, changed by the entries of the changelog in turn."""
    root = root or repository_root()
    found = dict(_LINE.findall(_baseline(root)))
    for entry in entries(root):
        found[entry.exercise] = entry.fingerprint
    return {name: print_ for name, print_ in sorted(found.items()) if print_ != REMOVED}


def unrecorded(root: Path | None = None) -> dict[str, str]:
    """Exercise -> in one sentence what differs from what is recorded; empty when all changes are recorded."""
    now, before, found = fingerprints(root), recorded(root), {}
    for name in sorted(now.keys() | before.keys()):
        if name not in before:
            found[name] = f"{name} is new"
        elif name not in now:
            found[name] = f"{name} is gone"
        elif now[name] != before[name]:
            pairs = zip(("statement", "stub", "points"), before[name].split("-"), now[name].split("-"))
            parts = [f"points ({old} before, {new} now)" if part == "points" else part
                     for part, old, new in pairs if old != new]  # fmt: skip
            found[name] = f"{name} has another {' and another '.join(parts)}"
    return found


def what_to_do(root: Path | None = None, today: datetime.date | None = None) -> str:
    """The command that records a change, in words for the author who made it."""
    if (today or datetime.date.today()) < begins(root):
        return "The contract has not begun: `minillm course changes --refresh` takes the exercises as they are."
    return (
        "A released exercise is a contract, so its change is recorded: `minillm course changes --record NN.exercise "
        '--what "what a student must know" --old-answers pass` (or fail, "some fail", new). '
        f"That writes a row into {CHANGELOG.as_posix()}; commit it with the change. "
        "If you did not mean the change, undo it."
    )


def record(
    exercise: str, what: str, old_answers: str, *, root: Path | None = None, today: datetime.date | None = None
) -> Entry:
    """Append a change to the changelog. Raises ValueError where there is nothing to record, or a field is no use."""
    root = root or repository_root()
    if old_answers not in OLD_ANSWERS:
        raise ValueError(f"--old-answers {old_answers!r}: one of {', '.join(OLD_ANSWERS)}")
    what = " ".join(what.split())
    if len(what) < 10 or "|" in what or "`" in what:
        raise ValueError(f"--what {what!r}: a sentence of 10 characters or more, without | and `")
    changed = unrecorded(root)
    if exercise not in changed:
        left = ", ".join(changed) or "none"
        raise ValueError(f"{exercise!r} has no change that is not recorded yet; exercises with one: {left}")
    is_new = exercise not in recorded(root)
    if (old_answers == "new") != is_new:
        raise ValueError(f"--old-answers {old_answers!r}: {changed[exercise]}, so it must be "
                         + ("new" if is_new else "pass, fail or some fail"))  # fmt: skip
    entry = Entry(
        today or datetime.date.today(), exercise, what, old_answers, fingerprints(root).get(exercise, REMOVED)
    )
    file = root / CHANGELOG
    file.write_text(f"{file.read_text(encoding='utf-8').rstrip()}\n{entry}\n", encoding="utf-8")
    return entry


def refresh(*, root: Path | None = None, today: datetime.date | None = None) -> int:
    """Write the fingerprints of today's exercises as the baseline; returns how many there are.

    Raises ValueError once the contract has begun.
    """
    root = root or repository_root()
    start, found = begins(root), fingerprints(root)
    if (today or datetime.date.today()) >= start:
        raise ValueError(f"the contract began on {start}: {what_to_do(root, today)}")
    lines = [f"{name} {print_}\n" for name, print_ in sorted(found.items())]
    (root / BASELINE).write_text(_HEAD.format(begins=start) + "".join(lines), encoding="utf-8")
    return len(found)


def begins(root: Path | None = None) -> datetime.date:
    """The first day on which a change must be recorded. Raises ValueError when the baseline does not say it."""
    text = (root or repository_root()).joinpath(BASELINE).read_text(encoding="utf-8")
    if not (found := _BEGINS.search(text)):  # a merge conflict leaves the line, so that `refresh` can mend the file
        raise ValueError(f"{BASELINE.as_posix()}: no line `# In force from YYYY-MM-DD.`")
    return datetime.date.fromisoformat(found[1])


def entries(root: Path | None = None, since: str | None = None) -> list[Entry]:
    """The rows of the changelog, oldest first; with `since`, a date or a git tag, only those of that day or later.

    Raises ValueError for a row that is no entry, and for a `since` that is neither.
    """
    root = root or repository_root()
    text = root.joinpath(CHANGELOG).read_text(encoding="utf-8")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|") or re.fullmatch(r"[|\- ]+|\| date .*", line):
            continue
        row = _ROW.fullmatch(line.strip())
        if row is None or row[4] not in OLD_ANSWERS:
            raise ValueError(
                f"{CHANGELOG.as_posix()} line {number}: no entry: `minillm course changes --record` writes them"
            )
        found.append(Entry(datetime.date.fromisoformat(row[1]), *row.groups()[1:]))
    first = _day(since, root) if since else datetime.date.min
    return [entry for entry in found if entry.date >= first]


def _baseline(root: Path) -> str:
    text = root.joinpath(BASELINE).read_text(encoding="utf-8")
    wrong = [line for line in text.splitlines() if not line.startswith("#") and not _LINE.fullmatch(line.strip())]
    if wrong:
        raise ValueError(f"{BASELINE.as_posix()}: {wrong[0]!r} is no fingerprint. {what_to_do(root)}")
    return text


def _day(since: str, root: Path) -> datetime.date:
    """A date as written, or the day of a tag's commit."""
    try:
        return datetime.date.fromisoformat(since)
    except ValueError:
        command = ["git", "log", "-1", "--format=%cs", since, "--"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode or not done.stdout.strip():
            raise ValueError(f"--since {since!r}: neither a date as 2026-11-25 nor a tag of this clone") from None
        return datetime.date.fromisoformat(done.stdout.strip())


def _of_notebook(nb, chapter: str) -> dict[str, str]:
    """The fingerprints of one exercise notebook, whose stubs are what nbgrader marks as solution cells. Where the task
    stands below what is broken, in a cell `NAME_spec`, that is part of the statement."""
    marked = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in nb.cells if "nbgrader" in cell.metadata}
    found = {}
    for statement in (name for name in marked if name.endswith("_statement")):
        name = statement.removesuffix("_statement")
        stubs = [
            cell.source
            for key, cell in marked.items()
            if re.fullmatch(rf"{name}(_\d+)?", key) and cell.metadata["nbgrader"]["solution"]
        ]
        points = [
            f"{marked[f'{name}_{part}'].metadata['nbgrader'].get('points', 0):g}"
            for part in PARTS
            if f"{name}_{part}" in marked
        ]
        texts = [marked[part].source for part in (statement, f"{name}_spec") if part in marked]
        hashes = [_hash("\n\n".join(texts)), _hash("\n\n".join(stubs))]
        found[f"{chapter}.{name}"] = "-".join([*hashes, "+".join(points) or "0"])
    return found


def _hash(text: str) -> str:
    return hashlib.sha256("\n".join(line.rstrip() for line in text.strip().splitlines()).encode()).hexdigest()[:10]
