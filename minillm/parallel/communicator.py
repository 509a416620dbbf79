"""Communicator: what ranks tell each other inside a step, counted. Built in chapter 20.

Each rank belongs to two groups of `torch.distributed`: the ranks of its stage, between which each matrix is cut, and
the ranks with its place in the other stages.

    tensor_parallel_size=2, pipeline_parallel_size=2        stage groups (0 1) (2 3)      pipeline groups (0 2) (1 3)

On CPUs the messages go through gloo, on GPUs through NCCL. Every call is counted by its kind (`Traffic`):
`minillm.parallel.traffic.step_traffic` says beforehand how many a step makes, and of how many bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.parallel.layout import Layout

KINDS = ("all_reduce", "all_gather", "gather", "broadcast", "send", "receive")


@dataclass
class Traffic:
    """Calls and bytes by kind, of one rank. The bytes of a call are those of the tensor that the rank hands in; of
    `receive`, and of `broadcast` on the ranks that receive, of the tensor that comes."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, num_bytes: int, count: int = 1) -> None:
        self.messages[kind] += count
        self.bytes[kind] += count * num_bytes

    def as_dict(self) -> dict[str, tuple[int, int]]:
        """(messages, bytes) of each kind that occurred."""
        return {kind: (self.messages[kind], self.bytes[kind]) for kind in KINDS if self.messages[kind]}


class Communicator:
    """The collectives of one rank. A layout of one rank needs no process group, and every call is then the identity.

    `torch.distributed` is initialised by the caller, and all ranks make their communicators at the same time.
    """

    def __init__(self, layout: Layout):
        self.layout, self.traffic = layout, Traffic()
        self.counts = True
        tp, pp = layout.tensor_parallel_size, layout.pipeline_parallel_size
        self.stage_group = self.pipeline_group = None
        self._sends: list[tuple[dist.Work, Tensor]] = []  # on their way, with the tensors that they read
        for stage in range(pp if tp > 1 else 0):
            group = dist.new_group(range(stage * tp, (stage + 1) * tp))
            self.stage_group = group if stage == layout.stage else self.stage_group
        for place in range(tp if pp > 1 else 0):
            group = dist.new_group(range(place, layout.world_size, tp))
            self.pipeline_group = group if place == layout.tensor_rank else self.pipeline_group

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Calls inside do not count: warm-up, and steps that are only measured."""
        self.counts, before = False, self.counts
        try:
            yield
        finally:
            self.counts = before

    def take_traffic(self) -> Traffic:
        """What was counted since the last call."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or another `op`) over the ranks of this stage, in place, with the same bits on each."""
        if self.stage_group is not None:
            tensor = tensor.contiguous()
            self._count("all_reduce", tensor)
            dist.all_reduce(tensor, op, self.stage_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks of this stage, which have one shape: [tensor_parallel_size, *shape]."""
        if self.stage_group is None:
            return tensor[None]
        self._count("all_gather", tensor)
        whole = tensor.new_empty(self.layout.tensor_parallel_size, *tensor.shape)
        dist.all_gather(list(whole.unbind()), tensor.contiguous(), self.stage_group)
        return whole

    def gather(self, tensor: Tensor) -> Tensor | None:
        """As `all_gather`, on the first rank of the stage alone; None on the others."""
        if self.stage_group is None:
            return tensor[None]
        self._count("gather", tensor)
        first, whole = self.layout.tensor_rank == 0, None
        if first:
            whole = tensor.new_empty(self.layout.tensor_parallel_size, *tensor.shape)
        to = self.layout.stage * self.layout.tensor_parallel_size
        dist.gather(tensor.contiguous(), list(whole.unbind()) if first else None, to, self.stage_group)
        return whole

    def from_first(self, tensor: Tensor) -> Tensor:
        """The tensor of the first rank of this stage, on each of its ranks; written into `tensor`."""
        if self.stage_group is not None:
            self._count("broadcast", tensor)
            dist.broadcast(tensor, self.layout.stage * self.layout.tensor_parallel_size, self.stage_group)
        return tensor

    def from_last_stage(self, tensor: Tensor, wait: bool = True) -> dist.Work | None:
        """Write what the last stage holds into `tensor` on the other stages. With `wait=False` the caller waits for the
        work that is returned before it reads the tensor."""
        if self.pipeline_group is None:
            return None
        self._count("broadcast", tensor)
        source = self.layout.leader + self.layout.tensor_rank
        work = dist.broadcast(tensor, source, self.pipeline_group, async_op=not wait)
        return None if wait else work

    def send(self, tensor: Tensor) -> None:
        """Hand a tensor to the same tensor rank of the next stage; returns before it has arrived."""
        for work, _ in self._sends:  # of the step before: the next stage has taken it, or is about to
            work.wait()
        tensor = tensor.contiguous()
        self._count("send", tensor)
        self._sends = [(dist.isend(tensor, self.layout.rank + self.layout.tensor_parallel_size), tensor)]

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a tensor with what the stage before sends."""
        self._count("receive", tensor)
        dist.recv(tensor, self.layout.rank - self.layout.tensor_parallel_size)
        return tensor

    def _count(self, kind: str, tensor: Tensor) -> None:
        if self.counts:
            self.traffic.add(kind, tensor.nbytes)


def init_process_group(layout: Layout, device: torch.device, store: dist.Store, seconds: float) -> None:
    """Join `torch.distributed`: NCCL where each rank has a GPU of its own, else gloo. `seconds` bound every message."""
    from datetime import timedelta

    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backend,
        store=store,
        rank=layout.rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=seconds),
        **options,
    )
