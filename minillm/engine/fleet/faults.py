"""Failures of replicas in a simulated fleet. Built in chapter 22."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Replica number `replica` dies at `time`; `repair` seconds later a new one begins its cold start, or never."""

    time: float
    replica: int
    repair: float | None = 0.0


def random_failures(num_replicas: int, mean_seconds: float, until: float, seed: int = 0) -> list[Failure]:
    """One failure at most for each replica, after an exponential time with this mean; those before `until` seconds."""
    if not mean_seconds > 0:
        raise ValueError(f"mean_seconds={mean_seconds} is not allowed; it must be above 0")
    rng = random.Random(seed)
    times = [rng.expovariate(1 / mean_seconds) for _ in range(num_replicas)]
    return sorted((Failure(time, place) for place, time in enumerate(times) if time < until), key=lambda one: one.time)
