"""The formulas behind `minillm bench predict`, part by part. Built in chapter 14.

    seconds = limit / share + fixed          limit = max(bytes / bandwidth, operations / rate), of the data sheet

`share` is what others reach: plain Triton reaches 0.76 of FlashAttention-3 (which reaches about 0.6 to 0.75 of the
rate), well-kept paged decoding 0.85 and more of the bandwidth, a large copy 0.9. `fixed` is what a launch in a recorded
step costs beside its work, a microsecond or two: the last programs of one kernel end before the first of the next
begin.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.gpus import GPU
from . import decode, measure, throughput
from .assumptions import DTYPE, EAGER, GAP, KERNELS, LAUNCHES_A_LAYER, LAUNCHES_A_STEP, META, NAME, PEERS, STREAMING


@dataclass(frozen=True)
class Prediction:
    """`result` and `figure` say where the measured number will stand: the name of a result, and the keys down to it.
    A key that ends in * is the beginning of one."""

    result: str
    figure: tuple[str, ...]
    unit: str
    low: float
    high: float
    formula: str
    inputs: dict
    why: str

    @property
    def name(self) -> str:
        return f"{self.result}: {' / '.join(self.figure[self.figure[0] == 'figures' :])}"


def predict(gpu: GPU) -> list[Prediction]:
    """Raises ValueError for a GPU without bfloat16, in which everything here is measured."""
    if gpu.capability < 80:
        raise ValueError(
            f"gpu={gpu.name!r} has no bfloat16, in which the parts of `bench gpu` are measured; "
            "predict an A100, L4, H100 or H200"
        )
    return [*ceilings(gpu), *kernels(gpu), *throughputs(gpu), *decodes(gpu), *steps(gpu), *bits(gpu), *others(gpu)]


def ceilings(gpu: GPU) -> list[Prediction]:
    name, sheet = "decode-qwen3-0.6b", {"bandwidth": gpu.memory_bandwidth, "rate": gpu.fp16_tensor_flops}
    return [
        Prediction(
            name,
            ("ceilings", "copy_bytes_per_second"),
            "bytes/s",
            0.82 * gpu.memory_bandwidth,
            0.96 * gpu.memory_bandwidth,
            "0.82 to 0.96 · bandwidth",
            sheet,
            "a copy of 1 GiB beside refresh and turning from reads to writes",
        ),
        Prediction(
            name,
            ("ceilings", "matmul_flops_per_second", NAME),
            "FLOP/s",
            0.6 * gpu.fp16_tensor_flops,
            0.85 * gpu.fp16_tensor_flops,
            "0.6 to 0.85 · rate",
            sheet,
            "random data draw power, and the clock gives way; the data sheet counts boost clock",
        ),
    ]


def kernels(gpu: GPU) -> list[Prediction]:
    found = []
    for family, (cases, share, fixed, why) in KERNELS.items():
        for case in cases(1, META, DTYPE):
            limit = max(case.num_bytes / gpu.memory_bandwidth, case.flops / gpu.fp16_tensor_flops)
            name = case.name.rsplit(",", 1)[0] + "*" if case.name.endswith("splits") else case.name
            found.append(
                Prediction(
                    f"kernels-{NAME}-{family}",
                    ("figures", name, "candidates", case.ours, "seconds"),
                    "s",
                    limit / share[1] + fixed[0],
                    limit / share[0] + fixed[1],
                    "max(bytes / bandwidth, flops / rate) / share + fixed",
                    {"bytes": case.num_bytes, "flops": case.flops, "share": share, "fixed": fixed},
                    why,
                )
            )
    found += [
        Prediction(
            f"kernels-{NAME}-{family}",
            ("figures", case, "candidates", peer, "minillm_speedup"),
            "times ours",
            *times,
            "the peer's seconds over ours",
            {},
            why,
        )
        for family, case, peer, times, why in PEERS
    ]
    return found


def step_seconds(gpu: GPU, shape: str, batch: int, weight_bytes: int | None = None) -> tuple[float, float, dict]:
    """A recorded decode step of `bench step`'s workload: bytes at a share of the bandwidth,
    and a gap for every launch."""
    config, workload = decode.model_config(decode.SHAPES[shape]), decode.Workload(prompt_tokens=64, output_tokens=64)
    kv_bytes = (workload.prompt_tokens + workload.output_tokens // 2) * config.kv_bytes_per_token(DTYPE)
    plain = decode.bytes_per_token(config, DTYPE, workload) - kv_bytes
    moved = (weight_bytes or plain) + batch * kv_bytes
    launches = [config.num_layers * layer + ends for layer, ends in zip(LAUNCHES_A_LAYER, LAUNCHES_A_STEP)]
    inputs = {"bytes": moved, "launches": launches, "gap": GAP, "share": STREAMING}
    low, high = (
        moved / gpu.memory_bandwidth / share + count * gap
        for share, count, gap in zip(reversed(STREAMING), launches, GAP)
    )
    return low, high, inputs


def steps(gpu: GPU) -> list[Prediction]:
    found = []
    for shape, batch in (("qwen3-0.6b", 1), ("qwen3-0.6b", 64), ("qwen2-0.5b", 256), ("llama-3.1-8b", 1)):
        name = f"step-{shape}-{NAME}-batch-{batch}"
        low, high, inputs = step_seconds(gpu, shape, batch)
        host = 2e-6 * batch  # of Python for each row of the batch, at most, where it is not hidden behind the step
        found.append(
            Prediction(
                name,
                ("figures", "rungs", "+ scheduled ahead", "step_seconds"),
                "s",
                low,
                high + host,
                "bytes / (share · bandwidth) + launches · gap",
                inputs,
                "recorded and scheduled ahead, a step is what its launches take on the GPU",
            )
        )
        calls = [2 * inputs["launches"][0], 4 * inputs["launches"][1]]
        found.append(
            Prediction(
                name,
                ("figures", "rungs", "torch", "step_seconds"),
                "s",
                calls[0] * EAGER[0],
                calls[1] * EAGER[1] + high,
                "operations · host seconds each",
                {"operations": calls, "host": EAGER},
                "eager, the host asks for every operation, and that takes longer than the work",
            )
        )
    return found


def decodes(gpu: GPU) -> list[Prediction]:
    low, high, inputs = step_seconds(gpu, "qwen3-0.6b", 1)
    name, where = "decode-qwen3-0.6b", ("figures", NAME)
    return [
        Prediction(
            name,
            (*where, "minillm_tokens_per_second"),
            "tokens/s",
            1 / (high + 3e-4),
            1 / low,
            "1 / (the recorded step + up to 0.3 ms of the host)",
            inputs,
            "a stream of one request; the goal is 35% of the bandwidth",
        ),
        Prediction(
            name,
            (*where, "speedup"),
            "times transformers",
            5.0,
            60.0,
            "eager step of transformers over ours",
            {"operations": (900, 1600), "host": EAGER},
            "transformers.generate makes 30 to 50 operations a layer, and its cache and sampling beside",
        ),
    ]


def throughputs(gpu: GPU) -> list[Prediction]:
    """Offline-256: the limit that `bench throughput` computes, of the data sheet, and the share that others reach."""
    found = []
    sheet = measure.Ceilings(gpu.memory_bandwidth, gpu.memory_bandwidth, {NAME: gpu.fp16_tensor_flops})
    for shape, share, why in (
        (
            "qwen3-0.6b",
            (0.30, 0.70),
            (
                "vLLM 50% and nano-vllm-triton 58% on an A100; here the weights weigh less beside the host; "
                "the goal is 60%"
            ),
        ),
        ("qwen2-0.5b", (0.12, 0.50), "28% elsewhere: the host's gap decides where the step is short; the goal is 35%"),
    ):
        config = decode.model_config(decode.SHAPES[shape])
        prompts, lengths = throughput.Workload(shape, 256, 100, 1024).lengths_and_prompts(config.vocab_size)
        limit = throughput.limit_seconds(config, DTYPE, prompts, lengths, sheet)
        name, inputs = f"throughput-{shape}", {"limit_seconds": limit, "output_tokens": sum(lengths), "share": share}
        found.append(
            Prediction(
                name,
                ("figures", "minillm_tokens_per_second"),
                "tokens/s",
                *(one * sum(lengths) / limit for one in share),
                "share · output tokens / limit",
                inputs,
                why,
            )
        )
        found.append(
            Prediction(
                name,
                ("figures", "speedup"),
                "times transformers",
                2.0,
                15.0,
                "their seconds for a useful token over ours",
                {},
                "continuous batching in eager PyTorch; the goal is 3",
            )
        )
    return found


def bits(gpu: GPU) -> list[Prediction]:
    config, found = decode.model_config(decode.SHAPES["qwen3-0.6b"]), []
    head = config.vocab_size * config.hidden_size
    for name, num_bits in (("int8", 8.25), ("int4", 4.25), ("fp8", 8.25)):
        weight_bytes = int((config.num_parameters() - head) * num_bits / 8 + 2 * head)
        low, high, inputs = step_seconds(gpu, "qwen3-0.6b", 1, weight_bytes)
        found.append(
            Prediction(
                "bits-qwen3-0.6b",
                ("figures", "batch 1", f"minillm {name}", "tokens_per_second"),
                "tokens/s",
                1 / (1.3 * high + 3e-4),
                1 / low,
                "1 / step with the packed bytes, 0.3 to 1.3 times",
                inputs,
                "at 0.6 B launches take as long as bytes, so fewer bits save less than their bytes",
            )
        )
    return found


def others(gpu: GPU) -> list[Prediction]:
    config, batch, context = decode.model_config(decode.SHAPES["qwen3-0.6b"]), 16, 8192
    weights, kv = 2 * config.num_parameters(), batch * context * config.kv_bytes_per_token(DTYPE)
    bound = (weights + kv) / (weights + kv * (0.5 + 2 / config.head_dim))
    return [
        Prediction(
            "kv-qwen3-0.6b",
            ("figures", f"{context} int8", "speedup"),
            "times 16 bits",
            1.2,
            bound,
            "(weights + KV) / (weights + KV · (1/2 + 2/head_dim))",
            {"weights": weights, "kv": kv},
            "at most the bytes that are saved; the goal is 1.7",
        ),
        Prediction(
            "speculation",
            ("figures", "copying", "ngram", "speedup"),
            "times plain",
            1.0,
            3.5,
            "tokens a step over (a check and the host's share)",
            {"parameters": 131e6},
            "131 M parameters are 55 µs of bytes here: the host's share of a step, which drafting cannot hide, decides",
        ),
        Prediction(
            "structured-tinyworld",
            ("figures", "batch 1", "inside", "regex", "cost"),
            "of a step",
            0.0,
            1.0,
            "host seconds of a mask over a recorded step",
            {},
            "a step of 14 M parameters takes less than half a millisecond, a mask tens of microseconds of the host",
        ),
        Prediction(
            f"offload-qwen3-0.6b-{NAME}-batch-1",
            ("figures", "bandwidth"),
            "bytes/s",
            18e9,
            60e9,
            "PCIe 4.0 or 5.0 × 16 at 0.75 to 0.95",
            {"pcie": (32e9, 64e9)},
            "pinned memory, one copy at a time; which bus the host has is not in the GPU's data sheet",
        ),
    ]
