"""RayWorkers: the workers of an LLM as Ray actors, on one machine or on a cluster. Built in chapter 20.

    send("execute", output)    pickled once into Ray's object store, read by every actor
    wait                       the leader's StepResult, or every rank's answer

The actors hold the same `Worker` as the processes of `WorkerGroup`; Ray says where they are, starts them and notices
when one dies. An actor that is stopped does not answer a call of its own, `beat`, and is named after some seconds.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from minillm.engine.distributed.group import WorkerError
from minillm.engine.distributed.process import EXECUTE, FATAL, failure
from minillm.engine.distributed.worker import Worker
from minillm.parallel.layout import Layout

POLL, BEAT_SECONDS = 0.5, 3.0
_clusters: set[int] = set()  # groups that use a cluster which this process has started


class RayRank:
    """What an actor does: the calls of one rank, in their order, and a heartbeat beside them."""

    def __init__(self):
        self.launched: deque[Any] = deque()
        self.doing = "starts"

    def where(self) -> tuple[str, int]:
        """A free port of the machine that this rank is on, and its process id."""
        import ray

        with socket.socket() as sock:
            sock.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{sock.getsockname()[1]}", os.getpid()

    def start(self, settings: bytes) -> None:
        self.worker = Worker(pickle.loads(settings))

    def call(self, message: tuple[str, tuple[Any, ...]]) -> tuple[str, Any]:
        """("ok", answer), or ("raised", error), or ("failed" or "lost", what is told of it)."""
        method, args = message
        self.doing = f"does {method}"
        try:
            if method == EXECUTE:
                return "ok", self._execute(*args)
            while self.launched:
                self.launched.popleft().wait()
            return "ok", getattr(self.worker, method)(*args)
        except Exception as error:
            return failure(error) if method in FATAL else ("raised", error)
        finally:
            self.doing = "waits for a step"

    def beat(self) -> str:
        return self.doing

    def _execute(self, output: Any) -> Any:
        self.launched.append(self.worker.runner.launch(output))
        leads = self.worker.layout.rank == self.worker.layout.leader
        result = None
        while len(self.launched) > (0 if leads else self.worker.depth):
            result = self.launched.popleft().wait()
        return result if leads else None


class RayWorkers:
    """As `WorkerGroup`, over Ray. Joins the cluster that RAY_ADDRESS or `ray.init` names, or starts one on this
    machine, which ends with the last group that uses it. Each actor has a GPU of its own where `on_gpu`."""

    def __init__(self, sizes: tuple[int, int], settings_of: Callable[[Layout, str], Any], on_gpu: bool = False):
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "distributed_executor_backend='ray' needs Ray: pip install 'minillm-book[scale]'", name=error.name
            ) from None
        self.ray = ray
        self.layouts = [Layout(*sizes, rank) for rank in range(sizes[0] * sizes[1])]
        self.leader = self.layouts[0].leader
        self.lock, self.error = threading.RLock(), None
        self.actors: list[Any] = []
        self._number, self._answers = 0, dict[int, list[Any]]()
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
            _clusters.add(0)  # the cluster itself
        if _clusters:
            _clusters.add(id(self.actors))
        self._end = weakref.finalize(self, _end, ray, self.actors, os.getpid())
        try:
            kind = ray.remote(num_cpus=0, num_gpus=int(on_gpu), max_restarts=0, concurrency_groups={"health": 1})
            rank_of = kind(_with_health(ray))
            self.actors += [rank_of.remote() for _ in self.layouts]
            places = ray.get([actor.where.remote() for actor in self.actors])
            self.pids = [pid for _, pid in places]
            for layout, actor in zip(self.layouts, self.actors):
                ray.get(actor.start.remote(pickle.dumps(settings_of(layout, places[0][0]))))
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def send(self, method: str, *args: Any) -> int:
        """As `WorkerGroup.send`."""
        with self.lock:
            self.check()
            message = self.ray.put((method, args))
            self._number += 1
            self._answers[self._number] = [actor.call.remote(message) for actor in self.actors]
            return self._number

    def wait(self, number: int, ranks: Sequence[int] | None = None) -> list[Any]:
        """As `WorkerGroup.wait`."""
        with self.lock:
            refs = self._answers.pop(number)
            wanted = range(len(refs)) if ranks is None else ranks
            missing = {refs[rank]: rank for rank in wanted}
            answers: dict[int, Any] = {}
            while missing:
                self.check()
                ready, _ = self.ray.wait(list(missing), num_returns=1, timeout=POLL)
                for ref in ready:
                    rank = missing.pop(ref)
                    answers[rank] = self._answer(rank, ref)
                    if answers[rank][0] in ("failed", "lost"):
                        self._fail_with(*self._culprit(refs))
                if not ready:
                    self._look()
        for kind, value in answers.values():
            if kind == "raised":
                raise value
        return [answers[rank][1] for rank in wanted]

    def call(self, method: str, *args: Any) -> list[Any]:
        """`send`, then `wait` for every rank."""
        with self.lock:
            return self.wait(self.send(method, *args))

    def check(self) -> None:
        """Raise when the group has ended."""
        if self.error is not None:
            raise self.error
        if not self.is_open:
            raise RuntimeError("the workers were ended; make a new LLM")

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._end()

    def _answer(self, rank: int, ref: Any) -> tuple[str, Any]:
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            return "failed", (f"{type(error).__name__}", str(error))

    def _culprit(self, refs: list[Any]) -> tuple[int, str, str]:
        """A rank that died, else one that raised an error, else one that lost its connection to another."""
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=POLL)
        found = {rank: self._answer(rank, ref) for rank, ref in enumerate(refs) if ref in ready}
        dead = [rank for rank, (kind, value) in found.items() if kind == "failed" and "Died" in value[0]]
        for rank in dead:
            return rank, "exit", "died: " + found[rank][1][1].splitlines()[0]
        for wanted in ("failed", "lost"):
            for rank, (kind, value) in found.items():
                if kind == wanted:
                    return (
                        rank,
                        value[0],
                        f"raised {value[0]}" if kind == "failed" else f"lost another rank: {value[0]}",
                    )
        return self.leader, "unknown", "failed"

    def _look(self) -> None:
        """Raise for an actor that does not answer, or is gone."""
        refs = [actor.beat.remote() for actor in self.actors]
        ready, silent = self.ray.wait(refs, num_returns=len(refs), timeout=BEAT_SECONDS)
        for rank, ref in enumerate(refs):
            if ref in silent:
                self._fail_with(rank, "silence", f"gave no sign of life for {BEAT_SECONDS} s")
        for rank, ref in enumerate(refs):
            if ref in ready and isinstance(answer := self._answer(rank, ref), tuple) and answer[0] == "failed":
                self._fail_with(rank, "exit", "died: " + answer[1][1].splitlines()[0])

    def _fail_with(self, rank: int, cause: str, told: str) -> None:
        self.error = WorkerError(
            f"the worker of {self.layouts[rank]} (Ray actor, pid {self.pids[rank]}) {told}. "
            "The other workers were ended with it: make a new LLM",
            rank, self.pids[rank], cause,
        )  # fmt: skip
        self.close()
        raise self.error


def _with_health(ray: Any) -> type[RayRank]:
    """`RayRank` with its heartbeat in a thread of its own."""
    return type("RayRank", (RayRank,), {"beat": ray.method(concurrency_group="health")(RayRank.beat)})


def _end(ray: Any, actors: list[Any], owner: int) -> None:
    if os.getpid() != owner or not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor, no_restart=True)
    if _clusters:
        _clusters.discard(id(actors))
        if _clusters == {0}:
            _clusters.clear()
            ray.shutdown()
