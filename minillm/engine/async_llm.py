"""AsyncLLM: the requests of many coroutines on one engine thread, in vLLM's shape. Built in chapter 23.

engine = AsyncLLM.from_engine_args(EngineArgs(model="tinyworld"))
async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=8), request_id="0"):
    print(output.outputs[0].text)
engine.shutdown()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from minillm.engine.inputs import Prompt
from minillm.engine.llm import LLM
from minillm.engine.llm_engine import EngineArgs
from minillm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from minillm.engine.prompt_forms import check_call
from minillm.engine.stream import Stream
from minillm.engine.thread import EngineThread
from minillm.sampling.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AsyncLLM:
    """Steps an `LLM` in a thread of its own (`EngineThread`). No method blocks the event loop: prompts are tokenized,
    and texts are made, beside it. Each request may be read in another event loop."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.thread = EngineThread(llm).start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> Self:
        """`options` are what vLLM takes beside them, such as usage_context; an LLM in this process needs none."""
        return cls(LLM.from_engine_args(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Any = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one prompt as they come, as its `output_kind` says. What was generated while its reader was
        elsewhere comes as one output. A reader that leaves aborts the request. Raises what `LLM.generate` would, and
        the error of a step that ended the request; one that was aborted ends with the finish_reason "abort".
        """
        check_call("generate", lora_request, others)
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()
        name = uuid4().hex if request_id is None else request_id

        def hear(delta: StreamDelta) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

        submission = _Submission()
        try:
            stream = await asyncio.to_thread(
                submission.make, lambda: self.thread.submit(prompt, sampling_params, name, priority, on_delta=hear)
            )
        except asyncio.CancelledError:
            submission.leave()
            raise
        reader = _Reader(stream)
        try:
            while not reader.is_finished:
                deltas = [await arrived.get()]
                while not arrived.empty():
                    deltas.append(arrived.get_nowait())
                reader.take(deltas)
                if reader.is_finished:
                    await asyncio.to_thread(stream.finished.wait)
                    if stream.error is not None:
                        raise stream.error
                if (output := reader.output(deltas)) is not None:
                    yield output
        finally:
            if not reader.is_finished:
                stream.abort()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these; an id that is not under way changes nothing."""
        self.thread.abort(*([request_id] if isinstance(request_id, str) else request_id))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self._between_steps(lambda: self.llm.reset_prefix_cache(reset_running_requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._between_steps(lambda: self.llm.sleep(level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._between_steps(lambda: self.llm.wake_up(tags))

    async def is_sleeping(self) -> bool:
        return self.llm.is_sleeping()

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.llm.get_tokenizer()

    async def check_health(self) -> None:
        """Raise RuntimeError where nothing can be computed any more."""
        await self._between_steps(self.llm.engine.check_open)

    def shutdown(self) -> None:
        """Abort what is under way, end the threads and close the LLM; a second call does nothing."""
        self.thread.close()
        self.llm.close()

    async def _between_steps(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.thread.call(function))


AsyncLLMEngine = AsyncLLM  # vLLM's older name


class _Submission:
    """A request on its way to the engine thread. The thread that submits it cannot be cancelled: a request whose reader
    has left meanwhile is aborted as soon as it is there."""

    def __init__(self):
        self._guard, self._stream, self._has_left = threading.Lock(), None, False

    def make(self, submit: Callable[[], Stream]) -> Stream:
        with self._guard:
            if self._has_left:
                raise asyncio.CancelledError
            self._stream = submit()
            return self._stream

    def leave(self) -> None:
        """Called in the event loop: it does not wait for the thread that submits."""
        self._has_left = True
        threading.Thread(target=self._abort, daemon=True).start()

    def _abort(self) -> None:
        with self._guard:
            if self._stream is not None:
                self._stream.abort()


class _Reader:
    """What the coroutine that reads a request has seen of it. The thread that makes the texts goes on meanwhile, so
    nothing here is shared with it before the end."""

    def __init__(self, stream: Stream):
        self.stream, self.params = stream, stream.sink.request.params
        with_scores = self.params.reports_logprobs
        self.samples = [
            CompletionOutput(index, "", [], 0.0 if with_scores else None, [] if with_scores else None)
            for index in range(self.params.n)
        ]

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def take(self, deltas: list[StreamDelta]) -> None:
        for delta in deltas:
            ends_all = delta.finish_reason == "abort" and not delta.token_ids  # one delta for all samples
            for sample in self.samples if ends_all else [self.samples[delta.index]]:
                if sample.finish_reason is None:
                    _add(sample, delta)

    def output(self, deltas: list[StreamDelta]) -> RequestOutput | None:
        """All so far, or what these deltas added, or nothing before the end."""
        kind, request = self.params.output_kind, self.stream.sink.request
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        if kind is RequestOutputKind.DELTA:
            parts = {at: CompletionOutput(at, "", [], None, None) for at in dict.fromkeys(one.index for one in deltas)}
            for delta in deltas:
                _add(parts[delta.index], delta)
            samples = list(parts.values())
        elif self.is_finished:
            samples = self.stream.sink.collected().outputs
        else:
            samples = [replace(sample, token_ids=list(sample.token_ids)) for sample in self.samples]
        prompt_logprobs = self.stream.sink.collected().prompt_logprobs if self.is_finished else None
        metrics = RequestMetrics.of(request, self.stream.sink)
        prompt = (request.prompt, request.prompt_token_ids, prompt_logprobs)
        return RequestOutput(self.stream.request_id, *prompt, samples, self.is_finished, metrics)


def _add(sample: CompletionOutput, delta: StreamDelta) -> None:
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if delta.logprobs:
        sample.logprobs = (sample.logprobs or []) + delta.logprobs
        scores = [row[token_id].logprob for row, token_id in zip(delta.logprobs, delta.token_ids)]
        sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(scores)
    if delta.finish_reason is not None:
        sample.finish_reason, sample.stop_reason, sample.error = delta.finish_reason, delta.stop_reason, delta.error
