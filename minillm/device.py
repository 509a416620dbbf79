"""What this machine can do: device, dtype, Triton, and its two measured ceilings. Built in chapter 00.

An engine is never faster than its machine, so every chapter measures against two
numbers taken here: how fast memory is copied and how fast matrices are multiplied.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

LEAST_ON_GPU = 2**30  # bytes of a copy or a sum: twenty times what the largest L2 holds
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIKE_A_GPU = "MINILLM_LIKE_A_GPU"
GPU_DEFAULTS = ("ahead", "triton")  # steps scheduled ahead; attention and fused layers in Triton, decode steps recorded


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The device to run on: "auto" is the GPU where there is one, else the CPU.

    Raises ValueError for a name torch does not know, or for a device that is not here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; use 'auto', 'cpu' or 'cuda'") from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise ValueError(
                f"device={str(device)!r} asks for a GPU, but torch {torch.__version__} sees {count}; use device='cpu'"
            )
    return resolved


def resolve_dtype(dtype: str | torch.dtype = "auto", device: str | torch.device = "auto") -> torch.dtype:
    """The dtype of weights and activations on this device.

    "auto" is float32 on a CPU, bfloat16 on a GPU from sm_80 (A100, L4) on, float16 below (T4).
    Raises ValueError for any other dtype, and for bfloat16 on a GPU that has none.
    """
    device = resolve_device(device)
    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if has_bfloat16 else torch.float16
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not supported; use 'auto', {', '.join(map(repr, DTYPES))}")
    if resolved is torch.bfloat16 and not has_bfloat16:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"dtype='bfloat16' needs a GPU from sm_80 on and {name} is older; use dtype='float16'")
    return resolved


def like_a_gpu(default: str) -> bool:
    """Whether a CPU takes this one of a GPU's defaults: "ahead" or "triton", where MINILLM_LIKE_A_GPU names it.

    `minillm check --like-a-gpu` sets the variable, to run the notebooks as a GPU would. What a caller asks for
    explicitly keeps its meaning, and on a GPU the variable changes nothing. Raises ValueError for a name that is no
    such default.
    """
    named = [name.strip() for name in os.environ.get(LIKE_A_GPU, "").split(",") if name.strip()]
    if unknown := set(named) - set(GPU_DEFAULTS):
        raise ValueError(
            f"{LIKE_A_GPU}={','.join(sorted(unknown))!r} is no default of a GPU; "
            f"use {' or '.join(GPU_DEFAULTS)}, or both with a comma"
        )
    return default in named


def triton_mode() -> str:
    """How a Triton kernel would run here.

    "compiled" on a GPU; "interpreted" on a CPU, or when TRITON_INTERPRET=1 asks for it;
    "absent" where Triton is not installed (macOS, Windows), and the PyTorch twins serve.
    """
    if importlib.util.find_spec("triton") is None:
        return "absent"
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return "interpreted"
    return "compiled"


def triton_has_tensor_cores(device: str | torch.device = "auto") -> bool:
    """Whether `tl.dot` becomes tensor-core code on this device.

    From sm_80 on it does. On sm_70 and sm_75 (V100, T4) only Triton before 3.3 emits it:
    a newer one falls back to ordinary multiply-adds, and torch's own kernels win.
    """
    device = resolve_device(device)
    if device.type != "cuda" or triton_mode() != "compiled":
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return True
    major, minor = (int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    return capability >= (7, 0) and (major, minor) < (3, 3)


@dataclass(frozen=True)
class DeviceInfo:
    """What the engine will run on. Prints as a table in a terminal (rich) and in a notebook."""

    device: str
    name: str
    architecture: str  # "sm_90" on a GPU, the instruction set on a CPU
    memory: str  # the device's own memory
    threads: int  # CPU threads torch uses
    dtype: str  # what dtype="auto" gives
    triton: str
    triton_tensor_cores: bool
    torch: str
    python: str

    def rows(self) -> list[tuple[str, str]]:
        return [(field.name.replace("_", " "), str(getattr(self, field.name))) for field in fields(self)]

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{key}</th><td>{value}</td></tr>" for key, value in self.rows()
        )
        return f"<table><caption>This machine</caption>{cells}</table>"

    def __rich__(self):
        from rich.table import Table

        table = Table("this machine", "")
        for row in self.rows():
            table.add_row(*row)
        return table


def describe(device: str | torch.device = "auto") -> DeviceInfo:
    """Look at this machine and say what it offers; nothing is measured here."""
    device = resolve_device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
        architecture = f"sm_{properties.major}{properties.minor}"
    else:
        name, memory_bytes = _cpu_name(), _cpu_memory_bytes()
        architecture = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return DeviceInfo(
        device=str(device),
        name=name,
        architecture=architecture,
        memory=f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes else "unknown",
        threads=torch.get_num_threads(),
        dtype=str(resolve_dtype("auto", device)).removeprefix("torch."),
        triton=triton_mode(),
        triton_tensor_cores=triton_has_tensor_cores(device),
        torch=torch.__version__,
        python=platform.python_version(),
    )


def measure_copy_bandwidth(
    device: str | torch.device = "auto", num_bytes: int = 256 * 2**20, repeats: int = 7
) -> float:
    """Bytes a second (read plus written) of one large copy: the roof of everything that is memory-bound.

    `num_bytes` must be far larger than the last cache, or the cache is measured: a GPU copies 1 GiB at least. Median of
    `repeats`.
    """
    device = resolve_device(device)
    num_bytes = max(num_bytes, LEAST_ON_GPU) if device.type == "cuda" else num_bytes
    # Random bytes, because hardware is faster on zeros than on any real weight.
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), device, repeats)


def measure_matmul_rate(
    device: str | torch.device = "auto", dtype: str | torch.dtype = "auto", size: int | None = None, repeats: int = 7
) -> float:
    """Floating-point operations a second of one large square matrix product, 2·size³ each. Median of `repeats`."""
    device = resolve_device(device)
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = torch.randn(2, size, size, device=device).to(resolve_dtype(dtype, device))
    return 2 * size**3 / _median_seconds(lambda: a @ b, device, repeats)


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping; half of all there is where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return (_cpu_memory_bytes() or 8 * 2**30) // 2


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Page-lock host memory where it lies, so that a GPU copies to and from it while everybody goes on. Returns it.

    `torch.empty(pin_memory=True)` rounds up to a power of two, which is too much to give away for gigabytes.
    Raises RuntimeError where the system refuses.
    """
    if size := tensor.numel() * tensor.element_size():
        cuda, place = torch.cuda.cudart(), tensor.data_ptr()
        if int(error := cuda.cudaHostRegister(place, size, 0)):
            raise RuntimeError(
                f"{size} bytes of host memory could not be page-locked ({error}); ask for less, or raise `ulimit -l`"
            )
        weakref.finalize(tensor, cuda.cudaHostUnregister, place)  # before its memory is given back
    return tensor


def _median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        return statistics.median(seconds_on_gpu(run, repeats))
    samples = []
    for _ in range(repeats + 1):
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[1:])  # the first call also allocates and picks a kernel


def seconds_on_gpu(run: Callable[[], object], repeats: int, window: float = 0.02) -> list[float]:
    """Seconds of one call, `repeats` times, by CUDA events around as many calls in a row as take `window` seconds.

    A copy of 256 MiB takes an H200 about 125 µs: the clock of the host would time the launch and the wait beside it.
    """

    def seconds_of(calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    seconds_of(1)  # the first call also allocates and picks a kernel
    calls = 1
    while (taken := seconds_of(calls)) < window and calls < 1 << 20:
        calls = max(2 * calls, math.ceil(1.2 * calls * window / max(taken, 1e-9)))
    return [seconds_of(calls) / calls for _ in range(repeats)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_memory_bytes() -> int | None:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
