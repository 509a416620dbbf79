"""Decoding at batch 1, against `transformers`, llama.cpp where it is installed, and the memory's limit.
Built in chapter 00.

To make one token every weight is read once, and every key and value of the text so far: a decode step can take no
less than those bytes over the bandwidth. `run` measures the bandwidth first, checks that both engines say the same
tokens, times them in turns, and then says where the rest of a step goes.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch

from ..device import resolve_device, resolve_dtype
from ..model.checkpoint import load_config
from ..model.config import ModelConfig
from ..zoo import tokenizer as bpe
from . import ladder, llama_cpp, measure
from .record import Record, release
from .timed_parts import take_apart


@dataclass(frozen=True)
class Shape:
    """A model by its sizes; its weights are random, for speed does not depend on them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None  # hidden_size / num_heads
    family: str = "llama"  # as transformers names it


SHAPES = {
    "smollm2-135m": Shape(49152, 576, 1536, 30, 9, 3),
    "tinyworld": Shape(1024, 256, 704, 4, 8, 4),
    "qwen3-0.6b": Shape(151936, 1024, 3072, 28, 16, 8, head_dim=128, family="qwen3"),
    "qwen2-0.5b": Shape(151936, 896, 4864, 24, 14, 2, family="qwen2"),
    "llama-3.1-8b": Shape(128256, 4096, 14336, 32, 32, 8),
}


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    prompt_tokens: int = 64
    output_tokens: int = 64
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench decode",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` and return a result (see `measure.result`); `on_run` hears what has just been done.

    Raises ValueError for an unknown shape, RuntimeError if the two engines disagree on a float32 token.
    """
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    where = resolve_device(device)
    dtypes = {name: resolve_dtype(name, where) for name in workload.dtypes}
    record = Record(f"decode-{workload.shape}", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
        path = write_random_checkpoint(
            shapes[workload.shape], Path(folder) / workload.shape, workload.seed, where, widest
        )
        config = load_config(path)
        megabytes = measure.megabytes_to_read(config.num_parameters() * 4, where)
        record.ceilings = measure.measure_ceilings(where, tuple(dtypes.values()), megabytes)
        on_run("ceilings")
        for name, dtype in dtypes.items():
            with record.case(name):
                record.figures[name] = compare(path, config, workload, record, name, dtype, on_run)
            gc.collect()
    return record.finish()


def compare(
    path: Path,
    config: ModelConfig,
    workload: Workload,
    record: Record,
    name: str,
    dtype: torch.dtype,
    on_run: Callable[[str], None],
) -> dict:
    """One dtype: the outputs checked, then both engines timed in turns, then our step taken apart."""
    device, room = record.device, measure.room_for(1, workload.prompt_tokens + workload.output_tokens)
    rng = random.Random(workload.seed)
    prompt = [rng.randrange(4, config.vocab_size) for _ in range(workload.prompt_tokens)]
    engines = {
        "transformers": ladder.with_transformers(use_cache=True)(str(path), device, dtype),
        "minillm": ladder.with_engine(**room)(str(path), device, dtype),
    }
    said = {
        engine: ladder.record(engine, stream, prompt, workload.output_tokens, ignore_eos=True)
        for engine, stream in engines.items()
    }
    agreeing = _common_prefix(said["transformers"].token_ids, said["minillm"].token_ids)
    if dtype == torch.float32 and agreeing < workload.output_tokens:
        raise RuntimeError(
            f"transformers and minillm disagree from token {agreeing} on, in float32: no point in timing"
        )

    peer = None
    if llama_cpp.installed() and device.type == "cpu" and config.model_type == "llama":
        peer = llama_cpp.LlamaCpp(
            llama_cpp.write_gguf(path, config, dtype, path.parent / f"{name}.gguf"),
            torch.get_num_threads(),
            2 * (len(prompt) + workload.output_tokens),
        )
        peer_said = list(islice(peer(prompt), workload.output_tokens))
        peer_agrees = _common_prefix(peer_said, said["minillm"].token_ids)
        # It rounds otherwise, so not to the end.
        if dtype == torch.float32 and peer_agrees < workload.output_tokens // 4:
            raise RuntimeError(
                f"llama.cpp and minillm disagree from token {peer_agrees} on, in float32: no point in timing"
            )

    def seconds_per_token(engine: str) -> float:
        if engine == "llama.cpp":
            tokens = peer(prompt)
            next(tokens)
            started = time.perf_counter()
            for _ in islice(tokens, workload.output_tokens - 1):
                pass
            return (time.perf_counter() - started) / (workload.output_tokens - 1)
        run = ladder.record(engine, engines[engine], prompt, workload.output_tokens, ignore_eos=True)
        return (run.said[-1].seconds - run.ttft) / (len(run.token_ids) - 1)

    timed = [*engines, "llama.cpp"] if peer else engines
    times = record.interleave(
        {engine: lambda engine=engine: seconds_per_token(engine) for engine in timed},
        workload.repeats,
        f"{name}/",
        lambda engine: on_run(f"{name} {engine}"),
    )
    floor = bytes_per_token(config, dtype, workload) / record.ceilings.bandwidth
    ours, theirs = times["minillm"], times["transformers"]
    figures = {
        "outputs_checked": dtype == torch.float32,
        "agreeing_tokens": agreeing,
        "bytes_per_token": bytes_per_token(config, dtype, workload),
        "limit_tokens_per_second": 1 / floor,
        "minillm_tokens_per_second": 1 / ours.median,
        "minillm_spread": ours.spread,
        "transformers_tokens_per_second": 1 / theirs.median,
        "transformers_spread": theirs.spread,
        "speedup": theirs.median / ours.median,
        "share_of_limit": floor / ours.median,
        "transformers_share_of_limit": floor / theirs.median,
    }
    engines.clear()  # or their graphs and caches would lie beside those of the engine that is taken apart
    release(device)
    figures |= take_apart(path, name, device, prompt, workload.output_tokens)
    if peer:
        peer.close()
        figures |= {
            "llama_cpp_agreeing_tokens": peer_agrees,
            "llama_cpp_tokens_per_second": 1 / times["llama.cpp"].median,
            "llama_cpp_spread": times["llama.cpp"].spread,
            "llama_cpp_share_of_limit": floor / times["llama.cpp"].median,
            "speedup_over_llama_cpp": times["llama.cpp"].median / ours.median,
        }
    on_run(f"{name} parts")
    return figures


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, workload: Workload) -> int:
    """What a decode step cannot avoid reading: the weights, and the keys and values of the text so far (its mean)."""
    weights = config.num_parameters()
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size  # of the input embedding a single row is read
    context = workload.prompt_tokens + workload.output_tokens // 2
    return weights * dtype.itemsize + context * config.kv_bytes_per_token(dtype)


def model_config(shape: Shape) -> ModelConfig:
    """The sizes as the engine knows them, without any weights."""
    return ModelConfig.from_hf(raw_config(shape) | {"model_type": shape.family, "eos_token_id": [1]})


def raw_config(shape: Shape) -> dict:
    return dict(
        head_dim=shape.head_dim or shape.hidden_size // shape.num_heads,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        initializer_range=2 * shape.hidden_size**-0.5,
        bos_token_id=0,
        eos_token_id=1,
    )


def write_random_checkpoint(
    shape: Shape, folder: Path, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Path:
    """A Hugging Face folder of that shape, float32, with a small tokenizer of the corpus.

    Weights are drawn wider than usual: then the layers, and not the embedding of the last token, decide what comes
    next, and two engines that agree on the tokens agree on the arithmetic. For a GPU they are drawn there,
    and written in `dtype`: eight billion numbers take a CPU minutes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(shape.family, **raw_config(shape))
    with ladder.no_progress_bars():
        if torch.device(device).type == "cuda":
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config).float()
        model.save_pretrained(folder)
    del model
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    bpe.wrap(bpe.learn(vocab_size=min(1024, shape.vocab_size), num_documents=200), 4096).save_pretrained(folder)
    return folder


def tables(measured: dict) -> list:
    """The limit first, then the figures with their share of it, then where a step goes (rich renderables)."""
    from rich.table import Table

    ceilings = measured["ceilings"]
    limit = Table("ceiling", "measured", title=measured["hardware"]["name"])
    limit.add_row("copy, read + written", f"{ceilings['copy_bytes_per_second'] / 1e9:.1f} GB/s")
    limit.add_row("read", f"{ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s")
    for dtype, rate in ceilings["matmul_flops_per_second"].items():
        limit.add_row(f"matrix product, {dtype}", f"{rate / 1e9:.0f} GFLOP/s")
    speed = Table(
        "dtype",
        "engine",
        "tokens/s",
        "± half range",
        "of limit",
        "speed-up",
        title=f"Decode at batch 1, {measured['workload']['shape']}",
    )
    for name, f in measured["figures"].items():
        speed.add_row(name, "the limit", f"{f['limit_tokens_per_second']:,.1f}", "", "100%", "", style="dim")
        for engine, of_limit, times in (
            ("transformers", "transformers_share_of_limit", "1"),
            ("minillm", "share_of_limit", f"{f['speedup']:.2f}"),
        ):
            speed.add_row(
                "",
                engine,
                f"{f[f'{engine}_tokens_per_second']:,.1f}",
                f"{f[f'{engine}_spread'] / 2:.0%}",
                f"{f[of_limit]:.0%}",
                f"{times}×",
                end_section=engine == "minillm" and "llama_cpp_spread" not in f,
            )
        if "llama_cpp_spread" in f:
            speed.add_row(
                "",
                "llama.cpp",
                f"{f['llama_cpp_tokens_per_second']:,.1f}",
                f"{f['llama_cpp_spread'] / 2:.0%}",
                f"{f['llama_cpp_share_of_limit']:.0%}",
                f"{f['speedup'] / f['speedup_over_llama_cpp']:.2f}×",
                end_section=True,
            )
    parts = Table("part of our step", *measured["figures"], title="Where a step goes, ms a token")
    spent = [f["parts"] for f in measured["figures"].values()]
    for part in dict.fromkeys(part for p in spent for part in p):
        parts.add_row(
            part, *(f"{1e3 * p.get(part, 0.0):.3f} ({p.get(part, 0.0) / sum(p.values()):.0%})" for p in spent)
        )
    return [limit, speed, parts]


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
