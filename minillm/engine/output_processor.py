"""OutputProcessor: whoever asked for something hears of it. Built in chapter 05.

    Engine.step -> TokenDelta -> OutputCollector of its request -> StreamDelta -> Submission, which calls its caller

The other side of the engine from `InputProcessor`: there text became requests, here tokens become text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from minillm.engine.collector import OutputCollector
from minillm.engine.engine import Engine, TokenDelta
from minillm.engine.lock import FairLock, locked
from minillm.engine.outputs import StreamDelta
from minillm.engine.request import Request
from minillm.engine.submission import Submission

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OutputProcessor:
    """Knows who waits for what. A request is known by its group id, from `collect` or `submit` until it has ended and
    its caller has been told."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase):
        self.engine, self.tokenizer = engine, tokenizer
        self.collectors: dict[str, OutputCollector] = {}  # of every request under way
        self.submissions: dict[str, Submission] = {}  # those of them that `submit` or a stream asked for
        self.waiting_deltas: dict[str, deque[TokenDelta]] = {}  # what a beam search has not taken yet
        engine.on_abort = self._hear_of_abort

    @property
    def lock(self) -> FairLock:
        return self.engine.lock

    @locked
    def collect(
        self, request: Request, streaming: bool = False, on_finish: Callable[[OutputCollector], None] | None = None
    ) -> OutputCollector:
        """Hand a request to the engine and collect what it generates. See `OutputCollector` for the other arguments."""
        collector = OutputCollector(request, self.decode, self.decode_all, streaming, on_finish)
        self.engine.add_request(request)
        self.collectors[request.group_id] = collector
        return collector

    @locked
    def submit(
        self, request: Request, on_delta: Callable[[Submission, StreamDelta], None] | None, streaming: bool
    ) -> Submission:
        """The same for a caller that goes on with something else, and is called."""
        collector = self.collect(request, streaming)
        submission = Submission(request, collector, self.engine.clock, self.withdraw, on_delta)
        self.submissions[request.group_id] = submission
        return submission

    @locked
    def withdraw(self, requests: list[Request]) -> None:
        """Nobody waits for these any more: end them, whatever they are at."""
        for request in requests:
            self._forget(request.group_id)
        self.engine.abort(*requests)

    def leave(self, requests: list[Request]) -> None:
        """`withdraw` without waiting: in the middle of a step, which may be where Python drops a generator,
        it waits for the end."""
        self.lock.call_soon(partial(self.withdraw, requests))

    def process(self, deltas: Iterable[TokenDelta]) -> BaseException | None:
        """Tell everybody what a step has made. Returns what a caller's own function raised; all others have heard."""
        failed: BaseException | None = None
        for delta in deltas:
            group = delta.request.group_id
            if (collector := self.collectors.get(group)) is None:
                if group in self.waiting_deltas:
                    self.waiting_deltas[group].append(delta)  # a beam search wants the tokens as they are
                continue
            if collector.has_ended(delta.request.index):
                continue  # guessed right, but behind a stop string
            said = collector.add(delta)
            if said.finish_reason and delta.finish_reason is None:
                self.engine.finish(said.finish_reason, delta.request)
            if (submission := self.submissions.get(group)) is not None:
                if collector.is_finished:
                    self._forget(group)
                try:
                    submission.hear(said)
                except BaseException as error:  # the others hear what is theirs all the same
                    failed = failed or error
                    submission.withdraw()
        return failed

    def fail(self, error: BaseException) -> None:
        """A step has failed, or its tokens are lost: everything is aborted, and all hear of it."""
        for collector in self.collectors.values():
            if not collector.is_finished:
                collector.error = error
                collector.abort()
        for submission in list(self.submissions.values()):
            self._forget(submission.request.group_id)
            try:
                submission.fail(error)
            except Exception as another:
                error.add_note(f"and a caller that was told of it raised {another!r}")
        self.engine.abort(*self.engine.scheduler.requests.values())  # none is left where the step itself has failed

    def decode(self, token_ids: list[int]) -> str:
        # The tokenizer's Rust core: its Python wrapper takes longer than a tiny model's whole step.
        return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: list[int]) -> str:
        return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)

    def _hear_of_abort(self, request: Request) -> None:
        """Somebody has aborted it, and not by `withdraw`, which forgets it first."""
        collector, submission = self.collectors.get(request.group_id), self.submissions.get(request.group_id)
        self._forget(request.group_id)
        if collector is not None:
            collector.abort()
        if submission is not None:
            submission.fail(None)

    def _forget(self, group: str) -> None:
        for known in (self.collectors, self.submissions, self.waiting_deltas):
            known.pop(group, None)
