"""Runs of the load generator: at each rate or concurrency, or in search of the largest rate. Built in chapter 24."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...engine.metrics import Targets
from ...engine.workload import TraceRequest
from ...sampling.noise import derive_seed
from .arrivals import arrival_times
from .client import Job, Report
from .lengths import PROFILES, Profile, num_shared_tokens, trace_of
from .outcome import Outcome
from .plan import Prompts
from .search import Found, drift, find_rate
from .summary import summarize, warnings_of
from .target import Target


@dataclass(frozen=True)
class Point:
    """One setting of the load. With a rate the loop is open: requests are sent at the times of the arrival process.
    Without one it is closed: each of `concurrency` clients sends its next request when its last one has ended. With
    both, a request whose time has come waits until less than `concurrency` are under way."""

    rate: float | None = None  # requests a second; inf sends all at once
    concurrency: int | None = None
    burstiness: float = 1.0  # 1 is Poisson, below 1 bursts, inf constant gaps

    def __post_init__(self):
        if self.rate is None and self.concurrency is None:
            raise ValueError("a point of load needs a rate (open loop), a concurrency (closed loop), or both")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate={self.rate} is not allowed; allowed: a number above 0, or inf")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} is not allowed; allowed: 1 or more")

    def __str__(self) -> str:
        clients = "" if self.concurrency is None else f"{self.concurrency} at once"
        return clients if self.rate is None else f"{self.rate:.4g}/s" + (clients and f", at most {clients}")


@dataclass(frozen=True)
class Workload:
    """What is sent at every point."""

    profile: Profile = PROFILES["fixed"]
    num_prompts: int = 64
    num_warmups: int = 4
    timeout: float = 600.0  # seconds until an answer must be complete
    seed: int = 0

    def __post_init__(self):
        if self.num_prompts < 1 or self.num_warmups < 0:
            raise ValueError(
                f"num_prompts={self.num_prompts} and num_warmups={self.num_warmups} are not allowed; "
                "allowed: 1 or more prompts, and 0 or more warm-ups"
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} is not allowed; allowed: seconds above 0")


@dataclass
class Run:
    """What was measured at one point."""

    point: Point
    report: Report
    figures: dict
    warnings: list[str]

    @property
    def outcomes(self) -> list[Outcome]:
        return self.report.outcomes

    def to_json(self) -> dict:
        return {
            "point": asdict(self.point),
            "figures": self.figures,
            "client": {"lag_seconds": self.report.lag, "cpu_share": self.report.cpu_share},
            "warnings": self.warnings,
            "outcomes": [one.to_json() for one in self.outcomes],
        }


class Generator:
    """Puts load on one target. Each run has prompts of its own, so that no run finds those of another in a cache."""

    def __init__(self, target: Target, prompts: Prompts, workload: Workload, targets: Targets | None = None):
        self.target, self.prompts, self.workload, self.targets = target, prompts, workload, targets
        self.num_runs = 0

    def run(
        self, point: Point, on_done: Callable[[int], object] = lambda count: None, num_prompts: int | None = None
    ) -> Run:
        """Measure one point of the profile's load, with the workload's number of requests or another one."""
        workload = self.workload
        seed = self._next_seed()
        times = [0.0] * (num_prompts or workload.num_prompts)
        if point.rate is not None:
            times = arrival_times(len(times), point.rate, point.burstiness, seed)
        trace = trace_of(workload.profile, times, seed, self.target.max_model_len)
        return self._measure(point, trace, point.rate is None, 1.0, on_done)

    def replay(
        self, trace: Sequence[TraceRequest], speed: float = 1.0, on_done: Callable[[int], object] = lambda count: None
    ) -> Run:
        """Measure a recorded trace, `speed` times as fast as it was."""
        if not trace or not speed > 0:
            raise ValueError(f"speed={speed} and {len(trace)} requests are not allowed; allowed: above 0, and some")
        self._next_seed()
        span = max(trace[-1].timestamp, 1e-9) / speed
        return self._measure(Point(rate=len(trace) / span), trace, False, 1 / speed, on_done)

    def find(
        self,
        start: float,
        least_attainment: float = 0.9,
        precision: float = 0.1,
        on_run: Callable[[Run], object] = lambda run: None,
        seconds: float = 10.0,
    ) -> tuple[Found, list[Run]]:
        """The largest Poisson rate at which at least this share of the requests keeps the targets, and every run of
        the search. Requests arrive for at least `seconds` at every rate: a queue that grows takes time to show."""
        runs: list[Run] = []

        def holds(rate: float) -> bool:
            runs.append(self.run(Point(rate), num_prompts=max(self.workload.num_prompts, math.ceil(rate * seconds))))
            on_run(runs[-1])
            return runs[-1].figures["attainment"] >= least_attainment

        return find_rate(holds, start, precision), runs

    def _next_seed(self) -> int:
        self.num_runs += 1
        return derive_seed(self.workload.seed, self.num_runs) % 10**6

    def _measure(
        self,
        point: Point,
        trace: Sequence[TraceRequest],
        is_closed_loop: bool,
        time_scale: float,
        on_done: Callable[[int], object],
    ) -> Run:
        workload = self.workload
        first = replace(workload.profile, prefix_length=0)
        warmups = trace_of(first, [0.0] * workload.num_warmups, 10**6 + self.num_runs, self.target.max_model_len)
        job = Job(
            self.target.endpoint(self.prompts.chat),
            self.prompts.sends(trace, is_closed_loop, time_scale),
            self.prompts.sends(warmups, True),
            point.concurrency,
            self.target.headers,
            workload.timeout,
        )
        report = drive(job, on_done)
        figures = summarize(report.outcomes, self.targets)
        complete = sorted((one for one in report.outcomes if one.is_complete), key=lambda one: one.intended)
        figures["ttft_drift"] = drift([one.ttft for one in complete])
        planned = [one.output_length for one in trace]
        shared = num_shared_tokens(trace)
        return Run(point, report, figures, warnings_of(figures, report.lag, planned, report.outcomes, shared))


def drive(job: Job, on_done: Callable[[int], object] = lambda count: None) -> Report:
    """Run the client in a process of its own, and wait for it; works inside a notebook too. Raises RuntimeError, with
    its last words, where it fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "minillm.bench.load.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        message: dict[str, Any] = {}
        try:
            json.dump(asdict(job), process.stdin)
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "done" in message:
                    on_done(message["done"])
            process.wait()
        except BrokenPipeError:
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if "outcomes" not in message:
            errors.seek(0)
            raise RuntimeError(f"the load generator failed: {' '.join(errors.read().split())[-500:]}")
    return Report([Outcome.from_json(one) for one in message["outcomes"]], message["lag"], message["cpu_share"])
