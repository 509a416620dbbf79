"""StepLog: what each step did, for those who watch the engine. Built in chapter 23.

    engine thread   add       a step: references and ids, appended to a queue; no arithmetic, no text
    any thread      take      the steps since the last call: each of them once

An engine whose list `step_logs` is empty pays nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import ScheduledRequest, SchedulerOutput, StepResult


class LoggedStep(NamedTuple):
    """A step that was computed. What it holds is not written to any more, but for the state of the requests."""

    time: float  # when its tokens had come, seconds on the engine's clock
    rows: Sequence[ScheduledRequest]
    arrived: Sequence[Request]  # that the runner had not seen
    generated: Sequence[str]  # a request id for each token
    ended: Sequence[Request]  # with one of these tokens
    preempted: Sequence[str]  # request ids
    num_accepted: Mapping[str, int]  # of the draft tokens of a row, by request id
    num_running: int  # requests
    num_waiting: int  # requests, the preempted ones among them


class StepLog:
    """Steps that wait to be looked at."""

    def __init__(self):
        self._steps: deque[LoggedStep] = deque()

    def add(
        self,
        scheduler: Scheduler,
        output: SchedulerOutput,
        result: StepResult,
        added: Sequence[tuple[Request, int | None]],
        now: float,
    ) -> None:
        """`added` are the tokens that the scheduler took of `result`."""
        if not output.rows and not output.preempted:
            return
        requests, num_running = scheduler.requests, len(scheduler.running)
        known = [requests.get(new.request_id) for new in output.arrived]
        self._steps.append(
            LoggedStep(
                now,
                output.rows,
                [request for request in known if request is not None],
                [request.request_id for request, token_id in added if token_id is not None],
                [request for request, _ in added if request.finish_reason is not None],
                output.preempted,
                result.num_accepted,
                num_running,
                len(requests) - num_running,
            )
        )

    def take(self) -> list[LoggedStep]:
        """The steps since the last call, in their order."""
        return [self._steps.popleft() for _ in range(len(self._steps))]
