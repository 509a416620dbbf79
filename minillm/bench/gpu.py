"""Everything that needs a GPU, by one command: is it right, then how fast is it. Built in chapter 14.

    minillm bench gpu --out results/ --list              the parts, in order, and how long each may take
    minillm bench gpu --out results/                     all of them
    minillm bench gpu --out results/ --part kernels --part decode --minutes 9.5 --archive results.tar.gz

Each part is a group of processes of its own with a time limit of at most 8 minutes, so that one that fails costs
nothing but itself; its output goes to OUT/<part>.log and its figures to OUT/*.json, which grow case by case.
OUT/summary.json says how every part ended and sets the figures beside the predictions (`minillm bench predict`);
a later run with other parts adds to it. With `--minutes`, no part runs beyond them, and what has found no time is
named.

For a GPU that is lent for three commands of ten minutes each:

    minillm bench gpu --out OUT --minutes 9.5 --part describe --part rehearsal --part tests-kernels --part kernels
    minillm bench gpu --out OUT --minutes 9.5 --part throughput-qwen3 --part decode --part step-qwen3
    minillm bench gpu --out OUT --minutes 9.5 --part bits --part kv --part speculation --part structured \\
        --part tests-engine

The first says whether the kernels are right and how far from the limits; it fills Triton's cache for the other two.
Then, with more time: throughput-qwen2, step-qwen2, step-llama, offload, tests-build, notebooks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from . import measure, predictions
from .gpu_parts import Part, parts_of

GRACE = 3.0  # seconds from the polite signal to the last one
POLL = 0.05
LEAST = 10.0  # seconds that a part is worth starting for
WORKERS = 12  # processes of one group at once, with as many cores


def run(
    out: Path,
    toy: bool = False,
    device: str = "cuda",
    only: tuple[str, ...] = (),
    on_run: Callable[[str], None] = lambda what: None,
    minutes: float | None = None,
    archive: Path | None = None,
) -> dict:
    """Run every part (or those whose names begin as one of `only`) and return the summary, which is written as well.

    Ctrl-C, and a polite signal to end, stop the parts under way and leave a summary that says so.
    """
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts_of(out, toy, device) if not only or part.name.startswith(only)]
    if not chosen:
        raise ValueError(
            f"--part {', '.join(only)} names no part; the parts are "
            f"{', '.join(part.name for part in parts_of(out, toy, device))}"
        )
    summary = Summary(out, device, archive, on_run)
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    batches = [list(parts) for _, parts in groupby(chosen, key=lambda part: part.group or part.name)]
    try:
        with signals_interrupt():
            for batch in batches:
                run_batch(batch, out, deadline, summary.ended)
    finally:
        for part in chosen:
            if part.name not in summary.ran:
                summary.add(part.name, "not run", 0.0)
        summary.write()
    return summary.facts


def run_batch(
    batch: list[Part], out: Path, deadline: float, on_end: Callable[[str, str, float], None], workers: int | None = None
) -> None:
    """The parts of `batch`, up to `workers` at once, each until it ends, its limit or the deadline has come."""
    workers = workers or max(1, min(WORKERS, os.cpu_count() or 1))
    waiting, running = list(batch), {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                part, now = waiting.pop(0), time.monotonic()
                if deadline - now < LEAST:
                    on_end(part.name, "not run: no time left", 0.0)
                    continue
                running[part] = start(part, out), now, min(now + part.seconds, deadline)
            time.sleep(POLL)
            for part, (process, started, limit) in list(running.items()):
                seconds = time.monotonic() - started
                if process.poll() is not None:
                    ended = "passed" if process.returncode == 0 else f"failed with status {process.returncode}"
                elif time.monotonic() >= limit:
                    ended = f"stopped after {limit - started:.0f} s"
                else:
                    continue
                end(process)  # its children too, whatever it left
                del running[part]
                on_end(part.name, ended, seconds)
    except BaseException:
        for part, (process, started, _) in running.items():
            end(process)
            on_end(part.name, "interrupted", time.monotonic() - started)
        raise


def start(part: Part, out: Path) -> subprocess.Popen:
    """A group of processes of its own, so that it can be ended with all its children."""
    with open(out / f"{part.name}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, *part.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )


def end(process: subprocess.Popen) -> None:
    """End the whole group: politely, so that results are closed, and after GRACE for good."""
    if signal_group(process, signal.SIGTERM):
        until = time.monotonic() + GRACE
        while time.monotonic() < until and signal_group(process, 0):
            process.poll()  # else the one that has ended still counts as one of the group
            time.sleep(POLL)
        signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: subprocess.Popen, number: int) -> bool:
    """Whether there is still anyone in the group to get the signal."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # the second is macOS's word for a group of the dead
        return False
    return True


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """A polite signal to end is Ctrl-C: what stops this command from outside then finds a summary too."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals are not heard
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Summary:
    """OUT/summary.json, whole after every part: what an earlier run there said of other parts stays."""

    def __init__(self, out: Path, device: str, archive: Path | None, on_run: Callable[[str], None]):
        self.out, self.archive, self.on_run, self.ran = out, archive, on_run, set()
        where = measure.torch.device(device)
        self.facts = {"hardware": measure.hardware(where), "versions": measure.versions(), "parts": {}}
        path = out / "summary.json"
        if path.exists():
            self.facts["parts"] = json.loads(path.read_text())["parts"]

    def ended(self, name: str, how: str, seconds: float) -> None:
        self.add(name, how, seconds)
        self.write()  # after each part: the next may be cut off
        self.on_run(name)

    def add(self, name: str, how: str, seconds: float) -> None:
        self.ran.add(name)
        if how.startswith("not run") and name in self.facts["parts"]:
            return  # an earlier run has done it
        self.facts["parts"][name] = {
            "ended": how,
            "seconds": round(seconds, 1),
            "last_line": last_line(self.out / f"{name}.log"),
        }

    def write(self) -> None:
        results = [measured for measured in measure.load("*", self.out) if "figures" in measured]
        self.facts["incomplete"] = {
            measured["name"]: measured["reason"] for measured in results if not measured.get("complete", True)
        }
        self.facts["predictions"] = predictions.compare(predictions.committed(self.facts["hardware"]["name"]), results)
        measure.write_whole(self.out / "summary.json", json.dumps(self.facts, indent=1) + "\n")
        if self.archive is not None:
            unfinished = self.archive.with_suffix(".tmp")
            with tarfile.open(unfinished, "w:gz") as tar:
                for path in sorted(self.out.iterdir()):
                    if path.suffix in (".json", ".log"):
                        tar.add(path, path.name)
            unfinished.replace(self.archive)


def last_line(path: Path) -> str:
    if not path.exists():
        return ""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def tables(summary: dict) -> list:
    """How every part ended; then what was predicted, beside what was measured (rich renderables)."""
    from rich.table import Table

    found = Table("part", "ended", "seconds", "its last line", title=summary["hardware"]["name"])
    for name, part in summary["parts"].items():
        found.add_row(name, part["ended"], f"{part['seconds']:.0f}", part["last_line"][:70])
    return [found, *predictions.tables(summary["predictions"])]


def list_table(parts: list[Part]):
    from rich.table import Table

    found = Table("part", "seconds at most", "at once with")
    for part in parts:
        found.add_row(part.name, str(part.seconds), part.group)
    return found
