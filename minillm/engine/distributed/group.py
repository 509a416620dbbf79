"""WorkerGroup: the processes of an LLM, from their start to their end, and what is said when one fails.
Built in chapter 20.

    send("execute", output)  ──shared memory──> rank 0, rank 1, ...      pickled once, read by all
    wait                     <──socket──────── the leader's StepResult   or every rank's answer to other calls

A worker that dies closes its socket; one that is stopped has no heartbeat any more; one that raises an error says so.
Whichever it is, the group ends: the other ranks wait for a message that will never come.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

from minillm.engine.distributed.board import Board, state_of
from minillm.engine.distributed.broadcast import Ring, Writer, shared_memory
from minillm.engine.distributed.zygote import Zygote, interrupts_held_back, zygote
from minillm.parallel.layout import Layout

POLL = 0.25  # seconds between two looks at the heartbeats
STOPPED_AFTER, SILENT_AFTER, UNKNOWN_AFTER = 10, 240, 120  # looks without a heartbeat: see `_silent`
MOST_ANSWERS = 1000  # that nothing has asked for
GATHER_SECONDS = 0.5  # after a failure, for others to be heard of


class WorkerError(RuntimeError):
    """A worker died, was stopped, or raised an error in the middle of a step. `rank`, `pid`, and `cause`, which is the
    signal's name or the error."""

    def __init__(self, message: str, rank: int, pid: int, cause: str):
        super().__init__(message)
        self.rank, self.pid, self.cause = rank, pid, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.pid, self.cause)


class WorkerGroup:
    """The workers of one LLM. Each method may be called from any thread; calls take turns.

    `settings_of(layout, store)` gives what the worker with that place is started with. However the group ends (`close`,
    garbage collection, the end of this process), no worker, file or memory of it is left.
    """

    def __init__(self, sizes: tuple[int, int], settings_of: Callable[[Layout, str], Any], preload: bool):
        self.layouts = [Layout(*sizes, rank) for rank in range(sizes[0] * sizes[1])]
        self.leader = self.layouts[0].leader
        self.lock = threading.RLock()
        self.error: BaseException | None = None  # why it ended, if not by `close`
        self.pids: list[int] = []
        self.connections: list[Connection] = []
        self._zygote = zygote(preload)
        with interrupts_held_back():
            self.folder = tempfile.mkdtemp(prefix="minillm-")
            left = self._zygote, self.pids, self.connections, self.folder, os.getpid()
            self._end = weakref.finalize(self, _end, *left)
        self._number, self._inbox = 0, dict[tuple[int, int], tuple[str, Any]]()
        self._gone: set[int] = set()  # ranks whose socket is closed
        self._failed: dict[int, tuple[str, tuple[str, str]]] = {}
        self._beats: list[tuple[int, int]] = [(0, 0)] * len(self.layouts)  # heartbeat, and looks since it came
        try:
            self._start(settings_of)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def _start(self, settings_of: Callable[[Layout, str], Any]) -> None:
        count = len(self.layouts)
        fds = [shared_memory(size) for size in (Board.num_bytes(count), Ring.num_bytes(count))]
        try:
            self.board, ring = Board(fds[0], count), Ring(fds[1], count)
            for layout in self.layouts:
                ours, theirs = socketpair()
                with theirs:
                    spec = {
                        "rank": layout.rank,
                        "num_ranks": count,
                        "folder": self.folder,
                        "environment": dict(os.environ),
                        "directory": str(Path.cwd()),
                        "settings": pickle.dumps(settings_of(layout, os.path.join(self.folder, "store"))),
                    }
                    with interrupts_held_back():
                        self.connections.append(Connection(ours.detach()))
                        self.pids.append(self._zygote.fork(spec, [theirs.fileno(), *fds]))
        finally:
            for fd in fds:
                os.close(fd)
        self.writer = Writer(ring, self.connections)
        self._poll = select.poll()
        self._rank_of = {connection.fileno(): rank for rank, connection in enumerate(self.connections)}
        for fd in self._rank_of:
            self._poll.register(fd, select.POLLIN)

    def send(self, method: str, *args: Any) -> int:
        """Let all workers do something; the number that their answers will have. Raises WorkerError when the group has
        ended, and what `pickle` raises for arguments that cannot be sent."""
        with self.lock, interrupts_held_back():
            self.check()
            data = pickle.dumps((self._number + 1, method, args))
            self._number += 1
            self._forget_old_answers()
            self.writer.write(data, self._look_while_full)
            return self._number

    def wait(self, number: int, ranks: Sequence[int] | None = None) -> list[Any]:
        """The answers of these ranks (of all by default) to call `number`, in their order.

        Raises what a worker raised, when it could go on afterwards; WorkerError when the group has ended with it.
        """
        ranks = range(len(self.layouts)) if ranks is None else ranks
        with self.lock:
            while missing := [rank for rank in ranks if (rank, number) not in self._inbox]:
                self.check()
                if any(kind == "raised" for (_, of), (kind, _) in self._inbox.items() if of == number):
                    self._await_others(missing, number)
                    break
                self._take_messages()
            answers = [self._inbox.pop((rank, number), ("missing", None)) for rank in ranks]
        for kind, value in answers:
            if kind == "raised":
                raise value
        return [value for _, value in answers]

    def call(self, method: str, *args: Any) -> list[Any]:
        """`send`, then `wait` for every rank."""
        with self.lock:
            return self.wait(self.send(method, *args))

    def check(self) -> None:
        """Raise when the group has ended."""
        if self.error is not None:
            raise self.error
        if not self.is_open:
            raise RuntimeError("the workers were ended; make a new LLM")
        if self.writer.is_torn:
            self._fail(RuntimeError("a long message to the workers was interrupted in the middle; make a new LLM"))

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        with interrupts_held_back():
            if self._end.alive and (writer := getattr(self, "writer", None)) is not None:
                writer.ring.close()
                self.board.close()
            self._end()

    def _forget_old_answers(self) -> None:
        """Those of steps that an interrupt ended while they were waited for."""
        if len(self._inbox) > MOST_ANSWERS:
            for key in sorted(self._inbox, key=lambda key: key[1])[: MOST_ANSWERS // 2]:
                del self._inbox[key]

    def _take_messages(self, seconds: float = POLL) -> None:
        """Take in what arrives within so many seconds; look at the heartbeats where nothing does."""
        ready = self._poll.poll(1e3 * seconds)
        for fd, _ in ready:
            self._take(self._rank_of[fd])
        if self._gone or self._failed:
            self._fail_with(*self._culprit())
        if not ready:
            self._look()

    def _take(self, rank: int) -> None:
        """Read a message and keep it. An interrupt waits for both: what is read is on no socket any more, and another
        call may wait for it, or no sign of a failed worker may come again."""
        with interrupts_held_back():
            try:
                data = self.connections[rank].recv_bytes()
            except (EOFError, OSError):
                self._gone.add(rank)
                self._poll.unregister(self.connections[rank].fileno())
                return
            number, kind, value = pickle.loads(data)
            if kind in ("failed", "lost"):
                self._failed[rank] = (kind, value)
            else:
                self._inbox[rank, number] = (kind, value)

    def _await_others(self, missing: list[int], number: int) -> None:
        """One rank has raised; where the others do not answer either, they wait for it, and the group ends."""
        deadline = time.monotonic() + 4 * GATHER_SECONDS
        while any((rank, number) not in self._inbox for rank in missing):
            if time.monotonic() > deadline:
                raised = next(value for kind, value in self._inbox.values() if kind == "raised")
                self._fail(raised)
            self._take_messages(POLL / 5)

    def _look_while_full(self) -> None:
        self._take_messages(0.05)

    def _look(self) -> None:
        """Raise for a worker whose heartbeat stands still."""
        for rank, (before, looks) in enumerate(self._beats):
            now = self.board.heartbeat(rank)
            looks = looks + 1 if now == before else 0
            self._beats[rank] = (now, looks)
            if (cause := self._silent(rank, looks)) is not None:
                self._fail_with(rank, *cause)

    def _silent(self, rank: int, looks: int) -> tuple[str, str] | None:
        """What is said of a rank without a heartbeat. A stopped process is told at once; one that runs may hold the
        interpreter for a while, such as in the import of a library, and is given a minute."""
        if looks < STOPPED_AFTER:
            return None
        state = state_of(self.pids[rank])
        if state in ("T", "t"):
            return "SIGSTOP", f"was stopped by a signal, and gave no sign of life for {looks * POLL:.1f} s"
        if looks >= (UNKNOWN_AFTER if state is None else SILENT_AFTER):
            return "silence", f"gave no sign of life for {looks * POLL:.0f} s"
        return None

    def _culprit(self) -> tuple[int, str, str]:
        """Of all that went wrong within a moment, what it began with: a rank that died, else one that raised an error,
        else one that lost its connection to another."""
        deadline = time.monotonic() + GATHER_SECONDS
        while not self._gone and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(1e3 * left):
                self._take(self._rank_of[fd])
            if any(kind == "failed" for kind, _ in self._failed.values()):
                break
        for rank in sorted(self._gone):
            status = self._zygote.wait(self.pids[rank], 2.0)
            if status is not None and os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                hint = " (the kernel sends it too where memory runs out)" if name == "SIGKILL" else ""
                return rank, name, f"was killed by {name}{hint}"
        for wanted in ("failed", "lost"):
            for rank, (kind, (told, text)) in sorted(self._failed.items()):
                if kind == wanted:
                    return rank, told, f"raised {told}\n{text}" if wanted == "failed" else f"lost another rank: {told}"
        rank = min(self._gone)
        return rank, "exit", f"ended with status {self._zygote.wait(self.pids[rank], 0.0)}"

    def _fail_with(self, rank: int, cause: str, told: str) -> None:
        first, _, rest = told.partition("\n")
        doing, pid = self.board.said(rank), self.pids[rank]
        message = (
            f"the worker of {self.layouts[rank]} (pid {pid}) {first}; what it was doing: {doing}. "
            "The other workers were ended with it: make a new LLM"
        )
        error = WorkerError(message, rank, pid, cause)
        if rest:
            error.add_note(rest)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.close()
        raise error


def _end(zygote: Zygote, pids: list[int], connections: list[Connection], folder: str, owner: int) -> None:
    """Leave nothing of a group; a fork of its process has no part in it."""
    if os.getpid() != owner:
        return
    zygote.kill(pids)
    for connection in connections:
        connection.close()
    shutil.rmtree(folder, ignore_errors=True)
