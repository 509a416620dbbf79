"""Offline throughput: many requests at once, against the best that `transformers.generate` reaches.
Built in chapter 05.

The workload is nano-vllm's recipe at a CPU's size: prompts of random tokens and output lengths drawn first, all
requests there from the start, no end of sequence. `transformers` batches what it is given: it pads every prompt of a
batch to the longest, and goes on until the longest output is made. So it is tried at several batch sizes and with both
of its attention implementations, and the best of these is what minillm is compared with, in turns.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..model.checkpoint import load_config, resolve_model
from . import measure, vllm_peer
from .decode import SHAPES, Shape, write_random_checkpoint
from .record import Record, release
from .transformers_peer import BATCH_SIZES, CONTINUOUS, IMPLEMENTATIONS, TEMPERATURE, Theirs

CHECKED_REQUESTS, CHECKED_TOKENS = 16, 16  # greedily, all requests in one batch of ours, before anything is timed
SPANS = ("schedule", "build batch", "update", "move blocks", "forward", "sample", "wait")
SPLIT = ("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend")


@dataclass(frozen=True)
class Workload:
    shape: str = "tinyworld"
    requests: int = 16
    shortest: int = 16
    longest: int = 256
    dtype: str = "float32"
    repeats: int = measure.MIN_REPEATS
    seed: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = "mp"

    @property
    def split(self) -> dict[str, Any]:
        """The arguments of `LLM` that say how many processes compute."""
        return {name: getattr(self, name) for name in SPLIT}

    def lengths_and_prompts(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Prompts first, then output lengths, from one stream of random numbers."""
        rng = random.Random(self.seed)
        most = min(10_000, vocab_size - 1)
        prompts = [
            [rng.randint(0, most) for _ in range(rng.randint(self.shortest, self.longest))]
            for _ in range(self.requests)
        ]
        return prompts, [rng.randint(self.shortest, self.longest) for _ in range(self.requests)]


def settings_of(device: torch.device) -> list[str]:
    """How transformers is tried: by padded batches, and on a GPU, where that pays, by its own continuous batching."""
    if device.type == "cuda":
        return [CONTINUOUS, "sdpa, batch 64"]
    return [f"{implementation}, batch {batch_size}" for implementation in IMPLEMENTATIONS for batch_size in BATCH_SIZES]


def num_rounds(workload: Workload, device: torch.device) -> int:
    return 2 + len(settings_of(device)) + (2 if device.type == "cpu" else 1) * (workload.repeats + 1)


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench throughput",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload`; a result for `measure.save`. Raises RuntimeError if the engines disagree on a float32 token.

    On a GPU our engine comes first and is gone before the peers start: each takes all the memory that it finds.
    """
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    ranks = workload.tensor_parallel_size, workload.pipeline_parallel_size
    split = "" if ranks == (1, 1) else "-tp{}-pp{}".format(*ranks)
    record = Record(f"throughput-{workload.shape}{split}", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(workload, Path(folder), shapes, where, dtype)
        config = load_config(path)
        weight_bytes = config.num_parameters() * dtype.itemsize
        record.ceilings = measure.measure_ceilings(where, (dtype,), measure.megabytes_to_read(weight_bytes, where))
        prompts, lengths = workload.lengths_and_prompts(config.vocab_size)
        limit = limit_seconds(config, dtype, prompts, lengths, record.ceilings)
        record.figures |= {
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": sum(lengths),
            "limit_tokens_per_second": sum(lengths) / limit,
        }
        theirs = Theirs(path, dtype, where, prompts, lengths)
        expected = [theirs.greedy(prompt, CHECKED_TOKENS) for prompt in prompts[:CHECKED_REQUESTS]]
        ours = Ours(path, workload, where, prompts, lengths)
        record.figures["agreeing_tokens"] = check(ours, expected, dtype)
        on_run("outputs checked")
        if where.type == "cpu":
            best = min(pilot := _pilot(theirs, record, on_run), key=pilot.get)
            record.interleave(
                {f"transformers {best}": lambda: theirs.run(best), "minillm": ours.run}, workload.repeats, on_run=on_run
            )
        else:  # minutes each, for a ratio that one run shows
            with record.case("minillm"):
                record.interleave({"minillm": ours.run}, workload.repeats, on_run=on_run)
                record.figures |= figures_of(record.samples, sum(lengths), limit)
        with record.case("parts of a step"):
            record.figures["step_shares"] = ours.shares()
        on_run("parts of a step")
        if where.type == "cuda":
            del ours
            release(where)
            if pilot := _pilot(theirs, record, on_run):
                best = min(pilot, key=pilot.get)
                record.samples[f"transformers {best}"] = measure.Samples((pilot[best],))
            theirs.models.clear()
            release(where)
            if vllm_peer.installed():
                with record.case("vLLM"):
                    seconds = vllm_peer.seconds_of(path, prompts, lengths, workload.dtype, TEMPERATURE)
                    record.samples["vLLM"] = measure.Samples((seconds,))
                    record.figures["vllm_tokens_per_second"] = sum(lengths) / seconds
        gc.collect()
    if "minillm" in record.samples:
        record.figures |= figures_of(record.samples, sum(lengths), limit)
    return record.finish()


def write_checkpoint(
    workload: Workload, folder: Path, shapes: dict[str, Shape], device: torch.device, dtype: torch.dtype
) -> Path:
    """The model of `workload`: the bundled one, or one with random weights, written into `folder`."""
    if workload.shape == "tinyworld":
        return resolve_model("tinyworld")
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    return write_random_checkpoint(shapes[workload.shape], folder / workload.shape, workload.seed, device, dtype)


def _pilot(theirs: Theirs, record: Record, on_run: Callable[[str], None]) -> dict[str, float]:
    """Seconds of every setting of transformers, once, for as many tokens of use as are asked for."""
    pilot: dict[str, float] = {}
    tokens = sum(theirs.lengths)
    for setting in settings_of(theirs.device):
        with record.case(f"transformers {setting}"):
            started = time.perf_counter()
            useful = theirs.run(setting)
            pilot[setting] = (time.perf_counter() - started) * tokens / useful
            record.figures["transformers_once"] = {name: tokens / seconds for name, seconds in pilot.items()}
        on_run(f"transformers {setting}")
    return pilot


def figures_of(times: dict[str, measure.Samples], tokens: int, limit: float) -> dict:
    our_times, best = times["minillm"], next((name for name in times if name.startswith("transformers ")), None)
    figures = {
        "minillm_tokens_per_second": tokens / our_times.median,
        "minillm_spread": our_times.spread,
        "share_of_limit": limit / our_times.median,
    }
    if best is None:
        return figures
    return figures | {
        "transformers_tokens_per_second": tokens / times[best].median,
        "transformers_spread": times[best].spread,
        "transformers_best": best.removeprefix("transformers "),
        "speedup": times[best].median / our_times.median,
    }


def check(ours: Ours, expected: list[list[int]], dtype: torch.dtype) -> int:
    """How many greedy tokens agree, of CHECKED_TOKENS a request,
    all requests in one batch here and one by one there."""
    said = ours.greedy(CHECKED_TOKENS)[:CHECKED_REQUESTS]
    agreeing = sum(a == b for one, other in zip(said, expected) for a, b in zip(one, other))
    if dtype == torch.float32 and said != expected:
        raise RuntimeError(
            f"transformers and minillm disagree on {len(said) * CHECKED_TOKENS - agreeing} of "
            f"{len(said) * CHECKED_TOKENS} greedy tokens, in float32: no point in timing"
        )
    return agreeing


class Ours:
    """minillm, every request handed over at once."""

    def __init__(
        self, path: Path, workload: Workload, device: torch.device, prompts: list[list[int]], lengths: list[int]
    ):
        self.llm = LLM(str(path), device=str(device), dtype=workload.dtype, **workload.split)
        self.prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=length, ignore_eos=True) for length in lengths
        ]

    def run(self) -> None:
        self.llm.engine.kv_cache.pool.evict_all()  # no repeat may live on what the last one left
        self.llm.generate(self.prompts, self.params, use_tqdm=False)

    def greedy(self, count: int) -> list[list[int]]:
        outputs = self.llm.generate(
            self.prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False
        )
        return [output.outputs[0].token_ids for output in outputs]

    def shares(self) -> dict[str, float]:
        """Of the time of all steps, the share spent in each part."""
        trace = self.llm.trace
        trace.enabled = True
        trace.clear()
        started = time.perf_counter()
        self.run()
        total = time.perf_counter() - started
        trace.enabled = False
        spent = {name: sum(trace.seconds(name).values()) / total for name in SPANS}
        return spent | {"the rest": 1 - sum(spent.values())}


def limit_seconds(
    config,
    dtype: torch.dtype,
    prompts: list[list[int]],
    lengths: list[int],
    ceilings: measure.Ceilings,
    more_bytes: int = 0,
) -> float:
    """No engine can take less: prefill at the machine's matrix product rate, then in each decode step the weights once,
    `more_bytes` beside them, and keys and values of every text so far; or, where that is more, the arithmetic of its
    rows."""
    weights = config.num_parameters()
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    rate = ceilings.matmul_flops_per_second[measure.name_of(dtype)]
    body = weights - config.vocab_size * config.hidden_size  # prompts need logits for their last token only
    seconds = 2 * (body * sum(map(len, prompts)) + (weights - body) * len(prompts)) / rate
    for step in range(1, max(lengths)):
        running = [len(prompt) + step for prompt, length in zip(prompts, lengths) if length > step]
        kv_bytes = sum(running) * config.kv_bytes_per_token(dtype)
        memory = (weights * dtype.itemsize + more_bytes + kv_bytes) / ceilings.bandwidth
        seconds += max(memory, 2 * weights * len(running) / rate)
    return seconds


def tables(measured: dict) -> list:
    """The limit first, then both engines, every setting of transformers,
    and the parts of our step (rich renderables)."""
    from rich.table import Table

    f = measured["figures"]
    speed = Table(
        "engine",
        "output tokens/s",
        "± half range",
        "of limit",
        "speed-up",
        title=f"{f['prompt_tokens']:,} prompt and {f['output_tokens']:,} output tokens, "
        f"{measured['workload']['shape']}, {measured['hardware']['name']}",
    )
    speed.add_row("the limit", f"{f['limit_tokens_per_second']:,.0f}", "", "100%", "", style="dim")
    speed.add_row(
        f"transformers, {f['transformers_best']}",
        f"{f['transformers_tokens_per_second']:,.0f}",
        f"{f['transformers_spread'] / 2:.0%}",
        f"{f['transformers_tokens_per_second'] / f['limit_tokens_per_second']:.0%}",
        "1×",
    )
    if "vllm_tokens_per_second" in f:
        rate = f["vllm_tokens_per_second"]
        speed.add_row(
            "vLLM, once",
            f"{rate:,.0f}",
            "",
            f"{rate / f['limit_tokens_per_second']:.0%}",
            f"{rate / f['transformers_tokens_per_second']:.2f}×",
        )
    speed.add_row(
        "minillm",
        f"{f['minillm_tokens_per_second']:,.0f}",
        f"{f['minillm_spread'] / 2:.0%}",
        f"{f['share_of_limit']:.0%}",
        f"{f['speedup']:.2f}×",
    )
    every = Table("transformers, once each", "output tokens/s")
    for name, rate in f["transformers_once"].items():
        every.add_row(name, f"{rate:,.0f}")
    parts = Table("part of minillm's run", "share")
    for name, share in f["step_shares"].items():
        parts.add_row(name, f"{share:.1%}")
    return [speed, every, parts]
