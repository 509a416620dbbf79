"""What each replica gets of its machine, and the arguments of its LLM. Built in chapter 22."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from minillm.engine.config import EngineConfig
from minillm.serving.replicas.config import FleetConfig
from minillm.serving.replicas.messages import Setup

if TYPE_CHECKING:
    from minillm.serving.replicas.fleet import Fleet
    from minillm.serving.replicas.members import Member


def arguments_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of an `LLM`: minillm's own, and vLLM's names for them."""
    given = {"model": "tinyworld"} | dict(given)
    names = {one.name for one in fields(EngineConfig)}
    own = {name: value for name, value in given.items() if name in names}
    return own, {name: value for name, value in given.items() if name not in names}


def threads_each(config: FleetConfig, on_gpu: bool) -> int | None:
    """Threads of each replica's steps: the cores of this machine, shared out among local replicas. None leaves the
    choice to the replica, which may be on another machine or compute on a GPU."""
    if config.num_threads is not None:
        return config.num_threads
    if on_gpu or config.backend != "local":
        return None
    return max(1, len(os.sched_getaffinity(0)) // config.most)


def setup_of(fleet: Fleet, member: Member) -> Setup:
    """How a replica of a fleet makes its engine."""
    on_own_gpu = fleet.on_gpu and fleet.fleet_config.backend == "local"  # Ray gives its actors theirs
    return Setup(
        fleet.arguments,
        fleet.fleet_id,
        fleet.kv_transport,
        fleet.secret,
        threads_each(fleet.fleet_config, fleet.on_gpu),
        cuda_device_of(member.number) if on_own_gpu else None,
    )


def cuda_device_of(number: int) -> int:
    """The GPU of local replica `number`: each in turn."""
    return number % max(1, torch.cuda.device_count())
