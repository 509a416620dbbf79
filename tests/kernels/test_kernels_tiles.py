"""Which tiles prefill attention takes on which GPU, and which program attends for which of them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from minillm.kernels import paged_prefill as module, tile_plan, tiles as table
from minillm.kernels.flash_attention import base_2_scale, flash_attention, torch_flash_attention
from minillm.kernels.gpus import GPUS
from minillm.kernels.paged_prefill import PrefillPlan, paged_prefill, prefill_tiles, torch_paged_prefill
from minillm.kernels.tile_plan import most_tiles, plan_tiles, torch_plan_tiles
from minillm.kernels.tiles import Tiles, candidate_tiles, choose_tiles, fit_to_queries
from tests.helpers.kernel_cases import device, error, needs_triton
from tests.kernels.test_kernels_attention import paged, qkv, starts

CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 120)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED = {gpu.capability: gpu.max_shared_per_block for gpu in GPUS.values()} | {
    86: 99 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
}
RAGGED = [  # tokens that sequences bring, positions before them
    ([5, 1, 9], [0, 0, 0]),
    ([0, 3, 0, 40, 0], [7, 0, 2, 9, 0]),  # sequences that bring nothing
    ([29, 1, 1, 2, 1, 1], [0] * 6),  # one long and many short, more than a program compares at once
    ([2, 2, 20], [100, 0, 3]),  # short, but after a long past
    ([4, 4, 4], [0, 0, 0]),  # equal ones keep their order
    ([0, 0], [5, 0]),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize("before", [0, 6])
@pytest.mark.parametrize("lengths, pasts", RAGGED)
def test_a_plan_lists_every_tile_once_the_longest_first(lengths, pasts, before, monkeypatch):
    monkeypatch.setattr(tile_plan, "BLOCK", 4)
    bounds = starts(lengths) + before  # the rows of single tokens stand before them
    seq_lens = torch.tensor(lengths) + torch.tensor(pasts)
    for tile, given in ((3, None), (4, seq_lens.to(device()))):
        shape = bounds, given, before + sum(lengths), max(lengths), tile
        plan, expected = plan_tiles(*shape), torch_plan_tiles(*shape)
        assert plan.dtype is torch.int32 and len(plan) == most_tiles(
            before + sum(lengths), len(lengths), max(lengths), tile
        )
        assert torch.equal(plan[:, 0], expected[:, 0])
        there = expected[:, 0] >= 0
        assert torch.equal(plan[there], expected[there])
        sees = [(0 if given is None else pasts[s]) + min(f + tile, lengths[s]) for s, f in plan[there].tolist()]
        assert sees == sorted(sees, reverse=True)
        assert {(s, f) for s, f in plan[there].tolist()} == {
            (s, f) for s, n in enumerate(lengths) for f in range(0, n, tile)
        }


def test_few_places_of_a_plan_stay_free():
    for lengths, _ in RAGGED:
        for tile in (1, 3, 16, 128):
            tiles = sum(-(-length // tile) for length in lengths)
            assert tiles <= most_tiles(sum(lengths), len(lengths), max(lengths), tile) < tiles + len(lengths)
    assert most_tiles(4096 + 63, 64, 4096, 128) == 95  # one prompt among 63 of one token: 32 x 64 places otherwise


@needs_triton
@pytest.mark.parametrize("codes_of_scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_turns_scores_around_is_refused(codes_of_scale):
    with pytest.raises(ValueError, match="a number above 0"):
        base_2_scale(codes_of_scale, 64)
    assert base_2_scale(None, 64) == base_2_scale(0.125, 64)


@needs_triton
def test_attention_over_one_long_sequence_and_many_short_ones():
    torch.manual_seed(0)
    lengths = [1, 0, 2, 70, 1, 0, 3, 1, 33]
    q, k, v = qkv(sum(lengths), 2, 1, 16, torch.float32)
    out = flash_attention(q, k, v, starts(lengths), max(lengths))
    assert error(out, torch_flash_attention(q.double(), k.double(), v.double(), starts(lengths), max(lengths))) < 2e-6


@needs_triton
def test_chunks_behind_single_tokens_and_empty_sequences():
    """The rows of the step's single tokens stand first and are answered for by another kernel:
    they stay as they are."""
    torch.manual_seed(0)
    brings, pasts, singles = [2, 0, 35, 1, 0, 3], [40, 3, 2, 0, 1, 9], 5
    keys, values, seq_lens, pages = paged([a + b for a, b in zip(brings, pasts)], 2, 16, 4, torch.float32)
    bounds = starts(brings) + singles
    q = qkv(singles + sum(brings), 6, 2, 16, torch.float32)[0]
    out = torch.full((len(q), 6, 16), 7.0, device=device())
    plan = PrefillPlan()
    for layer in range(2):
        paged_prefill(q, keys, values, bounds, seq_lens, pages, 35, out=out,
                      plan=plan.get(layer == 0, brings, q, keys, bounds, seq_lens, 35, None))  # fmt: skip
        expected = torch_paged_prefill(q.double(), keys.double(), values.double(), bounds, seq_lens, pages, 35)
        assert (out[:singles] == 7).all() and error(out[singles:], expected[singles:]) < 2e-6


@needs_triton
def test_a_plan_is_made_once_a_step_and_anew_for_the_next(monkeypatch):
    made = []
    monkeypatch.setattr(module, "plan_tiles", lambda *shape: made.append(shape) or torch.empty(1, 2))
    keys, q = torch.empty(2, 1, 16, 4), torch.empty(9, 2, 16)
    plan, batch, other = PrefillPlan(), object(), object()
    for first, of in ((True, batch), (False, batch), (False, batch), (True, batch), (False, other), (False, other)):
        plan.get(first, of, q, keys, starts([9]), torch.tensor([9]), 9, None)
    assert len(made) == 3, "the same object is another batch in the next step of a recorded size"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_gpu_has_tiles_that_fit(capability):
    for dtype, codes, windowed, dim in product(DTYPES, (False, True), (False, True), (16, 64, 80, 128, 192, 256)):
        case = dim, dtype, capability, codes, windowed
        first, *others = candidate_tiles(*case)
        assert first == choose_tiles(*case)
        assert first not in others and len(set(others)) == len(others)
        for tiles in (first, *others):
            assert tiles.tile_m % 16 == 0 and tiles.tile_n >= 16 and tiles.num_warps in (4, 8)
            width, size = 1 << (dim - 1).bit_length(), 1 if codes else dtype.itemsize
            # queries for the tensor cores, and the stages of keys and values
            needed = tiles.tile_m * width * dtype.itemsize + (tiles.num_stages - 1) * 2 * tiles.tile_n * width * size
            assert needed <= SHARED[capability], (case, tiles)


def test_a_gpu_has_its_own_tiles_or_says_why_not():
    assert set(table.TABLE) == {75, 80, 86, 89, 90, 100, 120}
    assert table.family(87) == 86 and table.family(103) == 100 and table.family(121) == 120 and table.family(70) == 75
    halves = [choose_tiles(128, torch.bfloat16, capability) for capability in (80, 90)]
    assert halves[0] != halves[1]
    assert choose_tiles(128, torch.float16, 120) == choose_tiles(128, torch.float16, 89), (
        "sm_120 multiplies as Ada does"
    )


@pytest.mark.parametrize(
    "rows, tile_m, num_warps", [(1, 16, 4), (17, 32, 4), (64, 64, 4), (65, 128, 8), (4096, 128, 8)]
)
def test_a_tile_with_fewer_queries_has_fewer_warps(rows, tile_m, num_warps):
    fitted = fit_to_queries(Tiles(128, 32, 8, 3), rows)
    assert fitted == Tiles(tile_m, 32, num_warps, 3)
    assert fit_to_queries(Tiles(32, 32, 4, 2), rows).num_warps == 4


def test_a_tile_has_rows_for_a_whole_group():
    keys = torch.empty(2, 1, 16, 4)
    assert prefill_tiles(torch.empty(9, 71, 16), keys, 1, None).tile_m == 128
    assert prefill_tiles(torch.empty(9, 3, 16), keys, 1, None).tile_m == 16
