"""Latent attention on a CPU, one token a sequence: the C kernel against the formula in float64, and the same bits
whatever shares the step."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels import native
from minillm.kernels.latent_decode import torch_latent_decode
from minillm.kv_cache.latent import LatentAttention, LatentKVCache
from minillm.kv_cache.native_latent import NativeLatentAttention
from minillm.model.batch import ForwardBatch

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
every_dtype = pytest.mark.parametrize("dtype", ERROR, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [  # positions after the step, tokens each brings, heads, columns of values, columns behind them, block size
    ([1], [1], 2, 16, 8, 1),
    ([5, 70, 33], [1, 1, 1], 6, 24, 8, 3),
    ([96, 97, 32], [1, 1, 9], 17, 64, 16, 16),  # two panels of heads; a prompt in the same step
    ([1000, 480, 481], [1, 1, 1], 50, 40, 10, 16),  # three parts, a whole one, and one key in the second; four panels
    ([70], [1], 16, 512, 64, 16),
]


def step(lengths: list[int], brings: list[int], block_size: int) -> ForwardBatch:
    """Sequences over blocks in any order, the table as wide as the longest one."""
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    rows = [row for row, count in enumerate(brings) for _ in range(count)]
    positions = torch.cat([torch.arange(end - count, end) for end, count in zip(lengths, brings)])
    slots = table[rows, positions // block_size] * block_size + positions % block_size
    starts = torch.tensor([0, *brings]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.zeros(len(rows), dtype=torch.int64), positions=positions, query_start_loc=starts,
        seq_lens=torch.tensor(lengths), block_table=table, slot_mapping=slots, max_query_len=max(brings),
        logits_indices=None, max_seq_len=max(lengths),
    )  # fmt: skip


def made(batch: ForwardBatch, heads: int, value_dim: int, rest: int, block_size: int, dtype: torch.dtype):
    """A cache, queries and latents. What is not yet written is NaN, but in the null block."""
    cache = LatentKVCache(1, 1, value_dim + rest, int(batch.block_table.max()), block_size, dtype)
    cache.keys[0][1:] = float("nan")
    for length, table in zip(batch.seq_lens.tolist(), batch.block_table):
        for place in range(0, length, block_size):
            cache.keys[0][table[place // block_size], : length - place] = torch.randn(
                min(block_size, length - place), value_dim + rest
            ).to(dtype)
    q, k = (torch.randn(batch.num_tokens, n, value_dim + rest).to(dtype) for n in (heads, 1))
    cache.keys[0].view(-1, value_dim + rest)[batch.slot_mapping] = float("nan")  # the step brings them
    return cache, q, k


@every_dtype
@pytest.mark.parametrize("lengths, brings, heads, value_dim, rest, block_size", SHAPES)
def test_it_equals_the_formula_and_writes_its_slots_only(lengths, brings, heads, value_dim, rest, block_size, dtype):
    torch.manual_seed(0)
    batch = step(lengths, brings, block_size)
    cache, q, k = made(batch, heads, value_dim, rest, block_size, dtype)
    expected = cache.keys[0].clone()
    expected.view(-1, value_dim + rest)[batch.slot_mapping] = k[:, 0]
    attention = NativeLatentAttention(cache, [None], heads, value_dim)
    found = attention.attend(q, k, k[..., :value_dim], 0, batch)
    torch.testing.assert_close(cache.keys[0], expected, rtol=0, atol=0, equal_nan=True)
    rows, whole = brings.count(1), expected.double()
    right = torch_latent_decode(q[:rows].double(), whole, batch.seq_lens[:rows], batch.block_table, value_dim)
    assert found.shape == (len(k), heads, value_dim)
    assert (found[:rows].double() - right).norm() < ERROR[dtype] * right.norm()
    for row in range(rows, len(lengths)):  # prompts, which torch attends for
        start, end = batch.query_start_loc[row : row + 2].tolist()
        each = torch.arange(lengths[row] - brings[row], lengths[row]) + 1
        tables = batch.block_table[row].expand(end - start, -1)
        right = torch_latent_decode(q[start:end].double(), whole.nan_to_num(0), each, tables, value_dim)
        assert (found[start:end].double() - right).norm() < ERROR[dtype] * right.norm()


@every_dtype
def test_a_token_has_the_same_bits_in_any_company(dtype):
    torch.manual_seed(1)
    batch = step([700, 3, 48, 481, 12], [1, 1, 1, 1, 5], 16)
    cache, q, k = made(batch, 20, 32, 16, 16, dtype)
    together = NativeLatentAttention(cache, [None], 20, 32).attend(q, k, k[..., :32], 0, batch)
    for row in range(4):
        one = slice(row, row + 1)
        alone = ForwardBatch(
            token_ids=batch.token_ids[one], positions=batch.positions[one], query_start_loc=torch.tensor([0, 1]),
            seq_lens=batch.seq_lens[one], block_table=batch.block_table[one], slot_mapping=batch.slot_mapping[one],
            max_query_len=1, logits_indices=None, max_seq_len=int(batch.seq_lens[row]),
        )  # fmt: skip
        found = NativeLatentAttention(cache, [None], 20, 32).attend(q[one], k[one], k[one, :, :32], 0, alone)
        assert torch.equal(found[0], together[row])


@every_dtype
def test_a_row_without_positions_is_zero_and_others_do_not_see_it(dtype):
    torch.manual_seed(3)
    batch = step([40, 1, 17], [1, 1, 1], 16)
    batch.seq_lens[1], batch.slot_mapping[1] = 0, 0  # fills up the batch, and writes to the null block
    cache, q, k = made(batch, 5, 24, 8, 16, dtype)
    found = NativeLatentAttention(cache, [None], 5, 24).attend(q, k, k[..., :24], 0, batch)
    right = torch_latent_decode(q.double(), cache.keys[0].double().nan_to_num(0), batch.seq_lens, batch.block_table, 24)
    assert not found[1].any() and (found.double() - right).norm() < ERROR[dtype] * right.norm()


def test_windows_are_refused():
    cache = LatentKVCache(2, 1, 32, 4, 16, torch.float32)
    with pytest.raises(ValueError, match=r"layer_windows=\[None, 9\]; use attention_backend='torch'"):
        NativeLatentAttention(cache, [None, 9], 5, 24)


def test_its_twin_is_the_attention_of_torch():
    torch.manual_seed(2)
    batch = step([40, 17, 9], [1, 1, 4], 16)
    cache, q, k = made(batch, 5, 24, 8, 16, torch.float32)
    cache.keys[0].nan_to_num_(0)  # torch multiplies what its mask hides by 0
    found = NativeLatentAttention(cache, [None], 5, 24).attend(q, k, k[..., :24], 0, batch)
    right = LatentAttention(cache, [None], 5).attend(q, k, k[..., :24], 0, batch)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "latent_dim, value_dim, kind, said",
    [
        (31, 24, "auto", "latents of 31 columns, 24 of them values"),  # the last panel of values would read beyond
        (33, 16, "auto", "latents of 33 columns"),  # bfloat16 is multiplied in pairs
        (32, 24, "int8", "latents in pages of torch.int8"),
    ],
)
def test_what_it_does_not_read_is_named(latent_dim, value_dim, kind, said):
    cache = LatentKVCache(1, 1, latent_dim, 3, 16, torch.float32, kv_dtype=kind)
    with pytest.raises(ValueError, match=f"attention_backend='native' has no kernels for {said}"):
        NativeLatentAttention(cache, [None], 4, value_dim)
