"""Where the time of a step goes on a GPU: its kernels' own times, by the part they belong to. Built in chapter 14.

A recorded step runs no Python between its launches, so methods cannot be timed there; nor could they be alone, for the
host runs ahead of the GPU. torch's profiler says what each kernel took, inside a replayed graph too.
Kernels are sorted by their names; what of the wall clock no kernel accounts for is the gaps between launches and the
host.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

PARTS = (  # the first pattern that is found in a kernel's name says its part
    ("attention", r"paged_decode|paged_prefill|flash|fmha|merge_kernel|attention|softmax_kernel"),
    (
        "matrix products",
        r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|matmul|few_rows_kernel|many_rows_kernel|dequantize_kernel|quantize_rows",
    ),
    ("norms", r"rms_norm|layer_norm"),
    ("rotation, writing of keys and values", r"rotate_and_store|rotary"),
    ("element-wise", r"silu"),
    ("sampling", r"draw_kernel|pick_kernel|threshold_kernel|sort|topk|argmax|distribution|cumsum|scan"),
    ("copies", r"memcpy|memset|copy|catarray|index|gather|scatter|fill"),
    ("element-wise", r"elementwise|vectorized|reduce|triton_"),
)
OTHER, GAPS = "other kernels", "gaps and the host"


@dataclass(frozen=True)
class KernelTime:
    name: str
    count: int  # launches
    seconds: float  # of all of them


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def by_part(kernels: Iterable[KernelTime], wall_seconds: float, num_tokens: int) -> dict[str, float]:
    """Seconds a token in each part, and in none; they add up to the wall clock."""
    spent: dict[str, float] = {}
    for kernel in kernels:
        part = part_of(kernel.name)
        spent[part] = spent.get(part, 0.0) + kernel.seconds
    spent[GAPS] = max(0.0, wall_seconds - sum(spent.values()))
    return {part: seconds / num_tokens for part, seconds in spent.items()}


def profiled(run: Callable[[], object]) -> list[KernelTime]:
    """The kernels that `run` launches on the GPU, by torch's profiler. Empty where it sees none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return kernels_of(recorded.events())


def kernels_of(events: Iterable) -> list[KernelTime]:
    """What ran on the device, of the profiler's events, added up by name."""
    found: dict[str, list[float]] = {}
    for event in events:
        if str(event.device_type).endswith("CUDA"):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    return [KernelTime(name, len(seconds), sum(seconds)) for name, seconds in found.items()]


def wall_and_kernels(
    run: Callable[[], object], profile: Callable[[Callable[[], object]], list[KernelTime]] = profiled
) -> tuple[float, list[KernelTime]]:
    """Seconds of `run` undisturbed, then its kernels from a run of their own:
    the profiler slows the host, not the kernels."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started, profile(run)
