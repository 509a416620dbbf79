"""Triton, wherever this is: compiled on a GPU, interpreted on a CPU, absent elsewhere. Built in chapter 10.

    from minillm.kernels.language import tl, triton

Triton decides when a kernel is decorated whether it will be compiled or interpreted, and its own library was decorated
when `triton` was imported. So the choice has to stand before that import, and this is the one place that makes it.
TRITON_INTERPRET in the environment, "1" or "0", overrides it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import torch
from torch import Tensor

from minillm.kernels.interpreter_fixes import repair_interpreter

if importlib.util.find_spec("triton") is None:
    MODE = "absent"
else:
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
    # A * b + c in one instruction; Triton 3.9 warns without, 3.10 says 0.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    MODE = "interpreted" if os.environ["TRITON_INTERPRET"] == "1" else "compiled"
    if MODE == "interpreted" and "triton.language" in sys.modules:
        # Someone (transformers does) imported it before the choice was made: what was decorated then cannot be
        # interpreted now. The compiled core stays, the Python around it is imported again.
        for name in [
            name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")
        ]:
            del sys.modules[name]


class AbsentTriton:
    """Stands in for `triton` and `triton.language`, so that the modules of this room can be imported for their
    twins."""

    def __getattr__(self, name: str) -> AbsentTriton:
        return self

    def __call__(self, *args, **kwargs) -> AbsentTriton:  # a decorator, with arguments or without, or a constant
        return self

    def __getitem__(self, grid):
        raise RuntimeError("Triton is not installed here (it needs Linux); use attention_backend='torch', or the twins")


if MODE == "absent":
    triton = tl = AbsentTriton()
else:
    import triton  # noqa: F401  (the modules of this room take both from here)
    import triton.language as tl  # noqa: F401

    if MODE == "interpreted":
        repair_interpreter()


def serves(x: Tensor) -> bool:
    """Whether a kernel can be launched on this tensor: on a GPU, or on a CPU where kernels are interpreted."""
    return MODE == "interpreted" or (MODE == "compiled" and x.is_cuda)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: the length of a block has to be one."""
    return 1 << max(n - 1, 0).bit_length()


def capability(x: Tensor) -> int:
    """The compute capability of the GPU that holds `x`, 75 for a T4, 90 for an H100; 80 on a CPU."""
    if not x.is_cuda:
        return 80
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor
