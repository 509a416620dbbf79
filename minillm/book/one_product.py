"""The CPU's matrix product alone, compiled with other flags. Built in chapter 14."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from minillm.kernels import native
from minillm.kernels.native_build import compile_shared

# `linear` of native_products.h for one thread and unquantized weights: the other kernels take most of a build's time.
_SOURCE = r"""
#include "native_base.h"
#include "native_linear.h"

void linear(const T *x, const T *weights, const T *bias, T *out, long rows, long out_features, long in) {
    Target target = {bias, NULL, out, out_features};
    float sums[CHUNK * WIDTH] __attribute__((aligned(64)));
    long panels = (out_features + LANES - 1) / LANES;
    for (long row = 0; row < rows; row += CHUNK)
        for (long first = 0, stop; first < panels; first = stop) {
            long count = rows - row < CHUNK ? rows - row : CHUNK;
            stop = GROUP > 1 ? (first / GROUP + 1) * GROUP : first + (rows <= 2 * ROWS ? PANELS : 1);
            stop = stop < panels ? stop : panels;
            Panels of = {first, out_features, stop - first};
            multiply_numbers(x + row * in, count, &of, weights, in, sums);
            finish(sums, row, count, &of, &target);
        }
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
    compile_shared(compiler, (*native.FLAGS, include, *flags), source, folder / "product.so")
    library = ctypes.CDLL(str(folder / "product.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_long
    library.linear.argtypes = (pointer, pointer, pointer, pointer, number, number, number)
    return library
