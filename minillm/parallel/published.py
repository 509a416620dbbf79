"""Results that others have published, each beside what the cost model says, and where the model is off. Built in
chapter 20.

Two of the model's inputs are measured: what one A100 reaches alone, for the rows of gpt-fast, and the latency of
Ethernet. All other inputs are counts, data sheets and NCCL's latencies. Read in November 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minillm.parallel.cost import (
    GB,
    LINKS,
    MACHINES,
    SHAPES,
    Machine,
    Split,
    all_reduce_seconds,
    step_cost,
)

MIB = 1 << 20
GPT_FAST = "https://github.com/pytorch-labs/gpt-fast/blob/0f925b5d4ce457b89a7ca6c9ce50f42bf2576945/README.md"
VLLM_24111 = "https://github.com/vllm-project/vllm/pull/24111"
NVIDIA_405B = "NVIDIA, Boosting Llama 3.1 405B Throughput by Another 1.5x on H200 and NVLink Switch, October 2024"
SARATHI = "Agrawal et al., Sarathi-Serve, OSDI 2024, arXiv:2403.02310"
META = "Yang et al., Context Parallelism for Scalable Million-Token Inference, MLSys 2025, arXiv:2411.01783"

# gpt-fast: batch 1, bf16, 8 A100 with NVLink at 330 W. On one GPU Llama 2 7B reads 1,397 GB/s.
ALONE = 1397.31 * GB
TOKENS_PER_SECOND = {
    ("Llama 2 7B", 2): 168.84, ("Llama 2 7B", 4): 254.02, ("Llama 2 7B", 8): 328.43,
    ("Llama 2 70B", 2): 21.32, ("Llama 2 70B", 4): 38.01, ("Llama 2 70B", 8): 62.50,
}  # fmt: skip
# vLLM: an all-reduce of bf16 on H100s with NVLink, microseconds by MiB; NCCL, and vLLM's own direct kernel.
NCCL_MICROSECONDS = {4: {0.5: 17, 1: 19, 2: 26, 4: 37}, 6: {0.5: 23, 1: 25, 2: 43, 4: 53}}
DIRECT_MICROSECONDS = {4: {0.5: 10, 1: 15, 2: 22, 4: 38}, 6: {0.5: 13, 1: 21, 2: 38, 4: 70}}


@dataclass(frozen=True)
class Row:
    """One published figure. `group` names the comparison that it belongs to."""

    group: str
    what: str
    unit: str
    reported: float
    predicted: float
    source: str

    @property
    def ratio(self) -> float:
        """Predicted over reported."""
        return self.predicted / self.reported


def published() -> list[Row]:
    """Every row, in the order in which chapter 20 discusses them."""
    return [*_all_reduces(), *_tensor_parallel(), *_tensor_or_pipeline(), *_across_nodes(), *_ring_attention()]


def _all_reduces() -> list[Row]:
    rows = []
    for algorithm, table in (("ring", NCCL_MICROSECONDS), ("direct", DIRECT_MICROSECONDS)):
        for devices, measured in table.items():
            for mib, microseconds in measured.items():
                seconds = all_reduce_seconds(mib * MIB, devices, LINKS["NVLink 4"], algorithm)
                what = f"{algorithm}, {devices} × H100, {mib:g} MiB"
                rows.append(Row("all-reduce", what, "µs", microseconds, 1e6 * seconds, VLLM_24111))
    return rows


def _tensor_parallel() -> list[Row]:
    machine = replace(MACHINES["A100"], bandwidth=ALONE)
    rows = []
    for (name, devices), reported in TOKENS_PER_SECOND.items():
        predicted = step_cost(SHAPES[name], machine, Split(tensor=devices)).tokens_per_second
        rows.append(Row("tensor parallel", f"{name}, TP {devices}", "tokens/s", reported, predicted, GPT_FAST))
    return rows


def _tensor_or_pipeline() -> list[Row]:
    """FP8 weights on eight H200: the rate of one request, and of prompts, which are limited by arithmetic."""
    shape = replace(SHAPES["Llama 3.1 405B"], itemsize=1)
    machine = replace(MACHINES["H200"], flops=2 * MACHINES["H200"].flops)  # FP8 tensor cores have twice the rate
    tensor, pipeline = Split(tensor=8), Split(pipeline=8)
    alone = [step_cost(shape, machine, split).tokens_per_second for split in (tensor, pipeline)]
    full = [
        step_cost(shape, machine, split, batch=8, new_tokens=2048).tokens_per_second for split in (tensor, pipeline)
    ]
    return [
        Row("tensor or pipeline", "405B, one request: TP 8 over PP 8", "×", 5.6, alone[0] / alone[1], NVIDIA_405B),
        Row("tensor or pipeline", "405B, most tokens/s: PP 8 over TP 8", "×", 1.5, full[1] / full[0], NVIDIA_405B),
    ]


def _across_nodes() -> list[Row]:
    """Falcon 180B on two nodes with four A100 each; the paper says that the time per output token more than doubles."""
    machine: Machine = replace(MACHINES["A100"], devices_per_node=4, network=LINKS["Ethernet 100 Gb/s"])
    within, across = (
        step_cost(SHAPES["Falcon 180B"], machine, split, batch=32, context=2048).latency
        for split in (Split(tensor=4, pipeline=2), Split(tensor=8))
    )
    what = "Falcon 180B, time between tokens: TP 8 over TP 4 × PP 2"
    return [Row("across nodes", what, "×", 2.0, across / within, SARATHI)]


def _ring_attention() -> list[Row]:
    """A prompt of 2^20 tokens on 16 nodes of eight H100: how much of 16 times as fast is left.

    One ring step of a layer passes the keys and values of 1 / 16 of the prompt while it computes with them. With one
    port of 400 Gb/s for each GPU the transfer is hidden, so that the model says that nothing is lost.
    """
    shape, nodes, tokens = SHAPES["Llama 3.1 405B"], 16, 1 << 20
    part = tokens / nodes
    pairs = part * part / 2  # causal, and balanced: half of a part's queries times keys
    compute = 4 * pairs * shape.num_heads * shape.head_dim / (8 * 0.5 * MACHINES["H100"].flops)
    transfer = LINKS["InfiniBand NDR"].seconds(part * shape.kv_bytes_per_token / shape.num_layers / 8)
    efficiency = compute / max(compute, transfer)
    return [Row("ring attention", "405B, 1M tokens, 16 nodes: efficiency", "%", 93, 100 * efficiency, META)]
