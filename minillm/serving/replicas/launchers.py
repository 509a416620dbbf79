"""Launchers: how the processes of replicas are started and ended. Built in chapter 22.

    LocalLauncher   forks of a zygote on this machine
    RayLauncher     actors of a Ray cluster (`minillm.serving.replicas.ray_launcher`)

A launcher starts a process and can end it. All else is the same for both: the process reaches the front over a socket,
and that socket says when it dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from minillm.serving.replicas.config import FleetConfig
from minillm.serving.replicas.zygote import ENVIRONMENT

PATIENCE = 10.0  # seconds for a zygote to end


class ReplicaProcess(Protocol):
    """One replica's process."""

    pid: int

    def is_alive(self) -> bool: ...

    def kill(self) -> None:
        """End it at once (SIGKILL); nothing happens if it has ended."""


class Launcher(Protocol):
    """Starts processes that run `minillm.serving.replicas.replica.Replica`."""

    host: str  # the front's address, as the replicas see it

    def prepare(self, arguments: Mapping[str, Any]) -> None:
        """Called once, with the arguments of `LLM`, before the first start."""

    def start(self, address: tuple[str, int], secret: bytes, replica_id: str, generation: int) -> ReplicaProcess:
        """May be called in any thread. Returns before the engine is made."""

    def close(self) -> None:
        """End what the launcher itself has started. A second call does nothing."""


class LocalLauncher:
    """Replicas on this machine. With `preload` they share the weights of one load; `preload=False` is for a GPU, where
    each replica has its own, and only the imports are shared."""

    host = "127.0.0.1"

    def __init__(self, preload: bool = True):
        self.preload = preload
        self.arguments: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}  # of the zygote's start, and of its load
        self._zygote: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()
        self._is_closed = False

    def prepare(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        try:
            json.dumps(self.arguments)
        except TypeError as error:
            raise TypeError(f"{error}: arguments of a fleet are numbers, strings, lists and dictionaries") from None

    def start(self, address: tuple[str, int], secret: bytes, replica_id: str, generation: int) -> ReplicaProcess:
        command = {"do": "start", "replica_id": replica_id, "generation": generation}
        command |= {"address": address, "secret": secret.hex()}
        with self._turn:
            if self._is_closed:
                raise RuntimeError("this launcher is closed")
            return ForkedProcess(self._ask(command)["pid"])

    def close(self) -> None:
        with self._turn:
            self._is_closed = True
            if self._zygote is None:
                return
            with suppress(OSError):
                self._zygote.stdin.close()
            try:
                self._zygote.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
            self._zygote.stdout.close()
            self._zygote = None

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._zygote is None or self._zygote.poll() is not None:
            self._begin()
        return self._told(command)

    def _begin(self) -> None:
        start = time.monotonic()
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "minillm.serving.replicas.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the front alone
        )
        told = self._told({"do": "preload", "arguments": self.arguments, "weights": self.preload})
        if "error" in told:
            raise RuntimeError(f"the replicas' model cannot be loaded: {told['error']}")
        self.seconds = {"imports": time.monotonic() - start - told["seconds"], "load": told["seconds"]}

    def _told(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            self._zygote.stdin.write(json.dumps(command) + "\n")
            self._zygote.stdin.flush()
            line = self._zygote.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = self._zygote.wait()
            raise RuntimeError(f"the process that starts replicas has ended with code {code}; its stderr says why")
        return json.loads(line)


class ForkedProcess:
    """A fork of the zygote, which is its parent and takes note of its end."""

    def __init__(self, pid: int):
        self.pid = pid

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def make_launcher(config: FleetConfig, on_gpu: bool) -> Launcher:
    """What the configuration says. Raises ModuleNotFoundError where Ray is not installed."""
    if config.backend == "local":
        return LocalLauncher(preload=not on_gpu)
    try:
        from minillm.serving.replicas.ray_launcher import RayLauncher
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError("backend='ray' needs ray; pip install 'minillm-book[scale]'", name="ray") from None
    return RayLauncher(config.ray_address, num_gpus=int(on_gpu))
