"""What a step costs on many devices: messages by the alpha-beta model, arithmetic by the roofline. Built in chapter 20.

A message of s bytes takes alpha + s / beta: the latency of a link, and its bandwidth in one direction. No figure here
is fitted. Latencies are those of NCCL's own cost model (src/graph/tuning.cc at 01afd20, ring with protocol LL128),
bandwidths those of data sheets; `minillm.parallel.published` sets the results beside measurements of others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from minillm.kernels.gpus import GPUS

GB = 1e9


@dataclass(frozen=True)
class LinkSpeed:
    """A link of one device. latency: seconds a message; bandwidth: bytes/s in one direction."""

    name: str
    latency: float
    bandwidth: float
    source: str

    def seconds(self, num_bytes: float) -> float:
        """One message: alpha + bytes / beta."""
        return self.latency + num_bytes / self.bandwidth


_NCCL = "latency: NCCL's tuning.cc"
LINKS = {
    link.name: link
    for link in (
        LinkSpeed("NVLink 3", 1.9e-6, 300 * GB, f"600 GB/s both ways, NVIDIA A100 data sheet; {_NCCL}"),
        LinkSpeed("NVLink 4", 1.9e-6, 450 * GB, f"900 GB/s both ways, NVIDIA H100 data sheet; {_NCCL}"),
        LinkSpeed("PCIe 4.0 x16", 2.5e-6, 31.5 * GB, f"16 GT/s on 16 lanes, coded 128b/130b, PCI-SIG; {_NCCL}"),
        LinkSpeed("PCIe 5.0 x16", 2.5e-6, 63 * GB, f"32 GT/s on 16 lanes, coded 128b/130b, PCI-SIG; {_NCCL}"),
        LinkSpeed("InfiniBand NDR", 4.0e-6, 50 * GB, f"400 Gb/s a port, NVIDIA ConnectX-7 data sheet; {_NCCL}"),
        LinkSpeed("Ethernet 100 Gb/s", 80e-6, 12.5 * GB, "100 Gb/s; latency: half of the 163 µs that an all-reduce of "
                  "8 bytes took between two p3dn.24xlarge, gist jacobkahn/a92f4425 (July 2019)"),
    )
}  # fmt: skip


def all_reduce_seconds(num_bytes: float, world_size: int, link: LinkSpeed, algorithm: str = "ring") -> float:
    """Seconds until the sum of `num_bytes` is on each of `world_size` devices.

    algorithm: "ring" sends 2 (n - 1) messages of an n-th, one after the other; "tree" 2 log2 n messages of the whole;
    "direct" n - 1 messages of the whole, which start together and share the device's bandwidth; "two-shot" n - 1
    messages of an n-th to add them up, and n - 1 to give the sums back, each time all together.
    """
    if world_size == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * (world_size - 1) * link.seconds(num_bytes / world_size)
    if algorithm == "tree":
        return 2 * math.ceil(math.log2(world_size)) * link.seconds(num_bytes)
    if algorithm == "direct":
        return link.seconds((world_size - 1) * num_bytes)
    if algorithm == "two-shot":
        return 2 * link.seconds((world_size - 1) / world_size * num_bytes)
    raise ValueError(f"algorithm={algorithm!r}: use 'ring', 'tree', 'direct' or 'two-shot'")


@dataclass(frozen=True)
class Machine:
    """Devices of one kind. Bytes, bytes/s, FLOP/s; `link` within a node, `network` between nodes."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: LinkSpeed
    network: LinkSpeed = LINKS["InfiniBand NDR"]
    devices_per_node: int = 8

    def at(self, bandwidth: float = 1.0, flops: float = 1.0) -> Machine:
        """The same machine where only these shares of the data sheet's two rates are reached."""
        return replace(self, bandwidth=self.bandwidth * bandwidth, flops=self.flops * flops)

    def link_of(self, num_devices: int) -> LinkSpeed:
        """What connects a group of that many devices: the slowest link in it."""
        return self.link if num_devices <= self.devices_per_node else self.network


def _machine(gpu: str, memory: float, link: str) -> Machine:
    return Machine(gpu, memory * GB, GPUS[gpu].memory_bandwidth, GPUS[gpu].fp16_tensor_flops, LINKS[link])


MACHINES = {
    machine.name: machine
    for machine in (
        _machine("A100", 80, "NVLink 3"),
        _machine("H100", 80, "NVLink 4"),
        _machine("H200", 141, "NVLink 4"),
    )
}


@dataclass(frozen=True)
class Shape:
    """A decoder, by the counts that cost depends on. `itemsize`: bytes of a weight; activations have two."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    itemsize: float = 2
    mlp_matrices: int = 3
    all_reduces_per_layer: int = 2  # 1 where attention and MLP read the same input (Falcon, GPT-J)

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Of the matrices: norms are left out. The output matrix is counted beside the embedding."""
        return self.num_layers * self.layer_parameters + 2 * self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Llama 2 7B", 32, 4096, 11008, 32, 32, 128, 32_000),
        Shape("Llama 2 70B", 80, 8192, 28672, 64, 8, 128, 32_000),
        Shape("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128_256),
        Shape("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128, 128_256),
        Shape("Llama 3.1 405B", 126, 16384, 53248, 128, 8, 128, 128_256),
        Shape("Falcon 180B", 80, 14848, 59392, 232, 8, 64, 65_024, mlp_matrices=2, all_reduces_per_layer=1),
    )
}


@dataclass(frozen=True)
class Split:
    """How `tensor * pipeline * replicas` devices share a model and its requests."""

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    def __str__(self) -> str:
        named = (("TP", self.tensor), ("PP", self.pipeline), ("replicas", self.replicas))
        return " × ".join(f"{name} {count}" for name, count in named if count > 1) or "one device"


@dataclass(frozen=True)
class StepCost:
    """One step, in seconds. A request's token passes through all stages in `latency`; `compute` and `communicate` are
    those of one stage and one micro-batch, and a stage works for the share `busy` of the time."""

    compute: float
    communicate: float
    latency: float
    busy: float
    tokens_per_second: float  # of all replicas
    memory: float  # bytes of weights and KV cache on the fullest device


def step_cost(
    shape: Shape,
    machine: Machine,
    split: Split,
    *,
    batch: int = 1,
    context: int = 0,
    new_tokens: int = 1,
    algorithm: str = "ring",
) -> StepCost:
    """A step of `batch` requests in all, each with `new_tokens` new tokens and `context` tokens in its cache.

    A stage reads its weights once for each micro-batch; there are as many micro-batches as stages, or as requests if
    those are fewer. Raises ValueError where the heads cannot be split evenly or a stage would have no layer.
    """
    tensor, pipeline = split.tensor, split.pipeline
    if shape.num_heads % tensor:
        raise ValueError(f"tensor={tensor} does not divide the {shape.num_heads} heads of {shape.name}")
    if pipeline > shape.num_layers:
        raise ValueError(f"pipeline={pipeline} leaves a stage without a layer: {shape.name} has {shape.num_layers}")
    requests = math.ceil(batch / split.replicas)
    micro_batches = min(pipeline, requests)
    rows = math.ceil(requests / micro_batches) * new_tokens
    layers = math.ceil(shape.num_layers / pipeline)

    output_matrix = shape.vocab_size * shape.hidden_size / pipeline  # counted as if all stages shared it
    parameters = (layers * shape.layer_parameters + output_matrix) / tensor
    kv_share = layers / shape.num_layers / min(tensor, shape.num_kv_heads)  # more ranks than KV heads: copies
    kv_bytes = rows / new_tokens * context * shape.kv_bytes_per_token * kv_share
    reading = (parameters * shape.itemsize + kv_bytes) / machine.bandwidth
    compute = max(reading, 2 * parameters * rows / machine.flops)

    activations = rows * shape.hidden_size * 2
    all_reduce = all_reduce_seconds(activations, tensor, machine.link_of(tensor), algorithm)
    communicate = layers * shape.all_reduces_per_layer * all_reduce
    hop = machine.link_of(tensor * pipeline).seconds(activations) if pipeline > 1 else 0.0
    stage = compute + communicate + hop
    return StepCost(
        compute=compute,
        communicate=communicate + hop,
        latency=pipeline * stage - hop,
        busy=micro_batches / pipeline,
        tokens_per_second=batch * new_tokens / (pipeline * stage),
        memory=shape.num_parameters * shape.itemsize / tensor / pipeline + micro_batches * kv_bytes,
    )


def best_splits(
    shape: Shape,
    machine: Machine,
    num_devices: int,
    *,
    batch: int,
    context: int = 0,
    objective: str = "latency",
    memory_share: float = 0.9,
    algorithm: str = "ring",
) -> list[tuple[Split, StepCost]]:
    """Every way to use `num_devices` that fits into memory, the best one first.

    objective: "latency" (of a decode step) or "throughput" (tokens a second). Raises ValueError where nothing fits.
    """
    if objective not in ("latency", "throughput"):
        raise ValueError(f"objective={objective!r}: use 'latency' or 'throughput'")
    found = []
    for tensor in _divisors(num_devices):
        for pipeline in _divisors(num_devices // tensor):
            split = Split(tensor, pipeline, num_devices // tensor // pipeline)
            if shape.num_heads % tensor or pipeline > shape.num_layers or split.replicas > batch:
                continue
            cost = step_cost(shape, machine, split, batch=batch, context=context, algorithm=algorithm)
            if cost.memory <= memory_share * machine.memory:
                found.append((split, cost))
    if not found:
        raise ValueError(
            f"{shape.name} with {batch} requests of {context} tokens does not fit into {memory_share:.0%} of "
            f"{num_devices} × {machine.memory / GB:.0f} GB; use more devices, fewer requests or fewer bits"
        )
    if objective == "latency":
        return sorted(found, key=lambda pair: pair[1].latency)
    return sorted(found, key=lambda pair: -pair[1].tokens_per_second)


def kv_bytes_per_device(shape: Shape, world_size: int, num_tokens: int, *, data_parallel: bool = False) -> float:
    """Bytes of KV cache on each of `world_size` devices for `num_tokens` cached tokens in all.

    Tensor parallel attention splits heads, and keeps copies where there are more devices than KV heads. Data parallel
    attention splits requests: each device has all heads of its own.
    """
    parts = world_size if data_parallel else min(world_size, shape.num_kv_heads)
    return num_tokens * shape.kv_bytes_per_token / parts


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
