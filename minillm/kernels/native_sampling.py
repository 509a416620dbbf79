"""The C kernel that chooses tokens on a CPU. Built in chapter 14; its twin is `minillm.sampling.sampler.Sampler`."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels import native


def draws(logits: Tensor) -> bool:
    """Whether `draw` serves these logits: float32 on a CPU, the numbers of a row side by side."""
    return logits.is_cpu and logits.dtype == torch.float32 and logits.stride(-1) == 1 and native.library() is not None


def draw(
    logits: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    is_greedy: Tensor | None = None,
) -> Tensor:
    """One token a row, int64 [num_rows]: the argmax of logits / temperature + Gumbel noise, which is never stored.

    logits [num_rows, vocab_size], of one token at least; of the others one number a row: float32, int64 twice and bool.
    Rows that are greedy, and all rows without seeds, have the argmax of their logits. Of equal values the smallest id
    wins.
    """
    columns = [None if one is None else one.contiguous() for one in (temperature, seeds, positions, is_greedy)]
    rows, count = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    pointers = [None if one is None else one.data_ptr() for one in columns]
    native.library().draw(logits.data_ptr(), logits.stride(0), *pointers, out.data_ptr(), rows, count)
    return out
