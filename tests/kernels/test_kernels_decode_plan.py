"""Splits by each sequence's own length: the plan, attention by it, and rows that are tokens of one sequence."""

from __future__ import annotations

import pytest
import torch

from minillm.book.traffic import count_traffic
from minillm.kernels import decode_plan
from minillm.kernels.decode_plan import plan_decode, plan_sizes, torch_plan_decode
from minillm.kernels.paged_decode import paged_decode, torch_paged_decode
from minillm.kernels.paged_prefill import torch_paged_prefill
from tests.helpers.kernel_cases import DTYPES, device, error, needs_triton, poisoned
from tests.kernels.test_kernels_attention import PAGED_SHAPES, TOLERANCE, paged, qkv, starts

pytestmark = needs_triton
INDEXES = [torch.int32, torch.int64]


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 16 positions, so that short sequences have several."""
    monkeypatch.setattr(decode_plan, "MIN_SPLIT", 16)


def splits_of(plan) -> dict[int, int]:
    """Row -> number of splits."""
    row, *_, splits, _ = plan.items.tolist()
    return {at: count for at, count in zip(row, splits) if at >= 0}


def test_a_long_sequence_among_short_ones_has_dozens_of_splits_and_they_have_one():
    lengths = torch.tensor([*[1024] * 40, 100_000, *[1024] * 24, *[0] * 15], device=device())
    plan = plan_decode(lengths, 8, 131_072, 132)
    splits = splits_of(plan)
    assert splits.pop(40) >= 36 and set(splits.values()) == {1} and len(splits) == 79
    empty = (plan.items[0] == -1).sum().item() * 8
    assert plan.items.shape[1] == 80 + 66 and empty <= 4 * 132  # programs that return at once
    assert plan.part_bytes(16, 128) == 88 * 16 * 129 * 4


@pytest.mark.parametrize("num_seqs", [33, 64, 256, 600])
def test_equal_sequences_that_fill_the_gpu_are_not_split(num_seqs):
    plan = plan_decode(torch.full((num_seqs,), 1024, dtype=torch.int32, device=device()), 16, 40_960, 132)
    assert set(splits_of(plan).values()) == {1}


def test_a_plan_is_bounded_by_what_the_host_knows():
    assert plan_sizes(512, 8, 40_960, 132) == (512 + 66, 88, 66)
    assert plan_sizes(1, 8, 1_000, 132) == (1 + 3, 6, 66)  # too short to be cut more often
    assert plan_sizes(4, 8, 200, 132) == (4, 1, 66)
    assert plan_sizes(1, 8, 40_960, 132, window=1024) == (1 + 6, 12, 66)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        num_rows, kv_heads = (
            torch.randint(1, 90, (), generator=generator).item(),
            2 ** torch.randint(0, 5, (), generator=generator).item(),
        )
        lengths = (torch.rand(num_rows, generator=generator) ** 4 * 9000).long()
        _, num_slots, _ = plan_sizes(num_rows, kv_heads, 9000, 8)
        splits = splits_of(torch_plan_decode(lengths, kv_heads, 9000, 8)).values()  # its items fit, or it fails
        assert sum(count for count in splits if count > 1) <= num_slots


def query_index(counts: list[int], padding: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([at for count in counts for at in range(count)] + [0] * padding, dtype=dtype, device=device())


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("tokens_each", [None, 2, 8])
def test_the_plan_is_that_of_its_twin(tokens_each, window, index):
    counts = [1, 5, 2, 8, 1, 1, 3] * 90  # more rows than the planning program takes at a time
    starts_at = [4000 - place if place % 30 == 0 else 1 + place % 50 for place in range(len(counts))]
    lengths = torch.tensor(
        [start + token for start, count in zip(starts_at, counts) for token in range(count)] + [0] * 5
    )
    arguments = lengths.to(device(), index), 2, 4096, 132, window
    if tokens_each:
        arguments += query_index(counts, 5, index), tokens_each
    plan, twin = plan_decode(*arguments), torch_plan_decode(*arguments)
    real = twin.items[0] >= 0
    assert torch.equal(plan.items[0], twin.items[0]) and torch.equal(plan.items[:, real], twin.items[:, real])
    assert torch.equal(plan.counters, twin.counters) and plan.tokens_each == twin.tokens_each
    assert window or max(splits_of(plan).values()) > 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, brings, heads, kv_heads, dim, block_size, window", PAGED_SHAPES)
def test_paged_decode_by_plan(lengths, brings, heads, kv_heads, dim, block_size, window, dtype, short_splits):
    torch.manual_seed(2)
    keys, values, seq_lens, table = paged([*lengths, 0], kv_heads, dim, block_size, dtype)  # the last row is padding
    q = qkv(len(seq_lens), heads, kv_heads, dim, dtype)[0]
    seq_lens, table = seq_lens.int(), table.int()
    plan = plan_decode(seq_lens, kv_heads, 256, 4, window)
    assert max(splits_of(plan).values()) > 1 or max(lengths) < 24 or window == 20
    reference = torch_paged_decode(q.double(), keys.double(), values.double(), seq_lens, table, 1, window)
    for _ in range(2):  # two layers
        out = poisoned(q.shape, dtype)
        paged_decode(q, keys, values, seq_lens, table, window=window, out=out, plan=plan)
        assert error(out, reference) < TOLERANCE[dtype]
        assert (out[-1] == 0).all() and (plan.counters == 0).all()


@pytest.mark.parametrize(
    "heads, kv_heads, window, index", [(4, 2, None, torch.int32), (6, 2, 60, torch.int64), (3, 1, None, torch.int64)]
)
def test_tokens_of_one_sequence_share_their_keys(heads, kv_heads, window, index, short_splits):
    """Drafts of different lengths, rows of padding, and one sequence with more tokens than an item takes."""
    torch.manual_seed(5)
    counts, lengths = [3, 1, 4, 7, 2], [70, 33, 4, 130, 17]  # tokens of each, and its length with all of them
    keys, values, seq_lens, table = paged(lengths, kv_heads, 32, 16, torch.float32)
    q = qkv(sum(counts) + 2, heads, kv_heads, 32, torch.float32)[0]
    reference = torch_paged_prefill(q[:-2], keys, values, starts(counts), seq_lens, table, 7, window)
    rows = [seq for seq, count in enumerate(counts) for _ in range(count)]
    each = torch.tensor(
        [length - count + 1 + at for length, count in zip(lengths, counts) for at in range(count)] + [0, 0]
    )
    tables = torch.cat([table[rows], table[:2] * 0]).to(index)
    each, which = each.to(device(), index), query_index(counts, 2, index)
    plan = plan_decode(each, kv_heads, 256, 8, window, which, 4)
    assert plan.tokens_each == 4 and len(splits_of(plan)) == 6 + 2 and max(splits_of(plan).values()) > 1
    out = poisoned(q.shape, torch.float32)
    paged_decode(q, keys, values, each, tables, window=window, out=out, plan=plan)
    assert error(out[:-2], reference) < 2e-6 and (out[-2:] == 0).all()


def test_what_draft_tokens_share_is_read_once():
    lengths = [400, 401, 402, 403]
    keys, values, _, table = paged([403], 1, 64, 16, torch.float16)
    q, seq_lens = qkv(4, 2, 1, 64, torch.float16)[0], torch.tensor(lengths)
    traffic = []
    for which in (None, query_index([4], 0, torch.int32)):
        plan = plan_decode(seq_lens, 1, 512, 1, None, which, 4)
        traffic.append(count_traffic(paged_decode, q, keys, values, seq_lens, table.expand(4, -1), plan=plan).bytes)
    assert traffic[1] < 0.3 * traffic[0]


@pytest.mark.parametrize("splits", [None, 3])
def test_lengths_and_tables_of_32_bits_are_as_good(splits):
    keys, values, seq_lens, table = paged([90, 33], 1, 32, 16, torch.float32)
    q = qkv(2, 2, 1, 32, torch.float32)[0]
    wide, narrow = (
        paged_decode(q, keys, values, seq_lens.to(index), table.to(index), splits or 1,
                     plan=None if splits else plan_decode(seq_lens.to(index), 1, 90, 4))
        for index in (torch.int64, torch.int32)
    )  # fmt: skip
    assert torch.equal(wide, narrow)
    assert torch.equal(
        torch_paged_decode(q, keys, values, seq_lens.int(), table.int()),
        torch_paged_decode(q, keys, values, seq_lens, table),
    )
