"""Latent attention over pages, one token a sequence: the kernel against its formula in float64 and against its twin,
by one split and by a plan. Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.kernels import decode_plan
from minillm.kernels.decode_plan import plan_decode
from minillm.kernels.latent_decode import head_tiles, latent_decode, torch_latent_decode
from minillm.kv_cache.quantized import quantize_vectors
from tests.helpers.kernel_cases import DTYPES, device, error, guarded_outputs, needs_triton, poisoned, random
from tests.kernels.test_kernels_attention import TOLERANCE

pytestmark = needs_triton
INT8, FP8 = torch.int8, torch.float8_e4m3fn
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [  # lengths, heads, columns of values, columns behind them, block size
    ([1], 2, 16, 8, 1),
    ([5, 70, 0, 33], 6, 32, 16, 16),  # the third row only fills up the batch
    ([100, 31], 17, 24, 10, 5),  # two tiles of heads, no power of two
    ([65, 64], 16, 64, 32, 64),
]
shapes = pytest.mark.parametrize("lengths, heads, value_dim, rest, block_size", SHAPES)


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 16 positions, so that short sequences have several."""
    monkeypatch.setattr(decode_plan, "MIN_SPLIT", 16)


def latent_pages(lengths: list[int], latent_dim: int, block_size: int, dtype: torch.dtype):
    """Random latents whose blocks lie in any order; slots that no sequence has filled are NaN, the null block 0."""
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts) + 2) + 1).tolist()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    latents = poisoned((sum(counts) + 3, block_size, latent_dim), dtype)
    latents[0] = 0
    for row, count in enumerate(counts):
        for place in range(count):
            block = table[row, place] = order.pop()
            filled = min(block_size, lengths[row] - place * block_size)
            latents[block, :filled] = torch.randn(filled, latent_dim).to(dtype)
    return latents, torch.tensor(lengths, dtype=torch.int32, device=device()), table.to(device())


def queries(num_seqs: int, heads: int, latent_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie apart, NaN between them."""
    return random((num_seqs, heads + 1, latent_dim), dtype)[:, :heads]


@every_dtype
@shapes
def test_one_token_of_each_sequence(lengths, heads, value_dim, rest, block_size, dtype):
    torch.manual_seed(0)
    latents, *index = latent_pages(lengths, value_dim + rest, block_size, dtype)
    q = queries(len(lengths), heads, value_dim + rest, dtype)
    reference = torch_latent_decode(q.double(), latents.double(), *index, value_dim)
    with guarded_outputs():
        out = latent_decode(q, latents, *index, value_dim)
    assert out.shape == (len(lengths), heads, value_dim) and error(out, reference) < TOLERANCE[dtype]
    assert error(torch_latent_decode(q, latents, *index, value_dim), reference) < TOLERANCE[dtype]
    assert all((out[row] == 0).all() for row, length in enumerate(lengths) if length == 0)


@every_dtype
@shapes
def test_long_sequences_are_split_by_a_plan(lengths, heads, value_dim, rest, block_size, dtype, short_splits):
    torch.manual_seed(1)
    latents, *index = latent_pages(lengths, value_dim + rest, block_size, dtype)
    q = queries(len(lengths), heads, value_dim + rest, dtype)
    plan = plan_decode(index[0], head_tiles(heads), 256, 8)
    assert plan.items[5, plan.items[0] >= 0].max() > 1 or max(lengths) < 24
    reference = torch_latent_decode(q.double(), latents.double(), *index, value_dim, 0.3)
    for _ in range(2):  # two layers
        out = poisoned((len(lengths), heads, value_dim), dtype)
        latent_decode(q, latents, *index, value_dim, 0.3, out, plan=plan)
        assert error(out, reference) < TOLERANCE[dtype] and (plan.counters == 0).all()


@every_dtype
@pytest.mark.parametrize("codes", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("size", [2e-4, 1.0, 1e4])
def test_latents_in_8_bits(size, codes, dtype, short_splits):
    """A weight times the scale of a small latent would be a float16 of one digit; the largest must not overflow."""
    torch.manual_seed(2)
    latents, *index = latent_pages([40, 9], 32 + 16, 8, torch.float32)
    empty = latents.isnan().any(-1)
    pages, scales = quantize_vectors(latents.nan_to_num(0) * size, codes)
    exact = pages.double() * scales.double()[..., None]
    scales[empty] = float("nan")
    if codes is FP8:
        pages.view(torch.uint8)[empty] = 0x7F  # NaN
    q = queries(2, 3, 48, dtype) / size
    reference = torch_latent_decode(q.double(), exact, *index, 32)
    if dtype is torch.float16:
        q, reference = q.clamp(-6e4, 6e4), torch_latent_decode(q.clamp(-6e4, 6e4).double(), exact, *index, 32)
    for plan in (None, plan_decode(index[0], 1, 64, 8)):
        assert error(latent_decode(q, pages, *index, 32, None, None, scales, plan), reference) < TOLERANCE[dtype]
    assert error(torch_latent_decode(q, pages, *index, 32, None, None, scales), reference) < TOLERANCE[dtype]


def test_what_does_not_belong_together_is_refused_by_name():
    latents, *index = latent_pages([9], 24, 4, torch.float32)
    codes, scales = quantize_vectors(latents.nan_to_num(0), INT8)
    q = queries(1, 2, 24, torch.float32)
    wide = torch.zeros(1, 4, 700)
    for said, *given in (
        ("do not fit", q[..., :20], latents, 16),
        ("do not fit", q, latents[0], 16),
        ("value_dim=24 is not allowed: .* 1 to 23", q, latents, 24),
        ("value_dim=0 is not allowed", q, latents, 0),
        ("latent_dim=700 with value_dim=600", wide[:, :2], wide, 600),
        ("latent_dim=700 with value_dim=512", wide[:, :2], wide, 512),
        ("side by side", q.transpose(1, 2).contiguous().transpose(1, 2), latents, 16),
        ("torch.uint8 cannot be read", q, codes.view(torch.uint8), 16),
        ("torch.float32, which have none", q, latents, 16, scales),
        ("torch.int8 need scales, .*none were given", q, codes, 16),
        (r"torch.int8 need scales, .*float64 \[6, 4\]", q, codes, 16, scales.double()),
        (r"torch.int8 need scales, .*\[6, 1\]", q, codes, 16, scales[:, :1]),
    ):
        q_given, pages, value_dim, *more = given
        with pytest.raises(ValueError, match=said):
            latent_decode(q_given, pages, *index, value_dim, scales=more[0] if more else None)
