"""What a worker process does: it reads calls, computes, and answers. Built in chapter 20.

    Reader   (7, "execute", output)      -> runner.launch -> ... -> wait -> the leader answers (7, "ok", StepResult)
             (8, "count_blocks")         -> Worker.count_blocks          -> each rank answers (8, "ok", 1230)

Importing this module imports all that a worker needs: the zygote does so before it forks.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import traceback
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from minillm.engine.distributed.board import Board
from minillm.engine.distributed.broadcast import Reader, Ring
from minillm.engine.distributed.worker import Worker, WorkerSettings
from minillm.engine.step import SchedulerOutput

EXECUTE = "execute"
FATAL = (EXECUTE, "draft")  # calls in whose middle ranks wait for each other: one that fails leaves the others waiting
IDLE = "waits for a step"


def main(spec: dict[str, Any], fds: list[int]) -> None:
    """Serve calls until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` shows where a worker is
    bell = Connection(fds[0])
    rank, num_ranks = spec["rank"], spec["num_ranks"]
    board, ring = Board(fds[1], num_ranks), Ring(fds[2], num_ranks)
    board.start_heart(rank)
    board.say(rank, "starts")
    try:
        settings: WorkerSettings = pickle.loads(spec["settings"])
        WorkerLoop(Worker(settings), Reader(ring, rank, bell), bell, board).run()
    except EOFError:  # the LLM is gone
        return
    except BaseException as error:
        bell.send_bytes(pickle.dumps((None, *failure(error))))
        while True:  # the other side ends this process, which says nothing wrong to the other ranks meanwhile
            bell.recv_bytes()


def failure(error: BaseException) -> tuple[str, Any]:
    """ "failed", and what went wrong; "lost" where a message to another rank failed, which has its reason there."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    in_torch = any(f"torch{os.sep}distributed" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
    told = f"{type(error).__name__}: {error}".strip()
    where = f" ({os.path.basename(innermost[0].filename)} line {innermost[0].lineno})" if innermost else ""
    text = "".join(traceback.format_exception(error))
    return ("lost" if in_torch else "failed"), (told + where, text)


class WorkerLoop:
    """The calls of one worker, in their order.

    Waits for a step at once where nothing is gained by more steps under way: on a CPU, in the last stage. On a GPU,
    and in a stage that hears of its tokens from another one, the next step is launched first if it is there.
    """

    def __init__(self, worker: Worker, reader: Reader, answers: Connection, board: Board):
        self.worker, self.reader, self.answers, self.board = worker, reader, answers, board
        self.rank = worker.layout.rank
        self.launched: deque[tuple[int, Any]] = deque()
        self.num_steps = 0

    def run(self) -> None:
        while True:
            if self.launched and (not self._defers or not self.reader.has_message()):
                self._finish()
                continue
            if not self.launched:
                self.board.say(self.rank, IDLE)
            number, method, args = pickle.loads(self.reader.read())
            if method == EXECUTE:
                self._launch(number, *args)
                while len(self.launched) > self.worker.depth:
                    self._finish()
            else:
                while self.launched:
                    self._finish()
                self._call(number, method, args)

    @property
    def _defers(self) -> bool:
        return self.worker.device.type == "cuda" or not self.worker.layout.is_last

    def _launch(self, number: int, output: SchedulerOutput) -> None:
        self.num_steps += 1
        self.board.say(
            self.rank, f"computes step {self.num_steps}: {len(output.rows)} requests, {output.num_tokens} tokens"
        )
        self.launched.append((number, self.worker.runner.launch(output)))

    def _finish(self) -> None:
        number, launched = self.launched.popleft()
        result = launched.wait()
        if self.worker.layout.rank == self.worker.layout.leader:
            self._answer(number, "ok", result)

    def _call(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        self.board.say(self.rank, f"does {method}")
        try:
            value = getattr(self.worker, method)(*args)
        except Exception as error:
            if method in FATAL:
                raise
            self._answer(number, "raised", error)
            return
        self._answer(number, "ok", value)

    def _answer(self, number: int, kind: str, value: Any) -> None:
        try:
            data = pickle.dumps((number, kind, value))
            pickle.loads(data)  # some exceptions can be written and not read
        except Exception as error:
            what = f"{type(value).__name__}: {value}" if kind == "raised" else f"the answer cannot be sent: {error}"
            data = pickle.dumps((number, "raised", RuntimeError(what)))
        self.answers.send_bytes(data)
