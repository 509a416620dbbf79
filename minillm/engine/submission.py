"""Submission: a request that is under way while its caller does something else. Built in chapter 19.

submission = llm.submit("Once upon a time", SamplingParams(max_tokens=8))     nothing is computed yet
while not submission.is_finished:
    llm.step()                                                                everybody's requests, in one batch
print(submission.output().outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Callable

from minillm.engine.collector import OutputCollector
from minillm.engine.outputs import RequestOutput, StreamDelta
from minillm.engine.request import Request


class Submission:
    """What `LLM.submit` hands back: whether the request is finished, its output, and the way to withdraw it.

    `on_delta(submission, delta)` hears of each token inside the step that made it, whoever asked for that step.
    The last delta has a `finish_reason`; it is "abort" when somebody aborted it, and when a step failed:
    then `error` says with what. It may submit more, but may not ask for a step. What it raises ends its own request;
    the others hear what is theirs, then it goes on to whoever asked for the step.
    """

    def __init__(
        self,
        request: Request,
        collector: OutputCollector,
        clock: Callable[[], float],
        end: Callable[[list[Request]], None],
        on_delta: Callable[[Submission, StreamDelta], None] | None = None,
    ):
        self.request, self.collector, self.clock, self.end = request, collector, clock, end
        self.on_delta = on_delta
        self.error: BaseException | None = None  # of the step that failed
        self._output: RequestOutput | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come: it has ended, was aborted or withdrawn."""
        return self.collector.is_finished

    def output(self) -> RequestOutput:
        """What it said. Raises RuntimeError if it is not finished, or did not come to an end."""
        if self._output is None:
            why = "it is still under way; call llm.step()" if not self.is_finished else "it was withdrawn or aborted"
            why = why if self.error is None else f"a step of the engine failed: {self.error!r}"
            raise RuntimeError(f"request {self.request.request_id} has no output: {why}") from self.error
        return self._output

    def withdraw(self) -> None:
        """End it now, whatever it is at; nothing happens if it is finished."""
        if not self.is_finished:
            self.end([self.request])
            self.collector.abort()

    def hear(self, delta: StreamDelta) -> None:
        """A token has come; the collector knows of it already."""
        if self.is_finished:
            self._output = self.collector.output(self.clock())
        if self.on_delta is not None:
            self.on_delta(self, delta)

    def fail(self, error: BaseException | None) -> None:
        """A step failed, and everything that was under way with it; or, without an error, somebody aborted this one."""
        self.error = error
        self.collector.abort()
        if self.on_delta is not None:
            self.on_delta(self, StreamDelta("", [], "abort"))
