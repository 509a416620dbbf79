"""The CPU's matrix product alone, compiled with other flags. Built in chapter 14."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from minillm.book.rungs import best_of
from minillm.kernels import huge_pages, native
from minillm.kernels.native_build import NO_UNIT, compile_shared, has_unit, unit_flags

# `linear` of native_products.h for one thread and unquantized weights: the other kernels take most of a build's time.
_SOURCE = r"""
#include "native_base.h"
#include "native_linear.h"

void linear(const T *x, const T *weights, const T *bias, T *out, long rows, long out_features, long in) {
    Target target = {bias, NULL, out, out_features};
    float sums[CHUNK * WIDTH] __attribute__((aligned(64)));
    long panels = (out_features + LANES - 1) / LANES;
    begin_tiles(1);
    for (long row = 0; row < rows; row += CHUNK)
        for (long first = 0, stop; first < panels; first = stop) {
            long count = rows - row < CHUNK ? rows - row : CHUNK;
            stop = GROUP > 1 ? (first / GROUP + 1) * GROUP : first + (rows <= 2 * ROWS ? PANELS : 1);
            stop = stop < panels ? stop : panels;
            Panels of = {first, out_features, stop - first};
            multiply_numbers(x + row * in, NULL, count, &of, weights, in, sums);
            finish(sums, row, count, &of, &target);
        }
    end_tiles();
}
"""


@cache
def compiled(*flags: str) -> ctypes.CDLL:
    """A library with `linear`, `weight_panels` and `weight_pair` of the C kernels, built with these flags on top."""
    folder = Path(tempfile.mkdtemp())
    source = folder / "product.c"
    source.write_text(_SOURCE)
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    include = f"-I{native.SOURCE.parent}"
    compile_shared(compiler, (*native.FLAGS, *unit_flags(), include, *flags), source, folder / "product.so")
    library = ctypes.CDLL(str(folder / "product.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_long
    library.linear.argtypes = (pointer, pointer, pointer, pointer, number, number, number)
    return library


def unit_times(widths: Sequence[int], out: int = 3072, inputs: int = 576) -> dict[tuple[str, int], float] | None:
    """Seconds of a bfloat16 product on one core, of so many rows each: with the CPU's matrix unit, without it, and
    PyTorch's. Few rows meet other weights in every product, 85 MB in all. None for a CPU without such a unit."""
    if not has_unit():
        return None
    counts = {rows: 24 if rows <= 16 else 2 for rows in widths}
    weights = [torch.randn(out, inputs).bfloat16() for _ in range(24)]
    packed = [huge_pages.copy(native.pack(weight)) for weight in weights]

    def times(multiply: Callable, matrices: list[Tensor]) -> dict[int, Callable]:
        x = {rows: torch.randn(rows, inputs).bfloat16() for rows in widths}
        return {rows: partial(_each, multiply, x[rows], matrices[: counts[rows]]) for rows in widths}

    runs = {
        "matrix unit": times(_call(compiled("-DBF16"), out), packed),
        "vector instructions": times(_call(compiled("-DBF16", *NO_UNIT), out), packed),
        "PyTorch": times(torch.nn.functional.linear, weights),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spent = best_of({(name, rows): run for name, by_rows in runs.items() for rows, run in by_rows.items()}, repeats=5)
    torch.set_num_threads(threads)
    return {(name, rows): seconds / counts[rows] for (name, rows), seconds in spent.items()}


def _each(multiply: Callable, x: Tensor, matrices: list[Tensor]) -> None:
    for matrix in matrices:
        multiply(x, matrix)


def _call(library: ctypes.CDLL, out: int) -> Callable:
    def multiply(x: Tensor, weights: Tensor) -> Tensor:
        made = torch.empty(len(x), out, dtype=x.dtype)
        library.linear(x.data_ptr(), weights.data_ptr(), None, made.data_ptr(), len(x), out, x.shape[1])
        return made

    return multiply
