"""Drives one zygote: hands it submissions, and starts one again without the cell that ended its process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from minillm.course.grading.confine import Limits
from minillm.course.grading.look import checkers_and_imports
from minillm.course.grading.plan import Source, Step, names_of, python_of, reference_steps
from minillm.course.grading.talk import Outcome, Seeds, Talk, ended, know_speakers

_PACKAGE = Path(__file__).resolve().parents[2]
_REFERENCES = [str(_PACKAGE / "book" / name) for name in ("checks", "proofs.py")]  # what the checks expect
_STARTS = 300.0  # seconds in which a zygote must have imported everything
_RUNS = 8  # of one submission: each begins again without a cell that ended the process
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "TRITON_DEFAULT_FP_FUSION")
_SET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not start CUDA, which does not survive a fork
}


class Gone(RuntimeError):
    """The zygote has ended, of itself or because it was killed."""


class Worker:
    """One zygote for one assignment: a context manager, for one thread."""

    def __init__(
        self, source: Source, limits: Limits, hidden: Sequence[Path] = (), modules: Sequence[str] = ()
    ) -> None:
        """hidden: files and folders that no submission may see: the course, the book's solutions and history.
        modules: to import before the first submission, as `scout` found them.

        Raises RuntimeError where the assignment's own imports fail on this machine.
        """
        if not hasattr(os, "fork"):
            raise RuntimeError("grading forks processes: it needs Linux or macOS")
        self.source, self.limits, self.modules = source, limits, list(modules)
        self.hidden = [str(path) for path in hidden if path.exists()]
        self.checkers, _ = checkers_and_imports(source.given.values())
        self._base = Path(tempfile.mkdtemp(prefix="minillm-grade-"))
        try:
            self._start()
        except BaseException:
            shutil.rmtree(self._base, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._base, ignore_errors=True)

    def run(self, steps: list[Step], seeds: Seeds, *, scouts: bool = False) -> Outcome:
        """Run a submission's steps. seeds: (exercise, part) -> the seed of that line, asked for when it is due.

        Where a cell ends the process, or never ends, the rest runs again without it. scouts: note what is imported.
        """
        outcome, left = Outcome(), dict(enumerate(steps))
        for _ in range(_RUNS):
            stopped = self._once(left, outcome, seeds, scouts)
            if outcome.forged:
                for name, exercise in self.source.exercises.items():
                    outcome.fail_rest(name, list(exercise.lines), "the submission spoke in the grader's name")
                return outcome
            if stopped is None or outcome.broken:
                return outcome
            at, why = stopped
            step = left.pop(at)
            if step.kind == "grade":
                outcome.fail_rest(step.exercise, self._parts(step), f"the check was cut off: {why}")
            else:
                outcome.errors[step.cell] = (f"the cell ended its process: {why}", 0)
            left = {i: s for i, s in left.items() if s.kind != "grade" or not self._is_judged(s, outcome)}
        for step in left.values():
            if step.kind == "grade":
                outcome.fail_rest(step.exercise, self._parts(step), f"cells ended their process {_RUNS} times")
        return outcome

    def scout(self) -> Outcome:
        """Run the reference answers once: what this machine can do; and import what they import."""
        outcome = self.run(reference_steps(self.source), lambda exercise, part: 0, scouts=True)
        self.modules = sorted(outcome.modules)
        self._load()
        return outcome

    def _load(self) -> None:
        if self.modules:
            self._order(b"i")
            self._control.sendall(json.dumps(self.modules).encode() + b"\n")
            self._answer(_STARTS)

    def _parts(self, step: Step) -> list[str]:
        return list(self.source.exercises[step.exercise].lines)

    def _is_judged(self, step: Step, outcome: Outcome) -> bool:
        return all((step.exercise, part) in outcome.verdicts for part in self._parts(step))

    def _once(self, steps: dict[int, Step], outcome: Outcome, seeds: Seeds, scouts: bool) -> tuple[int, str] | None:
        """One process, to the last step: None; or to the step that it did not get past, and why."""
        token, folder = secrets.token_hex(16), tempfile.mkdtemp(dir=self._base)
        talk, why = Talk(self.source, self.limits, steps, outcome, seeds), ""
        ours, theirs = socket.socketpair()
        try:
            with ours:
                know_speakers(ours)
                with theirs:
                    self._order(b"s", theirs.fileno())
                pid = int(self._answer(_STARTS))
                with contextlib.suppress(OSError):  # a process that has ended takes no job
                    ours.sendall(self._job(steps, token, folder, scouts))
                    why = talk.listen(ours, token)
                code = self._end(pid, at_once=bool(why))
        except (OSError, Gone) as error:  # the zygote has ended: this submission begins again, without the step
            self._stop()
            self._start()
            if talk.at is None:
                outcome.broken = str(error)
            if talk.done or outcome.broken:
                return None
            return talk.at, "the process that forks for each submission ended with it"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if talk.done or outcome.broken:
            return None
        if talk.at is None:
            outcome.broken = f"the process ended before the first cell: {ended(code)}"
            return None
        return talk.at, why or ended(code)

    def _job(self, steps: dict[int, Step], token: str, folder: str, scouts: bool) -> bytes:
        needed = {step.exercise for step in steps.values() if step.kind == "grade"}
        job = {
            "token": token,
            "folder": folder,
            "scouts": scouts,
            "hidden": self.hidden,
            "references": _REFERENCES,
            "namespaces": self.limits.namespaces,
            "memory": self.limits.memory,
            "cell_seconds": self.limits.cell_seconds,
            "line_seconds": self.limits.line_seconds,
            "cpu_seconds": len(steps) * max(self.limits.cell_seconds, self.limits.line_seconds) + 60,
            "steps": [_step(index, step) for index, step in steps.items()],
            "exercises": {name: self._exercise(name) for name in sorted(needed)},
        }
        return json.dumps(job).encode("ascii") + b"\n"

    def _exercise(self, name: str) -> dict:
        exercise = self.source.exercises[name]
        used = [names.uses for line in exercise.lines.values() if (names := names_of(line))]
        return {
            "id": name,
            "lines": exercise.lines,
            "stub": exercise.stub,
            "names": sorted(set().union(*used)),
            "checkers": sorted(self.checkers),
        }

    def _start(self) -> None:
        environment = {key: os.environ[key] for key in _KEPT if key in os.environ} | _SET
        environment["PYTHONPATH"] = str(_PACKAGE.parent)
        environment["HOME"] = environment["MPLCONFIGDIR"] = environment["IPYTHONDIR"] = str(self._base)
        if self.source.interprets_triton:
            environment["TRITON_INTERPRET"] = "1"
        self._control, theirs = socket.socketpair()
        self._unread = b""
        with theirs, open(self._base / "zygote.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "minillm.course.grading.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=self._base,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # what ends a group of processes ends none of ours
            )
        text = "\n".join([*self.source.given.values(), *self.source.own])
        setup = {"imports": self.source.imports, "figures": "figure(" in text or "pyplot" in text}
        self._control.sendall(json.dumps(setup).encode() + b"\n")
        told = json.loads(self._answer(_STARTS))
        if "error" in told:
            self._stop()
            raise RuntimeError(f"{self.source.path.name}: its imports fail on this machine: {told['error']}")
        self.gpu = bool(told["gpu"])
        self._load()

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _order(self, order: bytes, *fds: int) -> None:
        if self._process.poll() is not None:  # it runs nothing of a student's; the machine may have killed it
            if order != b"s":
                raise Gone("the process that forks for each submission has ended")
            self._stop()
            self._start()
        socket.send_fds(self._control, [order], fds)

    def _answer(self, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._control], [], [], max(0.0, end - time.monotonic()))
            data = self._control.recv(1 << 16) if ready else b""
            if not data:
                log = (self._base / "zygote.log").read_text(errors="replace").strip().splitlines()
                raise Gone(f"the process that forks for each submission has ended: {' '.join(log[-1:])}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self, pid: int, at_once: bool) -> int:
        """The exit status of a child that is ending, or is killed with all that it started.

        Raises Gone where the answer does not come: what comes later would be taken for the answer to something else.
        """
        self._order(b"k" if at_once else b"w")
        self._control.sendall(b"%d\n" % pid)
        return int(self._answer(60))


def _step(index: int, step: Step) -> dict:
    names = names_of(step.source) if step.kind == "given" else None
    return {
        "index": index,
        "kind": step.kind,
        "source": python_of(step.source) if step.kind == "given" else step.source,
        "cell": step.cell if step.kind == "cell" else index,
        "exercise": step.exercise,
        "binds": sorted(names.binds) if names else [],
    }
