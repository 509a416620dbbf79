"""The front: an LLM that has no model, and an engine whose steps are computed by replicas. Built in chapter 22.

    FrontLLM       tokenizer, checks, texts: all of an `LLM` but the model
    FleetEngine    add_request -> Router -> Submit            a replica computes
                   take(Tokens) -> TokenDelta -> sink         as if a step here had made them

It stands where an `LLM` and its `Engine` stand: `AsyncLLM`, the HTTP service and the metrics need not know.
"""

from __future__ import annotations

import pickle
from typing import Any

from minillm.engine.build import build_scheduler
from minillm.engine.config import EngineConfig
from minillm.engine.counters import Counters
from minillm.engine.defaults import default_sampling_params
from minillm.engine.deltas import TokenDelta
from minillm.engine.engine import Engine
from minillm.engine.inputs import InputProcessor
from minillm.engine.llm import LLM
from minillm.engine.lock import locked
from minillm.engine.lora_calls import Adapters
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import SchedulerOutput, StepResult
from minillm.engine.vllm_names import ModelOptions
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.checkpoint import load_tokenizer, resolve_model
from minillm.serving.replicas.messages import Begun, Ended, Facts, Tokens
from minillm.serving.router import Flight, Router
from minillm.trace import Trace


class Elsewhere:
    """The runner of an engine that computes nothing itself."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        raise RuntimeError("the replicas compute the steps; the front computes none")


class FleetEngine(Engine):
    """Requests go to the router, and tokens come from replicas. All of it is called by one thread, or under the lock.

    Raises ValueError for a request that no replica could ever serve, as an `Engine` does.
    """

    def __init__(self, config: EngineConfig, facts: Facts, router: Router, trace: Trace):
        manager = KVCacheManager(
            facts.num_blocks,
            facts.block_size,
            facts.enable_prefix_caching,
            facts.window,
            identity=facts.identity,
            sinks=facts.sinks,
        )
        super().__init__(
            scheduler=build_scheduler(manager, config, trace), runner=Elsewhere(), config=config, trace=trace
        )
        self.router = router
        self.arrived: list[TokenDelta] = []  # tokens that no caller has heard of

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to hand out. Tokens come as messages, and no step is needed for that."""
        return bool(self.arrived)

    @locked
    def step(self) -> list[TokenDelta]:
        """Hand out what has come from replicas."""
        self.check_open()
        deltas, self.arrived = self.arrived, []
        self.num_steps += 1
        return deltas

    @locked
    def add_request(self, request: Request) -> None:
        self.check_open()
        if request.params.logits_processors:
            try:
                pickle.dumps(request.params.logits_processors)
            except Exception as error:
                raise ValueError(
                    f"logits_processors={request.params.logits_processors!r} cannot be sent to another process "
                    f"({error}); give functions of a module that the replicas can import"
                ) from error
        self.scheduler.add(request)
        self.scheduler.waiting.peek()
        self.scheduler.waiting.pop()  # it waits in a replica, if anywhere
        self._run(request)
        self.router.start(request)

    @locked
    def finish(self, reason: str, *requests: Request) -> None:
        super().finish(reason, *requests)
        for request in requests:
            self.router.end(request)

    def take(self, tokens: Tokens) -> Flight | None:
        """What a replica has generated; its flight, or None for a flight that has ended here.

        Raises RuntimeError for tokens that do not follow those that are known.
        """
        flight = self.router.flights.get(tokens.flight_id)
        if flight is None or flight.request.is_finished:
            return None
        request = flight.request
        if tokens.position != len(request.output_token_ids):
            raise RuntimeError(
                f"replica {flight.replica_id} sent token {tokens.position} of request {request.request_id}, "
                f"which has {len(request.output_token_ids)}"
            )
        if tokens.begun is not None:
            self._begin(flight, tokens.begun)
        taken = request.take(list(tokens.token_ids), tokens.finish_reason == "stop", tokens.error)
        request.num_computed_tokens = len(request.token_ids) - 1
        self.router.generated(flight, len(taken))
        now = self.clock()
        request.token_times += [now] * len(taken)
        rows = tokens.logprobs or [None] * len(taken)
        deltas = [TokenDelta(request, token_id, row, None) for token_id, row in zip(taken, rows)]
        if not deltas:
            deltas = [TokenDelta(request, None, None, None)]
        deltas[-1] = deltas[-1]._replace(finish_reason=request.finish_reason)
        self.arrived += deltas
        if request.finish_reason is not None:
            self.scheduler.finish(request, request.finish_reason)
            self.router.end(request, is_told=tokens.finish_reason is not None)
        return flight

    def fail(self, ended: Ended) -> None:
        """A replica could not go on with a flight: the caller hears why."""
        flight = self.router.flights.get(ended.flight_id)
        if flight is not None:
            error = RuntimeError(
                f"replica {flight.replica_id} ended request {flight.request.request_id}: {ended.error}"
            )
            self.abort(flight.request.request_id, error=error)

    def _begin(self, flight: Flight, begun: Begun) -> None:
        """The first tokens that a replica generates of it."""
        request = flight.request
        if request.scheduled_time is None:
            request.scheduled_time = min(self.clock(), request.arrival_time + begun.queue_seconds)
            request.num_cached_tokens, request.cached_tokens = begun.num_cached_tokens, dict(begun.cached_tokens)
        if begun.prompt_logprobs is not None:
            request.prompt_logprobs = begun.prompt_logprobs
        forks, request.num_forks = range(1, 1 + request.num_forks), 0
        for index in forks:  # its prompt is computed, and lies in that replica's cache
            sample = request.fork(index)
            self.scheduler.requests[sample.request_id] = sample
            self.scheduler.samples.setdefault(sample.group_id, {})[sample.request_id] = sample
            self._run(sample)
            self.router.start(sample, near=flight)

    def _run(self, request: Request) -> None:
        request.move(RequestStatus.RUNNING)
        self.scheduler.running.append(request)


class FrontLLM(LLM):
    """The methods of an `LLM` that need no model."""

    def __init__(self, config: EngineConfig, options: ModelOptions, facts: Facts, router: Router):
        self.config, self.options = config, options
        path = resolve_model(config.model)
        self.model = None
        self.tokenizer = load_tokenizer(path if options.tokenizer is None else resolve_model(options.tokenizer))
        self.trace, self.counters = Trace(enabled=False), Counters()
        self._asleep: set[str] = set()
        self.engine = FleetEngine(config, facts, router, self.trace)
        self.max_model_len = facts.max_model_len
        default_params = default_sampling_params(path, config.generation_config, options.override_generation_config)
        limits = (facts.model_config.vocab_size, facts.max_model_len, frozenset(facts.model_config.eos_token_ids))
        self.inputs = InputProcessor(self.tokenizer, *limits, config.seed, self.engine.clock, default_params)
        self.adapters = Adapters(self)
        self.inputs.adapters = self.adapters.each


def _refuse(name: str) -> Any:
    def refused(self: FrontLLM, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not served by a fleet, whose models are in its replicas; use the methods of Fleet, or an LLM"
        )

    refused.__name__ = name
    return refused


ELSEWHERE = (
    "generate", "stream", "chat", "beam_search", "embed", "encode", "classify", "score", "sleep", "wake_up",
    "save_prefix_cache", "load_prefix_cache", "reset_prefix_cache", "reload_weights", "apply_model", "collective_rpc",
    "start_profile", "stop_profile",
)  # fmt: skip
for _name in ELSEWHERE:
    if hasattr(LLM, _name):
        setattr(FrontLLM, _name, _refuse(_name))
