"""The options of `minillm serve` for many replicas. Built in chapter 22."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Replicas = Annotated[int, typer.Option(min=1, help="Processes that each have an engine; requests are shared out.")]
RouterPolicy = Annotated[str, typer.Option(help="round_robin, random, least_tokens, power_of_two or prefix_aware.")]
PrefillReplicas = Annotated[
    int, typer.Option(min=0, help="Of the replicas, how many compute prompts alone; the others then decode alone.")
]
Autoscaler = Annotated[str | None, typer.Option(help="queue or deadline: change the number of replicas with the load.")]
MinReplicas = Annotated[int | None, typer.Option(min=1, help="With --autoscaler.")]
MaxReplicas = Annotated[int | None, typer.Option(min=1, help="With --autoscaler.")]
Ray = Annotated[bool, typer.Option("--ray", help="Replicas are Ray actors; without it, processes of this machine.")]
RayAddress = Annotated[
    str | None, typer.Option(help="Of a running Ray cluster, or auto to find it; by default Ray is started here.")
]
KVTransport = Annotated[str, typer.Option(help="auto, shm or tcp: how keys and values move between replicas.")]


@contextmanager
def serving_engine(model: str, options: dict[str, Any], fleet: dict[str, Any]) -> Iterator[Any]:
    """One engine in this process, or a fleet of replicas where `fleet` asks for any."""
    from ..engine.async_llm import AsyncLLM
    from ..engine.llm import LLM

    ray, ray_address = fleet.pop("ray"), fleet.pop("ray_address")
    is_fleet = ray or ray_address is not None or fleet["replicas"] > 1 or fleet["autoscaler"] is not None
    if not is_fleet and fleet["prefill_replicas"]:
        raise ValueError(f"--prefill-replicas {fleet['prefill_replicas']} needs --replicas of more")
    if is_fleet:
        from ..serving.replicas.config import FleetConfig
        from ..serving.replicas.fleet import Fleet

        backend = "ray" if ray or ray_address is not None else "local"
        engine: AsyncLLM = Fleet(
            {"model": model} | options, FleetConfig(backend=backend, ray_address=ray_address, **fleet)
        )
    else:
        engine = AsyncLLM(LLM(model, **options))
    try:
        yield engine
    finally:
        engine.shutdown()
