"""Autoscaling: how many replicas a fleet should have, as pure policies. Built in chapter 22.

    FleetLoad     what is known at one moment
    desired       (FleetLoad) -> a number of replicas

A policy reads no clock: the moment is a field of the load. So the same object scales a live fleet and a simulated one.
Scaling up is at once, since requests wait; scaling down only when fewer would have done for `hold_seconds`, since a
new replica costs a cold start.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """A fleet at one moment; `now` in seconds on any clock that does not go back."""

    now: float
    num_replicas: int  # that take requests, or are about to
    num_requests: int  # under way and waiting
    num_waiting_tokens: int = 0  # of prompts that have no token yet
    prefill_tokens_per_second: float = 0.0  # of one replica, as measured; 0 while nothing was measured


class AutoscalerPolicy(Protocol):
    def desired(self, load: FleetLoad) -> int:
        """How many replicas there should be; the fleet keeps it between its own limits."""


class Steady:
    """Lets a wish for fewer replicas pass only when it has lasted `hold_seconds`: the most that was wished for in that
    time counts."""

    def __init__(self, hold_seconds: float):
        if not hold_seconds >= 0:
            raise ValueError(f"hold_seconds={hold_seconds} is not allowed; it is a number of seconds from 0 on")
        self.hold_seconds = hold_seconds
        self._wished: deque[tuple[float, int]] = deque()  # (moment, replicas), each fewer than the one before

    def add(self, now: float, wish: int) -> int:
        while self._wished and self._wished[-1][1] <= wish:
            self._wished.pop()
        self._wished.append((now, wish))
        while self._wished[0][0] < now - self.hold_seconds:
            self._wished.popleft()
        return self._wished[0][1]


class QueueAutoscaler:
    """So many replicas that each has at most `requests_per_replica` requests."""

    def __init__(self, requests_per_replica: float = 8.0, hold_seconds: float = 30.0):
        if not requests_per_replica > 0:
            raise ValueError(f"requests_per_replica={requests_per_replica} is not allowed; it is a number over 0")
        self.requests_per_replica = requests_per_replica
        self._steady = Steady(hold_seconds)

    def desired(self, load: FleetLoad) -> int:
        return self._steady.add(load.now, math.ceil(load.num_requests / self.requests_per_replica))


class DeadlineAutoscaler:
    """So many replicas that a prompt that arrives now has its first token within `ttft_seconds`.

    It waits for the prompts before it, shared by all replicas: waiting tokens / (replicas × rate). Until a rate is
    measured, the number of replicas stays as it is.
    """

    def __init__(self, ttft_seconds: float = 1.0, hold_seconds: float = 30.0):
        if not ttft_seconds > 0:
            raise ValueError(f"ttft_seconds={ttft_seconds} is not allowed; it is a number of seconds over 0")
        self.ttft_seconds = ttft_seconds
        self._steady = Steady(hold_seconds)

    def desired(self, load: FleetLoad) -> int:
        if not load.prefill_tokens_per_second:
            return self._steady.add(load.now, load.num_replicas)
        in_time = load.prefill_tokens_per_second * self.ttft_seconds  # tokens that one replica computes by then
        wish = math.ceil(load.num_waiting_tokens / in_time)
        return self._steady.add(load.now, max(wish, 1 if load.num_requests else 0))


AUTOSCALERS = {"queue": QueueAutoscaler, "deadline": DeadlineAutoscaler}


def make_autoscaler(policy: str | AutoscalerPolicy | None) -> AutoscalerPolicy | None:
    """A policy by name, or an object of your own with `desired`. Raises ValueError naming the policies there are."""
    if policy is None or callable(getattr(policy, "desired", None)):
        return policy
    if policy not in AUTOSCALERS:
        raise ValueError(
            f"autoscaler={policy!r} is not known; choose from {', '.join(sorted(AUTOSCALERS))}, "
            f"or pass an object with desired(load) -> a number of replicas"
        )
    return AUTOSCALERS[policy]()
