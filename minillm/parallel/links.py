"""Links between ranks: tensors are sent and received, and every message and byte is counted. Built in chapter 20.

A rank is one of the `world_size` workers that compute together. `Link` is all that a collective needs. A `ThreadLink`
connects the threads of one process, for tests and for reading; it notices at once when no rank can go on. A
`GroupLink` connects processes through torch.distributed: gloo on CPUs, NCCL on GPUs.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Sent:
    """What one rank has sent so far."""

    messages: int = 0
    bytes: int = 0


class Link(ABC):
    """What one rank holds: it can send a tensor to any other rank, and receive one from any other."""

    device = torch.device("cpu")  # where its tensors are

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size, self.sent = rank, world_size, Sent()

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor` to rank `to`. The tensor may be changed once this returns."""

    @abstractmethod
    def recv(self, like: Tensor, source: int) -> Tensor:
        """Wait for the next tensor from rank `source`: a new tensor of `like`'s shape, dtype and device."""

    @abstractmethod
    def start_exchange(self, tensor: Tensor, to: int, like: Tensor, source: int) -> Callable[[], Tensor]:
        """Begin to send to one rank and to receive from another; the returned function waits for both.

        In between, the rank may compute. `tensor` must not be changed before the wait is over.
        """

    def exchange(self, tensor: Tensor, to: int, like: Tensor, source: int) -> Tensor:
        """Send to one rank and receive from another at the same time: around a ring, all ranks may do it at once."""
        return self.start_exchange(tensor, to, like, source)()

    def _count(self, tensor: Tensor) -> None:
        self.sent.messages += 1
        self.sent.bytes += tensor.numel() * tensor.element_size()


class Hang(RuntimeError):
    """No rank can go on: each waits for another, or for one that has returned."""


class ThreadLink(Link):
    """A link between threads of this process, made by `run_threads`."""

    def __init__(self, rank: int, world: _World):
        super().__init__(rank, world.world_size)
        self._world = world

    def send(self, tensor: Tensor, to: int) -> None:
        self._count(tensor)
        self._world.send(tensor.detach().clone(), self.rank, to)

    def take(self, source: int) -> Tensor:
        """Wait for the next tensor from rank `source`, whatever its shape."""
        return self._world.recv(self.rank, source)

    def recv(self, like: Tensor, source: int) -> Tensor:
        tensor = self.take(source)
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"rank {self.rank} expects {list(like.shape)} {like.dtype} from rank {source}, "
                f"which sent {list(tensor.shape)} {tensor.dtype}"
            )
        return tensor

    def start_exchange(self, tensor: Tensor, to: int, like: Tensor, source: int) -> Callable[[], Tensor]:
        self._count(tensor)
        self._world.post(tensor.detach().clone(), self.rank, to)
        return lambda: self.recv(like, source)


class GroupLink(Link):
    """A link between the processes of a torch.distributed group (None: the default group)."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def send(self, tensor: Tensor, to: int) -> None:
        self._count(tensor)
        dist.send(tensor.detach().contiguous(), self._peer(to), group=self.group)

    def recv(self, like: Tensor, source: int) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(tensor, self._peer(source), group=self.group)
        return tensor

    def start_exchange(self, tensor: Tensor, to: int, like: Tensor, source: int) -> Callable[[], Tensor]:
        self._count(tensor)
        outgoing = tensor.detach().contiguous()
        incoming = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        # Batched, since NCCL runs what two ranks send each other in order: two sends would wait for each other.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, self._peer(to), self.group),
                dist.P2POp(dist.irecv, incoming, self._peer(source), self.group),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return incoming

        return wait

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def run_threads(function: Callable[..., Any], parts: Sequence[tuple], *, buffered: bool = True) -> list[Any]:
    """`function(link, *parts[rank])` for each rank, in a thread each; returns what the ranks return, in order.

    buffered: False makes `send` wait until the receiver takes the tensor, as a large message of MPI or NCCL does.
    Raises what a rank raises, and `Hang`, with what each rank waits for, as soon as no rank can go on.
    """
    world, results = _World(len(parts), buffered), [None] * len(parts)

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadLink(rank, world), *parts[rank])
        except BaseException as error:
            world.fail(error)
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(parts))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C: the ranks end at their next message
        world.fail(error)
        raise
    if world.error is not None:
        raise world.error
    return results


class _World:
    """The tensors under way between threads, and what each rank waits for."""

    def __init__(self, world_size: int, buffered: bool):
        self.world_size, self.buffered = world_size, buffered
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)  # (source, to) -> not yet received
        self._waits: dict[int, tuple[str, Callable[[], bool]]] = {}  # rank -> what it waits for, whether it is there
        self._present = set(range(world_size))

    def send(self, tensor: Tensor, rank: int, to: int) -> None:
        self.post(tensor, rank, to)
        if not self.buffered:
            with self._changed:
                self._wait(rank, f"sends to rank {to}", lambda: not self._mail[rank, to])

    def post(self, tensor: Tensor, rank: int, to: int) -> None:
        self._check(rank, to)
        with self._changed:
            self._mail[rank, to].append(tensor)
            self._changed.notify_all()

    def recv(self, rank: int, source: int) -> Tensor:
        self._check(rank, source)
        with self._changed:
            self._wait(rank, f"receives from rank {source}", lambda: bool(self._mail[source, rank]))
            tensor = self._mail[source, rank].popleft()
            self._changed.notify_all()
            return tensor

    def fail(self, error: BaseException) -> None:
        """The first error ends all ranks."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        with self._changed:
            self._present.discard(rank)
            self._look_for_a_hang()

    def _wait(self, rank: int, what: str, is_there: Callable[[], bool]) -> None:
        self._waits[rank] = what, is_there
        self._look_for_a_hang()
        while self.error is None and not is_there():
            self._changed.wait()
        del self._waits[rank]
        if self.error is not None:
            raise self.error

    def _look_for_a_hang(self) -> None:
        stuck = self._present == set(self._waits) and not any(is_there() for _, is_there in self._waits.values())
        if not self._present or not stuck or self.error is not None:
            return
        told = [f"rank {rank} {what}" for rank, (what, _) in sorted(self._waits.items())]
        told += [f"rank {rank} has returned" for rank in range(self.world_size) if rank not in self._present]
        self.error = Hang(f"no rank can go on: {', '.join(told)}")
        self._changed.notify_all()

    def _check(self, rank: int, other: int) -> None:
        if not 0 <= other < self.world_size or other == rank:
            raise ValueError(
                f"rank {rank} cannot exchange with rank {other}; the others are 0 to {self.world_size - 1}"
            )
