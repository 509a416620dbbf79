"""Project 2, route for a fleet: which replica takes the next request, on a virtual clock. Built in chapter 25.

    Arrival    the request that has to be routed: its length and the hashes of its full blocks
    Load       a replica: unfinished requests, their tokens, and how much of this prompt it has cached
    score      serves a trace with the simulated fleet of chapter 22; the value is a price in milliseconds

A submission is a class without arguments that has `pick(arrival, loads) -> index` into `loads`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from minillm.book.projects.scoring import Project, Refused, Score, called, is_int
from minillm.engine.fleet.costs import ReplicaSpec
from minillm.engine.fleet.simulation import FleetSimulation
from minillm.engine.fleet.synthetic import Sessions
from minillm.engine.fleet.traces import HASH_BLOCK, FleetRequest
from minillm.engine.routing import FleetView, RequestView
from minillm.engine.simulator import CostModel

NUM_REPLICAS = 12
SPEC = ReplicaSpec(CostModel(6.8e-3, 31e-6, 12e-6, 44e-9, 1.2e-9), num_kv_tokens=60_000, max_num_seqs=64)
PRICE = 0.5  # milliseconds of P99 that a gigabyte of computed keys and values is worth


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at the router. Two prompts share a prefix exactly as far as their `block_hashes` agree."""

    number: int  # in order of arrival, from 0
    prompt_tokens: int
    block_hashes: tuple[int, ...]  # one for each full block of 512 tokens


@dataclass(frozen=True, slots=True)
class Load:
    """A replica, as far as the router knows."""

    num_requests: int  # unfinished requests that it was given
    num_tokens: int  # of those: prompt tokens and the output tokens so far
    cached_tokens: int  # tokens at the head of this prompt that its prefix cache holds


class Baseline:
    """The package's `prefix_aware`, over all replicas: the fewest tokens to compute for this prompt, plus a quarter of
    the tokens of the requests that are there already; ties to the fewest tokens."""

    def pick(self, arrival: Arrival, loads: tuple[Load, ...]) -> int:
        def cost(index: int) -> tuple[float, int]:
            load = loads[index]
            return max(1, arrival.prompt_tokens - load.cached_tokens) + load.num_tokens / 4, load.num_tokens

        return min(range(len(loads)), key=cost)


def make_trace(seed: int, num_requests: int = 1500) -> Iterator[FleetRequest]:
    """Conversations over a few long system prompts, in waves: quiet, then a rush."""
    rng = random.Random(f"capstone router {seed}")
    sessions = Sessions(rng, reuse=0.8, num_system_prompts=6)
    now = 0.0
    for index in range(num_requests):
        rush = (index // 150) % 2
        now += rng.expovariate(120.0 if rush else 60.0)
        length = min(8_000, max(64, round(rng.lognormvariate(7.8, 0.7))))
        yield FleetRequest(now, length, rng.randint(16, 400), sessions.hash_ids(length))


def score(submission: type, seed: int = 0) -> Score:
    """Serve the trace of `seed`; the value is P99 of TTFT in ms, plus half a ms for each GB of computed KV.

    Raises Refused where `pick` raises, or returns something else than the index of a replica.
    """
    policy = Policy(called(f"{getattr(submission, '__name__', submission)}()", submission))
    report = FleetSimulation(SPEC, NUM_REPLICAS, policy).run(make_trace(seed))
    computed = (report.prompt_tokens - report.cached_tokens) * SPEC.kv_bytes
    p99 = report.percentile("ttft", 99) * 1e3
    figures = {
        "hit rate": round(report.hit_rate, 6),
        "P99 of TTFT (ms)": round(p99, 3),
        "mean TTFT (ms)": round(sum(report.ttft) / len(report.ttft) * 1e3, 3),
        "KV computed (GB)": round(computed / 1e9, 3),
        "requests": report.num_requests,
        "steps": report.num_steps,
    }
    return Score(round(p99 + PRICE * computed / 1e9, 6), figures)


class Policy:
    """Stands between the fleet and a submission: hands over copies, takes an index, and lets nothing else through."""

    def __init__(self, router):
        self.router, self.number = router, -1

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        self.number += 1
        # The fleet's own view of a request knows how long its answer will be; this one does not.
        arrival = Arrival(self.number, request.num_prompt_tokens, tuple(request.block_hashes))
        size = request.block_size
        loads = tuple(
            Load(one.num_requests, one.num_tokens, one.num_cached_blocks(arrival.block_hashes) * size)
            for one in replicas
        )
        picked = called(f"request {self.number}: pick", self.router.pick, arrival, loads)
        if not is_int(picked) or not 0 <= picked < len(loads):
            raise Refused(
                f"request {self.number}: pick returned {picked!r}; return the index of one of the {len(loads)} "
                f"replicas, from 0 to {len(loads) - 1}"
            )
        return replicas[picked].replica_id


assert HASH_BLOCK == 512  # as `Arrival` says

PROJECT = Project(
    name="router",
    defines="MyRouter",
    value="ms: P99 of TTFT, and half a ms for each GB of KV computed",
    more=False,
    seeds=(1, 2, 3),
    score=score,
    baseline=Baseline,
    imports={"minillm.book.projects.router": ("Arrival", "Load")},
)
