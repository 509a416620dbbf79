"""Which tiles are fastest on the GPU that is there: timed once, and kept on disk. Built in chapter 13.

Builds say what fits and what spills (`minillm.kernels.tiles`), not what is fastest. So an engine that starts on a GPU
times the candidates of its own shape once, and writes the winner to a file of the cache folder:

    tiles-<hash of the key>.json    {"key": {GPU, versions, shape}, "tiles": [128, 64, 8, 3], "seconds": {...}}

The builds' choice stands wherever nothing was timed: without a GPU, while a graph is captured, or with MINILLM_TUNE=0
in the environment. It also stands unless another candidate is faster by more than the noise of a timing.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from minillm.kernels.kv_codes import INT4, pair_of
from minillm.kernels.language import MODE, capability
from minillm.kernels.native_build import cache_folder, is_ours
from minillm.kernels.paged_prefill import paged_prefill
from minillm.kernels.tiles import TUNED, Tiles, candidate_tiles
from minillm.rounding import ceil_div

MARGIN = 0.97  # of the builds' time: what is not faster than this is noise
NUM_SEQS, LENGTH = 2, 2048  # of the prompts that are timed

Timer = Callable[[Callable[[], object]], float]


def tune_attention(keys: Tensor, values: Tensor, num_heads: int, dtype: torch.dtype, timer: Timer | None = None,
                   folder: Path | None = None) -> Tiles | None:  # fmt: skip
    """Make the fastest tiles those of `paged_prefill` in this process, for pages like `keys` and `values`.

    `dtype` is that of the queries. Times with `timer`, CUDA events where it is None; `folder` is the cache's where it
    is None. Returns the winner, or None where nothing is timed.
    """
    if timer is None and not may_time(keys):
        return None
    shape = keys.shape[2] * pair_of(keys), dtype, capability(keys), keys.element_size() == 1, False
    if shape not in TUNED:
        key = {
            "gpu": torch.cuda.get_device_name(keys.device) if keys.is_cuda else "none", "torch": torch.__version__,
            "triton": version_of("triton"), "shape": [str(part) for part in shape],
            "pages": [num_heads, *keys.shape[1:]],
        }  # fmt: skip
        run = prompts_like(keys, values, num_heads, dtype)
        TUNED[shape] = fastest(key, candidate_tiles(*shape), run, timer or cuda_seconds, folder)
    return TUNED[shape]


def may_time(x: Tensor) -> bool:
    """Whether kernels run on a GPU here, with memory of their own, and can be waited for: a graph that is being
    captured would record the timing."""
    if os.environ.get("MINILLM_TUNE") == "0" or MODE != "compiled" or not x.is_cuda or type(x) is not Tensor:
        return False
    return not torch.cuda.is_current_stream_capturing()


def fastest(
    key: dict, candidates: Sequence[Tiles], run: Callable[[Tiles], object], timer: Timer, folder: Path | None = None
) -> Tiles:
    """The candidate that `run` is fastest with, from the file of `key` if it has one.
    The first one is the builds' choice."""
    file = file_of(key, folder)
    known = read(file, key, candidates) if file else None
    if known is not None:
        return known
    seconds = {}
    for tiles in candidates:
        try:
            seconds[tiles] = timer(lambda tiles=tiles: run(tiles))
        except (RuntimeError, ValueError) as error:  # this GPU or this compiler does not take it: it is no candidate
            if "out of memory" in str(error):
                raise
    best = min(seconds, key=seconds.get, default=candidates[0])
    if best != candidates[0] and seconds[best] > MARGIN * seconds.get(candidates[0], float("inf")):
        best = candidates[0]
    if file and seconds:
        write(
            file, {"key": key, "tiles": list(best), "seconds": {str(tuple(tiles)): s for tiles, s in seconds.items()}}
        )
    return best


def file_of(key: dict, folder: Path | None = None) -> Path | None:
    """Where the winner of `key` is kept; None where nothing can be, or where others could write."""
    try:
        folder = cache_folder() if folder is None else folder
        if not is_ours(folder):
            return None
    except (OSError, RuntimeError):  # no home, or a read-only one
        return None
    return folder / f"tiles-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def read(file: Path, key: dict, candidates: Sequence[Tiles]) -> Tiles | None:
    """The winner that a file names, if it is a file of this key and names one of the candidates; else None."""
    try:
        found = json.loads(file.read_text())
        tiles = Tiles(*found["tiles"])
        return tiles if found["key"] == key and tiles in candidates else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(file: Path, found: dict) -> None:
    """All or nothing, so that a process beside this one never reads half a file;
    what cannot be written is timed again."""
    unfinished = None
    try:
        handle, unfinished = tempfile.mkstemp(suffix=".json", dir=file.parent)
        with os.fdopen(handle, "w") as target:
            json.dump(found, target)
        os.replace(unfinished, file)
    except OSError:
        if unfinished:
            Path(unfinished).unlink(missing_ok=True)


def cuda_seconds(launch: Callable[[], object], rounds: int = 5, launches: int = 4) -> float:
    """The median time of a launch, after one that compiles it and one that warms up."""
    launch(), launch()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(launches):
            launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / launches)
    return statistics.median(times)


def prompts_like(keys: Tensor, values: Tensor, num_heads: int, dtype: torch.dtype) -> Callable[[Tiles], Tensor]:
    """Attention of a few prompts over pages of these shapes, as a function of the tiles."""
    block_size, device = keys.shape[3], keys.device
    per_seq = ceil_div(LENGTH, block_size)
    generator = torch.Generator(device).manual_seed(
        0
    )  # numbers, as zeros take less power, and the user's stream untouched

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    pages = [some(NUM_SEQS * per_seq + 1, *x.shape[1:]) for x in (keys, values)]
    # Bytes of int4 are of any number from 0 to 255.
    pages = [((x * 64 + 128).clamp(0, 255) if keys.dtype is INT4 else x).to(keys.dtype) for x in pages]
    scales = [torch.ones(pages[1].shape[:3], device=device) if x.element_size() == 1 else None for x in pages]
    table = torch.arange(1, NUM_SEQS * per_seq + 1, device=device).view(NUM_SEQS, per_seq)
    bounds = torch.arange(NUM_SEQS + 1, device=device) * LENGTH
    lengths = torch.full((NUM_SEQS,), LENGTH, device=device)
    q = some(NUM_SEQS * LENGTH, num_heads, keys.shape[2] * pair_of(keys)).to(dtype)
    index = bounds, lengths, table, LENGTH, None, None, torch.empty_like(q)
    return lambda tiles: paged_prefill(q, *pages, *index, *scales, tiles=tiles)


def version_of(package: str) -> str:
    """The installed version; "none" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
