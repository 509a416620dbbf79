"""EngineThread: one thread steps the engine; everyone else hands it messages. Built in chapter 22.

    callers        submit · abort · call · pause · drain          any thread, none of them waits for a step
                      | inbox
    engine thread  messages -> step -> messages -> step ...       the only one that touches the engine
                      | tokens
    text thread    tokens -> text -> Stream of each request       a stop string goes back to the inbox

Detokenizing happens beside the steps, and what a slow reader has not taken yet waits in its stream.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from minillm.engine.deltas import TokenDelta
from minillm.engine.inputs import Prompt
from minillm.engine.lora_request import LoRARequest
from minillm.engine.outputs import StreamDelta
from minillm.engine.prompt_forms import check_callback
from minillm.engine.request import Request
from minillm.engine.sink import OutputSink
from minillm.engine.slices import SHORT, USUAL, run_with_slices
from minillm.engine.stream import Stream
from minillm.kernels.native_threads import release_team
from minillm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from minillm.engine.llm import LLM

Message = Callable[[], object]


class EngineThread:
    """Runs an `LLM` in a thread of its own, from `start` (or `with EngineThread(llm) as thread:`) to `close`.

    Request ids are the caller's own; each may be used again when its request has ended. The LLM's own methods stay
    usable: they take turns with this thread. `on_finish` is called in the text thread for each request that ends,
    before its caller hears of it.
    """

    def __init__(self, llm: LLM, on_finish: Callable[[OutputSink], None] | None = None):
        self.llm, self.on_finish = llm, on_finish
        self.inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there are tasks; False: the last were
        self._tasks: deque[Callable[[], None]] = deque()  # for the text thread
        self._is_told = False  # of tasks that it has not begun
        self.streams: dict[str, Stream] = {}  # under way, by the caller's id
        self.error: BaseException | None = None  # of the last step that failed
        self.num_failed_steps = 0
        self._guard = threading.RLock()  # of streams, the flags, and the order of messages
        self._idle = threading.Condition(self._guard)
        self._accepts, self._paused, self._closing = False, False, False
        self._listens = False  # whether messages are still read
        # An event loop that starts them has short slices, and a team that is interrupted often loses time.
        self._threads = [
            threading.Thread(target=run_with_slices, args=(slices, run), name=name, daemon=True)
            for run, name, slices in ((self._run, "engine", USUAL), (self._write, "text", SHORT))
        ]

    def start(self) -> Self:
        self.llm.engine.check_open()
        with self._guard:
            if self._closing or self._listens:
                raise RuntimeError("an engine thread starts once; make a new one")
            self._accepts = self._listens = True
        release_team()  # this thread has loaded the model; the engine thread's team shall be the only one
        for thread in self._threads:
            thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
        on_delta: Callable[[StreamDelta], None] | None = None,
    ) -> Stream:
        """Ask for one prompt. It is tokenized and checked in the caller's thread, which raises what `LLM.generate`
        would; what only the engine can refuse is raised by the stream. `on_delta` is called in the text thread.

        Raises ValueError for an id that is under way, RuntimeError when the thread is not running, or drains.
        """
        check_callback(on_delta)
        request = self.llm.one_request("submit", prompt, sampling_params, priority, user, lora_request)
        return self.add(request, request_id, on_delta)

    def add(
        self,
        request: Request,
        request_id: str | None = None,
        on_delta: Callable[[StreamDelta], None] | None = None,
        keeps_deltas: bool = True,
    ) -> Stream:
        """`submit` for a request that was made and checked before: it waits for nothing. Raises the same.
        With `keeps_deltas=False` the stream cannot be iterated over; its deltas go to `on_delta` alone."""
        stream = Stream(request.group_id if request_id is None else request_id, self, on_delta, keeps_deltas)
        stream.sink = self.llm.outputs.sink(request, streaming=True, name=stream.request_id, on_finish=self.on_finish)
        with self._guard:
            if not self._accepts:
                raise RuntimeError("this engine thread takes no requests: it was not started, drains, or is closed")
            if stream.request_id in self.streams:
                raise ValueError(f"request_id={stream.request_id!r} is under way; every request needs its own id")
            self.streams[stream.request_id] = stream
            self.tell(lambda: self._add(request, stream))  # under the guard, so that no abort of it is told before
        return stream

    def abort(self, *request_ids: str) -> None:
        """End these, whatever they are at; an id that is not under way changes nothing."""
        self.check_process()
        with self._guard:
            groups = [self.streams[name].sink.request.group_id for name in request_ids if name in self.streams]
            self.tell(lambda: self.llm.engine.abort(*groups))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run something between two steps, such as `llm.save_prefix_cache`; its result, or what it raised.
        Raises RuntimeError when the thread is not running."""
        self.check_process()
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        if not self.tell(run):
            raise RuntimeError("this engine thread runs nothing between steps: it was not started, or is closed")
        return future

    def pause(self) -> None:
        """Take no further step until `resume`; returns when the step under way is done.
        Requests wait, and may be added."""
        self._check_outside("pause", self._threads[:1])
        self.call(lambda: setattr(self, "_paused", True)).result()

    def resume(self) -> None:
        self._paused = False
        self.tell(lambda: None)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no further request, and wait until all have ended; whether they have, within `timeout` seconds."""
        self.check_process()
        self._check_outside("drain", self._threads)
        with self._guard:
            self._accepts = False
            return self._idle.wait_for(lambda: not self.streams, timeout)

    def close(self) -> None:
        """Abort what is under way and end the threads. The LLM stays open;
        a second call does nothing, nor does one in a child."""
        if self.llm.engine.is_forked:
            return
        with self._guard:
            self._accepts = False
            if self._closing or not self._threads[0].is_alive():
                return
            self._closing = True
            self.abort(*self.streams)
            self.inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback may close it
                thread.join()
        with self._guard:
            self._listens = False
            while not self.inbox.empty():  # what the text thread has said last
                if (message := self.inbox.get()) is not None:
                    message()

    def tell(self, message: Message) -> bool:
        """Have something done by the engine thread, between two steps; whether it will be."""
        with self._guard:
            if self._listens:
                self.inbox.put(message)
            return self._listens

    def _check_outside(self, method: str, threads: Sequence[threading.Thread]) -> None:
        if (current := threading.current_thread()) in threads:
            raise RuntimeError(
                f"{method}() would wait for the thread that it is called in, {current.name!r}; "
                "call it from a thread of your own"
            )

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has none of these threads."""
        if self.llm.engine.is_forked:
            self.llm.engine.check_open()

    def forget(self, stream: Stream) -> None:
        """It has ended: its id is free again."""
        self.tell(lambda: self.llm.outputs.raw.pop(stream.sink.request.group_id, None))
        with self._idle:
            if self.streams.get(stream.request_id) is stream:
                del self.streams[stream.request_id]
            self._idle.notify_all()

    def _add(self, request: Request, stream: Stream) -> None:
        try:
            self.llm.outputs.add_raw(request, _Forward(stream))
        except Exception as error:
            self.pass_on(partial(stream.fail, error))

    def _run(self) -> None:
        """The engine thread."""
        while True:
            try:
                working = self.llm.engine.has_unfinished and not self._paused
                message = self.inbox.get_nowait() if working else self.inbox.get()
                if message is None:
                    break
                message()
                continue  # all messages first
            except queue.Empty:
                pass
            except BaseException as error:
                self.error = error
                continue
            try:
                self.llm.step_once()
            except BaseException as error:  # the requests in the step have ended with it, and their streams say so
                self.error = error
                self.num_failed_steps += 1
                if self.llm.engine.is_closed:
                    time.sleep(0.01)
        self.outbox.put(False)

    def pass_on(self, task: Callable[[], None]) -> None:
        """Have something done by the text thread, in the order of the calls. It is woken once for what comes together:
        waking a thread takes longer than a token."""
        self._tasks.append(task)
        if not self._is_told:
            self._is_told = True
            self.outbox.put(True)

    def _write(self) -> None:
        """The text thread."""
        working = True
        while working:
            working = self.outbox.get()
            self._is_told = False  # cleared first: what comes from now on is told again, and may be found done
            while self._tasks:
                self._tasks.popleft()()


class _Forward:
    """Stands for a stream in the engine thread: passes on what comes, and does no work there."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def take(self, delta: TokenDelta) -> None:
        self.stream.thread.pass_on(partial(self.stream.take, delta))

    def fail(self, error: BaseException | None) -> None:
        self.stream.thread.pass_on(partial(self.stream.fail, error))
