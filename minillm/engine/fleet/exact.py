"""The same fleet with the real scheduler in every replica, step by step. Built in chapter 22.

It is what the coarse `SimulatedReplica` is checked against: chapter 09's simulated engine, that is the scheduler and
the cache manager that serve, on one virtual clock for each replica. It takes some sixty times as long.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.engine.engine import Engine
from minillm.engine.fleet.costs import ReplicaSpec
from minillm.engine.fleet.job import Job
from minillm.engine.fleet.report import FleetReport
from minillm.engine.fleet.traces import FleetRequest
from minillm.engine.routing import FleetView, RequestView, RouterPolicy, make_router_policy
from minillm.engine.simulator import simulated_engine


def exact_fleet(
    spec: ReplicaSpec, num_replicas: int, policy: str | RouterPolicy, trace: Iterable[FleetRequest]
) -> FleetReport:
    """Serve the trace. The policy sees loads, and no blocks."""
    policy = make_router_policy(policy)
    engines = {
        f"replica-{number}": simulated_engine(
            spec.cost,
            spec.num_kv_tokens // spec.kv_block,
            spec.kv_block,
            enable_prefix_caching=spec.enable_prefix_caching,
            enable_chunked_prefill=spec.enable_chunked_prefill,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
        )
        for number in range(num_replicas)
    }
    view, report = FleetView(engines), FleetReport()
    requests = []
    for index, one in enumerate(trace):
        for name, engine in engines.items():
            _run(name, engine, view, one.timestamp)
        name = policy.pick(RequestView(str(index), one.input_length, (), one.block_size, one.output_length), view)
        request = one.to_request(index)
        requests.append(request)
        engines[name].clock.wait_until(one.timestamp)
        engines[name].add_request(request)
        view.started(name, one.input_length)
    for name, engine in engines.items():
        _run(name, engine, view, float("inf"))
    for index, request in enumerate(requests):
        job = Job(index, request.arrival_time, request.num_prompt_tokens, len(request.token_times))
        job.first_token, job.finished = request.token_times[0], request.token_times[-1]
        job.cached, job.num_preemptions = request.num_cached_tokens, request.num_preemptions
        report.add(job)
    return report


def _run(name: str, engine: Engine, view: FleetView, until: float) -> None:
    """Step an engine to the first boundary from `until` on."""
    while engine.has_unfinished and engine.clock() < until:
        before = list(engine.scheduler.requests.values())
        counts = [len(request.output_token_ids) for request in before]
        engine.step()
        view.generated(name, sum(len(one.output_token_ids) for one in before) - sum(counts))
        for request in before:
            if request.is_finished:
                view.finished(name, len(request.token_ids))
