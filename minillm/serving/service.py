"""Service: between HTTP and the engine. Who asks, what is admitted, what is under way. Built in chapter 23.

body -> Service.call -> Gate: a place -> requests, long ones made in a thread -> Gate: their tokens -> Reading -> Call
Call: pieces while they come, or all outputs; leaving it gives everything back
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import uuid4

from minillm.engine.admission import check_servable
from minillm.engine.async_llm import AsyncLLM
from minillm.engine.llm import LLM
from minillm.engine.lora_request import LoRARequest
from minillm.engine.outputs import RequestOutput
from minillm.engine.reading import Piece, Reading
from minillm.engine.request import Request
from minillm.sampling.params import SamplingParams
from minillm.serving.adapters import ServedAdapters
from minillm.serving.config import ServerConfig
from minillm.serving.engine_room import EngineRoom
from minillm.serving.errors import ApiError
from minillm.serving.fields import PromptTokensDetails, Usage
from minillm.serving.gate import SHUTTING_DOWN, Gate
from minillm.serving.keys import Client
from minillm.serving.turnstile import Turnstile


@dataclass(frozen=True)
class Asking:
    """What a request takes from its client and from the server."""

    defaults: SamplingParams
    priority: int
    user: str
    lora_request: LoRARequest | None = None
    tool_call_parser: str = "hermes"  # the format in which the model calls tools


class Body(Protocol):
    """What both endpoints' requests have."""

    model: str | None
    n: int | None
    priority: int | None
    user: str | None
    request_id: str | None

    @property
    def is_short(self) -> bool: ...

    def requests(self, llm: LLM, asking: Asking) -> list[Request]: ...


class Service:
    """One model behind HTTP. All methods belong to one event loop."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, name: str | None = None):
        self.engine, self.llm, self.config = engine, engine.llm, config
        self.name = name or config.served_model_name or str(engine.llm.config.model)
        self.created = int(time.time())
        self.gate = Gate(config.max_queued_requests, config.max_queued_tokens)
        self.turnstile = Turnstile()
        self._has_made = False  # requests, of any length
        self.room = EngineRoom(self)
        self.calls: set[Call] = set()  # under way
        self.adapters = ServedAdapters(self.llm, self.name, config.load_adapters)
        for lora_name, path in config.adapters:
            self.adapters.load_now(lora_name, path)

    async def call(self, body: Body, client: Client, num_prompts: int, prefix: str) -> Call:
        """Check, admit and submit what `body` asks for. Raises ApiError, and what the engine says of its fields."""
        self.gate.check_open()
        client.check_rate()
        self._check_size(num_prompts, body.n or 1)
        self.gate.enter(num_prompts)
        num_tokens = 0
        try:
            requests = await self._made(body, self._asking(body, client))
            most = sum(request.num_prompt_tokens + request.params.n * request.max_tokens for request in requests)
            self.gate.check_open()
            self.gate.take_tokens(most)
            num_tokens = most
            call_id = f"{prefix}-{body.request_id or uuid4().hex}"
            names = [f"{call_id}-{place}" for place in range(len(requests))]
            reading = self.engine.read(requests, names)
        except BaseException:
            self.gate.leave(num_prompts, num_tokens)
            raise
        client.count_tokens(sum(request.num_prompt_tokens for request in requests))
        model = body.model if body.model and self.serves(body.model) else self.name  # NAME is told as NAME/VERSION
        return Call(self, call_id, model, client, requests, reading, num_tokens)

    async def drain(self, seconds: float, why: str = SHUTTING_DOWN) -> None:
        """Admit nothing more, and wait for what is under way; what has not ended after `seconds` is aborted, and its
        clients get a last piece that says so. `why` is what others are told."""
        self.gate.close(why)
        deadline = time.monotonic() + seconds
        while self.calls and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for call in tuple(self.calls):
            call.reading.abort()

    async def _made(self, body: Body, asking: Asking) -> list[Request]:
        """In a thread beside the loop, because tokenizing takes time; a short one at once where no thread has the
        tokenizer: the hand-over to a thread and back takes longer. The first one takes a thread in any case, since
        much is set up for it."""
        is_short = self._has_made and asking.lora_request is None and body.is_short
        if is_short:
            await self.turnstile.enter()
            if (lock := self.llm.inputs.lock).acquire(blocking=False):
                try:
                    return self._make(body, asking)
                finally:
                    lock.release()
        requests = await asyncio.to_thread(self._make, body, asking)
        self._has_made = True
        if not is_short:
            await self.turnstile.enter()
        return requests

    def _make(self, body: Body, asking: Asking) -> list[Request]:
        self.llm.engine.check_open()
        try:
            requests = body.requests(self.llm, asking)
        except RecursionError:
            raise ApiError(400, "the request has brackets inside brackets too deep to be read; unfold some") from None
        scheduler = self.llm.engine.scheduler
        for request in requests:
            check_servable(
                request, scheduler.kv_cache, scheduler.max_num_batched_tokens, scheduler.enable_chunked_prefill
            )
        return requests

    def _asking(self, body: Body, client: Client) -> Asking:
        if body.priority and "priority" not in (policy := self.llm.config.scheduling_policy):
            raise ApiError(
                400,
                f"priority={body.priority} has no meaning under the policy {policy!r}; leave it out, "
                "or start the server with --scheduling-policy priority or preemptive_priority",
                "priority",
            )
        priority = max(client.priority, body.priority if body.priority is not None else client.priority)
        user, adapter = client.user or body.user or "", self.adapters.find(body.model)
        return Asking(self.llm.inputs.default_params, priority, user, adapter, self.config.tool_call_parser)

    def serves(self, model: str) -> bool:
        """Whether a request that names `model` is one for this service: its model, or an adapter of it."""
        return model == self.name or model in self.adapters.known

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models tells: this model, under each name that it is served by."""
        llm = self.llm
        root = str(llm.config.model)
        card = {"id": self.name, "created": self.created, "root": root, "max_model_len": llm.max_model_len}
        return [card, *self.adapters.cards()]

    def _check_size(self, num_prompts: int, n: int) -> None:
        if num_prompts > (most := self.config.max_prompts):
            raise ApiError(
                400, f"prompt has {num_prompts} entries; at most {most} are allowed in one request", "prompt"
            )
        if n > (most := self.config.max_choices):
            raise ApiError(400, f"n={n} is not allowed; allowed: 1 to {most}", "n")


class Call:
    """One HTTP request under way in the engine; `with` it, so that everything is given back."""

    def __init__(
        self,
        service: Service,
        call_id: str,
        model: str,
        client: Client,
        requests: Sequence[Request],
        reading: Reading,
        num_tokens: int,
    ):
        self.service, self.id, self.model, self.client, self.requests = service, call_id, model, client, requests
        self.reading, self.num_tokens = reading, num_tokens
        self.created = int(time.time())
        self._num_completion = 0
        self._is_left = False
        service.calls.add(self)
        service.room.note(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_left:
            return
        self._is_left = True
        self.reading.abort()
        service = self.service
        service.calls.discard(self)
        service.gate.leave(len(self.requests), self.num_tokens)
        self.client.count_tokens(self._num_completion)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Raises ApiError 503 at the deadline, and the error of a step that ended the request."""
        async with self._deadline():
            async for pieces in self.reading:
                self._num_completion += sum(len(delta.token_ids) for _, delta in pieces)
                yield pieces

    async def outputs(self) -> list[RequestOutput]:
        """All of it, at the end."""
        async for _ in self.pieces():
            pass
        return self.reading.outputs()

    def usage(self, counts: Callable[[int], int] = lambda count: count) -> Usage:
        """The tokens so far; `counts` corrects those of the answers."""
        prompt = sum(request.num_prompt_tokens for request in self.requests)
        completion = counts(self._num_completion)
        cached = sum(request.num_cached_tokens for request in self.requests)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _deadline(self) -> _Deadline:
        return _Deadline(self.service.config.request_seconds)


class _Deadline:
    """`asyncio.timeout` that says what to do about it."""

    def __init__(self, seconds: float | None):
        self.seconds, self._timeout = seconds, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ApiError(
                503,
                f"the answer was not complete after request_seconds={self.seconds:g}; ask for fewer tokens, "
                "or try again later",
                code="timeout",
            ) from None
