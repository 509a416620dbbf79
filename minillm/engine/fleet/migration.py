"""Which running requests to move to which replica, and what a move costs. Built in chapter 22.

Llumnix (Sun et al. 2024) balances by *freeness*: the free part of the memory, with what the head of the queue waits for
counted as used, for each request that runs. A request is moved from the replica with the least freeness to the one with
the most, while it goes on decoding: its keys and values are copied block by block, then what was written meanwhile, and
only the last, short copy stops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.engine.fleet.costs import Link
from minillm.engine.fleet.job import Job
from minillm.engine.fleet.replica import SimulatedReplica


@dataclass(frozen=True)
class Migration:
    """Settings of the moves: how often replicas are compared, and how far apart their freeness (tokens a request) has
    to be. `max_moves` bounds the requests that one replica sends or takes at a time."""

    interval: float = 1.0
    low: float = 1_000.0
    high: float = 4_000.0
    max_moves: int = 4

    def __post_init__(self):
        if not self.interval > 0 or not self.low <= self.high or self.max_moves < 1:
            raise ValueError(f"{self} is not allowed: interval above 0, low at most high, max_moves at least 1")


def freeness(replica: SimulatedReplica) -> float:
    """Free tokens for each running request, what the head of the queue needs counted as used; below 0 if it waits."""
    free = replica.pool.free
    if replica.waiting:
        free -= max(replica.waiting[0].num_tokens, free + 1)
    return free / max(1, len(replica.decoding))


def plan(replicas: Sequence[SimulatedReplica], settings: Migration) -> list[tuple[Job, SimulatedReplica]]:
    """Pairs of a request and the replica that it should move to."""
    ranked = sorted(
        ((freeness(replica), place, replica) for place, replica in enumerate(replicas)), key=lambda r: r[:2]
    )
    moves: list[tuple[Job, SimulatedReplica]] = []
    low, high = 0, len(ranked) - 1
    while low < high and ranked[low][0] < settings.low and ranked[high][0] > settings.high:
        source, target = ranked[low][2], ranked[high][2]
        room = target.pool.free // 2  # so that the target does not become the next source
        candidates = [job for job in source.decoding if job not in source.moving]
        for job in sorted(candidates, key=lambda job: job.num_tokens)[: settings.max_moves]:
            if job.num_tokens >= room:
                break
            room -= job.num_tokens
            moves.append((job, target))
        low, high = low + 1, high - 1
    return moves


def stages(num_tokens: int, kv_bytes: int, link: Link, step_seconds: float, max_stages: int = 8) -> list[int]:
    """Tokens that each stage of a live migration copies; the last stage stops the request.

    A stage copies what was written during the one before. It is the last when it would take no longer than a decode
    step, or when the stages no longer become shorter, or at `max_stages`.
    """
    copied: list[int] = []
    left = num_tokens
    while left > 0 and len(copied) < max_stages:
        copied.append(left)
        seconds = link.seconds(left * kv_bytes)
        written = int(seconds / step_seconds)
        if seconds <= step_seconds or written >= left:
            break
        left = max(1, written)
    return copied


def pause_seconds(num_tokens: int, kv_bytes: int, link: Link, step_seconds: float) -> tuple[float, float]:
    """(seconds until the last stage begins, seconds that the last stage stops the request for)."""
    *before, last = stages(num_tokens, kv_bytes, link, step_seconds)
    return sum(link.seconds(count * kv_bytes) for count in before), link.seconds(last * kv_bytes)
