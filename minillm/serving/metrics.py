"""Metrics of a server for Prometheus, with vLLM's names and labels, so that its dashboards fit. Built in chapter 23.

Nothing is computed here while tokens are made: the engine's threads count (`ServingCounters`), and a scrape reads.
Names that begin with "minillm:" are our own. A label `adapter` tells the requests of an adapter from the others'.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from minillm.engine.counters import Distribution
from minillm.engine.serving_counters import AdapterCounters, adapter_of

if TYPE_CHECKING:
    from minillm.serving.models import Models
    from minillm.serving.service import Service

LABELS = ("model_name", "engine")
ENGINE = "0"  # a service has one
FINISHED_REASONS = ("stop", "length", "abort", "error")
LAG_EVERY = 0.05  # seconds between two looks at the event loop: each takes a core from a step for 0.2 ms
LAG = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

# Of each adapter's requests: name, attribute of AdapterCounters, what it is.
COUNTERS = (
    ("prompt_tokens", "num_prompt_tokens", "Tokens of prompts that were computed or found in a cache."),
    ("generation_tokens", "num_generation_tokens", "Tokens that were generated."),
    ("prefix_cache_queries", "num_prompt_tokens", "Tokens of prompts that were looked up in the prefix cache."),
    ("prefix_cache_hits", "num_cached_tokens", "Tokens of prompts that the prefix cache had."),
)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft", "From arrival to the first token."),
    ("inter_token_latency_seconds", "itl", "Between two steps that made tokens of a request."),
    ("time_per_output_token_seconds", "itl", "The older name of inter_token_latency_seconds."),
    ("request_time_per_output_token_seconds", "tpot", "A request's mean time per output token after the first."),
    ("e2e_request_latency_seconds", "e2e", "From arrival to the last token."),
    ("request_queue_time_seconds", "queue", "From arrival to the first step."),
    ("request_inference_time_seconds", "inference", "From the first step to the last token."),
    ("request_prefill_time_seconds", "prefill", "From the first step to the first token."),
    ("request_decode_time_seconds", "decode", "From the first token to the last."),
    ("request_prompt_tokens", "prompt_len", "Tokens of a prompt."),
    ("request_generation_tokens", "generation_len", "Tokens of a sample."),
    ("request_max_num_generation_tokens", "max_generation_len", "Tokens of a request's longest sample."),
    ("request_params_n", "n", "Samples that a request asks for."),
    ("request_params_max_tokens", "max_tokens", "Tokens that a sample may have."),
)


class ServerMetrics:
    """What `/metrics` shows of a server and its models, in a registry of its own."""

    def __init__(self, models: Models):
        self.models, self.registry = models, CollectorRegistry()
        self.num_refused: Tally[int] = Tally()  # answers of 400 and above, by status
        self.loop_lag = Distribution(LAG)  # seconds that the event loop came late to a timer
        self.registry.register(self)

    def refused(self, status: int) -> None:
        """A request was answered with an error."""
        self.num_refused[status] += 1

    def text(self) -> bytes:
        """What a scrape gets; in any thread."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """No names before the first scrape: the registry would collect to find them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client for each scrape. A name appears once, with the samples of all models."""
        families: dict[str, Metric] = {}
        for service in self.models:
            for family in EngineMetrics(service).collect():
                if (seen := families.setdefault(family.name, family)) is not family:
                    seen.samples += family.samples
        yield from families.values()
        yield from self._of_http()

    def _of_http(self) -> Iterator[Metric]:
        """What is counted before a model is known: under the name of the only one; a repository has no such name."""
        default = self.models.default if self.models.loader is None else None
        labels = ("" if default is None else default.name, ENGINE)
        name, what = "minillm:requests_refused", "Requests that were answered with an error, by HTTP status."
        family = CounterMetricFamily(name, what, labels=(*LABELS, "status"))
        for status, count in sorted(dict(self.num_refused).items()):
            family.add_metric((*labels, str(status)), count)
        yield family
        what = "How late the event loop comes to a timer."
        yield _histogram("minillm:event_loop_lag_seconds", what, self.loop_lag, labels)


class EngineMetrics:
    """What `/metrics` shows of one service."""

    def __init__(self, service: Service):
        self.service = service

    def collect(self) -> Iterator[Metric]:
        labels = (self.service.name, ENGINE)
        counters = self.service.engine.counters
        by_adapter = dict(counters.by_adapter)
        of_replicas = getattr(self.service.engine, "replica_metrics", None)  # of a fleet: chapter 22
        yield from self._state(labels) if of_replicas is None else of_replicas(self.service.name)
        yield _counter(
            "vllm:num_preemptions", "Requests that lost their blocks to others.", counters.num_preemptions, labels
        )
        yield _histogram("vllm:iteration_tokens_total", "Tokens that a step processes.", counters.step_tokens, labels)
        for name, attribute, what in COUNTERS:
            values = {adapter: getattr(one, attribute) for adapter, one in by_adapter.items()}
            yield _by_adapter(CounterMetricFamily(f"vllm:{name}", what, labels=(*LABELS, "adapter")), values, labels)
        yield _ended(by_adapter, labels)
        for name, attribute, what in HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", what, labels=(*LABELS, "adapter"))
            for adapter, one in by_adapter.items():
                _add_distribution(family, (*labels, adapter), getattr(one, attribute))
            yield family
        yield from self._speculation(labels)
        yield from self._adapters(by_adapter)
        yield self._cache_config()
        yield from self._gate(labels)

    def _state(self, labels: tuple[str, ...]) -> Iterator[Metric]:
        """How the engine stands now."""
        engine = self.service.llm.engine
        running, requests = len(engine.scheduler.running), len(engine.scheduler.requests)
        usage = engine.kv_cache.pool.usage
        yield _gauge("vllm:num_requests_running", "Requests in the batch.", running, labels)
        yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", max(0, requests - running), labels)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache's blocks that are owned; 1 is all.", usage, labels
        )
        yield _gauge("vllm:gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", usage, labels)

    def _speculation(self, labels: tuple[str, ...]) -> Iterator[Metric]:
        speculation = self.service.llm.engine.speculation
        if speculation is None:
            return
        of = speculation.metrics
        drafts = "Drafts that were verified."
        yield _counter("vllm:spec_decode_num_drafts", drafts, of.num_drafts, labels)
        yield _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", of.num_draft_tokens, labels)
        yield _counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", of.num_accepted_tokens, labels)
        name, what = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in the draft."
        family = CounterMetricFamily(name, what, labels=(*LABELS, "position"))
        for position, count in enumerate(list(of.accepted_per_position)):
            family.add_metric((*labels, str(position)), count)
        yield family

    def _adapters(self, by_adapter: Iterable[str]) -> Iterator[Metric]:
        """vLLM tells which adapters run and wait in the labels of a gauge whose value is the time."""
        config = self.service.llm.config
        max_loras = config.max_loras if config.enable_lora else None
        if max_loras is None and not any(by_adapter):
            return
        scheduler = self.service.llm.engine.scheduler
        running, requests = list(scheduler.running), list(scheduler.requests.values())
        is_running = {request.request_id for request in running}
        waiting = [request for request in requests if request.request_id not in is_running]
        names = ("model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of the requests under way.", labels=names)
        listed = [",".join(sorted({adapter_of(one) for one in some} - {""})) for some in (waiting, running)]
        family.add_metric((self.service.name, str(max_loras or 0), *listed), time.time())
        yield family

    def _cache_config(self) -> Metric:
        config, pool = self.service.llm.config, self.service.llm.engine.kv_cache.pool
        facts: dict[str, Any] = {
            "model_name": self.service.name,
            "block_size": config.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_gpu_blocks": pool.num_blocks,
            "engine": ENGINE,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache was made.", labels=tuple(facts))
        family.add_metric(tuple(map(str, facts.values())), 1)
        return family

    def _gate(self, labels: tuple[str, ...]) -> Iterator[Metric]:
        gate = self.service.gate
        what = "Prompts that were admitted and have not ended."
        yield _gauge("minillm:requests_admitted", what, gate.num_requests, labels)
        what = "Tokens that the admitted requests may still come to."
        yield _gauge("minillm:tokens_admitted", what, gate.num_tokens, labels)


async def watch_loop(lag: Distribution) -> None:
    """Note, until it is cancelled, how late the running event loop comes to a timer."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        lag.add(max(0.0, loop.time() - due))


def _gauge(name: str, what: str, value: float, labels: tuple[str, ...]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _counter(name: str, what: str, value: float, labels: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(name, what, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _by_adapter(family: Any, values: dict[str, float], labels: tuple[str, ...]) -> Metric:
    for adapter, value in values.items():
        family.add_metric((*labels, adapter), value)
    return family


def _ended(by_adapter: dict[str, AdapterCounters], labels: tuple[str, ...]) -> Metric:
    what = 'Samples that have ended, by how; "abort" where the client left.'
    family = CounterMetricFamily("vllm:request_success", what, labels=(*LABELS, "adapter", "finished_reason"))
    for adapter, counters in by_adapter.items():
        for reason in FINISHED_REASONS:
            family.add_metric((*labels, adapter, reason), counters.ended[reason])
    return family


def _histogram(name: str, what: str, distribution: Distribution, labels: tuple[str, ...]) -> Metric:
    family = HistogramMetricFamily(name, what, labels=LABELS)
    _add_distribution(family, labels, distribution)
    return family


def _add_distribution(family: HistogramMetricFamily, labels: tuple[str, ...], distribution: Distribution) -> None:
    buckets = distribution.metric(family.name).buckets
    family.add_metric(labels, [(limit, count) for limit, count in buckets.items()], distribution.total)
