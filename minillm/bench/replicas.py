"""A fleet of replicas: failover, migration, router policies, and what a cold start takes. Built in chapter 22.

    cold start    a process of its own, a fork of the zygote, and the first token with and without blocks on disk
    failover      replicas are killed (SIGKILL) while they stream: how long a stream pauses; no token lost or doubled
    migration     a request moves with its keys and values, or computes them again: pause and bytes by context length
    routing       the hit rate and the time to first token by router policy, on prompts with shared beginnings

Every token is compared with those of one engine, in float32; a difference is an error and not a figure.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import LLM, SamplingParams
from ..engine.routing import POLICIES, make_router_policy
from ..serving.replicas.config import FleetConfig
from ..serving.replicas.fleet import Fleet
from ..serving.replicas.members import Member, State
from .record import Record

PARTS = ("cold start", "failover", "migration", "routing")
PATIENCE = 120.0  # seconds
MOST_STREAMS = 400  # that end before their replica is killed, until the measurement is given up


@dataclass(frozen=True)
class Workload:
    model: str = "tinyworld"
    replicas: int = 2
    kills: int = 20
    streams: int = 4  # at once, during the kills
    moves: int = 10  # of each kind and context length
    contexts: tuple[int, ...] = (128, 256, 512, 768)  # tokens
    prefixes: int = 12
    prefix_tokens: int = 256
    requests: int = 96
    transports: tuple[str, ...] = ("shm", "tcp")
    seed: int = 0
    parts: tuple[str, ...] = PARTS

    def __post_init__(self):
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"{unknown[0]!r} is no part of this benchmark; parts: {', '.join(PARTS)}")

    @property
    def arguments(self) -> dict[str, Any]:
        return {"model": self.model, "dtype": "float32", "device": "cpu", "num_kv_blocks": 400, "max_num_seqs": 32}


def run(
    workload: Workload = Workload(),
    command: str = "minillm bench fleet",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` on this machine's CPU; a result for `measure.save`. Raises RuntimeError for a wrong token."""
    name = f"fleet-{workload.model}" + ("" if workload.parts == PARTS else "-" + "-".join(workload.parts))
    record = Record(name.replace(" ", "-"), command, torch.device("cpu"), asdict(workload), keep)
    measures = {"cold start": _cold_start, "failover": _failover, "migration": _migration, "routing": _routing}
    for part in workload.parts:
        with record.case(part):
            record.figures[part] = measures[part](workload)
        on_run(part)
    return record.finish()


class Heard(threading.Thread):
    """Reads a stream, with the time of each token."""

    def __init__(self, stream: Any):
        super().__init__(daemon=True)
        self.stream, self.times, self.token_ids = stream, [], []
        self.start()

    def run(self) -> None:
        for delta in self.stream:
            self.token_ids += delta.token_ids
            self.times += [time.monotonic()] * len(delta.token_ids)

    def longest_gap(self) -> float:
        return max(later - sooner for sooner, later in zip(self.times, self.times[1:]))

    def mean_interval(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def check(llm: LLM, heard: Heard) -> None:
    """Raise RuntimeError unless these are the tokens of one engine, each of them once."""
    heard.join(PATIENCE)
    request = heard.stream.sink.request
    params = request.params.clone()
    params.seed = request.seed
    [wanted] = llm.generate({"prompt_token_ids": request.prompt_token_ids}, params, use_tqdm=False)
    if heard.is_alive() or heard.token_ids != wanted.outputs[0].token_ids:
        raise RuntimeError(f"{len(heard.token_ids)} tokens of the fleet are not those of one engine")


def _random_prompt(workload: Workload, length: int, number: int) -> dict[str, list[int]]:
    rng = random.Random(f"{workload.seed} {number}")
    return {"prompt_token_ids": [rng.randrange(4, 800) for _ in range(length)]}


def _cold_start(workload: Workload) -> dict[str, Any]:
    """Seconds until an engine is ready, and until its first token."""
    code = f"from minillm import LLM; LLM(**{workload.arguments!r})"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    alone, prompt = time.monotonic() - start, _random_prompt(workload, 768, 0)
    params, ttft = SamplingParams(temperature=0, max_tokens=2), {}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"disk_kv_path": folder, "disk_kv_bytes": 2**28, "host_kv_bytes": 2**26}
        for name, more in (("nothing cached", {}), ("to disk", disk), ("blocks on disk", disk)):
            with Fleet(workload.arguments | more, FleetConfig(replicas=1)) as fleet:
                fleet.submit([5, 6, 7], params).output(PATIENCE)  # its first step, whatever it is of
                ttft[name] = fleet.submit(prompt, params).output(PATIENCE).metrics.ttft
                first = next(iter(fleet.members))
                zygote, first_seconds = dict(fleet.launcher.seconds), first.start_seconds
                if name == "nothing cached":
                    more_seconds = [_restart_seconds(fleet, first) for _ in range(5)]
                    memory = _memory(first.process.pid)
    del ttft["to disk"]
    return {
        "process_of_its_own_seconds": alone,
        "first_replica_seconds": first_seconds,
        "of_which_zygote": zygote,
        "next_replica_seconds": statistics.median(more_seconds),
        "replica_memory_mib": memory,
        "ttft_seconds_768_tokens": ttft,
    }


def _restart_seconds(fleet: Fleet, member: Member) -> float:
    """How long a replica takes until it is ready, where the zygote is there."""
    generation = member.generation
    fleet.kill(member.replica_id)
    _wait(lambda: member.generation > generation and member.state is State.READY)
    return member.start_seconds


def _memory(pid: int) -> dict[str, float]:
    """MiB of a process: all that it has mapped, and what no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {"resident": found["Rss"], "private": found["Private_Clean"] + found["Private_Dirty"]}


def _failover(workload: Workload) -> dict[str, Any]:
    rng, llm, kinds = (
        random.Random(workload.seed),
        LLM(**workload.arguments),
        ({"temperature": 0.0}, {"temperature": 0.8}),
    )
    pauses, usual, num_tokens, kills, number = [], [], 0, 0, 0
    with Fleet(workload.arguments, FleetConfig(replicas=workload.replicas, num_threads=1)) as fleet:
        while kills < workload.kills or not fleet.router.num_failovers:  # a stream may end as its replica is killed
            if number >= MOST_STREAMS + workload.kills * workload.streams:
                raise RuntimeError(f"no stream was interrupted by any of {kills} kills")
            heard = []
            for kind in (kinds * workload.streams)[: workload.streams]:
                params = SamplingParams(**kind, ignore_eos=True, max_tokens=256)
                heard.append(Heard(fleet.submit(_random_prompt(workload, 64, number), params)))
                number += 1
            failed_over, reached = set(), [0] * len(heard)
            while any(one.is_alive() for one in heard):
                time.sleep(rng.uniform(0.02, 0.15))
                flights = list(fleet.router.by_request.values())
                gone_on = all(len(one.token_ids) > before or not one.is_alive() for one, before in zip(heard, reached))
                more = kills < workload.kills or not fleet.router.num_failovers
                if more and flights and gone_on:  # else a stream might see nothing but deaths
                    victim = rng.choice(flights).replica_id
                    if fleet.replicas.get(victim) == "ready":
                        failed_over |= {one.request.request_id for one in flights if one.replica_id == victim}
                        reached = [len(one.token_ids) for one in heard]
                        fleet.kill(victim)
                        kills += 1
            for one in heard:
                check(llm, one)
                num_tokens += len(one.token_ids)
                usual.append(one.mean_interval())
                if one.stream.sink.request.request_id in failed_over:
                    pauses.append(one.longest_gap())
            fleet.wait_until_ready(timeout=PATIENCE)
        failovers = fleet.router.num_failovers
    return {
        "kills": kills,
        "failovers": failovers,
        "streams": number,
        "tokens_checked": num_tokens,
        "tokens_lost_or_doubled": 0,  # `check` raises otherwise
        "pause_seconds": {"median": statistics.median(pauses), "longest": max(pauses)},
        "token_interval_seconds": statistics.median(usual),
    }


def _migration(workload: Workload) -> dict[str, Any]:
    """Pauses by context length: with the keys and values moved, over each transport, and with all computed again."""
    llm, figures = LLM(**workload.arguments), {}
    for transport in workload.transports:
        config = FleetConfig(replicas=2, num_threads=1, kv_transport=transport)
        with Fleet(workload.arguments, config) as fleet:
            for context in workload.contexts:
                for recompute in (False, True) if transport == workload.transports[0] else (False,):
                    kind = "recomputed" if recompute else transport
                    figures[f"{kind}, {context} tokens"] = _moves(workload, fleet, llm, context, recompute)
    return figures


def _moves(workload: Workload, fleet: Fleet, llm: LLM, context: int, recompute: bool) -> dict[str, float]:
    moves, intervals, number = [], [], context
    for _ in range(20 * workload.moves):
        number += 1
        params = SamplingParams(temperature=0.7, seed=number, ignore_eos=True, max_tokens=96)
        fleet.clear_prefix_caches()
        before = len(fleet.migrations.moves)
        heard = Heard(fleet.submit(_random_prompt(workload, context, number), params))
        _wait(lambda heard=heard: len(heard.token_ids) > 8)
        here = fleet.where(heard.stream)
        if here is not None:
            fleet.migrate(heard.stream, "r1" if here == "r0" else "r0", recompute=recompute)
        check(llm, heard)
        intervals.append(heard.mean_interval())
        moves += list(fleet.migrations.moves)[before:]
        if len(moves) >= workload.moves:
            break
    step = statistics.median(intervals)
    pause = statistics.median(move.pause_seconds for move in moves)
    return {
        "pause_seconds": pause,
        "pause_in_token_intervals": pause / step,
        "destination_steps_most": max(move.num_steps for move in moves),
        "took_in": sum(move.took_in for move in moves),
        "moves": len(moves),
        "bytes": statistics.median(move.num_bytes for move in moves),
        "token_interval_seconds": step,
    }


def _routing(workload: Workload) -> dict[str, Any]:
    """Each replica's cache holds a part of the prefixes, so where a request goes decides what has to be computed."""
    blocks_of_all = workload.prefixes * (workload.prefix_tokens // 16 + 4)
    figures: dict[str, Any] = {}
    for replicas in (2, 4):
        small = workload.arguments | {"num_kv_blocks": max(80, blocks_of_all * 3 // (2 * replicas))}
        with Fleet(small, FleetConfig(replicas=replicas, num_threads=1)) as fleet:
            for name in POLICIES:
                figures[f"{name}, {replicas} replicas"] = _route(workload, fleet, name)
    return figures


def _route(workload: Workload, fleet: Fleet, policy: str) -> dict[str, float]:
    fleet.clear_prefix_caches()
    fleet.router.policy = make_router_policy(policy)
    rng, params = random.Random(workload.seed), SamplingParams(temperature=0, max_tokens=4)
    prefixes = [_random_prompt(workload, workload.prefix_tokens, -1 - number) for number in range(workload.prefixes)]
    outputs, streams = [], []
    for number in range(workload.requests):
        own = _random_prompt(workload, 32, number)["prompt_token_ids"]
        streams.append(fleet.submit({"prompt_token_ids": rng.choice(prefixes)["prompt_token_ids"] + own}, params))
        if len(streams) == 2:
            outputs += [stream.output(PATIENCE) for stream in streams]
            streams = []
    ttfts = sorted(output.metrics.ttft for output in outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "hit_rate": sum(output.num_cached_tokens for output in outputs) / prompt,
        "ttft_seconds_median": statistics.median(ttfts),
        "ttft_seconds_p99": ttfts[int(0.99 * (len(ttfts) - 1))],
    }


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the fleet has not come so far within {PATIENCE:g} s")
        time.sleep(0.001)
