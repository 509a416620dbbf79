"""OutputProcessor: from the tokens of a step to the callers that wait for them. Built in chapter 05.

    Engine.step -> TokenDelta -> OutputSink of its request -> StreamDelta -> its caller

The other side of the engine from `InputProcessor`: there text became requests, here tokens become text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from minillm.engine.deltas import TokenDelta
from minillm.engine.detokenizer import invalid_byte_token
from minillm.engine.engine import Engine
from minillm.engine.lock import FairLock, locked
from minillm.engine.outputs import StreamDelta
from minillm.engine.request import Request
from minillm.engine.sink import OutputSink
from minillm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Listener(Protocol):
    """Takes the tokens of a request as they are: a beam search,
    or a thread that makes text of them beside the steps."""

    def take(self, delta: TokenDelta) -> object: ...
    def fail(self, error: BaseException | None) -> object:
        """It was aborted; with an error, a step failed."""


class OutputProcessor:
    """Knows the sink of every request under way, by its group id: from `add` until the request has ended and its caller
    has been notified. Where a caller wants the tokens as they are, a `Listener` stands in the sink's place.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase):
        self.engine, self.tokenizer = engine, tokenizer
        self.invalid_byte = invalid_byte_token(tokenizer.backend_tokenizer)
        self.sinks: dict[str, OutputSink] = {}
        self.raw: dict[str, Listener] = {}
        self._is_handing_out = False
        engine.on_end = self._hear_of_end

    @property
    def lock(self) -> FairLock:
        return self.engine.lock

    @locked
    def add(self, request: Request, **options: Any) -> OutputSink:
        """Hand a request to the engine, and collect what it generates. See `OutputSink` for the options."""
        sink = self.sink(request, end=self.withdraw, **options)
        self.engine.add_request(request)
        self.sinks[request.group_id] = sink
        return sink

    def sink(self, request: Request, **options: Any) -> OutputSink:
        """What makes text of its tokens, for a caller that hands them to it."""
        decode, clock = self.decode_of(request.params), self.engine.clock
        return OutputSink(request, decode, self.decode_all, clock, invalid_byte=self.invalid_byte, **options)

    @locked
    def add_raw(self, request: Request, listener: Listener) -> None:
        """The same for a listener, which hears of tokens until `raw` holds it no longer."""
        self.engine.add_request(request)
        self.raw[request.group_id] = listener

    @locked
    def withdraw(self, requests: list[Request]) -> None:
        """No caller waits for these any more: end them, at any moment."""
        for request in requests:
            self._forget(request.group_id)
        self.engine.abort(*(request.group_id for request in requests))

    def leave(self, requests: list[Request]) -> None:
        """`withdraw` without waiting: in the middle of a step, which may be where Python drops a generator,
        it waits for the end."""
        self.lock.call_soon(partial(self.withdraw, requests))

    def process(self, deltas: Iterable[TokenDelta]) -> BaseException | None:
        """Hand out what a step has made. Returns what a caller's own function raised; all others have been notified. An
        interrupt in the middle loses tokens: it ends the requests that they belong to."""
        failed: BaseException | None = None
        left = deque(deltas)
        self._is_handing_out = True
        try:
            while left:
                failed = self._hand_out(left[0]) or failed
                left.popleft()
        except BaseException as error:
            groups = dict.fromkeys(delta.request.group_id for delta in left)
            for action in (
                *(partial(self._hear_of_end, group, error) for group in groups),
                partial(self.engine.abort, *groups),
            ):
                try:  # all are notified, whatever one of them raises
                    action()
                except BaseException as another:
                    error.add_note(f"while its requests were ended: {another!r}")
            raise
        finally:
            self._is_handing_out = False
        return failed

    def check_may_step(self) -> None:
        """Raise RuntimeError inside a callback: a step there would hand out tokens before those of the step that is
        under way."""
        if self._is_handing_out:
            raise RuntimeError(
                "a callback may not ask for a step; submit() what it wants, and let the caller of this step go on"
            )

    def decode_of(self, params: SamplingParams) -> Callable[[list[int]], str]:
        """How a request wants its text."""
        if params.skip_special_tokens:
            return self.decode
        return self.decode_all if params.spaces_between_special_tokens else self.decode_apart

    def decode(self, token_ids: list[int]) -> str:
        # The tokenizer's Rust core: its Python wrapper takes longer than a tiny model's whole step.
        return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: list[int]) -> str:
        return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode_apart(self, token_ids: list[int]) -> str:
        """With special tokens, and what stands between them decoded by itself: no tokenizer puts a space there."""
        special = self._special_ids
        runs = groupby(token_ids, key=lambda token_id: (token_id in special, token_id if token_id in special else None))
        return "".join(self.decode_all(list(run)) for _, run in runs)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    def _hand_out(self, delta: TokenDelta) -> BaseException | None:
        group = delta.request.group_id
        if (sink := self.sinks.get(group)) is None:
            if group in self.raw:
                self.raw[group].take(delta)
            return None
        if sink.has_ended(delta.request.index):
            return None  # drafted and accepted, but behind a stop string
        said = sink.take(delta)
        if said.finish_reason and delta.finish_reason is None:
            self.engine.finish(said.finish_reason, delta.request)
        if sink.is_finished:
            self._forget(group)
        return None if sink.on_delta is None else self._notify(sink, said)

    def _notify(self, sink: OutputSink, said: StreamDelta) -> Exception | None:
        """What the caller's function raises ends its own request."""
        try:
            sink.notify(said)
        except Exception as error:
            if not sink.is_finished:
                self.withdraw([sink.request])
                sink.abort(error)
            sink.error = error
            return error
        return None

    def _hear_of_end(self, group: str, error: BaseException | None) -> None:
        """It was aborted from outside, or in a step that failed, and not by `withdraw`, which forgets it first."""
        listener = self.sinks.get(group) or self.raw.get(group)
        self._forget(group)
        if listener is not None:
            listener.fail(error)

    def _forget(self, group: str) -> None:
        self.sinks.pop(group, None)
        self.raw.pop(group, None)
