"""Executor: how the engine reaches what computes its steps. Built in chapter 05.

    Engine -> InProcessExecutor -> ModelRunner            one model in this process
           -> InProcessExecutor -> SimulatedRunner        a cost model and a virtual clock (chapter 09)

All that passes is plain data (`minillm.engine.step`), so workers in other processes can take the runner's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from minillm.engine.step import SchedulerOutput, StepResult


class Launched(Protocol):
    """A step on its way."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Computes steps: a `ModelRunner`, or the simulator's."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...


class Executor(Protocol):
    """Computes steps, one after the other."""

    runs_ahead: bool  # whether `launch` returns before the step is computed

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute a step. Whatever it raises ends the requests of that step."""

    def launch(self, output: SchedulerOutput) -> Launched:
        """Start a step; at most one other is not waited for yet."""

    def draft(self, asked: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Draft tokens for each (request id, most tokens)."""

    def collective(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker's runner; their answers, in the workers' order."""

    def check_health(self) -> None:
        """Raise RuntimeError if a worker cannot compute any more."""

    def shutdown(self) -> None:
        """Free what the workers hold; a second call does nothing."""


class InProcessExecutor:
    """Calls a runner in this process. A runner of your own needs `execute` alone."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.is_shut_down = False

    @property
    def runs_ahead(self) -> bool:
        return hasattr(self.runner, "launch")

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.runner.execute(output)

    def launch(self, output: SchedulerOutput) -> Launched:
        return self.runner.launch(output)

    def draft(self, asked: Sequence[tuple[str, int]]) -> list[list[int]]:
        return self.runner.draft(asked)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.runner, method)(*args)]

    def check_health(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("the executor was shut down; make a new engine")

    def shutdown(self) -> None:
        self.is_shut_down = True
