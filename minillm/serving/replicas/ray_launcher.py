"""RayLauncher: each replica is a Ray actor, on this machine or anywhere in a cluster. Built in chapter 22.

Ray places the process where CPUs and GPUs are free, sets CUDA_VISIBLE_DEVICES, and ends it with the cluster. What the
process does is the same as without Ray (`minillm.serving.replicas.replica`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

START_SECONDS = 120.0  # until an actor is placed


class Actor:
    """What runs in the actor's process."""

    def __init__(self, address: tuple[str, int], secret: bytes, replica_id: str, generation: int):
        self.arguments = (tuple(address), secret, replica_id, generation, time.monotonic())

    def start(self) -> int:
        """Serve in a thread, so that Ray can reach the actor meanwhile; returns the process id."""
        import os

        from minillm.serving.replicas.replica import run_replica

        threading.Thread(target=run_replica, args=self.arguments, name="replica").start()
        return os.getpid()


class RayLauncher:
    """Starts Ray, or joins the cluster at `address`. Each actor has `num_cpus` and `num_gpus` to itself."""

    def __init__(self, address: str | None = None, num_gpus: float = 0, num_cpus: float = 1):
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            local = {} if address is not None else {"include_dashboard": False}
            ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
        self.host = ray.util.get_node_ip_address() if address is not None else "127.0.0.1"
        self.resources = {"num_gpus": num_gpus, "num_cpus": num_cpus}
        self._is_closed = False

    def prepare(self, arguments: Mapping[str, Any]) -> None:
        """Each actor loads the model from its own machine's files."""

    def start(self, address: tuple[str, int], secret: bytes, replica_id: str, generation: int) -> ActorProcess:
        """Raises RuntimeError if the cluster has no room."""
        handle = ray.remote(Actor).options(**self.resources).remote(address, secret, replica_id, generation)
        try:
            return ActorProcess(handle, ray.get(handle.start.remote(), timeout=START_SECONDS))
        except Exception as error:
            with suppress(Exception):
                ray.kill(handle)
            raise RuntimeError(f"Ray cannot place replica {replica_id} with {self.resources}: {error}") from error

    def close(self) -> None:
        if not self._is_closed and self.owns_ray:
            ray.shutdown()
        self._is_closed = True


class ActorProcess:
    """A Ray actor's process."""

    def __init__(self, handle: Any, pid: int):
        self.handle, self.pid = handle, pid
        self._is_killed = False
        self._asked = handle.__ray_ready__.remote()  # a question that is answered, or fails with the actor

    def is_alive(self) -> bool:
        """Waits for nothing: an actor that has just died may still count as alive for a moment."""
        if self._is_killed:
            return False
        if ray.wait([self._asked], timeout=0)[0]:
            try:
                ray.get(self._asked)
            except Exception:
                return False
            self._asked = self.handle.__ray_ready__.remote()
        return True

    def kill(self) -> None:
        self._is_killed = True
        with suppress(Exception):
            ray.kill(self.handle, no_restart=True)
