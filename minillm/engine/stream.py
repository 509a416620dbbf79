"""Stream: one request of an engine thread, as its caller sees it. Built in chapter 22."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from minillm.engine.deltas import TokenDelta
from minillm.engine.outputs import RequestOutput, StreamDelta
from minillm.engine.sink import OutputSink

if TYPE_CHECKING:
    from minillm.engine.thread import EngineThread


class Stream:
    """One request of an `EngineThread`: iterate over its deltas, or wait for its `output`.
    Several threads may not share one."""

    def __init__(
        self,
        request_id: str,
        thread: EngineThread,
        on_delta: Callable[[StreamDelta], None] | None,
        keeps_deltas: bool = True,
    ):
        self.request_id, self.thread, self.on_delta, self.keeps_deltas = request_id, thread, on_delta, keeps_deltas
        self.sink: OutputSink  # made by `EngineThread.submit`
        self.error: BaseException | None = None  # why it was refused, or ended without an output
        self.finished = threading.Event()
        self._deltas: queue.SimpleQueue[StreamDelta | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[StreamDelta]:
        """The deltas of all samples, as they come. Raises what the request was refused or ended with."""
        while (delta := self._next()) is not None:
            yield delta
        if self.error is not None:
            raise self.error

    def output(self, timeout: float | None = None) -> RequestOutput:
        """Wait until it has ended. Raises TimeoutError after `timeout` seconds,
        and what it was refused or ended with."""
        self.thread.check_process()
        if not self.finished.wait(timeout):
            raise TimeoutError(f"request {self.request_id!r} has not ended within {timeout} s; ask again, or abort it")
        if self.error is not None:
            raise self.error
        return self.sink.collected()

    def abort(self) -> None:
        """End it; nothing happens if it has ended."""
        self.thread.abort(self.request_id)

    def _next(self) -> StreamDelta | None:
        self.thread.check_process()
        return self._deltas.get()

    # Called by the text thread alone.

    def take(self, delta: TokenDelta) -> None:
        """A token of it, as the engine has it."""
        sink = self.sink
        if sink.is_finished or sink.has_ended(delta.request.index):
            return
        said = sink.take(delta)
        if said.finish_reason and delta.finish_reason is None:  # a stop string, which the engine does not see
            self.thread.tell(lambda: self.thread.llm.engine.finish(said.finish_reason, delta.request))
        self._deliver(said)
        if sink.is_finished:
            self.close()

    def fail(self, error: BaseException | None) -> None:
        """It was aborted; with an error, a step failed, or it was refused."""
        if self.finished.is_set():
            return
        self.error = error
        if not self.sink.is_finished:
            self.sink.abort(error)
        self._deliver(StreamDelta("", [], "abort", None if error is None else str(error), self.request_id))
        self.close()

    def close(self) -> None:
        self.on_delta = None  # it leads back to here: without the circle all is freed at once
        self.finished.set()
        self._deltas.put(None)
        self.thread.forget(self)

    def _deliver(self, delta: StreamDelta) -> None:
        if self.keeps_deltas:
            self._deltas.put(delta)
        if self.on_delta is not None:
            try:
                self.on_delta(delta)
            except BaseException as error:  # ends its own request, and not the thread that all others need
                self.on_delta = None
                self.abort()
                self.fail(error)
