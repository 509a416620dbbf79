"""What each generation of GPUs multiplies and copies with, and which of it a build uses. Built in chapter 11.

                    product         operands            sums                a copy into shared memory
    Turing    75    mma.sync        registers           registers           ld.global, st.shared
    Ampere    80    mma.sync        registers           registers           cp.async, 16 bytes a thread
    Ada       89    mma.sync        registers           registers           cp.async
    Hopper    90    wgmma           shared memory       registers           cp.async.bulk.tensor (TMA), a whole tile
    Blackwell 100   tcgen05.mma     shared memory       tensor memory       cp.async.bulk.tensor
    Blackwell 120   mma.sync        registers           registers           cp.async.bulk.tensor

The names are those of PTX (NVIDIA, "Parallel Thread Execution ISA": the sections on wgmma, on the fifth generation of
tensor cores and on tensor copies). A compiler need not use what a GPU has: `way_of` says what it did use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minillm.kernels.build import Report

LARGE_COPY = "cp.async.bulk.tensor"


@dataclass(frozen=True)
class Generation:
    """One generation of tensor cores, by the instructions of its programs."""

    name: str
    capability: int  # 90 is 9.0; the first GPU of the generation
    product: str  # the widest instruction of its tensor cores
    issued_by: int  # threads that issue one together
    copy: str  # the widest copy from memory to shared memory
    tensor_memory_columns: int = 0  # of 128 lanes of 4 bytes, in an SM


GENERATIONS = (
    Generation("Turing", 75, "mma.sync", 32, "ld.global"),
    Generation("Ampere", 80, "mma.sync", 32, "cp.async"),
    Generation("Hopper", 90, "wgmma", 128, LARGE_COPY),
    Generation("Blackwell, data centre", 100, "tcgen05.mma", 1, LARGE_COPY, 512),
    Generation("Blackwell, desktop", 120, "mma.sync", 32, LARGE_COPY),
)


class Way(NamedTuple):
    """How the loop of a build works."""

    product: str  # "" where no tensor core works
    copy: str  # the widest copy into shared memory; "ld.global" where threads load and store
    sums: str  # "registers" or "tensor memory"
    specialised: bool  # warps with roles of their own: some load, some multiply


def generation_of(capability: int) -> Generation:
    """The generation of a GPU of this capability: Ampere for 86 and 89. ValueError for what is older than Turing."""
    found = [generation for generation in GENERATIONS if generation.capability <= capability]
    if not found:
        raise ValueError(f"capability={capability}: the oldest generation with an entry is Turing, 75")
    return found[-1]


def way_of(report: Report) -> Way:
    """What a build uses, from its PTX. ValueError for a report with an error."""
    if report.error:
        raise ValueError(f"{report.name} did not compile for {report.capability}: {report.error}")
    product = next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if report.count(name)), "")
    copy = next((name for name in (LARGE_COPY, "cp.async") if report.count(name)), "ld.global")
    sums = "tensor memory" if report.count("tcgen05.alloc") else "registers"
    return Way(product, copy, sums, report.extra_warps > 0)
