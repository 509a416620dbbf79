"""What `/metrics` shows of each replica of a fleet. Built in chapter 22.

The label `engine` is the replica's id, in the place where vLLM has the number of a data-parallel engine. Requests,
tokens and latencies are counted by the front, for all replicas together, as for a single engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from minillm.serving.replicas.members import State
from minillm.serving.replicas.messages import Report

if TYPE_CHECKING:
    from minillm.serving.replicas.fleet import Fleet

LABELS = ("model_name", "engine")
GAUGES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the batch.", lambda report: report.num_running),
    ("vllm:num_requests_waiting", "Requests in the queue.", lambda report: report.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks that are owned.", lambda r: r.kv_cache_usage),
    ("minillm:replica_step_seconds", "A running mean of a step's time.", lambda report: report.step_seconds),
)
COUNTERS: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("minillm:replica_steps", "Steps of the engine since its start.", lambda report: report.num_steps),
    ("minillm:replica_generation_tokens", "Tokens generated since its start.", lambda r: r.num_generated_tokens),
    ("minillm:replica_prompt_tokens_computed", "Prompt tokens computed.", lambda r: r.num_computed_tokens),
    ("minillm:replica_prompt_tokens_cached", "Prompt tokens found in its cache.", lambda r: r.num_cached_tokens),
    ("vllm:num_preemptions", "Requests that lost their blocks to others.", lambda r: r.num_preemptions),
)


def replica_metrics(fleet: Fleet, model_name: str) -> Iterator[Metric]:
    """In any thread. A counter begins again at 0 when a replica's process was started again."""
    members = list(fleet.members)
    reports = [(member.replica_id, member.report) for member in members if member.report is not None]
    for family, told in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, what, value in told:
            metric = family(name, what, labels=LABELS)
            for replica_id, report in reports:
                metric.add_metric((model_name, replica_id), value(report))
            yield metric
    up = GaugeMetricFamily("minillm:replica_up", "1 while the replica takes requests.", labels=(*LABELS, "role"))
    blocks = GaugeMetricFamily("minillm:replica_cached_blocks", "Blocks that it reported as cached.", labels=LABELS)
    for member in members:
        up.add_metric((model_name, member.replica_id, member.role), member.state is State.READY)
        view = fleet.router.view_of(member.replica_id)
        if member.replica_id in view:
            blocks.add_metric((model_name, member.replica_id), len(view.get(member.replica_id).blocks))
    yield from (up, blocks)
    for name, what, count in (
        (
            "minillm:replica_restarts",
            "Processes that were started in the place of dead ones.",
            fleet.members.num_restarts,
        ),
        ("minillm:failovers", "Samples that went on elsewhere when their replica died.", fleet.router.num_failovers),
        ("minillm:migrations", "Samples that moved with their keys and values.", fleet.router.num_moves),
        ("minillm:kv_bytes_moved", "Bytes of keys and values sent.", fleet.migrations.num_bytes),
    ):
        metric = CounterMetricFamily(name, what, labels=("model_name",))
        metric.add_metric((model_name,), count)
        yield metric
