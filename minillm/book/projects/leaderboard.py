"""The leaderboard: a folder with a line of JSON for each entry, and each source under its hash. Built in chapter 25.

FOLDER/entries.jsonl      {"project", "name", "source", "seeds", "gain", "values", "figures", "why"}
FOLDER/sources/HASH.py    what was scored; with it the entry can be scored again
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minillm.book.projects.catalogue import NAMES, find_project
from minillm.book.projects.run import Outcome, run
from minillm.book.projects.source import read_source, source_hash

ENTRIES, SOURCES = "entries.jsonl", "sources"
MAX_NAME = 60


@dataclass(frozen=True)
class Entry:
    """A scored submission. `why` is empty for a valid one."""

    project: str
    name: str
    source: str  # its hash
    seeds: list[int]
    gain: float = 0.0
    values: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    why: str = ""

    @property
    def is_valid(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Place:
    """A line of a table: `rank` 0 is an entry that is not valid."""

    rank: int
    entry: Entry


def add(folder: Path, project: str, name: str, file: Path, seeds: Sequence[int] | None = None) -> Entry:
    """Score a file and append it; an answer that breaks a rule becomes an entry that says which.

    Raises ValueError for an unknown project, a name that cannot stand in a table, or a file without a submission.
    """
    found = find_project(project)
    if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"name={name!r} is not allowed; 1 to {MAX_NAME} printable characters")
    source = read_source(file, found)
    seeds = list(found.seeds if seeds is None else seeds)
    outcome = run(source, project, seeds)
    entry = Entry(project, name.strip(), source_hash(source), seeds, **asdict(outcome))
    keep(folder, entry, source)
    return entry


def keep(folder: Path, entry: Entry, source: str) -> None:
    """Write the source under its hash, then the entry: two writers at once lose nothing."""
    sources = Path(folder) / SOURCES
    sources.mkdir(parents=True, exist_ok=True)
    target = sources / f"{entry.source}.py"
    if not target.is_file():
        with tempfile.NamedTemporaryFile(dir=sources, suffix=".part", delete=False) as part:
            part.write(source.encode())  # its bytes, so that the hash is the file's
        Path(part.name).replace(target)
    line = json.dumps(asdict(entry), ensure_ascii=False) + "\n"
    with (Path(folder) / ENTRIES).open("ab", buffering=0) as file:
        file.write(line.encode())


def read(folder: Path) -> list[Entry]:
    """All entries, in the order in which they came. Raises ValueError with the line of one that cannot be read."""
    path = Path(folder) / ENTRIES
    if not path.is_file():
        raise ValueError(f"{folder}: no leaderboard here, since {ENTRIES} is missing; add a first entry to begin one")
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                entries.append(Entry(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from error
    return entries


def places(entries: Sequence[Entry], project: str) -> list[Place]:
    """Each name's best valid entry, the largest gain first; equal gains share a rank, and the earlier one stands first.
    Names without a valid entry follow with their last one. Entries on other seeds than the newest are left out."""
    of_project = [entry for entry in entries if entry.project == project]
    if not of_project:
        return []
    seeds = of_project[-1].seeds
    best: dict[str, Entry] = {}
    failed: dict[str, Entry] = {}
    for entry in of_project:
        if entry.seeds != seeds:
            continue
        if not entry.is_valid:
            failed[entry.name] = entry
        elif entry.name not in best or entry.gain > best[entry.name].gain:
            best.pop(entry.name, None)  # it stands where its best entry came
            best[entry.name] = entry
    ordered = sorted(best.values(), key=lambda entry: -entry.gain)  # stable
    ranked = [Place(1 + sum(other.gain > entry.gain for other in ordered), entry) for entry in ordered]
    return ranked + [Place(0, entry) for name, entry in failed.items() if name not in best]


def again(folder: Path, entry: Entry) -> Outcome:
    """Score an entry's source once more. Raises ValueError if the source is not there, or is not what was hashed."""
    path = Path(folder) / SOURCES / f"{entry.source}.py"
    if not path.is_file():
        raise ValueError(f"{entry.name}: the source {entry.source[:12]} is not in {path.parent}")
    source = path.read_bytes().decode()
    if source_hash(source) != entry.source:
        raise ValueError(f"{entry.name}: {path.name} was changed; its hash is {source_hash(source)[:12]}")
    return run(source, entry.project, entry.seeds)


def disagreement(entry: Entry, outcome: Outcome) -> str:
    """What a second run found otherwise; empty when it agrees."""
    if (entry.values, entry.why, entry.gain) == (outcome.values, outcome.why, outcome.gain):
        return ""
    return f"{outcome.why or outcome.values} where the entry has {entry.why or entry.values}"


def table(folder: Path) -> str:
    """The leaderboard as text, project by project."""
    entries, parts = read(folder), []
    for name in NAMES:
        parts += [_one_table(name, ranked)] if (ranked := places(entries, name)) else []
    return "\n\n".join(parts) if parts else "no entry yet"


def _one_table(name: str, ranked: Sequence[Place]) -> str:
    project = find_project(name)
    seeds = ", ".join(map(str, ranked[0].entry.seeds))
    width = max(4, *(len(place.entry.name) for place in ranked))
    lines = [f"{name}: times better than the baseline, on seeds {seeds} ({project.value})",
             f"{'rank':>4}  {'name':<{width}}  {'gain':>7}  {'source':<12}  value on each seed"]  # fmt: skip
    for rank, entry in ((place.rank, place.entry) for place in ranked):
        shown = " ".join(f"{value:g}" for value in entry.values) if rank else f"not valid: {entry.why}"
        gain = f"{entry.gain:.3f}" if rank else "–"
        lines.append(f"{rank or '–':>4}  {entry.name:<{width}}  {gain:>7}  {entry.source[:12]}  {shown}")
    return "\n".join(lines)
