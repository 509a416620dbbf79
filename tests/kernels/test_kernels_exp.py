"""The exponential of the CPU's kernels, alone: compiled for this CPU and for lesser ones, against float64."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest

from minillm.kernels import native
from minillm.kernels.native_build import compile_shared

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
SMALLEST = np.finfo(np.float32).tiny  # of a normal number

SOURCE = """
#include "native_base.h"
void exp_all(float *x, long count) {
    for (long i = 0; i < count; i += LANES) *(lanes *)(x + i) = exp_lanes(*(lanes *)(x + i));
}
"""


@pytest.mark.parametrize("flags", [(), ("-mno-avx512f",), ("-march=x86-64",)], ids=["this CPU", "AVX2", "no AVX"])
def test_exp_is_exact_or_zero_and_never_subnormal(flags, tmp_path):
    (tmp_path / "exp.c").write_text(SOURCE)
    include = f"-I{native.SOURCE.parent}"
    compile_shared(
        shutil.which("gcc") or "clang", (*native.FLAGS, *flags, include), tmp_path / "exp.c", tmp_path / "exp.so"
    )
    x = np.linspace(-120, 88, 16 * 2**14, dtype=np.float32)
    x[:16] = [-np.inf, -1e30, -1e9, -500, -104, -103.97, -88, -87.5, -87.34, -87.01, -87, -86.9, -1e-30, 0, 1e-30, 1]
    made = x.copy()
    ctypes.CDLL(str(tmp_path / "exp.so")).exp_all(made.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(made)))
    assert ((made == 0) | (made >= SMALLEST)).all()  # a subnormal slows every product down that it takes part in
    exact = np.exp(x.astype(np.float64))
    seen = x >= -87
    assert (made[~seen] == 0).all() and (made[seen] > 0).all()
    assert (np.abs(made[seen] / exact[seen] - 1) < 3e-7).all()
