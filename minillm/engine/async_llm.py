"""AsyncLLM: the requests of many coroutines on one engine thread, in vLLM's shape. Built in chapter 23.

engine = AsyncLLM.from_engine_args(EngineArgs(model="tinyworld"))
async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=8), request_id="0"):
    print(output.outputs[0].text)
engine.shutdown()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4
from weakref import WeakKeyDictionary

from minillm.engine.inputs import Prompt
from minillm.engine.llm import LLM
from minillm.engine.llm_engine import EngineArgs
from minillm.engine.lora_request import LoRARequest
from minillm.engine.mailbox import Mailbox
from minillm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from minillm.engine.prompt_forms import check_call
from minillm.engine.reading import Piece, Reading
from minillm.engine.request import Request
from minillm.engine.serving_counters import ServingCounters
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
        llm.counters = self.counters = ServingCounters(llm)
        self.thread = EngineThread(llm, self.counters.end).start()
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox[Piece]] = WeakKeyDictionary()

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
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one prompt as they come, as its `output_kind` says. What was generated while its reader was
        elsewhere comes as one output. A reader that leaves aborts the request. Raises what `LLM.generate` would, and
        the error of a step that ended the request; one that was aborted ends with the finish_reason "abort".
        """
        check_call("generate", others)
        name = uuid4().hex if request_id is None else request_id
        request = await asyncio.to_thread(
            self.llm.one_request, "generate", prompt, sampling_params, priority, None, lora_request
        )
        async for output in self._outputs(request, name):
            yield output

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for one conversation; `options` are those of `LLM.chat`."""
        name = uuid4().hex if request_id is None else request_id
        requests = await asyncio.to_thread(
            self.llm.chat_requests, messages, sampling_params, priority=priority, lora_request=lora_request, **options
        )
        if len(requests) != 1:
            raise ValueError(f"chat() takes 1 conversation, not {len(requests)}; call it once for each")
        async for output in self._outputs(requests[0], name):
            yield output

    def read(self, requests: Sequence[Request], request_ids: Sequence[str] | None = None) -> Reading:
        """Submit requests that were made by `LLM.one_request` or `LLM.chat_requests`, to read them piece by piece in
        this event loop."""
        return Reading(self.thread, self._mailbox(), requests, request_ids)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these; an id that is not under way changes nothing."""
        self.thread.abort(*([request_id] if isinstance(request_id, str) else request_id))

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no further request, and wait until all have ended; whether they have, within `timeout` seconds."""
        return await asyncio.to_thread(self.thread.drain, timeout)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """`LLM.add_lora`, beside the event loop and the steps."""
        return await asyncio.to_thread(self.llm.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        return await asyncio.to_thread(self.llm.remove_lora, lora_id)

    async def list_loras(self) -> set[int]:
        return self.llm.list_loras()

    async def pin_lora(self, lora_id: int) -> bool:
        return await asyncio.to_thread(self.llm.pin_lora, lora_id)

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

    async def _outputs(self, request: Request, name: str) -> AsyncGenerator[RequestOutput, None]:
        with self.read([request], [name]) as reading:
            seen = _Seen(reading.streams[0])
            async for pieces in reading:
                deltas = [delta for _, delta in pieces]
                seen.take(deltas)
                if not reading.is_finished and (output := seen.output(deltas)) is not None:
                    yield output
        yield seen.output(deltas)

    def _mailbox(self) -> Mailbox[Piece]:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            self._mailboxes[loop] = Mailbox(loop)
        return self._mailboxes[loop]


AsyncLLMEngine = AsyncLLM  # vLLM's older name


class _Seen:
    """What the coroutine that reads a request has seen of it. The thread that makes the texts goes on meanwhile, so
    nothing here is shared with it before the end."""

    def __init__(self, stream: Stream):
        self.stream, self.params = stream, stream.sink.request.params
        with_scores, lora = self.params.reports_logprobs, stream.sink.request.spec.lora_request
        self.samples = [
            CompletionOutput(
                index, "", [], 0.0 if with_scores else None, [] if with_scores else None, lora_request=lora
            )
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
            parts = {
                at: CompletionOutput(at, "", [], None, None, lora_request=request.spec.lora_request)
                for at in dict.fromkeys(one.index for one in deltas)
            }
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
        lora_request = request.spec.lora_request
        return RequestOutput(self.stream.request_id, *prompt, samples, self.is_finished, metrics, lora_request)


def _add(sample: CompletionOutput, delta: StreamDelta) -> None:
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if delta.logprobs:
        sample.logprobs = (sample.logprobs or []) + delta.logprobs
        scores = [row[token_id].logprob for row, token_id in zip(delta.logprobs, delta.token_ids)]
        sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(scores)
    if delta.finish_reason is not None:
        sample.finish_reason, sample.stop_reason, sample.error = delta.finish_reason, delta.stop_reason, delta.error
