"""What the tests of the Triton kernels share: where they run, buffers that show what was not written, and the error."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from minillm.kernels import language

# The interpreter multiplies bfloat16 matrices wrongly, and a T4 has no bfloat16.
HAS_BFLOAT16 = (
    language.MODE == "compiled" and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
)
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_BFLOAT16

# The relative error of a whole tensor that two roundings to the dtype may cause.
ROUNDING = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
needs_triton = pytest.mark.skipif(language.MODE == "absent", reason="Triton needs Linux: the twins serve")
GUARD = 4096  # elements of NaN before and after a guarded tensor


def device() -> str:
    """Kernels run on the GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN everywhere: an element that a kernel forgets, or reads where it should not, spoils the result."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device())


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every machine, with NaN before and after them."""
    generator = torch.Generator().manual_seed(seed)
    return framed(shape, dtype).copy_(torch.randn(shape, generator=generator))


def framed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN, with more NaN before and after it in memory."""
    return poisoned((math.prod(shape) + 2 * GUARD,), dtype)[GUARD : GUARD + math.prod(shape)].view(shape)


def projection(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Heads of q, k and v side by side, and one more that nobody may read: [num_tokens, num_heads + 1, head_dim]."""
    return random((num_tokens, num_heads + 1, head_dim), dtype)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@contextmanager
def guarded_outputs():
    """Within it, what a launcher takes from torch.empty is NaN, and must not be written beyond its ends."""
    real, made = torch.empty, []

    def empty(*shape, dtype=None, device=None):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        memory = real(math.prod(shape) + 2 * GUARD, dtype=dtype, device=device)
        if not memory.is_floating_point():
            return real(shape, dtype=dtype, device=device)
        made.append(memory.fill_(float("nan")))
        return memory[GUARD:-GUARD].view(shape)

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = real
    for memory in made:
        assert memory[:GUARD].isnan().all(), "written before the beginning of an output"
        assert memory[-GUARD:].isnan().all(), "written beyond the end of an output"


def error(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference| over the whole tensor, in float64; NaN and inf count as infinitely wrong."""
    reference = reference.to(out.device, torch.float64)
    difference = (out.double() - reference).norm() / reference.norm().clamp(min=1e-300)
    return float(difference.nan_to_num(nan=float("inf")))
