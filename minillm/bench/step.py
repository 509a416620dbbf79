"""The whole step, one optimisation after the other: the ablation ladder of chapter 14. Built in chapter 14.

Every rung is the same engine with one more switch on, says the same greedy tokens, and is timed in turns with the
others. On a CPU the switches are the packed weights, our own C kernels, and one call for a layer or for
all of them; on a GPU the Triton kernels, the recorded steps (CUDA graphs) and the step scheduled ahead.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import LLM, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..kernels import native
from ..model import layers
from ..model.checkpoint import load_config
from . import decode, measure
from .decode import SHAPES, Shape, write_random_checkpoint
from .record import Record
from .switches import switched_off


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtype: str = "float32"
    batch: int = 1
    prompt_tokens: int = 64
    output_tokens: int = 64
    repeats: int = measure.MIN_REPEATS
    seed: int = 0


@dataclass(frozen=True)
class Rung:
    name: str
    settings: dict = field(default_factory=dict)  # of the LLM
    without: tuple[str, ...] = ()  # what is switched off, of SWITCHES
    compiled: bool = False  # the element-wise parts through torch.compile


CPU_RUNGS = (
    Rung("torch, plain weights", dict(attention_backend="torch"), ("C kernels", "packed weights")),
    Rung("+ weights packed by oneDNN", dict(attention_backend="torch"), ("C kernels",)),
    Rung("+ torch.compile for norms and SwiGLU", dict(attention_backend="torch"), ("C kernels",), compiled=True),
    Rung("our C kernels instead", dict(attention_backend="native"), ("whole layers",)),
    Rung("+ a layer in one call", dict(attention_backend="native"), ("joined model",)),
    Rung("+ the model in one call", dict(attention_backend="native")),
)
GPU_RUNGS = (
    Rung("torch", dict(attention_backend="torch", enforce_eager=True, async_scheduling=False)),
    Rung("+ Triton kernels", dict(attention_backend="triton", enforce_eager=True, async_scheduling=False)),
    Rung("+ CUDA graphs", dict(attention_backend="triton", async_scheduling=False)),
    Rung("+ scheduled ahead", dict(attention_backend="triton", async_scheduling=True)),
)


class Engine:
    """One rung, ready to run."""

    def __init__(self, rung: Rung, path: Path, workload: Workload, device: torch.device, prompts: list[list[int]]):
        self.rung, self.prompts, self.count = (
            rung,
            [{"prompt_token_ids": prompt} for prompt in prompts],
            workload.output_tokens,
        )
        self.params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
        length = workload.prompt_tokens + workload.output_tokens
        started = time.perf_counter()
        with switched_off(rung.without):
            self.llm = LLM(
                str(path),
                device=str(device),
                dtype=workload.dtype,
                max_num_seqs=max(1, len(prompts)),
                max_model_len=length,
                num_kv_blocks=-(-length // 16) * len(prompts) + 1,
                enable_prefix_caching=False,
                **rung.settings,
            )
            if rung.compiled:
                compile_parts(self.llm)
            self.said = self.run()[1]
        self.start_seconds = time.perf_counter() - started  # loading, packing, compiling, recording, the first answer

    def run(self) -> tuple[float, list[list[int]]]:
        """Seconds a decode step, prompts left out, and the tokens said."""
        with switched_off(self.rung.without):
            outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        first = max(output.metrics.first_token_time for output in outputs)
        last = max(output.metrics.token_times[-1] for output in outputs)
        return (last - first) / (self.count - 1), [output.outputs[0].token_ids for output in outputs]

    def operations(self) -> float:
        """Operations that torch is asked for in a decode step."""
        with switched_off(self.rung.without), CountOperations() as counted:
            self.llm.generate(
                self.prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
            )
            long = counted.total()
            self.llm.generate(
                self.prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False
            )
        return (2 * long - counted.total()) / 10  # ten steps more


def compile_parts(llm: LLM) -> None:
    """What of a layer is neither a matrix product nor attention: torch fuses it into loops of its own."""

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return (x * scale).to(x.dtype) * weight

    silu_mul, rms_norm = torch.compile(silu_mul, dynamic=True), torch.compile(rms_norm, dynamic=True)
    for module in llm.model.modules():
        if isinstance(module, layers.SwiGLU):
            module.forward = lambda x, mlp=module: mlp.down_proj(silu_mul(mlp.gate_up_proj(x)))
        elif isinstance(module, layers.RMSNorm):
            module.forward = lambda x, norm=module: rms_norm(x, norm.weight, norm.eps)


class CountOperations(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher; what runs in one call of ours is none of them."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def rungs_for(device: torch.device, names: tuple[str, ...] = ()) -> tuple[Rung, ...]:
    """The ladder of this device, or some rungs of it; without a C compiler the CPU's ends with torch.

    Raises ValueError for a name that no rung has.
    """
    rungs = GPU_RUNGS if device.type == "cuda" else _cpu_rungs()
    if unknown := set(names) - {rung.name for rung in rungs}:
        raise ValueError(
            f"rung={sorted(unknown)} is not on the ladder; its rungs here are {', '.join(rung.name for rung in rungs)}"
        )
    return tuple(rung for rung in rungs if not names or rung.name in names)


def _cpu_rungs() -> tuple[Rung, ...]:
    return tuple(
        rung for rung in CPU_RUNGS if rung.settings["attention_backend"] == "torch" or native.library() is not None
    )


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench step",
    shapes: dict[str, Shape] = SHAPES,
    rungs: tuple[Rung, ...] | None = None,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure every rung; a result for `measure.save`. Raises RuntimeError if one says other tokens, in float32."""
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    record = Record(
        f"step-{workload.shape}-{workload.dtype}-batch-{workload.batch}", command, where, asdict(workload), keep
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_checkpoint(
            shapes[workload.shape], Path(folder) / workload.shape, workload.seed, where, dtype
        )
        config = load_config(path)
        record.ceilings = ceilings = measure.measure_ceilings(
            where, (dtype,), measure.megabytes_to_read(config.num_parameters() * dtype.itemsize, where)
        )
        generator = torch.Generator().manual_seed(workload.seed)
        prompts = torch.randint(
            4, config.vocab_size, (workload.batch, workload.prompt_tokens), generator=generator
        ).tolist()
        engines = {}
        for rung in rungs or rungs_for(where):
            with record.case(rung.name):
                engines[rung.name] = Engine(rung, path, workload, where, prompts)
            on_run(f"{rung.name}: ready")
        if not engines:
            return record.finish()
        said = [engine.said for engine in engines.values()]
        agreeing = {
            name: sum(a == b for one, other in zip(engine.said, said[0]) for a, b in zip(one, other))
            for name, engine in engines.items()
        }
        if dtype == torch.float32 and any(one != said[0] for one in said):
            raise RuntimeError(
                f"the rungs say different tokens, in float32: {agreeing} of {workload.batch * workload.output_tokens} "
                "agree with the first rung; no point in timing"
            )
        with record.case("steps in turns"):
            times = record.interleave(
                {name: lambda engine=engine: engine.run()[0] for name, engine in engines.items()},
                workload.repeats,
                on_run=on_run,
            )
            operations = {name: engine.operations() for name, engine in engines.items()}
            floor = limit_seconds(config, dtype, workload, ceilings)
            record.figures |= {
                "limit_step_seconds": floor,
                "rungs": figures_of(times, operations, engines, agreeing, workload.batch, floor),
            }
    return record.finish()


def limit_seconds(config, dtype: torch.dtype, workload: Workload, ceilings: measure.Ceilings) -> float:
    """Weights once, and keys and values of every text at its mean length, over the bandwidth."""
    read = decode.Workload(prompt_tokens=workload.prompt_tokens, output_tokens=workload.output_tokens)
    kv_bytes = decode.bytes_per_token(config, dtype, read) - decode.bytes_per_token(
        config, dtype, decode.Workload(prompt_tokens=0, output_tokens=0)
    )
    return (decode.bytes_per_token(config, dtype, read) + (workload.batch - 1) * kv_bytes) / ceilings.bandwidth


def figures_of(
    times: dict[str, measure.Samples],
    operations: dict[str, float],
    engines: dict[str, Engine],
    agreeing: dict[str, int],
    batch: int,
    floor: float,
) -> dict:
    first = times[next(iter(times))].median
    return {
        name: {
            "step_seconds": samples.median,
            "spread": samples.spread,
            "tokens_per_second": batch / samples.median,
            "share_of_limit": floor / samples.median,
            "times_first": first / samples.median,
            "torch_operations_a_step": operations[name],
            "start_seconds": engines[name].start_seconds,
            "agreeing_tokens": agreeing[name],
        }
        for name, samples in times.items()
    }


def tables(measured: dict) -> list:
    """The limit first, then every rung with its share of it (rich renderables)."""
    from rich.table import Table

    f, w = measured["figures"], measured["workload"]
    table = Table(
        "rung",
        "ms a step",
        "± half range",
        "of limit",
        "times the first",
        "torch operations",
        "start, s",
        title=f"A decode step of {w['batch']} × {w['shape']}, {w['dtype']}, {measured['hardware']['name']}",
    )
    table.add_row("the limit", f"{1e3 * f['limit_step_seconds']:.2f}", "", "100%", "", "", "", style="dim")
    for name, r in f["rungs"].items():
        table.add_row(
            name,
            f"{1e3 * r['step_seconds']:.2f}",
            f"{r['spread'] / 2:.0%}",
            f"{r['share_of_limit']:.0%}",
            f"{r['times_first']:.2f}×",
            f"{r['torch_operations_a_step']:.0f}",
            f"{r['start_seconds']:.1f}",
        )
    return [table]
