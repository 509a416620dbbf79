"""`minillm progress`: which exercises of a reader's clone pass, and what comes next; kept on this machine only."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minillm.book.paths import notebooks

_FORMAT = 1


@dataclass(frozen=True)
class Standing:
    """One exercise of a clone.

    chapter: its number and title. message: the first line of what its check says, where it was begun and does not pass.
    """

    chapter: str
    id: str
    title: str
    kind: str
    minutes: int
    passed: bool
    begun: bool
    message: str = ""


def look(
    root: Path, *, again: bool = False, advance: Callable[[str], object] = lambda name: None
) -> dict[Path, list[Standing]]:
    """Exercise notebook -> its exercises, in reading order.

    A notebook runs, cell by cell in a process of its own, if it or its checks have changed since the last look, or
    `again`; one that was never begun does not. advance gets the name of each that runs. Raises FileNotFoundError where
    the clone has no exercises.
    """
    paths = notebooks("exercises", root)
    if not paths:
        raise FileNotFoundError(f"no exercises in {root / 'exercises'}: they come with a clone of the repository")
    known, found = {} if again else _read(root), {}
    checks = _digest(sorted((root / "minillm" / "book" / "checks").glob("*.py")))
    for path in paths:
        solution = root / "solutions" / path.name
        if not solution.is_file():
            continue
        stamp = _digest([path, solution], checks)
        entry = known.get(path.name)
        if entry and entry["stamp"] == stamp:
            found[path] = [Standing(**one) for one in entry["exercises"]]
            continue
        found[path] = _graded(path, solution, advance)
        known[path.name] = {"stamp": stamp, "exercises": [dataclasses.asdict(one) for one in found[path]]}
        _write(root, known)
    return found


def state_file(root: Path) -> Path:
    """Where the look at this clone is kept: a file in the user's state folder, named after the clone's path."""
    from platformdirs import user_state_path

    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    return user_state_path("minillm") / f"progress-{name}.json"


def next_of(standings: dict[Path, list[Standing]]) -> tuple[Path, Standing] | None:
    """The first exercise that was begun and does not pass, else the first that is left, stretches last."""
    left = [(path, one) for path, listed in standings.items() for one in listed if not one.passed]
    return min(left, key=lambda pair: (not pair[1].begun, pair[1].kind == "stretch"), default=None)


def table(standings: dict[Path, list[Standing]]):
    """A row for each chapter with its exercises and the minutes that are left, and a sum for each part of the book."""
    from rich.table import Table

    from minillm.book.contents import PARTS

    made = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    made.add_column("chapter")
    made.add_column("exercises")
    made.add_column("minutes left", justify="right")
    for name, first, last in PARTS:
        rows = [(path, listed) for path, listed in standings.items() if first <= int(path.name[:2]) <= last]
        if not rows:
            continue
        left = sum(map(minutes_left, (listed for _, listed in rows)))
        made.add_row(f"[bold]{' · '.join(name.splitlines())}[/bold]", "", f"[bold]{left}[/bold]")
        for _, listed in rows:
            marks = " ".join(_mark(one) for one in listed)
            made.add_row(f"  {listed[0].chapter}", marks, str(minutes_left(listed) or ""))
    return made


def minutes_left(listed: list[Standing]) -> int:
    """Of the exercises that do not pass yet, as their statements give them."""
    return sum(one.minutes for one in listed if not one.passed)


def _mark(one: Standing) -> str:
    return "[green]✓[/green]" if one.passed else "[red]✗[/red]" if one.begun else "·"


def _graded(path: Path, solution: Path, advance: Callable[[str], object]) -> list[Standing]:
    from minillm.book import nbfile, workload
    from minillm.course.grading import plan
    from minillm.course.grading.confine import Limits
    from minillm.course.grading.talk import Outcome
    from minillm.course.grading.worker import Worker

    source = plan.Source.read(solution)
    work, outcome, wrong = workload.headings(source.notebook), Outcome(), ""
    try:
        nb = plan.prepared(nbfile.read(path), source)
        idle = plan.untouched(nb, source) | set(plan.missing(nb, source))
        steps = [s for s in plan.steps_of(nb, source) if s.kind != "grade" or s.exercise not in idle]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        idle, steps, wrong = set(source.exercises), [], f"{path.name} is not a notebook: {error}"
    if len(idle) < len(source.exercises):
        advance(path.name)
        with Worker(source, Limits()) as worker:
            outcome = worker.run(steps, lambda exercise, part: 0)  # the seed of the notebook's own lines
    chapter = source.notebook.cells[0].source.partition("\n")[0].strip("# ").removesuffix(": exercises")
    found = []
    for name, exercise in source.exercises.items():
        verdicts = [outcome.verdicts.get((name, part)) for part in exercise.lines]
        passed = all(v is not None and v.passed for v in verdicts)
        said = [v.message for v in verdicts if v is not None and not v.passed] or [outcome.broken or wrong]
        told = "" if passed or (name in idle and not wrong) else said[0].partition("\n")[0]
        title, kind, minutes = dataclasses.astuple(work[name]) if name in work else (name, "", 0)
        found.append(Standing(chapter, name, title, kind, minutes, passed, name not in idle, told))
    return found


def _digest(paths: list[Path], begin: str = "") -> str:
    digest = hashlib.sha256(begin.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(root: Path) -> dict:
    """What the last look found; nothing where it cannot be read, since another look finds it again."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(state_file(root).read_text(encoding="utf-8"))
        if found["format"] == _FORMAT:
            for entry in found["notebooks"].values():
                [Standing(**one) for one in entry["exercises"]]
            return found["notebooks"]
    return {}


def _write(root: Path, known: dict) -> None:
    file = state_file(root)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.partial")
    unfinished.write_text(json.dumps({"format": _FORMAT, "notebooks": known}, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(file)
