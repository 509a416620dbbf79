"""One submission, scored in a process of its own: nothing that it leaves behind reaches the next. Built in chapter 25.

outcome = run(source, "scheduler", seeds=(1, 2, 3))
outcome.gain, outcome.why
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minillm.book.projects.catalogue import find_project
from minillm.book.projects.scoring import Refused
from minillm.book.projects.source import load

SECONDS = 300  # that a submission may take on all of its seeds together


@dataclass(frozen=True)
class Outcome:
    """What a submission did: its gain and its figures on each seed, or `why` it is not valid."""

    gain: float = 0.0
    values: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    why: str = ""

    @property
    def is_valid(self) -> bool:
        return not self.why


def run(source: str, project: str, seeds: Sequence[int] | None = None, seconds: float = SECONDS) -> Outcome:
    """Score a source in a fresh process. What breaks a rule, or takes more than `seconds`, gives an invalid outcome.

    Raises ValueError for an unknown project or no seed.
    """
    found = find_project(project)
    seeds = list(found.seeds if seeds is None else seeds)
    if not seeds:
        raise ValueError("seeds=() is not allowed; at least one seed, a whole number")
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "answer.json"
        job = json.dumps({"source": source, "project": project, "seeds": seeds, "answer": str(answer)})
        command = [sys.executable, "-m", "minillm.book.projects.run"]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        try:
            done = subprocess.run(
                command, input=job, capture_output=True, text=True, timeout=seconds, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(why=f"took more than {seconds:g} s on {len(seeds)} seeds")
        if not answer.is_file():
            return Outcome(why=f"the process ended with {done.returncode}: {_last_line(done.stderr)}")
        return Outcome(**json.loads(answer.read_text(encoding="utf-8")))


def run_here(source: str, project: str, seeds: Sequence[int]) -> Outcome:
    """As `run`, in this process and without a limit of time."""
    found = find_project(project)
    try:
        # Loaded anew for each seed: what it remembers of one trace is not there for the next.
        scores = [found.score(load(source, found), seed) for seed in seeds]
    except Refused as refused:
        return Outcome(why=str(refused))
    gain = round(found.gain(scores, seeds), 6)
    return Outcome(gain, [score.value for score in scores], [score.figures for score in scores])


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def main() -> None:
    job = json.loads(sys.stdin.read())
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        outcome = run_here(job["source"], job["project"], job["seeds"])
    Path(job["answer"]).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    main()
