"""The attention kernels against their formula in float64: in the interpreter here, compiled where there is a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from minillm.kernels.flash_attention import flash_attention, torch_flash_attention
from minillm.kernels.paged_decode import (
    choose_num_splits,
    merge_splits,
    paged_decode,
    torch_merge_splits,
    torch_paged_decode,
)
from minillm.kernels.paged_prefill import paged_prefill, torch_paged_prefill
from minillm.model.attention import causal_attention
from tests.helpers.kernel_cases import DTYPES, device, error, poisoned

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [  # lengths, query heads, KV heads, head_dim, window
    ([1], 2, 1, 16, None),
    ([5, 70, 33], 4, 2, 32, None),
    ([130, 3], 2, 2, 64, 7),
    ([100], 3, 1, 80, 40),  # neither the heads nor the dimensions are a power of two
    ([65, 64, 63], 2, 1, 64, 64),
    ([40], 1, 1, 24, 1),
    ([17], 2, 1, 256, None),
]


def qkv(num_tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of one matrix, as the projection leaves them."""
    return (
        torch.randn(num_tokens, heads + 2 * kv_heads, dim, device=device())
        .to(dtype)
        .split([heads, kv_heads, kv_heads], 1)
    )


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], device=device())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, heads, kv_heads, dim, window", SHAPES)
def test_flash_attention(lengths, heads, kv_heads, dim, window, dtype):
    torch.manual_seed(0)
    q, k, v = qkv(sum(lengths), heads, kv_heads, dim, dtype)
    out = flash_attention(q, k, v, starts(lengths), max(lengths), window)
    reference = torch_flash_attention(q.double(), k.double(), v.double(), starts(lengths), max(lengths), window)
    assert error(out, reference) < TOLERANCE[dtype]


def test_flash_attention_survives_scores_that_overflow_a_naive_softmax():
    q, k, v = qkv(50, 2, 1, 32, torch.float32)
    out = flash_attention(q * 100, k * 100, v, starts([50]), 50)
    reference = torch_flash_attention(q.double() * 100, k.double() * 100, v.double(), starts([50]), 50)
    assert error(out, reference) < 1e-4


def test_flash_attention_scales_as_it_is_told():
    q, k, v = qkv(20, 2, 1, 32, torch.float32)
    out = flash_attention(q, k, v, starts([20]), 20, scale=0.5)
    assert error(out, torch_flash_attention(q, k, v, starts([20]), 20, scale=0.5)) < 2e-6
    assert error(out, torch_flash_attention(q, k, v, starts([20]), 20)) > 1e-2


def test_the_twin_is_the_books_formula():
    q, k, v = qkv(30, 6, 2, 16, torch.float64)
    for window in (None, 4):
        assert (
            error(
                torch_flash_attention(q, k, v, starts([30]), 30, window),
                causal_attention(q.float(), k.float(), v.float(), window),
            )
            < 1e-6
        )


def test_heads_that_do_not_fit_are_refused():
    q, k, v = qkv(4, 3, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        flash_attention(q, k, v, starts([4]), 4)
    q, k, v = qkv(4, 1, 1, 8, torch.float32)
    with pytest.raises(ValueError, match=r"head_dim=8.*16 to 256"):
        flash_attention(q, k, v, starts([4]), 4)
    q, k, v = (x.transpose(0, 2).contiguous().transpose(0, 2) for x in qkv(16, 1, 1, 16, torch.float32))
    with pytest.raises(ValueError, match="side by side"):
        flash_attention(q, k, v, starts([16]), 16)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_hides_a_query_from_itself_is_refused(window):
    q, k, v = qkv(4, 1, 1, 16, torch.float32)
    with pytest.raises(ValueError, match=f"window={window} leaves a query not even itself"):
        flash_attention(q, k, v, starts([4]), 4, window)


def paged(lengths: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype):
    """Random pages, a block table whose blocks lie in any order;
    slots that no sequence has filled are NaN, the null block 0."""
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts) + 2) + 1).tolist()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int64)
    keys, values = (
        poisoned((sum(counts) + 3, kv_heads, *shape), dtype) for shape in ((dim, block_size), (block_size, dim))
    )
    keys[0] = values[0] = 0
    for row, count in enumerate(counts):
        for place in range(count):
            block = table[row, place] = order.pop()
            keys[block], values[block] = torch.randn(keys.shape[1:]), torch.randn(values.shape[1:])
            filled = lengths[row] - place * block_size
            keys[block, ..., max(filled, 0) :] = values[block, :, max(filled, 0) :] = float("nan")
    return keys, values, torch.tensor(lengths, device=device()), table.to(device())


PAGED_SHAPES = [  # lengths, tokens each brings, query heads, KV heads, head_dim, block size, window
    ([1], [1], 2, 1, 16, 1, None),
    ([5, 70, 33], [5, 1, 20], 6, 2, 32, 16, None),
    ([130, 3, 50], [7, 3, 0], 7, 1, 64, 16, 20),
    ([100], [40], 3, 1, 80, 8, 30),
    ([65], [65], 2, 2, 128, 32, 64),
    ([33], [2], 2, 1, 16, 5, None),  # a block size that is no power of two
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, brings, heads, kv_heads, dim, block_size, window", PAGED_SHAPES)
def test_paged_prefill(lengths, brings, heads, kv_heads, dim, block_size, window, dtype):
    torch.manual_seed(1)
    keys, values, seq_lens, table = paged(lengths, kv_heads, dim, block_size, dtype)
    q = qkv(sum(brings), heads, kv_heads, dim, dtype)[0]
    out = poisoned((sum(brings), heads, dim), dtype)
    paged_prefill(q, keys, values, starts(brings), seq_lens, table, max(brings), window, out=out)
    reference = torch_paged_prefill(
        q.double(), keys.double(), values.double(), starts(brings), seq_lens, table, max(brings), window
    )
    assert error(out, reference) < TOLERANCE[dtype]


def test_paged_prefill_leaves_the_rows_of_others_alone():
    keys, values, seq_lens, table = paged([20, 9], 1, 16, 4, torch.float32)
    q = qkv(12, 2, 1, 16, torch.float32)[0]
    out = torch.full((12, 2, 16), 7.0, device=device())
    paged_prefill(q, keys, values, torch.tensor([1, 9, 11], device=device()), seq_lens, table, 8, out=out)
    assert (out[0] == 7).all() and (out[11] == 7).all() and (out[1:11] != 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize("lengths, brings, heads, kv_heads, dim, block_size, window", PAGED_SHAPES)
def test_paged_decode(lengths, brings, heads, kv_heads, dim, block_size, window, num_splits, dtype):
    torch.manual_seed(2)
    keys, values, seq_lens, table = paged([*lengths, 0], kv_heads, dim, block_size, dtype)  # the last row is padding
    q = qkv(len(seq_lens), heads, kv_heads, dim, dtype)[0]
    out = poisoned(q.shape, dtype)
    paged_decode(q, keys, values, seq_lens, table, num_splits, window, out=out)
    reference = torch_paged_decode(q.double(), keys.double(), values.double(), seq_lens, table, num_splits, window)
    assert error(out, reference) < TOLERANCE[dtype]
    assert (out[-1] == 0).all()


def test_paged_decode_is_the_last_row_of_paged_prefill():
    keys, values, seq_lens, table = paged([300, 77], 2, 32, 16, torch.float32)
    q = qkv(2, 4, 2, 32, torch.float32)[0]
    prefill = paged_prefill(q, keys, values, starts([1, 1]), seq_lens, table, 1)
    assert error(paged_decode(q, keys, values, seq_lens, table, 4), prefill) < 2e-6


def test_slots_beyond_two_billion_elements_are_addressed_in_64_bits():
    """A cache of more than 2^31 elements whose untouched pages cost nothing; its last block holds the sequence."""
    from minillm.kv_cache.paged import PagedKVCache

    block_elements = 4 * 64 * 16
    num_blocks = 2**31 // block_elements + 2
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of GPU memory")
    cache = PagedKVCache(1, 4, 64, num_blocks, 16, torch.float16, device())
    keys, values = cache.keys[0], cache.values[0]
    keys[num_blocks], values[num_blocks] = torch.randn(4, 64, 16), torch.randn(4, 16, 64)
    table, seq_lens = torch.tensor([[num_blocks]], device=device()), torch.tensor([13], device=device())
    q = qkv(1, 4, 4, 64, torch.float16)[0]
    small = (x[num_blocks:].clone() for x in (keys, values))
    reference = torch_paged_decode(q, *small, seq_lens, table * 0)
    assert error(paged_decode(q, keys, values, seq_lens, table, 1), reference) < 1e-3
    assert error(paged_prefill(q, keys, values, starts([1]), seq_lens, table, 1), reference) < 1e-3


def test_merging_is_one_softmax_over_all_splits():
    torch.manual_seed(3)
    scores, values = torch.randn(2, 3, 5, 40, device=device()) * 9, torch.randn(2, 3, 5, 40, 24, device=device())
    scores[:, :, 3] = float("-inf")  # an empty split
    logs = torch.logsumexp(scores, -1) / torch.log(torch.tensor(2.0))
    part = torch.einsum("nhsk,nhskd->nhsd", scores.softmax(-1).nan_to_num(0), values)
    out = merge_splits(part, logs, poisoned((2, 3, 24), torch.float32))
    whole = torch.einsum("nhk,nhkd->nhd", scores.flatten(2).softmax(-1), values.flatten(2, 3))
    assert error(out, whole) < 2e-6
    assert error(torch_merge_splits(part, logs, torch.empty_like(out)), whole) < 2e-6


def test_merging_only_empty_splits_gives_zero():
    part, logs = torch.zeros(1, 1, 2, 16, device=device()), torch.full((1, 1, 2), float("-inf"), device=device())
    assert (merge_splits(part, logs, poisoned((1, 1, 16), torch.float32)) == 0).all()


@pytest.mark.parametrize(
    "num_seqs, kv_heads, length, num_sms, splits",
    [
        (1, 8, 4096, 132, 16),  # 33 wanted, 16 possible
        (1, 8, 256, 132, 1),  # too short to cut
        (256, 8, 4096, 132, 1),  # every SM has work
        (1, 1, 100_000, 132, 64),  # the most there are
        (4, 8, 100_000, 132, 8),  # 264 // 32, a power of two
    ],
)
def test_the_number_of_splits(num_seqs, kv_heads, length, num_sms, splits):
    assert choose_num_splits(num_seqs, kv_heads, length, num_sms) == splits
