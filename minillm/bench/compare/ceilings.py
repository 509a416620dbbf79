"""The limits of the machine, measured before and after each case. Built in chapter 14.

Other work on the machine, or on the host of a virtual one, lowers them for minutes, so a case is compared with what was
measured next to it. In float32 oneDNN's product of packed weights can be faster than torch's own, and engines use it:
the better of both is the limit.
"""

from __future__ import annotations

import time

import torch

from ...model.layers import can_pack
from .. import measure

CPU = torch.device("cpu")
SIZE, REPEATS = 2048, 5  # of the packed product


def measured(weight_bytes: int, dtypes: tuple[torch.dtype, ...]) -> measure.Ceilings:
    """Bandwidth for weights of that size, and the matrix product rate of each dtype."""
    found = measure.measure_ceilings(CPU, dtypes, measure.megabytes_to_read(weight_bytes, CPU))
    packed = {measure.name_of(dtype): packed_rate(dtype) for dtype in dtypes}
    return best_of(found, measure.Ceilings(0.0, 0.0, packed))


def packed_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of oneDNN's product with a packed weight; 0 where there is none."""
    x, weight = torch.randn(2, SIZE, SIZE).to(dtype)
    if not can_pack(weight):
        return 0.0
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, SIZE)
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first one warms up
        started = time.perf_counter()
        torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE**3 / best


def best_of(a: measure.Ceilings, b: measure.Ceilings) -> measure.Ceilings:
    return measure.Ceilings(
        max(a.copy_bytes_per_second, b.copy_bytes_per_second),
        max(a.read_bytes_per_second, b.read_bytes_per_second),
        {name: max(rate, b.matmul_flops_per_second[name]) for name, rate in a.matmul_flops_per_second.items()},
    )
