"""ParallelEngine: an engine whose steps other processes compute, several at once in a pipeline. Built in chapter 20.

    2 stages, requests a b c d      stage 0   ab | cd | ab | cd |
                                    stage 1      | ab | cd | ab | cd       a step has half of the requests

    3 stages, requests a b c d      stage 0   ab | c  | d  | ab | c  |
                                    stage 1      | ab | c  | d  | ab | c
                                    stage 2           | ab | c  | d  | ab | c

A decoding request needs the token of its last step, so it is in one step at a time. With as many steps under way as
there are stages, each with its share of the requests, no stage waits. The chunks of a prompt need no token, and follow
each other at once.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minillm.device import like_a_gpu
from minillm.engine.build import build_manager, build_scheduler
from minillm.engine.config import EngineConfig
from minillm.engine.deltas import TokenDelta, joined
from minillm.engine.distributed.executor import MultiprocExecutor
from minillm.engine.distributed.group import WorkerError
from minillm.engine.engine import Engine
from minillm.engine.executor import Launched
from minillm.engine.failures import end_steps
from minillm.engine.lock import locked
from minillm.engine.preemptive import PreemptiveScheduler
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.speculation import Speculation
from minillm.engine.step import SchedulerOutput
from minillm.rounding import ceil_div
from minillm.trace import Trace

if TYPE_CHECKING:
    from minillm.engine.distributed.model import RemoteModel


class ParallelEngine(Engine):
    """An `Engine` over the workers of a `RemoteModel`."""

    def __init__(self, model: RemoteModel, config: EngineConfig, trace: Trace):
        planned = model.plan(config)
        kv_cache = build_manager(model.shape, planned)
        lengths = model.build(kv_cache, config)
        executor = MultiprocExecutor(model.workers, model.shape, model.adapters(config))
        super().__init__(scheduler=_scheduler(kv_cache, config, trace), config=config, trace=trace, executor=executor)
        self.num_stages = config.pipeline_parallel_size
        self.flying: deque[tuple[SchedulerOutput, Launched]] = deque()  # launched steps of a pipeline, oldest first
        if isinstance(self.scheduler, PipelineScheduler):
            self.scheduler.flying = self.flying
        spec = config.speculative_config
        if spec is not None:
            self.speculation = Speculation(executor.draft, spec.num_speculative_tokens, lengths, trace)
        ahead = model.shape.device.type == "cuda" or self.num_stages > 1 or like_a_gpu("ahead")
        self.overlap = ahead if config.async_scheduling is None else config.async_scheduling

    @property
    def has_unfinished(self) -> bool:
        return super().has_unfinished or bool(self.flying)

    @locked
    def add_request(self, request: Request) -> None:
        """As `Engine.add_request`. Raises ValueError for functions that cannot be sent to the workers."""
        if request.params.logits_processors:
            try:
                pickle.dumps(request.params.logits_processors)
            except Exception as error:
                raise ValueError(
                    f"logits_processors={request.params.logits_processors!r} cannot be sent to the workers of a "
                    f"parallel LLM ({error}); use functions of a module, not lambdas or functions in functions"
                ) from error
        super().add_request(request)

    @locked
    def step(self) -> list[TokenDelta]:
        """As `Engine.step`. Where a worker has failed, all requests end with that error, and the engine is closed."""
        try:
            return super().step()
        except WorkerError as error:
            self.why_closed = str(error)
            self.abort(*self.scheduler.requests, error=error)
            self.is_closed = True
            raise

    @locked
    def close(self) -> None:
        """As `Engine.close`; the workers give back the memory of the KV cache."""
        if self.is_closed or self.is_forked:
            return
        if not self.executor.workers.is_open:  # nothing of what is under way will ever be there
            self.flying.clear()
            self.in_flight = None
            self.scheduler.drop_in_flight()
        try:
            super().close()
        finally:
            self.executor.shutdown()

    def _step_ahead(self) -> list[TokenDelta]:
        """In a pipeline, launch a step of requests that are in none, and see to the oldest step when there is one for
        every stage, or nothing left to launch."""
        if self.num_stages == 1 or self.speculation is not None:
            return super()._step_ahead()
        output = self._schedule()
        if output.rows or not self.flying or output.finished or output.reset or output.moves:
            try:
                self.flying.append((output, self.executor.launch(output)))
            except BaseException as error:
                self._put_away(error, output)
                raise
            self.scheduler.advance(output)
        deltas: list[TokenDelta] = []
        if not output.rows or len(self.flying) >= self.num_stages:
            deltas += self._land()
        if not self.scheduler.requests:
            deltas += self._take_in_flight()
        return joined(deltas)

    def _take_in_flight(self, *later: SchedulerOutput) -> list[TokenDelta]:
        deltas = super()._take_in_flight(*later)
        while self.flying:
            deltas += self._land()
        return deltas

    def _land(self) -> list[TokenDelta]:
        """Wait for the oldest step of the pipeline."""
        output, launched = self.flying[0]
        try:
            result = launched.wait()
        except BaseException as error:
            self._put_away(error)
            raise
        self.flying.popleft()
        return self._update(output, result)

    def _put_away(self, error: BaseException, *outputs: SchedulerOutput) -> None:
        under_way = [output for output, _ in self.flying]
        self.flying.clear()
        end_steps(self, error, *under_way, *outputs)


class PipelineScheduler(Scheduler):
    """Gives each step its share of the requests, and none that waits for the token of another step. `flying` are the
    launched steps, which the engine keeps."""

    def __init__(self, num_stages: int, *parts: Any):
        super().__init__(*parts)
        self.num_stages, self._left = num_stages, 0
        self.flying: Sequence[tuple[SchedulerOutput, Launched]] = ()

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`, for one of as many steps as there are stages. The requests that are in none are
        shared among the stages that have no step: 4 requests on 3 stages are 2, 1 and 1, not 2, 2 and nothing."""
        most = min(len(self.requests), self.max_num_seqs)
        idle = most - sum(request.num_in_flight > 0 for request in self.running)
        free = self.num_stages - sum(bool(output.rows) for output, _ in self.flying)
        self._left = min(ceil_div(most, self.num_stages), ceil_div(max(0, idle), max(1, free)))
        return super().schedule()

    def _num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        if request.num_in_flight or not self._left:
            return 0
        return super()._num_new_tokens(request, num_computed, budget)

    def _schedule(self, output: SchedulerOutput, request: Request, count: int) -> int:
        self._left -= count > 0
        return super()._schedule(output, request, count)


class PreemptivePipelineScheduler(PreemptiveScheduler, PipelineScheduler):
    """Running requests make way for more urgent ones before a step takes its share."""


def _scheduler(kv_cache: Any, config: EngineConfig, trace: Trace) -> Scheduler:
    made = build_scheduler(kv_cache, config, trace)
    if config.pipeline_parallel_size == 1 or config.async_scheduling is False or config.speculative_config is not None:
        return made
    kind = PreemptivePipelineScheduler if isinstance(made, PreemptiveScheduler) else PipelineScheduler
    return kind(
        config.pipeline_parallel_size,
        kv_cache,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        made.waiting,
        config.enable_chunked_prefill,
        config.preemption_mode,
        trace,
        made.gate,
    )
