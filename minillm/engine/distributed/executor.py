"""MultiprocExecutor: steps computed by several processes. Built in chapter 20.

Engine -> MultiprocExecutor -> WorkerGroup ──shared memory──> Worker of rank 0 -> ParallelRunner
                                               └────────────> Worker of rank 1 -> ParallelRunner
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from minillm.engine.distributed.adapters import RemoteAdapters
from minillm.engine.distributed.worker import Shape
from minillm.engine.step import SchedulerOutput, StepResult


class Workers(Protocol):
    """What an executor needs of a group of workers: `WorkerGroup`, or `RayWorkers`."""

    leader: int
    is_open: bool
    pids: list[int]

    def send(self, method: str, *args: Any) -> int: ...
    def wait(self, number: int, ranks: Sequence[int] | None = None) -> list[Any]: ...
    def call(self, method: str, *args: Any) -> list[Any]: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class RemoteStep:
    """A step that workers compute."""

    def __init__(self, workers: Workers, number: int):
        self.workers, self.number = workers, number

    def wait(self) -> StepResult:
        return self.workers.wait(self.number, [self.workers.leader])[0]


class MultiprocExecutor:
    """An `Executor` over the workers of one model; the leader of them answers for all.

    It is its own runner (`engine.runner`), which has no cache or forward pass to look at. `collective` calls a method
    of `minillm.engine.distributed.worker.Worker` on each rank, such as "take_traffic".
    """

    runs_ahead = True

    def __init__(self, workers: Workers, model: Shape, adapters: RemoteAdapters | None = None):
        self.workers, self.model, self.adapters = workers, model, adapters
        self.is_shut_down = False

    @property
    def runner(self) -> MultiprocExecutor:
        return self

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput) -> RemoteStep:
        return RemoteStep(self.workers, self.workers.send("execute", output))

    def draft(self, asked: Sequence[tuple[str, int]]) -> list[list[int]]:
        return self.collective("draft", asked)[self.workers.leader]

    def collective(self, method: str, *args: Any) -> list[Any]:
        return self.workers.call(method, *args)

    def check_health(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("the executor was shut down; make a new engine")
        self.workers.check()

    def shutdown(self) -> None:
        """Free the KV cache. The workers, which hold the weights too, belong to the model (`RemoteModel.close`)."""
        if not self.is_shut_down:
            self.is_shut_down = True
            if self.workers.is_open:
                self.collective("free_cache")
