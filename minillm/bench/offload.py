"""Weights streamed from host memory, beside what the bus allows. Built in chapter 17.

A step reads every streamed layer once: it takes at least those bytes over the bandwidth from host to device, which is
measured in the same run, on the very buffers. On a CPU host and device are one memory: the same road, plain copies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..model.checkpoint import load_config
from ..model.offload import LayerStream
from . import measure
from .decode import SHAPES, Shape, write_random_checkpoint
from .record import Record


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtype: str = "auto"
    share: float = 0.5  # of the layers, streamed
    batch: int = 1
    prompt_tokens: int = 64
    output_tokens: int = 32
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench offload",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Decode with all layers on the device and with some on the host, in turns; a result for `measure.save`.

    Raises ValueError for an unknown shape or a share that streams nothing, RuntimeError where float32 tokens differ.
    """
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    record = Record(
        f"offload-{workload.shape}-{workload.dtype}-batch-{workload.batch}", command, where, asdict(workload), keep
    )
    with tempfile.TemporaryDirectory() as folder, record.case("streamed layers"):
        path = write_random_checkpoint(
            shapes[workload.shape], Path(folder) / workload.shape, workload.seed, where, dtype
        )
        config = load_config(path)
        layer_bytes = matrix_elements(shapes[workload.shape]) * dtype.itemsize
        offloaded = round(workload.share * config.num_layers) * layer_bytes
        length = workload.prompt_tokens + workload.output_tokens
        settings = dict(
            device=str(where),
            dtype=dtype,
            max_num_seqs=workload.batch,
            max_model_len=length,
            enforce_eager=True,
            num_kv_blocks=-(-length // 16) * workload.batch + 1,
            enable_prefix_caching=False,
        )
        engines = {
            "all on the device": LLM(str(path), **settings),
            "streamed": LLM(str(path), cpu_offload_bytes=offloaded, **settings),
        }
        generator = torch.Generator().manual_seed(workload.seed)
        prompts = torch.randint(
            4, config.vocab_size, (workload.batch, workload.prompt_tokens), generator=generator
        ).tolist()
        said: dict[str, list] = {}

        def seconds_a_step(name: str) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
            outputs = engines[name].generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            said[name] = [output.outputs[0].token_ids for output in outputs]
            first = max(output.metrics.first_token_time for output in outputs)
            return (max(output.metrics.token_times[-1] for output in outputs) - first) / (workload.output_tokens - 1)

        times = record.interleave(
            {name: lambda name=name: seconds_a_step(name) for name in engines}, workload.repeats, on_run=on_run
        )
        same = len({str(tokens) for tokens in said.values()}) == 1
        if dtype == torch.float32 and not same:
            raise RuntimeError(
                "streamed layers say other tokens than those on the device, in float32: no point in timing"
            )
        stream, engine = engines["streamed"].model.stream, engines["streamed"].engine
        copies = record.interleave({"copy": lambda: copy_through(stream)}, workload.repeats, on_run=on_run)["copy"]
        # Counted; both slots were filled once before.
        bytes_a_step = (stream.bytes_streamed - 2 * stream.layer_bytes) / engine.num_steps
        bandwidth = stream.host.numel() * stream.host.element_size() / copies.median
        record.figures |= {
            "streamed_layers": len(stream.index),
            "num_layers": config.num_layers,
            "bytes_a_step": bytes_a_step,
            "bandwidth": bandwidth,
            "limit_tokens_per_second": workload.batch * bandwidth / bytes_a_step,
            "same_tokens": same,
            "tokens_per_second": workload.batch / times["streamed"].median,
            "spread": times["streamed"].spread,
            "tokens_per_second_on_device": workload.batch / times["all on the device"].median,
        }
    return record.finish()


def matrix_elements(shape: Shape) -> int:
    """Numbers in the four matrices of a layer."""
    head_dim = shape.head_dim or shape.hidden_size // shape.num_heads
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    return shape.hidden_size * (attention + 3 * shape.intermediate_size)


def copy_through(stream: LayerStream) -> None:
    """Every streamed layer into its slot, with nothing computing beside."""
    for index, row in enumerate(stream.host):
        stream.slots[index % 2].copy_(row, non_blocking=True)


def table(measured: dict):
    """The streamed engine beside its limit, and beside the same engine with room for all (rich)."""
    from rich.table import Table

    f = measured["figures"]
    table = Table(
        "weights",
        "tokens/s",
        "limit",
        "share of it",
        title=f"{f['streamed_layers']} of {f['num_layers']} layers streamed, {f['bytes_a_step'] / 1e6:.1f} MB a step "
        f"at {f['bandwidth'] / 1e9:.1f} GB/s, {measured['hardware']['name']}",
    )
    table.add_row("all on the device", f"{f['tokens_per_second_on_device']:.1f}", "", "")
    table.add_row(
        "streamed",
        f"{f['tokens_per_second']:.1f} ± {f['spread'] / 2:.0%}",
        f"{f['limit_tokens_per_second']:.1f}",
        f"{f['tokens_per_second'] / f['limit_tokens_per_second']:.0%}",
    )
    return table
