"""What a simulated fleet did: latencies, hits, bytes, replica hours. Built in chapter 22."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from minillm.engine.fleet.job import Job


@dataclass
class FleetReport:
    """Filled request by request, so that a million of them need no more than some arrays. Times in seconds."""

    num_requests: int = 0
    num_refused: int = 0  # larger than a replica's whole cache
    num_preemptions: int = 0
    num_moves: int = 0  # live migrations
    num_resumed: int = 0  # requests that went on after a failure of their replica
    recomputed_tokens: int = 0  # tokens that were computed again for them
    kv_bytes_moved: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    replica_seconds: float = 0.0  # ordered replicas, starting ones included
    busy_seconds: float = 0.0
    seconds: float = 0.0  # from the first arrival to the last token
    num_events: int = 0
    num_steps: int = 0
    arrivals: array = field(default_factory=lambda: array("d"))
    ttft: array = field(default_factory=lambda: array("d"))
    tpot: array = field(default_factory=lambda: array("d"))
    e2e: array = field(default_factory=lambda: array("d"))
    pauses: array = field(default_factory=lambda: array("d"))  # of the requests that moved or lost their replica
    replicas_over_time: list[tuple[float, int]] = field(default_factory=list)

    def add(self, job: Job) -> None:
        """A finished request."""
        self.num_requests += 1
        self.num_preemptions += job.num_preemptions
        self.prompt_tokens += job.prompt_length
        self.cached_tokens += job.cached
        self.output_tokens += job.output_length
        self.seconds = max(self.seconds, job.finished)
        self.arrivals.append(job.arrival)
        self.ttft.append(job.first_token - job.arrival)
        self.e2e.append(job.finished - job.arrival)
        self.tpot.append((job.finished - job.first_token) / max(1, job.output_length - 1))
        if job.paused:
            self.pauses.append(job.paused)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that a prefix cache had."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def utilization(self) -> float:
        """Share of the replicas' time in which a step ran."""
        return self.busy_seconds / self.replica_seconds if self.replica_seconds else 0.0

    def percentile(self, what: str, q: float) -> float:
        """Of "ttft", "tpot", "e2e" or "pauses", in seconds. Raises ValueError where there is no value."""
        values = getattr(self, what)
        if not len(values):
            raise ValueError(f"no request has a {what}; {self.num_requests} requests have finished")
        return float(np.percentile(np.frombuffer(values), q))

    def attainment(self, ttft: float | None = None, tpot: float | None = None) -> float:
        """Share of the requests, refused ones included, that met every target."""
        total = self.num_requests + self.num_refused
        if not total:
            raise ValueError("no request has finished")
        met = np.ones(self.num_requests, dtype=bool)
        for target, values in ((ttft, self.ttft), (tpot, self.tpot)):
            if target is not None:
                met &= np.frombuffer(values) <= target if len(values) else False
        return float(met.sum()) / total

    def summary(self) -> dict[str, float]:
        """The figures that benchmarks save."""
        latencies = {
            f"{what}_{name}_seconds": self.percentile(what, q)
            for what in ("ttft", "tpot", "e2e")
            for name, q in (("p50", 50), ("p90", 90), ("p99", 99))
        }
        return {
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
            "requests_per_second": self.num_requests / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            "hit_rate": self.hit_rate,
            "utilization": self.utilization,
            "num_preemptions": self.num_preemptions,
            "num_moves": self.num_moves,
            "num_resumed": self.num_resumed,
            "kv_bytes_moved": self.kv_bytes_moved,
            "ttft_mean_seconds": float(np.mean(np.frombuffer(self.ttft))),
            **latencies,
        }
