"""Latency as its users feel it: TTFT, ITL, TPOT, percentiles and goodput. Built in chapter 08.

arrival        1st token   2nd    3rd        last
   |---- TTFT ----|--ITL--|--ITL--|-- ... ----|
   |---------------- E2E latency -------------|        TPOT = (E2E - TTFT) / (tokens - 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minillm.engine.outputs import RequestOutput
from minillm.engine.request import Request
from minillm.kv_cache.tiers import TIERS


@dataclass(frozen=True)
class RequestRecord:
    """What happened to one request; times in seconds on one clock."""

    arrival_time: float
    token_times: tuple[float, ...]  # of every output token
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from a prefix cache
    num_preemptions: int = 0
    user: str = ""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)  # num_cached_tokens by tier (chapter 17)

    @classmethod
    def of(cls, finished: Request | RequestOutput) -> RequestRecord:
        """From a finished request of an engine, or from what `LLM.generate` returns (its first sample)."""
        if isinstance(finished, RequestOutput):
            m = finished.metrics
            prompt_len = len(finished.prompt_token_ids)
            times = tuple(m.token_times)
            return cls(
                m.arrival_time, times, prompt_len, m.num_cached_tokens, m.num_preemptions, cached_tokens=m.cached_tokens
            )
        return cls(
            finished.arrival_time,
            tuple(finished.token_times),
            finished.num_prompt_tokens,
            finished.num_cached_tokens,
            finished.num_preemptions,
            finished.user,
            finished.cached_tokens,
        )

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.arrival_time

    @property
    def inter_token_latencies(self) -> list[float]:
        """Time between each token and the one before (ITL); empty for a single token."""
        return [later - sooner for sooner, later in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for a single token."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps else 0.0

    @property
    def e2e_latency(self) -> float:
        return self.token_times[-1] - self.arrival_time


@dataclass(frozen=True)
class Percentiles:
    """Of one latency over many requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Raises ValueError for no value at all."""
        if not len(values):
            raise ValueError("no value to take percentiles of; at least one request with two tokens has to finish")
        return cls(float(np.mean(values)), *(percentile(values, q) for q in (50, 90, 99)), float(max(values)))


def percentile(values: Sequence[float], q: float) -> float:
    """The value that `q` percent lie under, 0 <= q <= 100; between two neighbours on a straight line."""
    if not 0 <= q <= 100:
        raise ValueError(f"q={q} is not allowed; allowed: a percentage from 0 to 100")
    return float(np.percentile(values, q))


@dataclass(frozen=True)
class Targets:
    """What a user was promised, in seconds; None is no promise."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None  # the longest gap between two tokens
    e2e: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        measured = {
            "ttft": record.ttft,
            "tpot": record.tpot,
            "itl": max(record.inter_token_latencies, default=0.0),
            "e2e": record.e2e_latency,
        }
        return all(getattr(self, name) is None or value <= getattr(self, name) for name, value in measured.items())


def goodput(records: Iterable[RequestRecord], targets: Targets, seconds: float) -> float:
    """Requests a second that met every target, as `vllm bench serve` reports it."""
    return sum(targets.met_by(record) for record in records) / seconds


@dataclass(frozen=True)
class ServingReport:
    """A run of many requests, in numbers."""

    num_requests: int
    seconds: float  # from the first arrival to the last token
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    hit_rate: float  # share of the prompt tokens that a prefix cache had
    ttft: Percentiles
    itl: Percentiles | None  # None when no request has two tokens
    e2e: Percentiles
    tier_hit_rates: Mapping[str, float] = field(default_factory=dict)  # hit_rate, by where the tokens were

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


def report(records: Sequence[RequestRecord]) -> ServingReport:
    """Sum up what finished. Raises ValueError when nothing did."""
    if not records:
        raise ValueError("0 finished requests: nothing to report")
    prompt_tokens = sum(record.num_prompt_tokens for record in records)
    gaps = [gap for record in records for gap in record.inter_token_latencies]
    return ServingReport(
        num_requests=len(records),
        seconds=max(record.token_times[-1] for record in records) - min(record.arrival_time for record in records),
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=sum(len(record.token_times) for record in records),
        num_preemptions=sum(record.num_preemptions for record in records),
        hit_rate=sum(record.num_cached_tokens for record in records) / max(1, prompt_tokens),
        ttft=Percentiles.of([record.ttft for record in records]),
        itl=Percentiles.of(gaps) if gaps else None,
        e2e=Percentiles.of([record.e2e_latency for record in records]),
        tier_hit_rates={
            tier: sum(record.cached_tokens.get(tier, 0) for record in records) / max(1, prompt_tokens) for tier in TIERS
        },
    )
