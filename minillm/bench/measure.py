"""How everything here is measured: ceilings first, runs interleaved, samples kept. Built in chapter 00.

A time means little alone. Candidates are therefore timed in turns (A B A B ...), so that a machine that warms up
or is busy for a while treats all of them alike; the median is reported with the range it came from; and the same
run measures what the machine could do at best, so that a figure can be given as a share of that limit.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__
from ..device import LEAST_ON_GPU, describe, measure_copy_bandwidth, measure_matmul_rate, seconds_on_gpu

RESULTS = Path(__file__).parent / "results"
MIN_REPEATS = 5


@dataclass(frozen=True)
class Samples:
    """The times of one candidate, in seconds, in the order in which they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def interleave(
    candidates: dict[str, Callable[[], object]],
    repeats: int = MIN_REPEATS,
    warmup: int = 1,
    device: torch.device | str = "cpu",
    on_run: Callable[[str], None] = lambda name: None,
    on_samples: Callable[[str, tuple[float, ...]], None] = lambda name, taken: None,
) -> dict[str, Samples]:
    """Time every candidate `repeats` times, in turns: A B A B ..., after `warmup` rounds that are thrown away.

    `on_run` hears the name of each run that has ended, warm-ups included, and `on_samples` its samples so far as well.
    A candidate that returns a number has timed itself, in seconds, and that is what counts
    (it may leave out what is not to be measured). Raises ValueError for fewer than 5 repeats: a median of less says
    little.
    """
    check_repeats(repeats)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round in range(warmup + repeats):
        for name, run in candidates.items():
            synchronize(device)
            start = time.perf_counter()
            own = run()
            synchronize(device)
            elapsed = time.perf_counter() - start
            if round >= warmup:
                seconds[name].append(own if isinstance(own, float) else elapsed)
            on_run(name)
            on_samples(name, tuple(seconds[name]))
    return {name: Samples(tuple(times)) for name, times in seconds.items()}


def check_repeats(repeats: int) -> None:
    """Raises ValueError for fewer than 5."""
    if repeats < MIN_REPEATS:
        raise ValueError(f"repeats={repeats} is too few for a median with a spread; take at least {MIN_REPEATS}")


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do at best, measured in the same run as what is compared with it."""

    copy_bytes_per_second: float  # a large copy: bytes read and bytes written
    read_bytes_per_second: float  # a large sum: bytes read
    matmul_flops_per_second: dict[str, float]  # a large matrix product, by dtype

    @property
    def bandwidth(self) -> float:
        """The limit for what only reads, as decoding does: the better of copying and reading, bytes/s."""
        return max(self.copy_bytes_per_second, self.read_bytes_per_second)


def measure_ceilings(
    device: torch.device, dtypes: tuple[torch.dtype, ...] = (torch.float32,), megabytes: int = 256
) -> Ceilings:
    """Copy and read bandwidth of `device`, and its matrix product rate for each dtype."""
    return Ceilings(
        measure_copy_bandwidth(device, megabytes * 2**20),
        measure_read_bandwidth(device, megabytes),
        {name_of(dtype): measure_matmul_rate(device, dtype) for dtype in dtypes},
    )


def megabytes_to_read(weight_bytes: int, device: torch.device) -> int:
    """How much to copy and to sum so that the ceiling is that of the memory which will hold the weights.

    A small model's weights sit in the CPU's cache, so its limit is the cache's. On a GPU it is that of the memory
    behind the L2, which holds 50 MB on a Hopper.
    """
    return LEAST_ON_GPU // 2**20 if device.type == "cuda" else min(256, max(1, weight_bytes // 2**20))


def measure_read_bandwidth(device: torch.device, megabytes: int = 256, repeats: int = 7) -> float:
    """Bytes a second that a sum over a large float32 tensor reads; the best of `repeats`, as for any ceiling.

    On a GPU it is 1 GiB at least, and the median of runs of 20 ms by CUDA events.
    """
    if device.type == "cuda":
        megabytes = max(megabytes, LEAST_ON_GPU // 2**20)
    numbers = torch.randn(megabytes * 2**20 // 4, device=device)  # [elements]; random, since zeros can be faster
    if device.type == "cuda":
        return numbers.numel() * 4 / statistics.median(seconds_on_gpu(numbers.sum, repeats))
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        numbers.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return numbers.numel() * 4 / best


def room_for(num_seqs: int, num_tokens: int) -> dict:
    """The settings of an LLM for `num_seqs` texts of `num_tokens` tokens and no more.

    Several engines are measured in one process: each of them would take 90% of a GPU's memory if it was not told.
    """
    return dict(max_num_seqs=num_seqs, max_model_len=num_tokens, num_kv_blocks=-(-num_tokens // 16) * num_seqs + 1)


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has done all it was given (a CPU always has)."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def result(
    name: str,
    command: str,
    device: torch.device,
    workload: dict,
    ceilings: Ceilings | None,
    figures: dict,
    samples: dict[str, Samples],
) -> dict:
    """One measurement with all that is needed to judge and to repeat it, ready to be written as JSON.

    `figures` are the numbers worth reading, with their units in their names; `samples` the raw seconds behind them.
    """
    return {
        "name": name,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": versions(),
        "workload": workload,
        "ceilings": asdict(ceilings) if ceilings else None,
        "figures": figures,
        "samples_seconds": {key: list(s.seconds) for key, s in samples.items()},
    }


def filled(head: dict, ceilings: Ceilings | None, figures: dict, samples: dict[str, Samples]) -> dict:
    """The result `head` with what has been measured by now."""
    return head | {
        "ceilings": asdict(ceilings) if ceilings else None,
        "figures": figures,
        "samples_seconds": {key: list(s.seconds) for key, s in samples.items()},
    }


def path_of(measured: dict, folder: Path = RESULTS) -> Path:
    """`folder/<name>-<hardware>.json`; CPUs of one name differ in what they compute with, so it is in theirs."""
    machine = measured["hardware"]
    named = machine["name"] if machine["device"] != "cpu" else f"{machine['name']} {instruction_set(machine)}"
    slug = "-".join("".join(c if c.isalnum() else " " for c in named.lower()).split())
    return folder / f"{measured['name']}-{slug}.json"


def instruction_set(hardware: dict) -> str:
    """That of a CPU, such as "AVX512", from the architecture that `minillm.device.describe` gives."""
    return hardware["architecture"].rpartition(", ")[2]


def save(measured: dict, folder: Path = RESULTS) -> Path:
    """Write `path_of` it and return that path; a later run on the same hardware replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(path_of(measured, folder), json.dumps(measured, indent=1) + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Write a file that is always whole: a process that is killed meanwhile leaves the last one."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text)
    return unfinished.replace(path)


def load(pattern: str, folder: Path = RESULTS) -> list[dict]:
    """The results whose file name matches `pattern`, such as "decode-*", for a chapter to plot."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{pattern}.json"))]


def hardware(device: torch.device) -> dict:
    """The machine as `minillm.device.describe` sees it; `name` is the device that did the work."""
    facts = asdict(describe(device)) | {"system": f"{platform.system()} {platform.machine()}"}
    if device.type == "cpu":
        facts["name"] += f", {facts['threads']} threads"
    return facts


def versions() -> dict:
    installed = {}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    installed["torch"] = torch.__version__  # with its build, such as +cpu
    return {"minillm": __version__, "python": platform.python_version()} | installed


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
