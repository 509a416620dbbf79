"""Decoding with low-bit weights, against our own bf16, `transformers` and llama.cpp, in one run.
Built in chapter 15.

A decode step cannot take less time than its bytes need: weights of 4.25 bits allow 3.8 times the tokens of bf16. `run`
measures how much of that arrives, at batch 1 against the peers, and over the batch sizes against our own bf16.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from .. import LLM
from ..device import resolve_device, resolve_dtype
from ..model.checkpoint import load_config, load_model
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..quantization.linear import QuantizedLinear
from . import decode, ladder, llama_cpp, measure
from .record import Record, release

GGUF_TYPES = ("BF16", "Q8_0", "Q4_0")
VARIANTS = {"int4, head too": {"name": "int4", "lm_head": "int4"}}  # the output matrix as llama.cpp's Q4_0 has it
TOLERANCE = 0.01  # of the norm of a product: what rounding it to bfloat16 may change


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtype: str = "bfloat16"
    quantizations: tuple[str, ...] = ("int8", "int4", "fp8")
    variants: tuple[str, ...] = tuple(VARIANTS)  # at batch 1 only
    batches: tuple[int, ...] = (2, 4, 8, 16, 32)
    prompt_tokens: int = 64
    output_tokens: int = 64
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def num_runs(workload: Workload) -> int:
    """How often `run` says that something is done."""
    engines = 2 + len(workload.quantizations + workload.variants) + len(GGUF_TYPES) * llama_cpp.installed()
    return (
        1
        + engines * (workload.repeats + 2)
        + (1 + len(workload.quantizations)) * len(workload.batches) * (workload.repeats + 1)
    )


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench bits",
    shapes: dict[str, decode.Shape] = decode.SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` and return a result (see `measure.result`); `on_run` hears what has just been done.

    Raises ValueError for an unknown shape, RuntimeError where a quantized product is not the one of its weights.
    """
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    record = Record(f"bits-{workload.shape}", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        path = decode.write_random_checkpoint(
            shapes[workload.shape], Path(folder) / workload.shape, workload.seed, where, dtype
        )
        config = load_config(path)
        record.ceilings = measure.measure_ceilings(
            where, (dtype,), measure.megabytes_to_read(config.num_parameters() * 2, where)
        )
        on_run("ceilings")
        rng = random.Random(workload.seed)
        prompt = [rng.randrange(4, config.vocab_size) for _ in range(workload.prompt_tokens)]
        with record.case("batch 1"):
            record.figures["batch 1"] = _alone(path, config, workload, record, dtype, prompt, on_run)
        release(where)
        with record.case("engines of the batches"):
            llms = _llms(path, workload, where)
            for batch in workload.batches:
                with record.case(f"batch {batch}"):
                    record.figures[f"batch {batch}"] = _together(llms, workload, record, prompt, batch, on_run)
    return record.finish()


def _alone(
    path: Path,
    config: ModelConfig,
    workload: Workload,
    record: Record,
    dtype: torch.dtype,
    prompt: list[int],
    on_run: Callable[[str], None],
) -> dict:
    """Every engine at batch 1, in turns."""
    engines, weight_bytes = _engines(path, config, workload, record, dtype, on_run)
    times = record.interleave(
        {name: lambda engine=engine: engine(prompt, workload.output_tokens) for name, engine in engines.items()},
        workload.repeats,
        on_run=on_run,
    )
    kv_bytes = (workload.prompt_tokens + workload.output_tokens // 2) * config.kv_bytes_per_token(dtype)
    base, theirs, bandwidth = times[f"minillm {workload.dtype}"], times["transformers"], record.ceilings.bandwidth
    return {
        name: {
            "tokens_per_second": 1 / taken.median,
            "spread": taken.spread,
            "weight_bytes": weight_bytes[name],
            "limit_tokens_per_second": bandwidth / (weight_bytes[name] + kv_bytes),
            "share_of_limit": (weight_bytes[name] + kv_bytes) / bandwidth / taken.median,
            "speedup_over_own": base.median / taken.median,
            "speedup_over_transformers": theirs.median / taken.median,
        }
        for name, taken in times.items()
    }


def _engines(
    path: Path,
    config: ModelConfig,
    workload: Workload,
    record: Record,
    dtype: torch.dtype,
    on_run: Callable[[str], None],
) -> tuple[dict[str, Callable], dict[str, int]]:
    """Seconds a token of each engine, called with a prompt and a number of tokens;
    and the weight bytes each must read."""
    plain_bytes = decode.bytes_per_token(config, dtype, workload) - (
        workload.prompt_tokens + workload.output_tokens // 2
    ) * config.kv_bytes_per_token(dtype)
    engines, weight_bytes, device = {}, {}, record.device
    engine = partial(ladder.with_engine, **measure.room_for(1, workload.prompt_tokens + workload.output_tokens))

    def add(name: str, stream, num_bytes: int) -> None:
        engines[name], weight_bytes[name] = _seconds_per_token(name, stream), num_bytes
        on_run(name)

    add("transformers", ladder.with_transformers(use_cache=True)(str(path), device, dtype), plain_bytes)
    add(f"minillm {workload.dtype}", engine()(str(path), device, dtype), plain_bytes)
    for name in workload.quantizations + workload.variants:
        quantization = VARIANTS.get(name, name)
        with record.case(f"minillm {name}"):
            check(path, quantization, dtype, device)
            num_bytes = weight_bytes_of(load_model(path, dtype, device, quantization))
            gc.collect()
            add(f"minillm {name}", engine(quantization=quantization)(str(path), device, dtype), num_bytes)
    if llama_cpp.installed() and device.type == "cpu" and config.model_type == "llama":
        for kind in GGUF_TYPES:
            file = llama_cpp.write_gguf(path, config, kind, path.parent / f"{kind}.gguf")
            peer = llama_cpp.LlamaCpp(
                file, torch.get_num_threads(), 2 * (workload.prompt_tokens + workload.output_tokens)
            )
            engines[f"llama.cpp {kind}"] = _seconds_of_peer(peer)
            weight_bytes[f"llama.cpp {kind}"] = file.stat().st_size
            on_run(f"llama.cpp {kind}")
    return engines, weight_bytes


def weight_bytes_of(model: Decoder) -> int:
    """What the matrices of a model take as they are kept, packed and with their scales."""
    linears = model.linears().values()
    return sum(
        x.quantized.held_bytes if x.quantized is not None else x.weight.numel() * x.weight.element_size()
        for x in linears
    )


def check(path: Path, quantization: str | dict, dtype: torch.dtype, device: torch.device) -> None:
    """Every product of the first layer and of the head, against the dequantized weights in float64.

    Raises RuntimeError where they are further apart than rounding explains.
    """
    model = load_model(path, dtype, device, quantization)
    products = [
        module
        for layer in (model.layers[0], model.lm_head)
        for module in layer.modules()
        if isinstance(module, QuantizedLinear)
    ]
    for product in products:
        x = torch.randn(5, product.in_features, device=device).to(dtype)
        expected = x.double() @ product.dequantize().double().t()
        error = float((product(x).double() - expected).norm() / expected.norm())
        if not error < TOLERANCE * (1 if dtype is not torch.float32 else 1e-3):
            raise RuntimeError(
                f"{quantization}, {product.out_features} x {product.in_features}: {error:.2%} away from the product "
                f"with the dequantized weight: no point in timing"
            )


def _seconds_per_token(name: str, stream) -> Callable[[list[int], int], float]:
    def measure_once(prompt: list[int], count: int) -> float:
        said = ladder.record(name, stream, prompt, count, ignore_eos=True)
        return (said.said[-1].seconds - said.ttft) / (len(said.token_ids) - 1)

    return measure_once


def _seconds_of_peer(peer: llama_cpp.LlamaCpp) -> Callable[[list[int], int], float]:
    def measure_once(prompt: list[int], count: int) -> float:
        tokens = peer(prompt)
        next(tokens)
        started = time.perf_counter()
        for _ in islice(tokens, count - 1):
            pass
        return (time.perf_counter() - started) / (count - 1)

    return measure_once


def _llms(path: Path, workload: Workload, device: torch.device) -> dict[str, LLM]:
    """Our own engine in each format, with room for the largest batch."""
    room = measure.room_for(max(workload.batches), workload.prompt_tokens + workload.output_tokens)
    return {
        name: LLM(
            str(path),
            device=str(device),
            dtype=workload.dtype,
            quantization=None if name == workload.dtype else name,
            **room,
        )
        for name in (workload.dtype, *workload.quantizations)
    }


def _together(
    llms: dict[str, LLM],
    workload: Workload,
    record: Record,
    prompt: list[int],
    batch: int,
    on_run: Callable[[str], None],
) -> dict:
    """Tokens a second with several sequences under way, by format."""
    candidates = {
        f"{name}/{batch}": lambda llm=llm: _seconds_per_step(llm, prompt, batch, workload.output_tokens // 2)
        for name, llm in llms.items()
    }
    times = record.interleave(candidates, workload.repeats, on_run=on_run)
    plain = times[f"{workload.dtype}/{batch}"]
    return {
        name: {
            "tokens_per_second": batch / taken.median,
            "spread": taken.spread,
            "speedup_over_own": plain.median / taken.median,
        }
        for name in llms
        for taken in [times[f"{name}/{batch}"]]
    }


def _seconds_per_step(llm: LLM, prompt: list[int], batch: int, steps: int) -> float:
    from .. import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    streams = [llm.stream({"prompt_token_ids": [token + 1 + i for token in prompt]}, params) for i in range(batch)]
    for stream in streams:
        next(stream)
    started = time.perf_counter()
    for _ in zip(*streams):
        pass
    return (time.perf_counter() - started) / steps


def tables(measured: dict) -> list:
    """The limit first, then the figures (rich renderables)."""
    from rich.table import Table

    workload, figures = measured["workload"], measured["figures"]
    alone = Table(
        "engine",
        "weights, MB",
        "limit, tokens/s",
        "tokens/s",
        "± half range",
        "of limit",
        "× own",
        "× transformers",
        title=(
            f"Decode at batch 1, {workload['shape']}, read bandwidth "
            f"{measured['ceilings']['read_bytes_per_second'] / 1e9:.1f} GB/s"
        ),
    )
    for name, f in figures["batch 1"].items():
        alone.add_row(
            name,
            f"{f['weight_bytes'] / 1e6:.0f}",
            f"{f['limit_tokens_per_second']:,.0f}",
            f"{f['tokens_per_second']:,.1f}",
            f"{f['spread'] / 2:.0%}",
            f"{f['share_of_limit']:.0%}",
            f"{f['speedup_over_own']:.2f}",
            f"{f['speedup_over_transformers']:.2f}",
        )
    names = (workload["dtype"], *workload["quantizations"])
    together = Table("batch", *names, title="Tokens a second over the batch size, and × our own " + workload["dtype"])
    for batch in workload["batches"]:
        row = figures[f"batch {batch}"]
        together.add_row(
            str(batch),
            *(f"{row[name]['tokens_per_second']:,.0f} ({row[name]['speedup_over_own']:.2f}×)" for name in names),
        )
    return [alone, together]
