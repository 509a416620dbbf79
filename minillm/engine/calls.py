"""Calls: how a caller's requests are stepped to their end, beside those of other threads. Built in chapter 05."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from minillm.engine.outputs import RequestOutput, StreamDelta
from minillm.engine.progress import progress_bar
from minillm.engine.request import Request
from minillm.engine.sink import OutputSink
from minillm.model.errors import AdapterError

if TYPE_CHECKING:
    from minillm.engine.llm import LLM


def serve(llm: LLM, requests: list[Request], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
    """Step until all of `requests` have ended, in steps of this thread or of another one; their outputs in order."""
    finished: list[OutputSink] = []
    sinks: list[OutputSink] = []
    with progress_bar(len(requests), use_tqdm) as advance:
        try:
            with llm.lock:
                sinks.extend(llm.outputs.add(request, on_finish=finished.append) for request in requests)
            num_finished = 0
            while num_finished < len(requests):
                num_tokens = step_for(llm, sinks, lambda: len(finished) < len(requests))
                before, num_finished = num_finished, len(finished)
                advance(num_finished - before, num_tokens)
        finally:
            llm.outputs.leave(requests)
    for sink in sinks:
        check_end(sink)
    return [sink.collected() for sink in sinks]


def stream(llm: LLM, request: Request) -> Iterator[StreamDelta]:
    """The tokens of one request as they come."""
    deltas: deque[StreamDelta] = deque()
    sink = llm.outputs.add(request, on_delta=lambda _, delta: deltas.append(delta), streaming=True)
    try:
        while deltas or not sink.is_finished:
            while not deltas:
                step_for(llm, [sink], lambda: not deltas)  # a step of another thread may have made some
            yield deltas.popleft()
    finally:  # also when the reader stops listening
        llm.outputs.leave([request])


def check_end(sink: OutputSink) -> None:
    """Raise AdapterError where its adapter was gone, and RuntimeError where a step of another thread, or `close`, has
    ended a request."""
    if isinstance(error := sink.error, AdapterError):
        raise error
    if error is not None:
        raise RuntimeError(
            f"another caller's step or close() ended a request of this call: {error!r}; "
            f"call again, or make a new LLM if this one is closed"
        ) from error


def step_for(llm: LLM, sinks: list[OutputSink], wanted: Callable[[], bool]) -> int:
    """A step, if it is still wanted when this thread's turn comes; how many tokens it made. An error that has ended
    none of `sinks` belongs to another call, which hears of it."""
    with llm.lock:
        if not wanted():
            return 0
        llm.outputs.check_may_step()
        try:
            return len(llm.step_once())
        except Exception as error:
            if not llm.engine.is_open or any(sink.error is error for sink in sinks):
                raise
            return 0
