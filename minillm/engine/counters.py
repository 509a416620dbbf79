"""Counters of an LLM's whole life, as Prometheus has them, with vLLM's names. Built in chapter 08."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.engine.deltas import TokenDelta

if TYPE_CHECKING:
    from minillm.engine.engine import Engine
    from minillm.engine.request import Request

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 600.0)


@dataclass
class Metric:
    """Something measured under one name; `labels` tell apart what has the same."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Several such numbers in order."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass
class Histogram(Metric):
    """How many values are at most as large as each upper limit; "+Inf" has all."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Distribution:
    """Values, sorted into buckets as they come: each counts in the first bucket whose limit is not below it."""

    limits: Sequence[float] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self):
        self.counts = self.counts or [0] * (len(self.limits) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.limits, value)] += times
        self.total += value * times

    def metric(self, name: str) -> Histogram:
        buckets, below = {}, 0
        for limit, count in zip((*map(str, self.limits), "+Inf"), list(self.counts)):
            below += count
            buckets[limit] = below
        return Histogram(name, {}, below, self.total, buckets)


class Counters:
    """Counts the tokens of each step, and a request when its last token has come. Requests that were aborted are left
    out, and so are those that an `EngineThread` ends at a stop string."""

    def __init__(self):
        self.tokens: Tally[str] = Tally()
        self.ended: Tally[str] = Tally()  # by finish_reason
        self.ttft, self.e2e = Distribution(), Distribution()

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        """What one step made, after it was handed out."""
        self.tokens["generation"] += len(deltas)
        ended = [delta for delta in deltas if delta.request.finish_reason is not None]
        if ended:
            self.tokens["generation"] -= sum(delta.token_id is None for delta in ended)
            for request in {delta.request.request_id: delta.request for delta in ended}.values():
                self._end(request)

    def _end(self, request: Request) -> None:
        self.ended[request.finish_reason] += 1
        if not request.index:  # samples share their prompt
            self.tokens["prompt"] += request.num_prompt_tokens
            self.tokens["cached"] += request.num_cached_tokens
        self.tokens["preemptions"] += request.num_preemptions
        if request.token_times:
            self.ttft.add(request.token_times[0] - request.arrival_time)
            self.e2e.add(request.token_times[-1] - request.arrival_time)

    def metrics(self, engine: Engine) -> list[Metric]:
        """All of them, and how the engine stands now."""
        running, requests = len(engine.scheduler.running), len(engine.scheduler.requests)
        found: list[Metric] = [
            Gauge("vllm:num_requests_running", {}, running),
            Gauge("vllm:num_requests_waiting", {}, requests - running),
            Gauge("vllm:kv_cache_usage_perc", {}, getattr(engine.kv_cache.pool, "usage", 0.0)),
            Counter("vllm:prefix_cache_queries", {}, self.tokens["prompt"]),
            Counter("vllm:prefix_cache_hits", {}, self.tokens["cached"]),
            Counter("vllm:num_preemptions", {}, self.tokens["preemptions"]),
            Counter("vllm:prompt_tokens", {}, self.tokens["prompt"]),
            Counter("vllm:generation_tokens", {}, self.tokens["generation"]),
        ]
        found += [
            Counter("vllm:request_success", {"finished_reason": reason}, count) for reason, count in self.ended.items()
        ]
        if engine.speculation is not None:
            spec = engine.speculation.metrics
            found += [
                Counter("vllm:spec_decode_num_drafts", {}, spec.num_drafts),
                Counter("vllm:spec_decode_num_draft_tokens", {}, spec.num_draft_tokens),
                Counter("vllm:spec_decode_num_accepted_tokens", {}, spec.num_accepted_tokens),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, list(spec.accepted_per_position)),
            ]
        return [
            *found,
            self.ttft.metric("vllm:time_to_first_token_seconds"),
            self.e2e.metric("vllm:e2e_request_latency_seconds"),
        ]
