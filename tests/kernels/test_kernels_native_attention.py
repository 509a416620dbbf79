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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    size: int,
    window: int | None,
    sinks: int,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """One sequence, so many tokens at a time. What is not written in the pages is no number, or a code of one that its
    scale makes none."""
    kv_heads, dim, blocks = k.shape[1], k.shape[2], -(-len(q) // size)
    keys, values = torch.empty(blocks, kv_heads, dim, size), torch.empty(blocks, kv_heads, size, dim)
    keys, values = (part.fill_(float("nan")).to(kv_dtype or q.dtype) for part in (keys, values))
    scales = None if kv_dtype is None else torch.full((2, blocks, kv_heads, size), float("nan")).unbind()
    pages, outs = Pages.of(keys, values, scales, window, sinks), []
    start = 0
    for length in lengths:
        end = start + length
        index = torch.tensor([0, length]), torch.tensor([end]), torch.arange(blocks)[None], torch.arange(start, end)
        outs.append(native.paged_attention(*(x[start:end] for x in (q, k, v)), pages, Sequences.of(*index, end)))
        start = end
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("size", [1e2, 1e6, 1e10, 1e17])
def test_scores_far_apart_leave_the_largest(size, dim, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 2, dim).to(dtype) for _ in range(3))
    q = q * size
    expected = causal_attention(q.float(), k.float(), v.float())
    for lengths in ([40], [1] * 40):
        torch.testing.assert_close(attend(q, k, v, lengths, 16, None, 0).float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-34, 1e-37, 1e-39])
def test_subnormal_numbers_are_the_same_in_any_company(size, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 2, 64) for _ in range(3))
    for inputs in ((q, k, v * size), (q * size, k.clamp(-3, 3) * 1e38, v)):
        inputs = [x.to(dtype) for x in inputs]
        assert torch.equal(attend(*inputs, [64], 16, None, 0), attend(*inputs, [1] * 64, 16, None, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [3, 100, 179, 191, 250])
def test_a_key_that_is_no_number_is_not_passed_over(bad, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 2, 64).to(dtype) for _ in range(3))
    k[bad, 1] = float("nan")
    whole = attend(q, k, v, [300], 16, None, 0)
    assert whole[:bad].isfinite().all() and whole[:, 0].isfinite().all()
    assert whole[bad:, 1].isnan().all()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group, dim, size", [(3, 64, 16), (1, 128, 16), (2, 96, 7)])
def test_long_pasts(group, dim, size, dtype):
    """Past the keys that a softmax takes at once and the queries of a tile. Scores grow with the position of the key
    (what was summed shrinks time and again), fall, or are mixed."""
    torch.manual_seed(0)
    count = 450
    q, k = torch.randn(count, 2 * group, dim), torch.randn(count, 2, dim)
    v = torch.randn(count, 2, dim).to(dtype)
    q[..., 0], slope = 4, torch.linspace(-20, 20, count)[:, None]
    for first in (slope, -slope, k[..., 0]):
        k[..., 0] = first
        now, past = q.to(dtype), k.to(dtype)
        whole = attend(now, past, v, [count], size, None, 0)
        twin = causal_attention(*(x.float() for x in (now, past, v)))
        torch.testing.assert_close(whole.float(), twin, rtol=2e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        for lengths in ([340] + [1] * 110, [5] * 90, [191, 1, 1, 250, 7], [200, 33, 32, 31, 154]):
            assert torch.equal(attend(now, past, v, lengths, size, None, 0), whole), lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window, sinks", [(None, 0), (20, 0), (20, 2)])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_spoils_later_tokens_only(bad, window, sinks, dtype):
    """Tokens of a step share their products, and 0 times infinity is no number."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(60, heads, 64).to(dtype) for heads in (6, 2, 2))
    v[41, 1] = bad
    whole, alone = (attend(q, k, v, lengths, 16, window, sinks) for lengths in ([60], [1] * 60))
    assert torch.equal(whole.nan_to_num(), alone.nan_to_num())
    assert whole[:41].isfinite().all() and whole[:, :3].isfinite().all()
    assert not whole[41, 3:].isfinite().any()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_value_outside_of_the_window_never_enters(bad, sinks, kv_dtype, dtype):
    """It lies in one page with values that are seen, and 0 times infinity is no number."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(60, heads, 32).to(dtype) for heads in (6, 2, 2))
    window, place = 9, 20
    sees = torch.zeros(60, 6, dtype=torch.bool)
    sees[place : place + window, 3:] = True  # the heads of KV head 1
    without = attend(q, k, v, [60], 1, window, sinks, kv_dtype)[~sees]
    v[place, 1, 5:] = bad
    for size, lengths in product((1, 2, 5, 16, 32), ([60], [1] * 60, [22, 5, 33])):
        out = attend(q, k, v, lengths, size, window, sinks, kv_dtype)
        assert torch.equal(bits(out[~sees]), bits(without)), (size, lengths)
        assert not out[sees].isfinite().all(dim=-1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window, sinks", [(None, 0), (9, 0), (9, 3)])
def test_zero_has_one_sign_in_any_company(window, sinks, dtype):
    """Products of bfloat16 take a sum that is subnormal for 0 and keep its sign; unseen values add more zeros."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 2, 64).to(dtype) for _ in range(3))
    for size in (1e-37, 1e-38):
        whole, alone = (attend(q, k, v * size, lengths, 16, window, sinks) for lengths in ([64], [1] * 64))
        assert torch.equal(bits(whole), bits(alone))
