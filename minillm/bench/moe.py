"""Decoding with a mixture of experts: against `transformers`, llama.cpp where it is installed, and a dense model.
Built in chapter 21.

The weights are random, the shape is Qwen3-MoE's at about a billion parameters. In turns, for each batch size:

    minillm          the mixture of experts
    dense            minillm again, with a dense model of equal active size: one MLP as wide as the experts of a token
    transformers     the mixture of experts, `generate`
    llama.cpp        the same, from a GGUF file

The limit of a step is what it cannot avoid reading: attention, the output matrix, keys and values, and the experts that
its tokens chose, which are counted while it runs.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..device import resolve_device, resolve_dtype
from ..model.checkpoint import load_config
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.routing import record_routing
from ..zoo import tokenizer as bpe
from . import llama_cpp, measure
from .compare.engines import Minillm, Transformers
from .compare.llama_batch import LlamaCppBatch
from .compare.request import Answer, Peer, Request
from .decode import Shape, raw_config
from .moe_gguf import write_moe_gguf
from .record import Record

POOL = 2**24  # random numbers from which the weights are cut: drawing a billion takes a minute


@dataclass(frozen=True)
class MoEShape:
    """A model whose every layer has experts; `shape.intermediate_size` is that of the dense model of equal active
    size."""

    shape: Shape
    num_experts: int
    num_experts_per_tok: int

    @property
    def expert_size(self) -> int:
        return self.shape.intermediate_size // self.num_experts_per_tok


SHAPES = {
    "qwen3-moe-1b": MoEShape(Shape(151936, 1024, 1536, 20, 16, 4, head_dim=128, family="qwen3_moe"), 16, 2),
    "toy": MoEShape(Shape(300, 64, 128, 2, 4, 2, head_dim=16, family="qwen3_moe"), 4, 2),
}


@dataclass(frozen=True)
class Workload:
    shape: str = "qwen3-moe-1b"
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 16
    output_tokens: int = 16
    quantization: str | None = None  # of minillm's models; the peers stay as they are
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def engines_of(workload: Workload) -> list[str]:
    peers = ["llama.cpp"] if llama_cpp.installed() else []
    return ["minillm", "dense", "transformers", *peers]


def num_runs(workload: Workload) -> int:
    return 1 + len(workload.batches) * (1 + len(engines_of(workload)) * (workload.repeats + 1))


def run(
    workload: Workload = Workload(),
    device: str = "cpu",
    command: str = "minillm bench moe",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload`; a result for `measure.save`.

    Raises ValueError for an unknown shape or another device than a CPU, RuntimeError if in float32 minillm has other
    greedy tokens than transformers.
    """
    if workload.shape not in SHAPES:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(SHAPES)}")
    where = resolve_device(device)
    if where.type != "cpu":
        raise ValueError(f"device={device!r}: this measurement compares engines on a CPU; use device='cpu'")
    dtype, moe = resolve_dtype(workload.dtype, where), SHAPES[workload.shape]
    record = Record(f"moe-{workload.shape}", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        path = write_checkpoint(moe, folder / "moe", dtype, workload.seed)
        dense = write_checkpoint(replace(moe, num_experts=0), folder / "dense", dtype, workload.seed)
        config = load_config(path)
        weight_bytes = config.num_parameters() * dtype.itemsize
        record.ceilings = measure.measure_ceilings(where, (dtype,), measure.megabytes_to_read(weight_bytes, where))
        record.figures["parameters"] = {
            "all": config.num_parameters(),
            "active": config.num_parameters(moe.num_experts_per_tok),
            "dense": load_config(dense).num_parameters(),
        }
        on_run("ceilings")
        engines = load(workload, path, dense, config, dtype, folder)
        try:
            for batch in workload.batches:
                with record.case(f"batch {batch}"):
                    figures = compare(engines, workload, batch, config, dtype, record, on_run)
                    record.figures[f"batch {batch}"] = figures
        finally:
            for engine in engines.values():
                engine.close()
            gc.collect()
    return record.finish()


def load(
    workload: Workload, path: Path, dense: Path, config: ModelConfig, dtype: torch.dtype, folder: Path
) -> dict[str, Peer]:
    blocks = max(workload.batches) * -(-(workload.prompt_tokens + workload.output_tokens) // 16) + 1
    settings = (workload.dtype, max(workload.batches), blocks, workload.quantization)
    engines: dict[str, Peer] = {"minillm": Minillm(path, *settings), "dense": Minillm(dense, *settings)}
    engines["transformers"] = Transformers(path, workload.dtype)
    if "llama.cpp" in engines_of(workload):
        file = write_moe_gguf(path, config, dtype, folder / "moe.gguf")
        engines["llama.cpp"] = LlamaCppBatch(file, torch.get_num_threads(), dtype is torch.float32)
    return engines


def compare(
    engines: dict[str, Peer],
    workload: Workload,
    batch: int,
    config: ModelConfig,
    dtype: torch.dtype,
    record: Record,
    on_run: Callable[[str], None],
) -> dict:
    """One batch size: tokens checked and experts counted, then all engines in turns."""
    generator = torch.Generator().manual_seed(workload.seed + batch)
    prompts = torch.randint(4, config.vocab_size, (batch, workload.prompt_tokens), generator=generator).tolist()
    request = Request(prompts, [workload.output_tokens] * batch)
    with record_routing(engines["minillm"].llm.model) as recorder:
        said = {name: engine.answer(request).token_ids for name, engine in engines.items() if name != "dense"}
    agreeing = {name: agreement(said["minillm"], theirs) for name, theirs in said.items() if name != "minillm"}
    if dtype is torch.float32 and workload.quantization is None and agreeing["transformers"] < 1:
        raise RuntimeError(
            f"{1 - agreeing['transformers']:.0%} of the greedy tokens differ from those of transformers, in float32: "
            "no point in timing"
        )
    touched = [recorder.touched(layer)[1:] for layer in config.moe.layers]  # of the steps behind the prompts
    mean = sum(map(sum, touched)) / sum(map(len, touched))
    on_run(f"batch {batch}: outputs checked")
    times = record.interleave(
        {name: lambda engine=engine: step_seconds(engine.answer(request)) for name, engine in engines.items()},
        workload.repeats,
        f"batch {batch}/",
        lambda name: on_run(f"batch {batch}: {name}"),
    )
    floor = bytes_per_step(config, dtype, batch, mean, workload) / record.ceilings.bandwidth
    chosen = config.moe.num_experts_per_tok / config.moe.num_experts
    return {
        "agreeing_tokens": agreeing,
        "experts_touched": mean,
        "experts_predicted": config.moe.num_experts * (1 - (1 - chosen) ** batch),
        "limit_tokens_per_second": batch / floor,
        "tokens_per_second": {name: batch / times[name].median for name in times},
        "spread": {name: times[name].spread for name in times},
        "speedup": {name: times[name].median / times["minillm"].median for name in times if name != "minillm"},
        "share_of_limit": floor / times["minillm"].median,
    }


def step_seconds(answer: Answer) -> float:
    """The mean time of a decode step: all sequences have the same length, so that each step has one token of each."""
    steps = len(answer.token_ids[0]) - 1
    return (answer.seconds - answer.first_seconds) / steps


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens that are equal up to the first difference of each sequence."""
    equal = sum(next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(ours, theirs))
    return equal / sum(map(len, ours))


def bytes_per_step(config: ModelConfig, dtype: torch.dtype, batch: int, touched: float, workload: Workload) -> float:
    """What a decode step cannot avoid reading, in `dtype`: the weights, of the experts those that are chosen, and the
    keys and values of the texts so far (their mean)."""
    one_expert = 3 * config.hidden_size * config.moe.intermediate_size
    weights = config.num_parameters() - len(config.moe.layers) * (config.moe.num_experts - touched) * one_expert
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    context = workload.prompt_tokens + workload.output_tokens / 2
    return weights * dtype.itemsize + batch * context * config.kv_bytes_per_token(dtype)


def write_checkpoint(moe: MoEShape, folder: Path, dtype: torch.dtype, seed: int) -> Path:
    """A Hugging Face folder with random weights and a small tokenizer of the corpus; without experts, of a dense Qwen3.

    The weights of all tensors are pieces of the same random numbers, from different places on.
    """
    raw = raw_config(moe.shape) | {"model_type": "qwen3", "dtype": measure.name_of(dtype)}
    if moe.num_experts:
        raw |= {
            "model_type": moe.shape.family,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_tok,
            "moe_intermediate_size": moe.expert_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    architecture = "Qwen3MoeForCausalLM" if moe.num_experts else "Qwen3ForCausalLM"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    drawn = torch.randn(POOL, generator=torch.Generator().manual_seed(seed)) * raw["initializer_range"]
    pool, tensors, start = drawn.to(dtype), {}, 0
    for name, view in Decoder(load_config(folder), dtype, "meta").checkpoint_views().items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(view.shape, dtype=dtype)
            continue
        start = (start + 1_000_003) % POOL  # a prime: no two tensors are alike
        whole = torch.empty(view.numel(), dtype=dtype)
        for first in range(0, view.numel(), POOL):
            part = whole[first : first + POOL]
            head = pool[start : start + len(part)]
            part[: len(head)], part[len(head) :] = head, pool[: len(part) - len(head)]
        tensors[name] = whole.view(view.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bpe.wrap(bpe.learn(vocab_size=min(1024, moe.shape.vocab_size), num_documents=200), 4096).save_pretrained(folder)
    return folder


def tables(measured: dict) -> list:
    """The limit beside every engine (rich renderables)."""
    from rich.table import Table

    f, w = measured["figures"], measured["workload"]
    table = Table(
        "batch", "engine", "tokens/s", "± half range", "of limit", "minillm is", "experts a layer",
        title=f"Decode, {w['shape']}, {f['parameters']['all'] / 1e9:.2f} B parameters, "
        f"{f['parameters']['active'] / 1e9:.2f} B active, {w['dtype']}, {measured['hardware']['name']}",
    )  # fmt: skip
    for batch in w["batches"]:
        one = f.get(f"batch {batch}")
        if one is None:
            continue
        counted = f"{one['experts_touched']:.2f} ({one['experts_predicted']:.2f} predicted)"
        limit = one["limit_tokens_per_second"]
        table.add_row(str(batch), "the limit", f"{limit:,.1f}", "", "100%", "", counted, style="dim")
        for name, rate in one["tokens_per_second"].items():
            of_limit = "" if name == "dense" else f"{rate / limit:.0%}"
            faster = f"{one['speedup'][name]:.2f}×" if name in one["speedup"] else ""
            table.add_row("", name, f"{rate:,.1f}", f"{one['spread'][name] / 2:.0%}", of_limit, faster, "")
    return [table]
