"""Scaler: applies an autoscaler's wish to a fleet. Built in chapter 22. All methods belong to the engine thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from minillm.engine.scaling import AutoscalerPolicy, FleetLoad
from minillm.serving.replicas.members import Member, State

if TYPE_CHECKING:
    from minillm.serving.replicas.fleet import Fleet

KEEP = 0.9  # of the fastest prefill seen so far, each second without a faster one


class Scaler:
    """Starts and drains replicas between the limits of the fleet's configuration; none by itself without a policy."""

    def __init__(self, fleet: Fleet, policy: AutoscalerPolicy | None):
        self.fleet, self.policy = fleet, policy
        self.prefill_rate = 0.0  # tokens a second of one replica
        self._computed: dict[str, tuple[float, int]] = {}  # of each replica: when, and its prompt tokens until then

    def tick(self) -> None:
        """Look at the replicas and at the load, and change the number of replicas if the policy says so."""
        now, config = time.monotonic(), self.fleet.fleet_config
        self.fleet.members.check(now, config.start_seconds, config.hang_seconds)
        self.end_drained()
        if self.policy is None:
            return
        self._measure(now)
        wish = self.policy.desired(self.load(now))
        self.scale(min(config.most, max(config.least, wish)))

    def load(self, now: float) -> FleetLoad:
        flights = list(self.fleet.router.by_request.values())
        waiting = sum(one.request.num_prompt_tokens for one in flights if not one.request.output_token_ids)
        return FleetLoad(now, len(self._present()), len(flights), waiting, self.prefill_rate)

    def scale(self, replicas: int) -> None:
        """Start replicas, or drain the least loaded ones, until there are so many."""
        fleet, present = self.fleet, self._present()
        numbers = (number for number in range(10**9) if f"r{number}" not in fleet.members.by_id)
        for _ in range(replicas - len(present)):
            number = next(numbers)
            fleet.members.add(number, "decode" if fleet.fleet_config.prefill_replicas else "both")
        by_load = sorted(present, key=self._load_of)
        if fleet.fleet_config.prefill_replicas:
            by_load = [member for member in by_load if member.role == "decode"][1:]  # one has to stay
        for member in by_load[: max(0, len(present) - replicas)]:
            fleet.members.drain(member)
        self.end_drained()

    def end_drained(self) -> None:
        """End the replicas that drain and have no flight any more."""
        members = self.fleet.members
        for member in members.in_state(State.DRAINING):
            if next(self.fleet.router.on(member.replica_id), None) is None:
                members.end(member)
        for member in members.in_state(State.GONE):
            if member.process is None or not member.process.is_alive():
                members.by_id.pop(member.replica_id, None)

    def _present(self) -> list[Member]:
        return self.fleet.members.in_state(State.STARTING, State.READY)

    def _load_of(self, member: Member) -> tuple[bool, int]:
        return member.state is State.READY, sum(1 for _ in self.fleet.router.on(member.replica_id))

    def _measure(self, now: float) -> None:
        """The fastest prefill that a replica was seen at lately."""
        for member in self.fleet.members.in_state(State.READY):
            if member.report is None:
                continue
            computed = member.report.num_computed_tokens
            before, seen = self._computed.get(member.replica_id, (now, computed))
            if computed != seen or member.replica_id not in self._computed:
                self._computed[member.replica_id] = (now, computed)
            if computed > seen and now > before:
                rate = (computed - seen) / max(now - before, 0.2)
                self.prefill_rate = max(rate, self.prefill_rate * KEEP)
