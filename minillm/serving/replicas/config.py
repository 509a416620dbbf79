"""FleetConfig: how many replicas there are, and how requests are shared among them. Built in chapter 22."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.engine.routing import RouterPolicy, make_router_policy
from minillm.engine.scaling import AutoscalerPolicy, make_autoscaler

BACKENDS = ("local", "ray")
KV_TRANSPORTS = ("auto", "shm", "tcp")
# Arguments of an LLM that replicas do not serve, and why.
REFUSED = {
    "enable_lora": "adapters are loaded into one engine; serve the merged model, or one server per adapter",
}


@dataclass(frozen=True)
class FleetConfig:
    """Raises ValueError or TypeError naming the field, the value and what is allowed."""

    replicas: int = 2  # at the start
    router_policy: str | RouterPolicy = "prefix_aware"
    prefill_replicas: int = 0  # of these, how many compute prompts alone; the others then decode alone
    autoscaler: str | AutoscalerPolicy | None = None  # "queue", "deadline", or an object with `desired`
    min_replicas: int | None = None  # None: `replicas`
    max_replicas: int | None = None
    backend: str = "local"
    ray_address: str | None = None  # of a running cluster, "auto" finds it; None starts one on this machine
    kv_transport: str = "auto"  # "shm" between processes of one machine, "tcp" between machines
    num_threads: int | None = None  # of each replica on a CPU; None: the cores, shared out
    start_seconds: float = 300.0  # until a replica is ready
    hang_seconds: float = 60.0  # without a word from a replica, after which it is killed
    max_failed_starts: int = 3  # of one replica, one after the other, until it is given up

    def __post_init__(self):
        for name, least in (("replicas", 1), ("prefill_replicas", 0), ("max_failed_starts", 1)):
            self._check_count(name, getattr(self, name), least)
        for name in ("min_replicas", "max_replicas", "num_threads"):
            if getattr(self, name) is not None:
                self._check_count(name, getattr(self, name), 1)
        if not self.least <= self.replicas <= self.most:
            raise ValueError(
                f"replicas={self.replicas} is not between min_replicas={self.least} and max_replicas={self.most}"
            )
        if self.prefill_replicas >= self.replicas and self.prefill_replicas:
            raise ValueError(
                f"prefill_replicas={self.prefill_replicas} leaves none of replicas={self.replicas} to decode; "
                f"allowed: 0 to {self.replicas - 1}"
            )
        if self.autoscaler is not None and self.prefill_replicas:
            raise ValueError(
                f"autoscaler={self.autoscaler!r} scales replicas that do both; leave out prefill_replicas, or it"
            )
        if self.autoscaler is None and (self.least, self.most) != (self.replicas, self.replicas):
            raise ValueError("min_replicas and max_replicas need an autoscaler: 'queue', 'deadline' or your own")
        for name, allowed in (("backend", BACKENDS), ("kv_transport", KV_TRANSPORTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {', '.join(allowed)}")
        if self.ray_address is not None and self.backend != "ray":
            raise ValueError(f"ray_address={self.ray_address!r} needs backend='ray'")
        for name in ("start_seconds", "hang_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: over 0")
        make_router_policy(self.router_policy)
        make_autoscaler(self.autoscaler)

    @property
    def least(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    def role(self, number: int) -> str:
        """What replica `number` does: "both", "prefill" or "decode"."""
        if not self.prefill_replicas:
            return "both"
        return "prefill" if number < self.prefill_replicas else "decode"

    def _check_count(self, name: str, value: Any, least: int) -> None:
        if type(value) is not int:
            raise TypeError(f"{name}={value!r} is not allowed; allowed: a whole number from {least} on")
        if value < least:
            raise ValueError(f"{name}={value} is not allowed; allowed: {least} or more")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for an argument of `LLM` that a fleet does not serve."""
    for name, why in REFUSED.items():
        if arguments.get(name):
            raise NotImplementedError(f"{name}={arguments[name]!r} is not served by replicas: {why}")
