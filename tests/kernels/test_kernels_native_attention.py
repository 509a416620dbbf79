"""The CPU's attention over pages where rounding shows: scores far apart, and sums whose order decides."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kernels.native_structs import Pages, Sequences
from minillm.model.attention import causal_attention

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], size: int, window: int | None, sinks: int) -> Tensor:
    """One sequence, so many tokens at a time."""
    kv_heads, dim, blocks = k.shape[1], k.shape[2], -(-len(q) // size)
    keys, values = torch.empty(blocks, kv_heads, dim, size), torch.empty(blocks, kv_heads, size, dim)
    keys, values = (part.to(q.dtype).fill_(float("nan")) for part in (keys, values))
    pages, outs = Pages.of(keys, values, None, window, sinks), []
    start = 0
    for length in lengths:
        end = start + length
        index = torch.tensor([0, length]), torch.tensor([end]), torch.arange(blocks)[None], torch.arange(start, end)
        outs.append(native.paged_attention(*(x[start:end] for x in (q, k, v)), pages, Sequences.of(*index, end)))
        start = end
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e2, 1e6, 1e10, 1e17])
def test_scores_far_apart_leave_the_largest(size, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 2, 16).to(dtype) for _ in range(3))
    q = q * size
    expected = causal_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(attend(q, k, v, [40], 16, None, 0).float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_behind_sinks_have_one_order_in_any_company(dtype):
    """All weights are equal, and large values cancel: what is left of small ones depends on the order of the sum."""
    torch.manual_seed(0)
    q, k = torch.zeros(30, 4, 64, dtype=dtype), torch.zeros(30, 2, 64, dtype=dtype)
    v = (torch.randn(30, 2, 64) + 2.0**30 * torch.randint(-1, 2, (30, 2, 64))).to(dtype)
    for size, sinks, window in product((1, 2, 3, 5, 7), (1, 2, 3, 5, 7), (2, 3, 6)):
        whole = attend(q, k, v, [30], size, window, sinks)
        for lengths in ([1] * 30, [2] * 15, [3, 4, 20, 2, 1]):
            assert torch.equal(attend(q, k, v, lengths, size, window, sinks), whole), (size, sinks, window, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "group, dim, size", [(1, 32, 16), (3, 64, 16), (8, 64, 32), (9, 96, 16), (2, 64, 5), (2, 48, 16)]
)
def test_sums_have_one_order_in_any_company(group, dim, size, dtype):
    """The same without sinks: few queries read the pages in place, many from a copy."""
    torch.manual_seed(0)
    count = 150
    q, k = torch.randn(count, 2 * group, dim).to(dtype), torch.randn(count, 2, dim).to(dtype)
    v = (torch.randn(count, 2, dim) + 2.0**30 * torch.randint(-1, 2, (count, 2, dim))).to(dtype)
    for sharpness in (0, 1, 40):  # equal weights; unequal ones; all but a few of them zero
        whole = attend(q * sharpness, k, v, [count], size, None, 0)
        for lengths in ([1] * count, [2] * 75, [7, 60, 1, 33, 16, 32, 1], [149, 1]):
            assert torch.equal(attend(q * sharpness, k, v, lengths, size, None, 0), whole), (sharpness, lengths)
