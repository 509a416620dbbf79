"""What adapters cost: decode speed of a batch without any, with one, and with many at once. Built in chapter 23.

One LLM serves all three in turns, so that nothing else differs. With few adapters as with many each token pays the two
small products of its own; what many add is the reading of more matrices.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from .. import LLM, LoRARequest, SamplingParams
from ..device import resolve_device
from . import measure
from .decode import SHAPES, write_random_checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtype: str = "float32"
    batch: int = 16  # requests that decode side by side
    adapters: int = 8  # different ones in the mixed batch
    rank: int = 16
    prompt_tokens: int = 32
    output_tokens: int = 32
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench lora",
    on_run: Callable[[str], None] = lambda what: None,
) -> dict:
    """Tokens a second of decoding, by how many adapters the batch has. Raises ValueError for an unknown shape."""
    if workload.shape not in SHAPES:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(SHAPES)}")
    where, rng = resolve_device(device), random.Random(workload.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_checkpoint(
            SHAPES[workload.shape], Path(folder) / "model", workload.seed, where, torch.float32
        )
        room = measure.room_for(workload.batch, workload.prompt_tokens + workload.output_tokens)
        lora = dict(enable_lora=True, max_loras=workload.adapters, max_lora_rank=workload.rank)
        llm = LLM(path, dtype=workload.dtype, device=str(where), enable_prefix_caching=False, **lora, **room)
        adapters = [
            LoRARequest(f"adapter {at}", 1 + at, write_random_adapter(llm, Path(folder) / str(at), workload.rank, at))
            for at in range(workload.adapters)
        ]
        asked = {
            "none": [None] * workload.batch,
            "one": [adapters[0]] * workload.batch,
            f"{workload.adapters} mixed": [adapters[at % workload.adapters] for at in range(workload.batch)],
        }
        vocab_size = llm.model.config.vocab_size
        prompts = [
            {"prompt_token_ids": [rng.randrange(4, vocab_size) for _ in range(workload.prompt_tokens)]}
            for _ in range(workload.batch)
        ]
        params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)

        def seconds_a_step(kind: str) -> float:
            sinks = [llm.submit(prompt, params, lora_request=one) for prompt, one in zip(prompts, asked[kind])]
            while any(len(sink.request.output_token_ids) < 1 for sink in sinks):
                llm.step()
            steps, start = 0, time.perf_counter()
            while llm.step():
                steps += 1
            return (time.perf_counter() - start) / (steps + 1)

        runs = {kind: lambda kind=kind: seconds_a_step(kind) for kind in asked}
        times = measure.interleave(runs, workload.repeats, device=where, on_run=on_run)
    figures: dict = {}
    for kind, samples in times.items():
        figures[kind] = {
            "tokens_per_second": workload.batch / samples.median,
            "step_seconds": samples.median,
            "spread": samples.spread,
            "relative": times["none"].median / samples.median,
        }
    return measure.result("lora", command, where, asdict(workload), None, figures, times)


def write_random_adapter(llm: LLM, folder: Path, rank: int, seed: int) -> Path:
    """An adapter of every matrix, as PEFT writes it."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for place, (out_features, in_features) in llm.model.lora.shapes.items():
        for letter, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            name = f"base_model.model.model.{place}.lora_{letter}.weight"
            tensors[name] = 0.02 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def table(measured: dict):
    from rich.table import Table

    w = measured["workload"]
    title = (
        f"{w['batch']} requests decode, {w['shape']}, {w['dtype']}, rank {w['rank']}, {measured['hardware']['name']}"
    )
    shown = Table("adapters", "tokens/s", "± half range", "ms a step", "of the speed without", title=title)
    for kind, one in measured["figures"].items():
        shown.add_row(
            kind,
            f"{one['tokens_per_second']:,.0f}",
            f"{one['spread'] / 2:.0%}",
            f"{1e3 * one['step_seconds']:.2f}",
            f"{one['relative']:.2f}",
        )
    return shown
