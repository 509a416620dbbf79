"""`minillm bench fleet-sim`: a thousand replicas, the coarse model's error, the papers' ratios. Built in chapter 22."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from ...engine.fleet.costs import H100_8B, ReplicaSpec
from ...engine.fleet.exact import exact_fleet
from ...engine.fleet.faults import random_failures
from ...engine.fleet.report import FleetReport
from ...engine.fleet.simulation import FleetSimulation
from ...engine.fleet.synthetic import mooncake_like, plain_trace
from ..record import Record
from .papers import PAPERS

PARTS = ("scale", "check", "papers")


@dataclass(frozen=True)
class Workload:
    """`requests` and `replicas` are those of the large run; `rate` is in requests/s for each replica."""

    requests: int = 1_000_000
    replicas: int = 1_000
    rate: float = 0.6
    kind: str = "conversation"
    policies: tuple[str, ...] = ("power_of_two", "prefix_aware")
    parts: tuple[str, ...] = PARTS
    papers: tuple[str, ...] = tuple(PAPERS)

    def __post_init__(self):
        for name, known in (("parts", PARTS), ("papers", tuple(PAPERS))):
            if unknown := set(getattr(self, name)) - set(known):
                raise ValueError(f"{name}={', '.join(sorted(unknown))} is unknown; choose from {', '.join(known)}")
        if self.requests < 1 or self.replicas < 1 or not self.rate > 0:
            raise ValueError(
                f"requests={self.requests}, replicas={self.replicas}, rate={self.rate} are not allowed; "
                f"all of them must be above 0"
            )

    @property
    def name(self) -> str:
        """Of the result: a run of some parts does not replace that of others."""
        parts = () if self.parts == PARTS else self.parts
        policies = () if self.policies == Workload.policies or "scale" not in self.parts else self.policies
        return "-".join(("fleet-sim", *parts, *policies)).replace("_", "-")


def num_cases(workload: Workload) -> int:
    """How many times `on_run` is called."""
    count = {"scale": len(workload.policies), "check": len(CHECKS), "papers": len(workload.papers)}
    return sum(count[part] for part in workload.parts)


def run(
    workload: Workload,
    command: str = "minillm bench fleet-sim",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """All parts; see the module. Times are those of one core: the simulation has one thread."""
    record = Record(workload.name, command, torch.device("cpu"), asdict(workload), keep)
    if "scale" in workload.parts:
        record.figures["scale"] = {}
        for policy in workload.policies:
            with record.case(f"scale, {policy}"):
                record.figures["scale"][policy] = scale(workload, policy)
            on_run(policy)
    if "check" in workload.parts:
        record.figures["check"] = {}
        for name in CHECKS:
            with record.case(f"check, {name}"):
                record.figures["check"][name] = check(name)
            on_run(name)
    if "papers" in workload.parts:
        record.figures["papers"] = {}
        for name in workload.papers:
            with record.case(name):
                record.figures["papers"][name] = PAPERS[name]()
            on_run(name)
    return record.finish()


def scale(workload: Workload, policy: str) -> dict:
    """The large run: seconds that it took, and what the fleet did. One replica in a hundred fails in it."""
    duration = workload.requests / (workload.rate * workload.replicas)
    failures = random_failures(workload.replicas, 100 * duration, duration, seed=7)
    fleet = FleetSimulation(H100_8B, workload.replicas, policy, failures=failures)
    trace = mooncake_like(workload.kind, workload.requests, workload.rate * workload.replicas, seed=6)
    started, cpu_started = time.perf_counter(), time.process_time()
    gc.disable()  # a million requests make no cycles, and the collector would look for some all the time
    try:
        report = fleet.run(trace)
    finally:
        gc.enable()
    return {
        "seconds_to_simulate": time.perf_counter() - started,
        "cpu_seconds_to_simulate": time.process_time() - cpu_started,
        "simulated_seconds": report.seconds,
        "num_events": report.num_events,
        "num_steps": report.num_steps,
        "num_failures": len(failures),
        **report.summary(),
    }


def _small(spec: ReplicaSpec = H100_8B, **changes) -> ReplicaSpec:
    return replace(spec, **changes)


CHECKS: dict[str, tuple[ReplicaSpec, int, str, Callable]] = {
    # name: (replica, number of replicas, policy, trace)
    "light load": (_small(), 4, "round_robin", lambda: plain_trace(300, 20, 400, 60, spread=0.8, seed=1)),
    "heavy load": (
        _small(max_num_batched_tokens=1024, max_num_seqs=64),
        4,
        "round_robin",
        lambda: plain_trace(400, 60, 600, 80, spread=0.8, seed=2),
    ),
    "small memory": (
        _small(num_kv_tokens=5_000, max_num_batched_tokens=512),
        4,
        "round_robin",
        lambda: plain_trace(300, 40, 300, 150, spread=0.7, seed=3, longest=4_000),
    ),
    "shared prefixes": (
        _small(num_kv_tokens=60_000, max_num_batched_tokens=2048, kv_block=512),
        4,
        "round_robin",
        lambda: mooncake_like("conversation", 300, 12, seed=4, scale=0.2),
    ),
    "two choices": (
        _small(max_num_seqs=32),
        4,
        "power_of_two",
        lambda: plain_trace(400, 60, 500, 80, spread=0.8, seed=5),
    ),
}


def check(name: str) -> dict:
    """The coarse model beside the real scheduler in every replica: the same trace, figure by figure."""
    spec, num_replicas, policy, trace = CHECKS[name]
    requests = list(trace())
    started = time.perf_counter()
    exact = exact_fleet(spec, num_replicas, policy, requests)
    between = time.perf_counter()
    coarse = FleetSimulation(spec, num_replicas, policy).run(requests)
    done = time.perf_counter()
    errors = _errors(coarse, exact)
    return {
        "num_requests": len(requests),
        "errors": errors,
        "hit_rates": [exact.hit_rate, coarse.hit_rate],
        "num_preemptions": [exact.num_preemptions, coarse.num_preemptions],
        "seconds": [between - started, done - between],
        "speedup": (between - started) / (done - between),
    }


def _errors(coarse: FleetReport, exact: FleetReport) -> dict[str, float]:
    """Relative errors of the coarse model."""
    figures = {f"{what} P{q}": (what, q) for what in ("ttft", "tpot", "e2e") for q in (50, 99)}
    return {name: coarse.percentile(*key) / exact.percentile(*key) - 1 for name, key in figures.items()} | {
        "seconds": coarse.seconds / exact.seconds - 1
    }


NEAREST = {"queue sizes": "least tokens", "TBT": "TPOT"}  # what is simulated in place of what a paper reports


def tables(measured: dict) -> list:
    """For the command line."""
    from rich.table import Table

    figures, made = measured["figures"], []
    if "scale" in figures:
        w = measured["workload"]
        title = f"{w['replicas']:,} replicas, {w['requests']:,} requests like Mooncake's {w['kind']} trace"
        table = Table("router", "to simulate, CPU s", "simulated, s", "TTFT P99, s", "hit rate", "resumed", title=title)
        for policy, run in figures["scale"].items():
            table.add_row(
                policy,
                f"{run['cpu_seconds_to_simulate']:.0f}",
                f"{run['simulated_seconds']:,.0f}",
                f"{run['ttft_p99_seconds']:.2f}",
                f"{run['hit_rate']:.1%}",
                str(run["num_resumed"]),
            )
        made.append(table)
    if "check" in figures:
        table = Table("coarse against exact", "largest error", "of", "times as fast", title="the coarse model's error")
        for name, run in figures["check"].items():
            worst = max(run["errors"], key=lambda what: abs(run["errors"][what]))
            table.add_row(name, f"{run['errors'][worst]:+.1%}", worst, f"{run['speedup']:.0f}")
        made.append(table)
    if "papers" in figures:
        table = Table("paper", "figure", "reported", "simulated", title="what papers report, and what is simulated")
        for name, paper in figures["papers"].items():
            found = {"ratios": paper.get("ratios")} | paper["found"]
            for what, told in paper["reported"].items():
                ours = what
                for theirs, nearest in NEAREST.items():
                    ours = ours.replace(theirs, nearest)
                shown = what if ours == what or ours not in found else f"{what} (simulated: {ours})"
                table.add_row(name, shown, _short(told), _short(found.get(ours)))
        made.append(table)
    return made


def _short(told: float | list[float] | str | None) -> str:
    """A number, a range of them, or what a paper says in words; a dash where nothing was simulated."""
    if isinstance(told, list):
        return " to ".join(map(_short, told))
    return "–" if told is None else told if isinstance(told, str) else f"{told:.3g}"
