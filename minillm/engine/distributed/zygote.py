"""Zygote: a small process that forks the workers of an LLM. Built in chapter 20.

    this process ──socket── zygote ── worker 0
                              │  └─── worker 1          "fork", "wait", "kill"

Importing torch takes seconds, a fork milliseconds: the zygote has imported what a worker needs, has started no thread
and touched no GPU, so that its forks are sound. Where workers use GPUs it imports nothing, and each worker does. It
never runs the program that made it, so a script needs no `if __name__ == "__main__"`, nor does a notebook.

When this process ends, however it ends, the socket closes: the zygote kills what is left and ends too. A zygote that is
killed takes its workers along (on Linux). Without workers it ends by itself after `IDLE_SECONDS`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

HEADER = struct.Struct("!I")
IDLE_SECONDS = 60.0
PRELOADED = "minillm.engine.distributed.process"
PR_SET_PDEATHSIG = 1
END_SECONDS = 5.0  # for a worker that was killed to be gone
MOST_FDS = 8


class Zygote:
    """A zygote of this process, started at the first fork. Threads take turns.

    `kill` is also what a finalizer calls, which Python runs in any thread at any moment: in the middle of a message
    too. It waits for nothing then, and the turn that it fell into ends the workers at its own end.
    """

    def __init__(self, preload: bool):
        self.preload, self.lock = preload, threading.RLock()
        self.process: subprocess.Popen | None = None
        self.socket: socket.socket | None = None
        self._owner: int | None = None  # the thread whose turn it is
        self._doomed: deque[list[int]] = deque()  # workers to be ended

    def fork(self, spec: dict[str, Any], fds: Sequence[int]) -> int:
        """Start a worker with these settings and copies of these file descriptors; its process id."""
        with self._turn():
            try:
                return self._ask("fork", spec, fds)
            except (EOFError, OSError):  # there is none yet, or it had been idle for long
                self._start()
                return self._ask("fork", spec, fds)

    def wait(self, pid: int, seconds: float) -> int | None:
        """The exit status of a worker, as `os.waitpid` has it, if it ends within so many seconds; else None."""
        with self._turn(), contextlib.suppress(EOFError, OSError):
            return self._ask("wait", (pid, seconds))
        return signal.SIGKILL  # the zygote is gone, and its workers with it

    def kill(self, pids: Sequence[int]) -> None:
        """End workers at once; returns when they are gone, unless this thread is in the middle of a turn."""
        self._doomed.append(list(pids))
        while self._doomed and self._owner != threading.get_ident():
            with self._turn():
                pass

    def close(self) -> None:
        """End the zygote, and whatever workers there still are."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # whichever thread still waits for an answer on it
            self.socket.close()
            self.socket = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
            self.process = None

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self.lock, interrupts_held_back():
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._end_doomed()
                self._owner = None
                if self._doomed:  # since a moment ago
                    self.kill([])

    def _end_doomed(self) -> None:
        while self._doomed:
            with contextlib.suppress(EOFError, OSError):  # the zygote is gone, and its workers with it
                self._ask("kill", self._doomed.popleft())

    def _ask(self, what: str, about: Any, fds: Sequence[int] = ()) -> Any:
        if self.socket is None:
            raise EOFError("there is no zygote")
        send(self.socket, (what, about), fds)
        kind, answer = receive(self.socket)[0]
        if kind == "error":
            raise RuntimeError(f"no worker could be started: {answer}")
        return answer

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        command = f"from {__name__} import main; main({theirs.fileno()}, {self.preload})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for this process, which ends its workers
            )
        self.socket = ours


_zygotes: dict[bool, Zygote] = {}


def zygote(preload: bool) -> Zygote:
    """The one of this process that imports beforehand what a worker needs, or the one that does not."""
    return _zygotes.setdefault(preload, Zygote(preload))


@atexit.register
def _close_all() -> None:
    for one in _zygotes.values():
        one.close()


def _forget_all() -> None:
    """In a fork of this process: the zygotes are not its own, and must see when their own process ends."""
    for one in _zygotes.values():
        if one.socket is not None:
            one.socket.close()
        if one.process is not None:
            one.process.returncode = 0  # not a child of this process: nothing to wait for
    _zygotes.clear()


os.register_at_fork(after_in_child=_forget_all)


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """An interrupt that arrives inside is raised behind it: half a message must not be left on a socket."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # a handler in C, which Python could not put back
        yield
        return
    signal.signal(signal.SIGINT, lambda *event: arrived.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived and callable(before):
            before(*arrived[0])


def send(sock: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    data = pickle.dumps(message)
    data = HEADER.pack(len(data)) + data
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    sock.sendall(data[sent:])


def receive(sock: socket.socket, num_fds: int = 0) -> tuple[Any, list[int]]:
    """A message, and the file descriptors that came with it. Raises EOFError where the other side is gone."""
    header, fds, _, _ = socket.recv_fds(sock, HEADER.size, num_fds)
    header += _received(sock, HEADER.size - len(header))
    return pickle.loads(_received(sock, HEADER.unpack(header)[0])), fds


def _received(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("the other side is gone")
        data += piece
    return bytes(data)


def main(fd: int, preload: bool) -> None:
    """What a zygote does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, nursery = socket.socket(fileno=fd), Nursery()
    if preload:
        import_module(PRELOADED)
    while select.select([sock], [], [], IDLE_SECONDS)[0] or nursery.has_children():
        if not select.select([sock], [], [], 0)[0]:
            continue
        try:
            (what, about), fds = receive(sock, MOST_FDS)
            answer = getattr(nursery, what)(about, fds, sock)
            for one in fds:
                os.close(one)
            send(sock, answer)
        except (EOFError, OSError):
            break
    nursery.kill(list(nursery.children))
    for folder in nursery.folders:
        shutil.rmtree(folder, ignore_errors=True)


class Nursery:
    """The workers that a zygote has forked."""

    def __init__(self):
        self.children: set[int] = set()  # that have not ended, as far as known
        self.statuses: dict[int, int] = {}
        self.folders: set[str] = set()  # to be removed at the end

    def fork(self, spec: dict[str, Any], fds: list[int], sock: socket.socket) -> tuple[str, Any]:
        self.folders.add(spec["folder"])
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return "error", str(error)
        if not pid:
            sock.close()
            _be_worker(spec, fds, parent)
        self.children.add(pid)
        return "ok", pid

    def wait(self, about: tuple[int, float], *_: object) -> tuple[str, Any]:
        return "ok", self.status(*about)

    def kill(self, pids: Sequence[int], *_: object) -> tuple[str, Any]:
        mine = [pid for pid in pids if pid in self.children]
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        return "ok", [self.status(pid, END_SECONDS) for pid in mine]

    def has_children(self) -> bool:
        for pid in list(self.children):
            self.status(pid, 0)
        return bool(self.children)

    def status(self, pid: int, seconds: float) -> int | None:
        """How a child has ended, if it does within so many seconds."""
        deadline = time.monotonic() + seconds
        while pid in self.children:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.children.discard(pid)
                self.statuses[pid] = status
            elif time.monotonic() >= deadline:
                return None
            else:
                time.sleep(0.002)
        return self.statuses.get(pid)


def _be_worker(spec: dict[str, Any], fds: list[int], parent: int) -> None:
    """In the child: never returns."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could take this process along
            os._exit(1)
        os.environ.clear()
        os.environ.update(spec["environment"])
        with contextlib.suppress(OSError):
            os.chdir(spec["directory"])
        import_module(PRELOADED).main(spec, fds)
    except BaseException:  # it has said what went wrong, if anything could be said
        os._exit(1)
    os._exit(0)
