"""What a replica can do: its step's cost, its memory, its limits, and the links between replicas. Built in chapter 22.

The prices are those of chapter 09's `CostModel`. `roofline` derives them from a model's shape and a data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.engine.simulator import CostModel
from minillm.kernels.gpus import GPUS


@dataclass(frozen=True)
class ReplicaSpec:
    """A replica: the cost of its steps (seconds), the tokens that its KV cache holds, the scheduler's limits.

    `enable_chunked_prefill=False` is the scheduler of 2023: a step processes whole prompts or decodes, never both, and
    prompts go first. `kv_block` is the engine's block size; a running request wastes half of a block on average.
    `cold_start` is the time from the order for a replica to its first step, in seconds.
    """

    cost: CostModel
    num_kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    kv_block: int = 16
    kv_bytes: int = 147_456  # of a token, in all layers
    cold_start: float = 30.0

    def __post_init__(self):
        for name in ("num_kv_tokens", "max_num_seqs", "max_num_batched_tokens", "kv_block", "kv_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; it must be at least 1")
        if not self.cold_start >= 0:
            raise ValueError(f"cold_start={self.cold_start} is not allowed; it must be at least 0 seconds")

    def decode_seconds(self, num_seqs: int, context: int, steps: int = 1) -> float:
        """`steps` decode steps of the same requests, whose contexts together are `context` tokens before the first."""
        cost = self.cost
        read = steps * context + num_seqs * (steps * (steps - 1) // 2)
        return steps * (cost.per_step + num_seqs * cost.per_decode) + cost.per_decode_context * read

    def prefill_seconds(self, num_tokens: int, start: int = 0) -> float:
        """One request alone: a step for each chunk of `num_tokens` tokens behind `start` known ones."""
        cost, chunk, seconds = self.cost, self.max_num_batched_tokens, 0.0
        while num_tokens > 0:
            count = min(chunk, num_tokens) if self.enable_chunked_prefill else num_tokens
            pairs = count * (2 * start + count + 1) // 2
            seconds += cost.per_step + count * cost.per_prefill_token + pairs * cost.per_prefill_pair
            start, num_tokens = start + count, num_tokens - count
        return seconds


@dataclass(frozen=True)
class Link:
    """How keys and values travel from one replica to another. `bandwidth` in bytes a second, `latency` in seconds.

    With `layers` above 1 the blocks are sent layer by layer while the step runs, so all but the last layer's share of
    the bytes travel before the step ends.
    """

    bandwidth: float = 25e9  # 200 Gbit/s
    latency: float = 1e-3
    layers: int = 1

    def __post_init__(self):
        if not self.bandwidth > 0 or not self.latency >= 0 or self.layers < 1:
            raise ValueError(f"{self} is not allowed: bandwidth above 0, latency at least 0, layers at least 1")

    def seconds(self, num_bytes: float) -> float:
        """All of the bytes, one after the other."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class ModelShape:
    """What the roofline needs to know of a model."""

    parameters: float
    num_layers: int
    hidden_size: int
    kv_size: int  # KV heads times head size
    element_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Of a token, in all layers."""
        return 2 * self.num_layers * self.kv_size * self.element_bytes


OPT_13B = ModelShape(13e9, 40, 5120, 5120)
LLAMA_13B = ModelShape(13e9, 40, 5120, 5120)
LLAMA_70B = ModelShape(70e9, 80, 8192, 1024)
MISTRAL_7B = ModelShape(7.24e9, 32, 4096, 1024)


def roofline(
    shape: ModelShape,
    gpu: str,
    memory: float,
    num_gpus: int = 1,
    bandwidth_share: float = 0.8,
    flops_share: float = 0.5,
    **limits,
) -> ReplicaSpec:
    """A replica on `num_gpus` of a GPU of `minillm.kernels.gpus`, each with `memory` bytes.

    A step reads the weights, a decoding row reads its keys and values, and each token takes 2 FLOPs per parameter; the
    two shares say how much of the data sheet is reached. Times are added, as in chapter 09, so a step that is bound by
    both memory and arithmetic is overestimated.
    """
    sheet = GPUS[gpu]
    bandwidth = sheet.memory_bandwidth * num_gpus * bandwidth_share
    flops = sheet.fp16_tensor_flops * num_gpus * flops_share
    weights = shape.parameters * shape.element_bytes
    cost = CostModel(
        per_step=weights / bandwidth,
        per_prefill_token=2 * shape.parameters / flops,
        per_decode=2 * shape.parameters / flops,
        per_decode_context=shape.kv_bytes / bandwidth,
        per_prefill_pair=4 * shape.num_layers * shape.hidden_size / flops,
    )
    room = int((0.9 * memory * num_gpus - weights) / shape.kv_bytes)
    return ReplicaSpec(cost, room, kv_bytes=shape.kv_bytes, **limits)


# Qwen3-8B in bf16 on one H100 with vLLM 0.30. The first three prices and the size of the cache are those of chapter 24,
# fitted to a public measurement; the two that grow with the context are the roofline's.
H100_8B = ReplicaSpec(CostModel(6.8e-3, 31e-6, 12e-6, 44e-9, 1.2e-9), num_kv_tokens=377_024)
