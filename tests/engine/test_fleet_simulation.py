"""The simulated fleet: the coarse replica is the scheduler, nothing is lost, and each event does what it says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from minillm.engine.fleet.costs import H100_8B, LLAMA_13B, Link, ReplicaSpec, roofline
from minillm.engine.fleet.exact import exact_fleet
from minillm.engine.fleet.faults import Failure, random_failures
from minillm.engine.fleet.migration import Migration, pause_seconds, stages
from minillm.engine.fleet.simulation import FleetSimulation
from minillm.engine.fleet.synthetic import mooncake_like, plain_trace, shared_prefix_trace
from minillm.engine.fleet.traces import FleetRequest
from minillm.engine.routing import POLICIES
from minillm.engine.scaling import QueueAutoscaler
from minillm.engine.simulator import CostModel

FLAT = CostModel(per_step=5e-3, per_prefill_token=2e-5, per_decode=2e-5)  # a chunk of one token costs as a decode does


def run(spec: ReplicaSpec, num_replicas: int, trace, policy="round_robin", **settings):
    return FleetSimulation(spec, num_replicas, policy, **settings).run(trace)


@pytest.mark.parametrize("seed", range(6))
def test_with_enough_memory_the_coarse_replica_is_the_scheduler(seed):
    """Every latency of every request, whatever the limits are."""
    rng = random.Random(seed)
    spec = ReplicaSpec(
        FLAT,
        num_kv_tokens=400_000,
        max_num_seqs=rng.choice([3, 16, 256]),
        max_num_batched_tokens=rng.choice([64, 300, 4096]),
        enable_prefix_caching=False,
    )
    rate = rng.choice([3, 15, 60])
    trace = list(plain_trace(60, rate, rng.choice([40, 300]), rng.choice([1, 30]), spread=0.9, seed=seed))
    coarse, exact = run(spec, 2, trace), exact_fleet(spec, 2, "round_robin", trace)
    assert sorted(coarse.ttft) == pytest.approx(sorted(exact.ttft), rel=1e-9)
    assert sorted(coarse.e2e) == pytest.approx(sorted(exact.e2e), rel=1e-9)
    assert coarse.num_steps > coarse.num_events > 0 and coarse.num_preemptions == 0


@pytest.mark.parametrize("seed", range(3))
def test_costs_that_grow_with_the_context_are_summed_in_closed_form(seed):
    cost = CostModel(6e-3, 3e-5, 3e-5, per_decode_context=5e-8, per_prefill_pair=0.0)
    spec = ReplicaSpec(cost, num_kv_tokens=400_000, max_num_batched_tokens=4096, enable_prefix_caching=False)
    trace = list(plain_trace(50, 12, 500, 60, spread=0.8, seed=seed))
    coarse, exact = run(spec, 1, trace), exact_fleet(spec, 1, "round_robin", trace)
    assert sorted(coarse.e2e) == pytest.approx(sorted(exact.e2e), rel=1e-9)


def test_prefix_hits_and_preemptions_are_close_to_the_schedulers():
    spec = replace(H100_8B, num_kv_tokens=6_000, max_num_batched_tokens=512)
    trace = list(plain_trace(150, 30, 300, 150, spread=0.7, seed=3, longest=4_000))
    coarse, exact = run(spec, 2, trace), exact_fleet(spec, 2, "round_robin", trace)
    assert exact.num_preemptions > 10 and coarse.num_preemptions == pytest.approx(exact.num_preemptions, rel=0.35)
    assert coarse.seconds == pytest.approx(exact.seconds, rel=0.05)
    assert coarse.percentile("ttft", 99) == pytest.approx(exact.percentile("ttft", 99), rel=0.1)
    spec = replace(H100_8B, num_kv_tokens=40_000, kv_block=512)
    trace = list(mooncake_like("conversation", 120, 8, seed=4, scale=0.15))
    coarse, exact = run(spec, 2, trace), exact_fleet(spec, 2, "round_robin", trace)
    assert exact.hit_rate > 0.05 and coarse.hit_rate == pytest.approx(exact.hit_rate, abs=0.02)
    assert coarse.percentile("e2e", 50) == pytest.approx(exact.percentile("e2e", 50), rel=0.03)


@pytest.mark.parametrize("seed", range(12))
def test_random_fleets_serve_every_request_once_and_give_everything_back(seed):
    """Routers, small memories, failures, migration, two kinds of replicas, autoscaling: all drawn at random. The
    simulation itself raises where memory or load is not given back."""
    rng = random.Random(seed)
    count, num_replicas = 150, rng.randint(2, 6)
    spec = replace(
        H100_8B,
        num_kv_tokens=rng.choice([6_000, 30_000, 377_024]),
        max_num_seqs=rng.choice([4, 64]),
        max_num_batched_tokens=rng.choice([128, 2048]),
        enable_chunked_prefill=rng.random() < 0.7,
        enable_prefix_caching=rng.random() < 0.8,
        cold_start=rng.choice([0.5, 5.0]),
    )
    settings = {
        "policy": rng.choice(sorted(POLICIES)),
        "link": Link(rng.choice([1e9, 1e11]), layers=rng.choice([1, 32])),
    }
    settings["failures"] = [
        Failure(one.time, one.replica, rng.choice([0.0, 1.0]))
        for one in random_failures(num_replicas, rng.choice([3.0, 1e9]), 6.0, seed)
    ]
    if rng.random() < 0.5:
        settings["migration"] = Migration(interval=0.2, low=500, high=500)
    if rng.random() < 0.4:
        settings["num_prefill"] = rng.randint(1, num_replicas - 1)
    elif rng.random() < 0.5:
        settings |= {
            "autoscaler": rng.choice([QueueAutoscaler(6.0, 3.0), "deadline"]),
            "max_replicas": 8,
            "scale_interval": 1.0,
        }
    trace = list(mooncake_like(rng.choice(["conversation", "synthetic"]), count, 25, seed=seed, scale=0.03))
    report = run(spec, num_replicas, trace, **settings)
    assert report.num_requests + report.num_refused == count
    fits = [one for one in trace if one.input_length + one.output_length + 16 <= spec.num_kv_tokens]
    assert report.output_tokens == sum(one.output_length for one in fits) and report.num_requests == len(fits)
    assert min(report.ttft) > 0 and all(e2e >= ttft for e2e, ttft in zip(report.e2e, report.ttft))
    assert 0 <= report.hit_rate < 1 and 0 < report.utilization <= 1
    again = run(spec, num_replicas, trace, **settings | {"autoscaler": None})
    assert "autoscaler" in settings or list(again.e2e) == list(report.e2e), "the same settings, another result"


def test_prefill_and_decode_apart_moves_each_prompt_once():
    trace = list(plain_trace(80, 20, 400, 40, spread=0.5, seed=1))
    apart = run(H100_8B, 3, trace, num_prefill=1, link=Link(25e9, latency=0.002))
    assert apart.kv_bytes_moved == sum(one.input_length for one in trace) * H100_8B.kv_bytes
    whole, layered = (
        run(H100_8B, 3, trace, num_prefill=1, link=Link(1e9, latency=0.002, layers=layers)) for layers in (1, 36)
    )
    assert layered.percentile("e2e", 50) < whole.percentile("e2e", 50)
    assert sorted(layered.ttft) == pytest.approx(sorted(whole.ttft))
    single = list(plain_trace(20, 20, 400, 1, seed=1))
    assert run(H100_8B, 3, single, num_prefill=1).kv_bytes_moved == 0  # the first token was the last


def test_a_failure_costs_time_and_no_token():
    trace = [FleetRequest(0.0, 500, 400) for _ in range(8)]
    calm = run(H100_8B, 2, trace)
    hurt = run(H100_8B, 2, trace, failures=[Failure(2.0, 0)])
    assert hurt.num_resumed == 4 and hurt.num_requests == 8 and len(hurt.pauses) == 4
    assert sorted(hurt.ttft) == pytest.approx(sorted(calm.ttft))  # the first tokens had come
    assert 4 * 500 < hurt.recomputed_tokens < 4 * 900
    assert 0 < max(hurt.pauses) < 0.5 < max(hurt.e2e) - max(calm.e2e) + 0.5
    alone = run(replace(H100_8B, cold_start=7.0), 1, trace, failures=[Failure(2.0, 0, repair=1.0)])
    assert min(alone.pauses) > 8.0  # nobody else takes them: repair and cold start
    with pytest.raises(RuntimeError, match="8 requests are left and no replica takes them"):
        run(H100_8B, 1, trace, failures=[Failure(1.0, 0, repair=None)])
    with pytest.raises(RuntimeError, match="8 requests are left"):
        run(H100_8B, 1, trace, failures=[Failure(1.0, 0, repair=None)], migration=Migration())


def test_live_migration_empties_a_crowded_replica():
    """All requests come to one replica; the others take some over while they decode, and pause for less than a step."""

    class First:
        def pick(self, request, replicas):
            return replicas[0].replica_id

    spec = roofline(LLAMA_13B, "A100", 80e9, max_num_batched_tokens=2048)
    trace = list(plain_trace(120, 30, 300, 300, spread=0.6, seed=1))
    settings = {"migration": Migration(interval=0.5, low=2_000, high=2_000), "link": Link(16e9, latency=1e-3)}
    alone, moved = run(spec, 3, trace, First()), run(spec, 3, trace, First(), **settings)
    assert moved.num_moves > 20 and moved.percentile("e2e", 99) < alone.percentile("e2e", 99)
    step = spec.decode_seconds(64, 64 * 600)
    assert moved.percentile("pauses", 50) < 2 * step


def test_stages_of_a_migration_shrink_until_the_last_takes_no_longer_than_a_step():
    link = Link(10e9, latency=1e-3)
    copied = stages(8_000, 819_200, link, 0.02)
    assert copied[0] == 8_000 and copied == sorted(copied, reverse=True)
    assert link.seconds(copied[-1] * 819_200) <= 0.02
    before, stopped = pause_seconds(8_000, 819_200, link, 0.02)
    assert stopped < 0.02 < before and before == pytest.approx(sum(link.seconds(n * 819_200) for n in copied[:-1]))
    assert len(stages(100, 819_200, Link(1e6, 0.0), 0.001)) <= 8  # slower than decoding: it gives up
    assert stages(1, 1, link, 1.0) == [1]


def test_an_autoscaler_pays_for_cold_starts_and_saves_replica_hours():
    spec = replace(H100_8B, cold_start=20.0)
    trace = [*plain_trace(300, 3, 500, 200, seed=1)]
    last = trace[-1].timestamp
    trace += [replace(one, timestamp=one.timestamp + last) for one in plain_trace(1500, 30, 500, 200, seed=2)]
    fixed = run(spec, 8, trace, "least_tokens")
    scaler = QueueAutoscaler(requests_per_replica=16, hold_seconds=30)
    scaled = run(spec, 1, trace, "least_tokens", autoscaler=scaler, max_replicas=8, scale_interval=5.0)
    assert scaled.replica_seconds < 0.7 * fixed.replica_seconds
    assert scaled.percentile("ttft", 99) >= fixed.percentile("ttft", 99)
    counts = [count for _, count in scaled.replicas_over_time]
    assert min(counts) == 1 and 2 <= max(counts) <= 8
    with pytest.raises(ValueError, match="min_replicas=3, max_replicas=2"):
        FleetSimulation(spec, 2, autoscaler="queue", min_replicas=3)
    with pytest.raises(ValueError, match="autoscaler='magic' is not known"):
        FleetSimulation(spec, 2, autoscaler="magic")


def test_the_live_routers_policies_find_the_prefixes():
    trace = list(shared_prefix_trace(400, 40, 60, 8, 200, 30, skew=0.3, seed=2))
    spec = replace(H100_8B, num_kv_tokens=100_000)
    hits = {policy: run(spec, 4, trace, policy).hit_rate for policy in POLICIES}
    assert hits["prefix_aware"] > 1.5 * max(hits[policy] for policy in ("round_robin", "random", "least_tokens"))
    with pytest.raises(ValueError, match="router_policy='best' is not known"):
        FleetSimulation(H100_8B, 2, "best")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: FleetSimulation(H100_8B, 0), "num_replicas=0"),
        (lambda: FleetSimulation(H100_8B, 2, num_prefill=2), "num_prefill=2"),
        (lambda: FleetSimulation(H100_8B, 3, num_prefill=1, autoscaler="queue"), "replicas of one kind"),
        (lambda: FleetSimulation(H100_8B, 2, failures=[Failure(1.0, 5)]), "replica=5"),
        (lambda: replace(H100_8B, max_num_seqs=0), "max_num_seqs=0 is not allowed"),
        (lambda: replace(H100_8B, cold_start=-1), "cold_start=-1"),
        (lambda: Link(bandwidth=0), "bandwidth"),
        (lambda: Migration(interval=0), "interval"),
        (lambda: random_failures(2, 0, 1), "mean_seconds=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_an_empty_trace_has_no_percentiles():
    report = run(H100_8B, 2, [])
    with pytest.raises(ValueError, match="no request has a ttft"):
        report.percentile("ttft", 50)
    with pytest.raises(ValueError, match="no request has finished"):
        report.attainment(ttft=1.0)
