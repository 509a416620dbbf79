"""Requests with different LoRA adapters in one batch, against one adapter at a time. Built in chapter 23.

The same requests with the same model, four times in turns:

    none             no adapter: what adapters cost is measured against it
    one adapter      all requests have the same one
    mixed            the requests have all the adapters, in one batch
    one at a time    the same requests and adapters, but only those of one adapter run together

The weights of the model are read once a step for a whole batch. One adapter at a time reads them as often as there are
adapters, which is what the limit of each case says: weights, keys and values, and the matrices of the adapters in use.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from .. import LLM, LoRARequest, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..model.lora_adapter import shapes_of
from . import measure, throughput
from .decode import SHAPES, Shape
from .record import Record

CASES = ("none", "one adapter", "mixed", "one at a time")
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    adapters: int = 8
    rank: int = 16
    requests: int = 16
    prompt_tokens: int = 32
    output_tokens: int = 32
    dtype: str = "float32"
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def num_runs(workload: Workload) -> int:
    return 1 + len(CASES) * (workload.repeats + 1)


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench lora",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload`; a result for `measure.save`. Raises RuntimeError if in float32 a request of the mixed batch
    has other greedy tokens than alone."""
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    record = Record(f"lora-{workload.shape}", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        served = Served(workload, Path(folder), where, shapes, dtype)
        config = served.llm.model.config
        weight_bytes = config.num_parameters() * dtype.itemsize
        record.ceilings = measure.measure_ceilings(where, (dtype,), measure.megabytes_to_read(weight_bytes, where))
        record.figures["adapter_bytes"] = served.adapter_bytes
        record.figures["limit_tokens_per_second"] = {
            case: served.num_tokens / served.limit_seconds(case, dtype, record.ceilings) for case in CASES
        }
        record.figures["agreeing_tokens"] = served.check(dtype)
        on_run("outputs checked")
        cases = {case: lambda case=case: served.run(case) for case in CASES}
        times = record.interleave(cases, workload.repeats, on_run=on_run)
        record.figures["tokens_per_second"] = {case: served.num_tokens / times[case].median for case in CASES}
        record.figures["spread"] = {case: times[case].spread for case in CASES}
        record.figures["speedup"] = times["one at a time"].median / times["mixed"].median
        record.figures["cost"] = {case: times[case].median / times["none"].median - 1 for case in CASES[1:3]}
    return record.finish()


class Served:
    """The model, its adapters, and the requests of every case."""

    def __init__(self, workload: Workload, folder: Path, where: torch.device, shapes: dict[str, Shape], dtype):
        recipe = throughput.Workload(workload.shape, seed=workload.seed)
        path = throughput.write_checkpoint(recipe, folder, shapes, where, dtype)
        self.llm = LLM(str(path), device=str(where), dtype=workload.dtype, enable_lora=True,
                       max_loras=workload.adapters, max_lora_rank=workload.rank)  # fmt: skip
        self.requests = []
        for number in range(1, workload.adapters + 1):
            write_random_adapter(folder / f"adapter-{number}", self.llm.model, workload.rank, number)
            self.requests.append(LoRARequest(f"adapter-{number}", number, folder / f"adapter-{number}"))
        generator = torch.Generator().manual_seed(workload.seed)
        size = (workload.requests, workload.prompt_tokens)
        self.prompts = torch.randint(self.llm.model.config.vocab_size, size, generator=generator).tolist()
        self.params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
        self.num_tokens = workload.requests * workload.output_tokens
        shapes_of_all = shapes_of(self.llm.model).values()
        self.adapter_bytes = sum(workload.rank * sum(shape) for shape in shapes_of_all) * dtype.itemsize

    def batches(self, case: str) -> list[list[tuple[int, LoRARequest | None]]]:
        """What runs together, one batch after the other: the number of a prompt, and its adapter."""
        indices = range(len(self.prompts))
        if case == "none":
            return [[(index, None) for index in indices]]
        if case == "one adapter":
            return [[(index, self.requests[0]) for index in indices]]
        mixed = [(index, self.requests[index % len(self.requests)]) for index in indices]
        if case == "mixed":
            return [mixed]
        return [[one for one in mixed if one[1] is request] for request in self.requests]

    def run(self, case: str) -> dict[int, list[int]]:
        """The greedy tokens of each prompt, by its number."""
        self.llm.engine.kv_cache.pool.evict_all()  # no repeat may live on what the last one left
        said = {}
        for batch in self.batches(case):
            prompts = [{"prompt_token_ids": self.prompts[index]} for index, _ in batch]
            adapters = [request for _, request in batch]
            outputs = self.llm.generate(prompts, self.params, use_tqdm=False, lora_request=adapters)
            said |= {index: output.outputs[0].token_ids for (index, _), output in zip(batch, outputs)}
        return said

    def check(self, dtype: torch.dtype) -> int:
        """How many greedy tokens of the mixed batch are those of one adapter at a time."""
        mixed, apart = self.run("mixed"), self.run("one at a time")
        agreeing = sum(a == b for index in mixed for a, b in zip(mixed[index], apart[index]))
        if dtype is torch.float32 and agreeing != self.num_tokens:
            raise RuntimeError(
                f"{self.num_tokens - agreeing} of {self.num_tokens} greedy tokens differ between a mixed batch and one "
                "adapter at a time, in float32: no point in timing"
            )
        return agreeing

    def limit_seconds(self, case: str, dtype: torch.dtype, ceilings: measure.Ceilings) -> float:
        """No engine can take less for a case: `throughput.limit_seconds` of every batch, with the matrices of the
        adapters in use read once in each decode step."""
        seconds = 0.0
        for batch in self.batches(case):
            prompts = [self.prompts[index] for index, _ in batch]
            lengths = [self.params.max_tokens] * len(batch)
            used = {request.lora_name for _, request in batch if request is not None}
            more = len(used) * self.adapter_bytes
            seconds += throughput.limit_seconds(self.llm.model.config, dtype, prompts, lengths, ceilings, more)
        return seconds


def write_random_adapter(folder: Path, model, rank: int, seed: int) -> Path:
    """A PEFT folder for every matrix of the decoder's layers, with random numbers small enough to leave text alive."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (out_features, in_features) in shapes_of(model).items():
        for part, shape in (("lora_A", (rank, in_features)), ("lora_B", (out_features, rank))):
            values = torch.randn(shape, generator=generator) * STANDARD_DEVIATION
            tensors[f"base_model.model.model.{name}.{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in shapes_of(model)})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def tables(measured: dict) -> list:
    """The limit beside every case (rich renderables)."""
    from rich.table import Table

    f, w = measured["figures"], measured["workload"]
    table = Table(
        "adapters", "limit, tokens/s", "output tokens/s", "± half range", "of limit", "speed-up",
        title=f"{w['requests']} requests, {w['adapters']} adapters of rank {w['rank']}, {w['shape']}, {w['dtype']}, "
        f"{measured['hardware']['name']}",
    )  # fmt: skip
    slowest = f["tokens_per_second"]["one at a time"]
    for case in CASES:
        rate, limit = f["tokens_per_second"][case], f["limit_tokens_per_second"][case]
        table.add_row(case, f"{limit:,.0f}", f"{rate:,.0f}", f"{f['spread'][case] / 2:.0%}", f"{rate / limit:.0%}",
                      f"{rate / slowest:.2f}×")  # fmt: skip
    return [table]
