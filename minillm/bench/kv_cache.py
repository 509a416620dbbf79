"""Decoding far into a text with the KV cache in 8 bits, against the model's own dtype. Built in chapter 17.

A step reads every weight once and the keys and values of the whole text, so the longer the text,
the more of the step is the cache. The cache is filled with random keys and values, which are quantized as they would
be: attention costs the same whatever they say, and no long prompt has to be computed first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..device import resolve_device, resolve_dtype
from ..engine.parts import build_attention
from ..kv_cache.paged import PagedKVCache
from ..model.attention import AttentionBackend
from ..model.batch import ForwardBatch
from ..model.checkpoint import load_model
from ..model.decoder import Decoder
from . import decode, kernels, measure
from .record import Record

KINDS = ("auto", "int8", "fp8")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtype: str = "bfloat16"
    contexts: tuple[int, ...] = (2048, 4096, 8192)  # tokens
    batch: int = 1
    steps: int = 8  # of one timed run
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def num_runs(workload: Workload) -> int:
    return 1 + len(KINDS) * len(workload.contexts) * (workload.repeats + 1)


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench kv",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Time decode steps at each context, with each kind of cache, in turns; see `measure.result`.

    Raises ValueError for an unknown shape or a context that is no whole number of blocks, RuntimeError if 8 bits make
    another model of it.
    """
    if workload.shape not in decode.SHAPES:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(decode.SHAPES)}")
    if odd := [context for context in workload.contexts if context % BLOCK_SIZE]:
        raise ValueError(f"context={odd[0]} is no multiple of {BLOCK_SIZE}, the tokens of a block")
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    with tempfile.TemporaryDirectory() as folder:
        path = decode.write_random_checkpoint(decode.SHAPES[workload.shape], Path(folder), workload.seed, where, dtype)
        model = load_model(path, dtype, where)
    weight_bytes = model.config.num_parameters() * dtype.itemsize
    record = Record(f"kv-{workload.shape}", command, where, asdict(workload), keep)
    record.ceilings = measure.measure_ceilings(where, (dtype,), measure.megabytes_to_read(weight_bytes, where))
    on_run("ceilings")
    for context in workload.contexts:
        with record.case(f"context {context}"):
            measure_context(model, workload, context, weight_bytes, record, on_run)
    return record.finish()


def measure_context(
    model: Decoder, workload: Workload, context: int, weight_bytes: int, record: Record, on_run: Callable[[str], None]
) -> None:
    """Decode steps at one context with every kind of cache. On a GPU they are recorded, as the engine records them:
    eager, the host would take longer for its launches than the GPU for the bytes."""
    caches = {kind: filled_cache(model, workload, context, kind) for kind in KINDS}
    attentions = {kind: build_attention(model, cache) for kind, cache in caches.items()}
    batch = batch_at(workload, context, model.device)
    changed = check(model, attentions, batch)
    forwards = {kind: lambda kind=kind: model.forward(batch, attentions[kind]) for kind in KINDS}
    if record.device.type == "cuda":
        forwards = {
            kind: kernels.record(lambda _, forward=forward: forward(), [(None,)]) for kind, forward in forwards.items()
        }
    times = record.interleave(
        {kind: lambda forward=forward: _repeat(forward, workload.steps) for kind, forward in forwards.items()},
        workload.repeats,
        f"{context} ",
        on_run,
    )
    for kind in KINDS:
        kv_bytes = caches[kind].bytes_per_block * workload.batch * context // BLOCK_SIZE
        seconds = times[kind].median / workload.steps
        record.figures[f"{context} {kind}"] = {
            "tokens_per_second": workload.batch / seconds,
            "spread": times[kind].spread,
            "speedup": times["auto"].median / times[kind].median,
            "kv_bytes": kv_bytes,
            "share_of_limit": (weight_bytes + kv_bytes) / record.ceilings.bandwidth / seconds,
            "logits_changed": changed[kind],
        }


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def filled_cache(model: Decoder, workload: Workload, context: int, kind: str) -> PagedKVCache:
    """Pages of `context` tokens for each sequence; the same keys and values for every kind."""
    config, generator = model.config, torch.Generator(model.device).manual_seed(workload.seed)
    num_tokens = workload.batch * context
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim, num_tokens // BLOCK_SIZE, BLOCK_SIZE)
    cache = PagedKVCache(*sizes, model.dtype, model.device, kv_dtype=kind)
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + num_tokens, device=model.device)
    for layer in range(config.num_layers):
        k, v = torch.randn(
            2, num_tokens, config.num_kv_heads, config.head_dim, generator=generator, device=model.device
        ).to(model.dtype)
        cache.write(layer, k, v, slots)
    return cache


def batch_at(workload: Workload, context: int, device: torch.device) -> ForwardBatch:
    """One token of each sequence, its last: its pages lie anywhere."""
    count, blocks = workload.batch, context // BLOCK_SIZE
    generator = torch.Generator().manual_seed(workload.seed)
    table = (torch.randperm(count * blocks, generator=generator) + 1).view(count, blocks).to(device)
    one = ForwardBatch.single([5] * count, device=device)
    return replace(
        one,
        positions=torch.full((count,), context - 1, device=device),
        query_start_loc=torch.arange(count + 1, device=device),
        seq_lens=torch.full((count,), context, device=device),
        block_table=table,
        slot_mapping=table[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        max_query_len=1,
        logits_indices=torch.arange(count, device=device),
        max_seq_len=context,
        num_decodes=count,
    )


def check(model: Decoder, attentions: dict[str, AttentionBackend], batch: ForwardBatch) -> dict[str, float]:
    """How far the logits of each kind are from those of the model's own dtype, as a share of their spread."""
    logits = {kind: model.forward(batch, attention) for kind, attention in attentions.items()}
    spread = logits["auto"].std()
    changed = {kind: float((said - logits["auto"]).std() / spread) for kind, said in logits.items()}
    for kind, share in changed.items():
        if share > 0.5:  # a random model of many layers makes much of little; unrelated logits would be 1.4 apart
            raise RuntimeError(
                f"kv_cache_dtype={kind!r} moves the logits by {share:.0%} of their spread: no point in timing"
            )
    return changed


def tables(measured: dict) -> list:
    """The limit first, then each context and kind with its share of it (rich renderables)."""
    from rich.table import Table

    limit = Table("ceiling", "measured", title=measured["hardware"]["name"])
    limit.add_row("read", f"{measured['ceilings']['read_bytes_per_second'] / 1e9:.1f} GB/s")
    speed = Table(
        "context",
        "cache",
        "KV bytes",
        "tokens/s",
        "± half range",
        "speed-up",
        "of limit",
        "logits changed",
        title=f"Decode with {measured['workload']['dtype']} weights, {measured['workload']['shape']}",
    )
    for name, f in measured["figures"].items():
        context, kind = name.split()
        speed.add_row(
            context if kind == "auto" else "",
            kind,
            f"{f['kv_bytes'] / 2**20:.0f} MiB",
            f"{f['tokens_per_second']:.1f}",
            f"{f['spread'] / 2:.0%}",
            f"{f['speedup']:.2f}×",
            f"{f['share_of_limit']:.0%}",
            f"{f['logits_changed']:.1%}",
            end_section=kind == KINDS[-1],
        )
    return [limit, speed]
