"""Engine: add requests, call step until nothing is left. Built in chapter 05.

    while engine.has_unfinished:
        for delta in engine.step():
            print(delta.request.request_id, delta.token_id)

Every part can be handed in: a scheduler, a cache manager, a sampler, a runner of your own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from minillm.device import like_a_gpu
from minillm.engine.build import build_manager, build_runner, build_scheduler
from minillm.engine.config import EngineConfig
from minillm.engine.deltas import TokenDelta, deltas_of, joined
from minillm.engine.drafting import build_speculation
from minillm.engine.executor import Executor, InProcessExecutor, Launched, Runner
from minillm.engine.failures import end_all, end_requests, end_steps
from minillm.engine.lock import FairLock, locked
from minillm.engine.parts import close_tiers
from minillm.engine.request import Request
from minillm.engine.runner import ModelRunner
from minillm.engine.scheduler import KVCache, Scheduler
from minillm.engine.speculation import DEFAULT_LENGTH, Speculation
from minillm.engine.stats import StepStats, note_step, note_tokens
from minillm.engine.step import Announcer, SchedulerOutput, StepResult
from minillm.engine.step_log import StepLog
from minillm.model.decoder import Decoder
from minillm.sampling.grammar.failed import Compile
from minillm.sampling.sampler import Sampler
from minillm.speculative.drafter import Drafter
from minillm.trace import Trace

CLOSED = "this LLM is closed: it computes nothing any more; make a new one"


class Engine:
    """The loop: schedule, execute, update.

    `model` may be None when a `runner` is given. What is not handed in is built for the model from `config`.
    `clock` gives seconds; the simulator hands in a virtual one. A `drafter` of your own drafts at most
    `num_speculative_tokens` tokens of a request in a step; one that `config` asks for says itself how many.
    A `runner` is reached in this process; an `executor` reaches what computes in its own way. Each method holds `lock`,
    so that threads take turns; a caller that needs several of them in one turn holds it too.
    """

    def __init__(
        self,
        model: Decoder | None = None,
        scheduler: Scheduler | None = None,
        kv_cache: KVCache | None = None,
        sampler: Sampler | None = None,
        drafter: Drafter | None = None,
        runner: Runner | None = None,
        config: EngineConfig | None = None,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_speculative_tokens: int = DEFAULT_LENGTH,
        executor: Executor | None = None,
    ):
        runner = runner if executor is None else getattr(executor, "runner", executor)
        if model is None and (runner is None or (scheduler is None and kv_cache is None)):
            raise ValueError("model=None needs a runner, and a scheduler or a kv_cache; pass them, or a model")
        config = config or EngineConfig(model="")
        self.trace = trace or Trace(enabled=False)
        self.clock = clock
        if scheduler is None:
            scheduler = build_scheduler(kv_cache or build_manager(model, config), config, self.trace)
        self.scheduler = scheduler
        self.kv_cache = kv_cache or scheduler.kv_cache
        if runner is None:
            tokens_each = config.tokens_each if drafter is None else 1 + num_speculative_tokens
            runner = build_runner(model, self.kv_cache, config, self.trace, sampler, drafter, tokens_each)
        if (gate := getattr(scheduler, "gate", None)) is not None and getattr(runner, "adapters", None) is not None:
            gate.prepare = runner.adapters.prepare
        self.executor = executor or InProcessExecutor(runner)
        if drafter is None and model is not None and isinstance(runner, ModelRunner):
            self.speculation = build_speculation(model, runner, self.kv_cache, config, self.trace)
        else:
            self.speculation = drafter and Speculation(self.executor.draft, num_speculative_tokens, trace=self.trace)
        self.prefetch: Callable[[Request], None] | None = getattr(self.kv_cache, "prefetch", None)
        on_gpu = model is not None and (model.device.type == "cuda" or like_a_gpu("ahead"))
        self.overlap = on_gpu if config.async_scheduling is None else config.async_scheduling
        self.announcer = Announcer()
        # A step whose tokens are not known on the host yet.
        self.in_flight: tuple[SchedulerOutput, Launched] | None = None
        # Hears of every request id that ended without a delta: aborted from outside, or in a step that failed with an
        # error.
        self.on_end: Callable[[str, BaseException | None], None] = lambda request_id, error: None
        self.step_logs: list[StepLog] = []  # each is told of every step, in the thread that takes it
        self.kept: list[TokenDelta] = []  # of a step, when the one behind it failed; the next step returns them
        self.num_steps = 0
        self.stats = StepStats()  # of the last step
        self.is_closed = False
        self.why_closed = CLOSED
        self.lock = FairLock()
        self.process_id = os.getpid()

    @property
    def runner(self) -> Runner:
        """What computes in this process; may be replaced while nothing is under way."""
        return self.executor.runner

    @runner.setter
    def runner(self, runner: Runner) -> None:
        self.executor.runner = runner

    def use_grammars(self, compile_grammar: Compile) -> None:
        """Let requests ask for structured outputs: how a grammar is made ready for a vocabulary (chapter 19)."""
        if isinstance(self.runner, ModelRunner):
            self.runner.compile_grammar = compile_grammar

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy that a fork made: the threads and the device of the first one are not here."""
        return os.getpid() != self.process_id

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.requests or self.kept) or self.in_flight is not None

    @locked
    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError at once for one that could never be served; the others go on. Raises
        RuntimeError when the engine is closed."""
        self.check_open()
        if request.params.structured_outputs is not None and getattr(self.runner, "compile_grammar", request) is None:
            raise ValueError(
                f"request {request.request_id} asks for structured_outputs={request.params.structured_outputs!r}, "
                f"and this engine has no tokenizer to compile them for; use LLM, or engine.use_grammars"
            )
        self.scheduler.add(request)
        if self.prefetch is not None:
            self.prefetch(request)

    @locked
    def abort(self, *request_ids: str, error: BaseException | None = None) -> None:
        """End requests at any moment, their samples too, wherever an id is that of a request or of a sample;
        their blocks are free once no step in flight writes into them. An id that is not under way changes nothing.
        `error` is why, where their callers have to hear it."""
        requests, samples = self.scheduler.requests, getattr(self.scheduler, "samples", {})
        groups = dict.fromkeys(requests[name].group_id if name in requests else name for name in request_ids)
        ending = [
            one
            for group in groups
            for one in (requests.get(group), *samples.get(group, {}).values())
            if one is not None
        ]
        with ExitStack() as afterwards:  # all are notified, whatever one of them raises
            for group in groups:
                afterwards.callback(self.on_end, group, error)
            self.finish("abort", *ending)

    @locked
    def finish(self, reason: str, *requests: Request) -> None:
        """End these very requests, for a reason that only the caller sees, such as a stop string."""
        for request in requests:
            self.scheduler.finish(request, reason)
        if not self.scheduler.requests:  # there may be no next step to take it in
            self._take_in_flight()

    @locked
    def step(self) -> list[TokenDelta]:
        """Compute one step and return the tokens it made. Nothing waiting is nothing to do: an empty list.

        If a step fails, the requests in it are aborted, and the error goes on to the caller. The others go on:
        their blocks are not written by a step that they are not in. Where the scheduler itself fails, all are aborted.
        """
        self.check_open()
        self.trace.begin_step()
        deltas = self._step_ahead() if self.overlap and self.executor.runs_ahead else self._step()
        if self.kept:
            deltas, self.kept = joined(self.kept + deltas), []
        self.num_steps += 1
        if not self.has_unfinished:
            self.scheduler.check_integrity()
        return deltas

    @locked
    def close(self) -> None:
        """End all requests, and let the disk keep what memory holds of prefixes, where there is a disk. Nothing can be
        computed any more; a second call does nothing."""
        if self.is_closed or self.is_forked:
            return
        self.is_closed = True
        try:
            error = RuntimeError("the LLM was closed")
            kept = dict.fromkeys(delta.request.group_id for delta in self.kept)
            self.kept = []
            with ExitStack() as afterwards:
                for group in kept:
                    afterwards.callback(self.on_end, group, error)
                self.abort(*self.scheduler.requests, error=error)
        finally:
            close_tiers(self.kv_cache, getattr(self.runner, "transfer", None))

    @property
    def is_open(self) -> bool:
        return not self.is_closed and not self.is_forked

    def check_open(self) -> None:
        """Raise RuntimeError when it is closed, or in a child process that has only a copy of it."""
        if self.is_forked:
            raise RuntimeError(
                f"this LLM was made in process {self.process_id}, and this is process {os.getpid()}, "
                "a fork of it without its threads and its device: make an LLM in the child itself, "
                f"and where there is a GPU start the child with multiprocessing.get_context('spawn')"
            )
        if self.is_closed:
            raise RuntimeError(self.why_closed)

    def _step(self) -> list[TokenDelta]:
        output = self._schedule()
        try:
            result = self.executor.execute(output)
        except BaseException as error:
            end_steps(self, error, output)
            raise
        return self._update(output, result)

    def _step_ahead(self) -> list[TokenDelta]:
        """Launch the next step, then see to the tokens of the one before, which the device computed meanwhile.

        The launched step may turn out to hold a request that has just ended: that token is dropped (chapter 14). A step
        whose tokens the host needs first (penalties, log-probabilities, samples about to split off) is waited for,
        and so is every step where the next one begins with a draft that continues them.
        """
        output = self._schedule()
        try:
            launched = self.executor.launch(output)
        except BaseException as error:
            end_steps(self, error, output)
            raise
        self.scheduler.advance(output)
        deltas = self._take_in_flight(output)
        self.in_flight = (output, launched) if output.rows else None
        if self.speculation is not None or output.needs_host or not self.scheduler.requests:
            try:
                deltas += self._take_in_flight()
            except BaseException:
                self.kept += deltas
                raise
        return joined(deltas)

    def _schedule(self) -> SchedulerOutput:
        if self.speculation is not None:
            try:
                self.speculation.propose(self.scheduler, self.announcer.known)
            except BaseException as error:
                end_requests(self, error, self.speculation.asked)
                raise
        try:
            with self.trace.span("schedule"):
                output = self.scheduler.schedule()
                self.announcer.complete(output, self.scheduler.requests, self.kv_cache.tables)
        except BaseException as error:
            end_all(self, error)
            raise
        if (gate := getattr(self.scheduler, "gate", None)) is not None and gate.failed:
            for request, error in gate.take_failed():
                self.abort(request.request_id, error=error)
        if self.speculation is not None:
            self.speculation.forget(output.finished)
        self.stats = note_step(self, output)
        return output

    def _take_in_flight(self, *later: SchedulerOutput) -> list[TokenDelta]:
        """Wait for the step in flight, if there is one; `later` were launched behind it, and fail with it."""
        if self.in_flight is None:
            return []
        output, launched = self.in_flight
        try:
            result = launched.wait()
        except BaseException as error:
            end_steps(self, error, *later)
            raise
        self.in_flight = None
        return self._update(output, result)

    def _update(self, output: SchedulerOutput, result: StepResult) -> list[TokenDelta]:
        with self.trace.span("update"):
            try:
                if self.speculation is not None:
                    self.speculation.count(output, result, self.scheduler.requests)
                added = self.scheduler.update(output, result)
            except BaseException as error:
                end_all(self, error)
                raise
        note_tokens(self, output, result, added)
        return deltas_of(added, result)
