"""Everything about tensor and pipeline parallel that only several devices can show, in one run. Built in chapter 20.

For each split of the devices: are the greedy tokens those of one device (float32), how long is a decode step at batch
1, how fast is a prompt, how many tokens a second come of many requests at once, and does a step send what the formula
says. For each number of ranks: how long an all-reduce takes, by its size. Where one device cannot hold the model, the
first split that can takes its place.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..engine.distributed.worker import Worker
from ..model.checkpoint import load_config, resolve_model
from ..parallel.layout import check_layout
from ..parallel.traffic import step_traffic
from . import measure
from .decode import SHAPES, write_random_checkpoint
from .record import Record

CHECKED_TOKENS = 16
DRAWN = SamplingParams(temperature=1.0, seed=0, ignore_eos=True)


@dataclass(frozen=True)
class Workload:
    shape: str = "llama-3.1-8b"  # one of `bench decode` with random weights, or a model by name
    splits: tuple[str, ...] = ()  # as in "2x1": ranks of a stage x stages; () is all that the devices allow
    dtype: str = "auto"
    prompt_tokens: int = 2048
    decode_tokens: int = 128
    requests: int = 256
    shortest: int = 100
    longest: int = 1024
    reduced_bytes: tuple[int, ...] = (2**10, 2**13, 2**16, 2**19, 2**22, 2**25)
    repeats: int = measure.MIN_REPEATS


TOY = Workload(
    "tinyworld", ("1x1", "2x1", "1x2"), "float32", prompt_tokens=64, decode_tokens=16, requests=4, shortest=4,
    longest=12, reduced_bytes=(2**10, 2**16),
)  # fmt: skip


def splits_of(workload: Workload, device: torch.device, config: Any) -> list[tuple[int, int]]:
    """(ranks of a stage, stages), fewest ranks first. Raises ValueError for one that is not written so."""
    if workload.splits:
        return sorted((parse(split) for split in workload.splits), key=lambda split: split[0] * split[1])
    most = torch.cuda.device_count() if device.type == "cuda" else 2
    powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
    found = [(tp, pp) for pp in powers for tp in powers if tp * pp <= most and _fits(config, tp, pp)]
    return sorted(found, key=lambda split: split[0] * split[1])


def parse(split: str) -> tuple[int, int]:
    try:
        tp, pp = map(int, split.split("x"))
    except ValueError:
        raise ValueError(f"split={split!r} is not allowed; allowed: ranks of a stage x stages, as in 2x1") from None
    return tp, pp


def run(
    workload: Workload,
    device: str = "auto",
    command: str = "minillm bench multi-gpu",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload`; a result for `measure.save`. A split that fails is recorded, and the others go on."""
    where = resolve_device(device)
    record = Record(f"multi-gpu-{Path(workload.shape).name}", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        path = _checkpoint(workload.shape, Path(folder), where, resolve_dtype(workload.dtype, where))
        config, expected = load_config(path), None
        for split in splits_of(workload, where, config):
            name = "x".join(map(str, split))
            with record.case(name):
                said = _tokens(path, split, where, config.vocab_size)
                expected = expected or said
                figures: dict[str, Any] = {"agreeing_tokens": _agreeing(said, expected), "of_tokens": _count(expected)}
                figures |= _measured(path, split, where, workload)
                record.figures[name] = figures
            on_run(name)
    return record.finish()


def _checkpoint(shape: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    if shape in SHAPES:
        return write_random_checkpoint(SHAPES[shape], folder / shape, 0, device, dtype)
    return resolve_model(shape)


def _tokens(path: Path, split: tuple[int, int], device: torch.device, vocab_size: int) -> list[list[int]]:
    """Greedy and drawn ones of a few prompts, in float32."""
    with _llm(path, split, device, "float32") as llm:
        prompts = _prompts(random.Random(0), vocab_size, [5, 40, 17, 3])
        greedy = SamplingParams(temperature=0.0, max_tokens=CHECKED_TOKENS, ignore_eos=True)
        drawn = DRAWN.clone()
        drawn.max_tokens = CHECKED_TOKENS
        outputs = llm.generate(prompts, [greedy, greedy, drawn, drawn], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


def _measured(path: Path, split: tuple[int, int], device: torch.device, workload: Workload) -> dict[str, Any]:
    rng = random.Random(1)
    with _llm(path, split, device, workload.dtype) as llm:
        vocab_size = llm.model.config.vocab_size
        long, short = _prompts(rng, vocab_size, [workload.prompt_tokens, 4])
        lengths = [rng.randint(workload.shortest, workload.longest) for _ in range(2 * workload.requests)]
        many, outputs = _prompts(rng, vocab_size, lengths[::2]), lengths[1::2]
        decode = [_seconds(llm, [short], [1 + workload.decode_tokens]) for _ in range(1 + workload.repeats)]
        first = [_seconds(llm, [short], [1]) for _ in range(1 + workload.repeats)]
        prompt = [_seconds(llm, [long], [1]) for _ in range(1 + workload.repeats)]
        offline = [_seconds(llm, many, outputs) for _ in range(2)]
        return {
            "decode_step_seconds": (_median(decode) - _median(first)) / workload.decode_tokens,
            "prompt_tokens_per_second": workload.prompt_tokens / _median(prompt),
            "offline_tokens_per_second": sum(outputs) / offline[-1],
            "num_kv_blocks": llm.engine.kv_cache.pool.num_blocks,
            "samples": {"decode": decode, "first token": first, "prompt": prompt, "offline": offline},
        } | (_between_ranks(llm, split, workload) if llm.get_world_size() > 1 else {})


def _between_ranks(llm: LLM, split: tuple[int, int], workload: Workload) -> dict[str, Any]:
    """What a step of one prompt sends, counted beside the formula; and the time of an all-reduce, on the slowest
    rank."""
    llm.reset_prefix_cache()
    llm.engine.executor.collective("take_traffic")
    num_tokens = min(600, llm.max_model_len - 1)  # more than a GPU replays, which would count nothing
    _seconds(llm, [{"prompt_token_ids": [1] * num_tokens}], [1])
    counted = [traffic.as_dict() for traffic in llm.engine.executor.collective("take_traffic")]
    size = llm.model.dtype.itemsize
    formula = [
        step_traffic(llm.model.config, *split, num_tokens, 1, rank=rank, itemsize=size).as_dict()
        for rank in range(len(counted))
    ]
    figures: dict[str, Any] = {"counted": counted, "formula": formula, "is_equal": counted == formula}
    if split[0] > 1:
        args = (workload.reduced_bytes, workload.repeats)
        of_ranks = llm.collective_rpc(time_all_reduce, args=args)
        figures["all_reduce_seconds"] = {
            size: max(seconds[size] for seconds in of_ranks) for size in map(str, workload.reduced_bytes)
        }
    return figures


def time_all_reduce(worker: Worker, sizes: tuple[int, ...], repeats: int, calls: int = 20) -> dict[str, float]:
    """Seconds of one all-reduce of so many bytes, by its size: the median of `repeats` rounds of `calls`."""
    found, on_gpu = {}, worker.device.type == "cuda"
    with worker.communicator.uncounted():
        for size in sizes:
            tensor = torch.zeros(size // 4, device=worker.device)
            rounds = []
            for _ in range(1 + repeats):
                if on_gpu:
                    torch.cuda.synchronize(worker.device)
                started = time.perf_counter()
                for _ in range(calls):
                    worker.communicator.all_reduce(tensor)
                if on_gpu:
                    torch.cuda.synchronize(worker.device)
                rounds.append((time.perf_counter() - started) / calls)
            found[str(size)] = statistics.median(rounds[1:])
    return found


def _llm(path: Path, split: tuple[int, int], device: torch.device, dtype: str) -> LLM:
    sizes = {"tensor_parallel_size": split[0], "pipeline_parallel_size": split[1]}
    return LLM(str(path), device=device.type, dtype=dtype, enable_prefix_caching=False, **sizes)


def _seconds(llm: LLM, prompts: list[dict], lengths: list[int]) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds[1:])  # the first one warms up


def _prompts(rng: random.Random, vocab_size: int, lengths: list[int]) -> list[dict]:
    return [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for length in lengths]


def _agreeing(said: list[list[int]], expected: list[list[int]]) -> int:
    return sum(a == b for one, other in zip(said, expected) for a, b in zip(one, other))


def _count(token_ids: list[list[int]]) -> int:
    return sum(map(len, token_ids))


def _fits(config: Any, tp: int, pp: int) -> bool:
    try:
        check_layout(config, tp, pp)
    except ValueError:
        return False
    return True


def table(measured: dict) -> Any:
    """A row for each split."""
    from rich.table import Table

    made = Table("split", "tokens as one device", "decode step", "prompt", "offline", "bytes as the formula says")
    for split, figures in measured["figures"].items():
        made.add_row(
            split,
            f"{figures['agreeing_tokens']} of {figures['of_tokens']}",
            f"{1e3 * figures['decode_step_seconds']:.2f} ms",
            f"{figures['prompt_tokens_per_second']:,.0f} tokens/s",
            f"{figures['offline_tokens_per_second']:,.0f} tokens/s",
            str(figures.get("is_equal", "-")),
        )
    return made
