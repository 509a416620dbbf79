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
from functools import partial
from typing import NamedTuple, Protocol

from minillm.device import like_a_gpu
from minillm.engine.config import EngineConfig
from minillm.engine.lock import FairLock, locked
from minillm.engine.memory import (
    build_attention,
    build_cache,
    build_graphs,
    build_manager,
    build_pieces,
    build_transfer,
    close_tiers,
    retention_of,
)
from minillm.engine.policies import cached_tokens_of, make_policy
from minillm.engine.request import Request
from minillm.engine.runner import LaunchedStep, ModelRunner
from minillm.engine.scheduler import KVCache, SampledToken, Scheduler, SchedulerOutput
from minillm.engine.speculation import DEFAULT_LENGTH, Speculation, build_speculation
from minillm.engine.warmup import warm_up
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.decoder import Decoder
from minillm.sampling.logprobs import Logprob
from minillm.sampling.sampler import Sampler
from minillm.speculative.drafter import Drafter
from minillm.speculative.rejection import RejectionSampler
from minillm.trace import Trace


class Runner(Protocol):
    """Computes steps: a `ModelRunner`, or the simulator's."""

    def execute(self, output: SchedulerOutput) -> list[list[SampledToken]]: ...


class TokenDelta(NamedTuple):
    """One new token of one request, or its end without one."""

    request: Request  # perhaps a sample that was split off the request that was added: see its group_id
    token_id: int | None  # None where its grammar failed before there was one: the finish_reason is "error"
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None  # with the request's last token: "stop", "length" or "error"


class Engine:
    """The loop: schedule, execute, update.

    `model` may be None when a `runner` is given. What is not handed in is built for the model from `config`.
    `clock` gives seconds; the simulator hands in a virtual one. A `drafter` of your own guesses at most
    `num_speculative_tokens` tokens of a request in a step; one that `config` asks for says itself how many.
    Each method holds `lock`, so that threads take turns; a caller that needs several of them in one turn holds it too.
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
    ):
        if model is None and (runner is None or (scheduler is None and kv_cache is None)):
            raise ValueError("model=None needs a runner, and a scheduler or a kv_cache; pass them, or a model")
        config = config or EngineConfig(model="")
        self.trace = trace or Trace(enabled=False)
        self.clock = clock
        if scheduler is None:
            kv_cache = kv_cache or build_manager(model, config)
            scheduler = Scheduler(
                kv_cache,
                config.max_num_seqs,
                config.max_num_batched_tokens,
                make_policy(config.scheduling_policy, cached_tokens_of(kv_cache)),
                config.enable_chunked_prefill,
                config.preemption_mode,
                self.trace,
            )
        self.scheduler = scheduler
        self.kv_cache = kv_cache or scheduler.kv_cache
        if runner is None:
            cache = build_cache(model, self.kv_cache, config.kv_cache_dtype)
            attention = build_attention(model, cache, config.attention_backend, retention_of(config, model))
            tokens_each = config.tokens_each if drafter is None else 1 + num_speculative_tokens
            graphs = build_graphs(model, attention, self.kv_cache, config, tokens_each)
            sampler = sampler or (RejectionSampler() if drafter is not None or config.speculative_config else Sampler())
            transfer, pieces = build_transfer(cache, self.kv_cache), build_pieces(model, graphs, config)
            runner = ModelRunner(model, cache, attention, sampler, self.trace, graphs, transfer, pieces)
            if model.device.type == "cuda" and isinstance(attention, TritonAttention):
                warm_up(model, attention, sampler)
        self.runner = runner
        if drafter is None and model is not None and isinstance(runner, ModelRunner):
            self.speculation = build_speculation(model, runner, self.kv_cache, config, self.trace)
        else:
            vocab_size = model and model.config.vocab_size
            self.speculation = drafter and Speculation(drafter, num_speculative_tokens, vocab_size, trace=self.trace)
        self.prefetch: Callable[[Request], None] | None = getattr(self.kv_cache, "prefetch", None)
        on_gpu = model is not None and (model.device.type == "cuda" or like_a_gpu("ahead"))
        self.overlap = (
            on_gpu and hasattr(runner, "launch") if config.async_scheduling is None else config.async_scheduling
        )
        self.in_flight: LaunchedStep | None = None  # a step that was launched and whose tokens nobody has seen
        self.on_abort: Callable[[Request], None] | None = None  # is told of every request that was aborted from outside
        self.num_steps = 0
        self.is_closed = False
        self.lock = FairLock()
        self.process_id = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy that a fork made: the threads and the device of the first one are not here."""
        return os.getpid() != self.process_id

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.requests) or self.in_flight is not None

    @locked
    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError at once for one that could never be served; the others go on. Raises
        RuntimeError when the engine is closed."""
        self.check_open()
        self.scheduler.add(request)
        if self.prefetch is not None:
            self.prefetch(request)

    @locked
    def abort(self, *requests: Request) -> None:
        """End requests at any moment, their samples too; their blocks are free once no step in flight writes into
        them."""
        groups = {request.group_id for request in requests}
        with ExitStack() as afterwards:  # all are told, whatever one of them raises
            for request in requests if self.on_abort is not None else ():
                afterwards.callback(self.on_abort, request)
            self.finish("abort", *[r for r in self.scheduler.requests.values() if r.group_id in groups])

    @locked
    def finish(self, reason: str, *requests: Request) -> None:
        """End these very requests, for a reason that only the caller sees, such as a stop string."""
        for request in requests:
            self.scheduler.finish(request, reason)
        if self.in_flight is not None and not self.scheduler.requests:  # there may be no next step to take it in
            try:
                self._take_in_flight()
            except BaseException as error:
                self._abandon(error)
                raise

    @locked
    def step(self) -> list[TokenDelta]:
        """Compute one step and return the tokens it made. Nothing waiting is nothing to do: an empty list.

        If a step fails, every request in flight is aborted and the prefix cache is emptied, since nobody knows how
        far the blocks were written; then the error goes on to the caller, and the engine can serve again.
        """
        self.check_open()
        self.trace.begin_step()
        try:
            # A runner of your own may have been put around the first.
            ahead = self.overlap and hasattr(self.runner, "launch")
            added = self._step_ahead() if ahead else self._step()
        except BaseException as error:
            self._abandon(error)
            raise
        self.num_steps += 1
        now = self.clock()
        for request, token in added:
            if token is not None:
                request.token_times.append(now)
        if not self.has_unfinished:
            self.scheduler.check_integrity()
        # Two steps may have been taken in.
        last = {request.request_id: index for index, (request, _) in enumerate(added)}
        return [
            TokenDelta(
                request, *(token or (None, None)), request.finish_reason if last[request.request_id] == index else None
            )
            for index, (request, token) in enumerate(added)
        ]

    @locked
    def close(self) -> None:
        """End all requests, and let the disk keep what memory holds of prefixes, where there is a disk. Nothing can be
        computed any more; a second call does nothing."""
        if self.is_closed or self.is_forked:
            return
        self.is_closed = True
        try:
            self.abort(*self.scheduler.requests.values())
        finally:
            close_tiers(self.kv_cache, getattr(self.runner, "transfer", None))

    def check_open(self) -> None:
        """Raise RuntimeError when it is closed, or in a child process that has only a copy of it."""
        if self.is_forked:
            raise RuntimeError(
                f"this LLM was made in process {self.process_id}, and this is process {os.getpid()}, "
                "a fork of it without its threads and its device: make an LLM in the child itself, "
                f"and where there is a GPU start the child with multiprocessing.get_context('spawn')"
            )
        if self.is_closed:
            raise RuntimeError("this LLM is closed: it computes nothing any more; make a new one")

    def _step(self) -> list[tuple[Request, SampledToken | None]]:
        output = self._schedule()
        sampled = self.runner.execute(output)
        added = self._update(output, sampled)
        if self.trace.enabled:
            self._count(output)
        return added

    def _schedule(self) -> SchedulerOutput:
        if self.speculation is not None:
            self.speculation.propose(self.scheduler)
        with self.trace.span("schedule"):
            return self.scheduler.schedule()

    def _update(
        self, output: SchedulerOutput, sampled: list[list[SampledToken]]
    ) -> list[tuple[Request, SampledToken | None]]:
        with self.trace.span("update"):
            if self.speculation is not None:
                self.speculation.count(output, sampled)
            return self.scheduler.update(output, sampled)

    def _step_ahead(self) -> list[tuple[Request, SampledToken | None]]:
        """Launch the next step, then see to the tokens of the one before, which the device computed meanwhile.

        The launched step may turn out to hold a request that has just ended: that token is dropped (chapter 14). A step
        whose tokens the host needs first (penalties, log-probabilities, samples about to split off) is waited for,
        and so is every step where the next one begins with guesses that continue them.
        """
        output = self._schedule()
        launched = self.runner.launch(output)
        self.scheduler.advance(output)
        if self.trace.enabled:
            self._count(output)
        added = self._take_in_flight()
        self.in_flight = launched if output.rows else None
        if self.speculation is not None or not self.scheduler.requests or any(row.needs_host for row in output.rows):
            added += self._take_in_flight()
        return added

    def _take_in_flight(self) -> list[tuple[Request, SampledToken | None]]:
        step, self.in_flight = self.in_flight, None
        if step is None:
            return []
        return self._update(step.output, step.wait())

    def _abandon(self, error: BaseException) -> None:
        """Put away what was in flight. `error` is what the caller has to see: what fails here becomes a note on it."""
        # With none in flight too: waiting may have failed.
        ends = [self.scheduler.drop_in_flight] if self.overlap else []
        self.in_flight = None
        ends += [partial(self.scheduler.finish, request, "abort") for request in self.scheduler.requests.values()]
        for action in (*ends, self._forget):
            try:
                action()
            except Exception as another:
                error.add_note(f"while the failed step was put away: {another!r}; make a new engine")

    def _forget(self) -> None:
        self.kv_cache.take_moves()
        self.kv_cache.pool.evict_all()

    def _count(self, output: SchedulerOutput) -> None:
        """What the figures and the metrics of the book are drawn from."""
        count = self.trace.count
        for row in output.rows:
            request = row.request
            count(
                "tokens", row.num_tokens, request=request.request_id, start=row.start, prompt=request.num_prompt_tokens
            )
        count("running", len(self.scheduler.running))
        count("waiting", len(self.scheduler.requests) - len(self.scheduler.running))
        count("blocks used", self.kv_cache.pool.num_blocks - self.kv_cache.pool.num_free)
        for kind in ("to_disk", "swap_out", "from_disk", "copies", "swap_in"):
            if moved := len(getattr(output.moves, kind)):
                count(kind, moved)
