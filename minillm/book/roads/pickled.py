"""An executor that lets nothing pass but bytes: what a worker in another process would be given.
Built in chapter 20."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from minillm.engine.engine import Engine
from minillm.engine.executor import InProcessExecutor, Launched
from minillm.engine.step import SchedulerOutput, StepResult


class PickledExecutor(InProcessExecutor):
    """Pickles every step on its way to the runner, and every result on its way back."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        return passed(super().execute(passed(output)))

    def launch(self, output: SchedulerOutput) -> Launched:
        return _PickledStep(super().launch(passed(output)))

    def draft(self, asked: Sequence[tuple[str, int]]) -> list[list[int]]:
        return passed(super().draft(passed(asked)))


class _PickledStep:
    def __init__(self, launched: Launched):
        self.launched = launched

    def wait(self) -> StepResult:
        return passed(self.launched.wait())


def pickle_steps(engine: Engine) -> None:
    """Put a `PickledExecutor` between `engine` and its runner."""
    engine.executor = PickledExecutor(engine.runner)
    if engine.speculation is not None:
        engine.speculation.draft = engine.executor.draft


def passed(message: Any) -> Any:
    """`message` as it arrives on the other side. Raises TypeError for a message that is not plain data."""
    data = pickle.dumps(message)
    for module in (b"torch._utils", b"minillm.engine.request", b"minillm.sampling.grammar.library"):
        if module in data:
            raise TypeError(
                f"a {type(message).__name__} holds an object of {module.decode()}; a step holds plain data alone"
            )
    return pickle.loads(data)
