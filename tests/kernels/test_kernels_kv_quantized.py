"""Pages of 8 and 4 bits in the Triton kernels, against float64 and against the cache's own quantization.
Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.kernels import decode_plan
from minillm.kernels.decode_plan import plan_decode
from minillm.kernels.kv_codes import INT4, decode, from_pairs, to_code, to_pairs, torch_decode, torch_encode
from minillm.kernels.language import tl, triton
from minillm.kernels.paged_decode import paged_decode, torch_paged_decode
from minillm.kernels.paged_prefill import paged_prefill, torch_paged_prefill
from minillm.kernels.rotary import rotate_and_store, torch_rotate_and_store
from minillm.kv_cache.quantized import pack_nibbles, quantize_vectors, unpack_nibbles
from tests.helpers.kernel_cases import DTYPES, device, error, framed, needs_triton, poisoned, projection, random
from tests.kernels.test_kernels_attention import TOLERANCE, paged, qkv, starts
from tests.kernels.test_kernels_rotary import angles, whole

pytestmark = needs_triton
INT8, FP8 = torch.int8, torch.float8_e4m3fn
every_code = pytest.mark.parametrize("codes", [INT8, FP8], ids=["int8", "fp8"])
every_kind = pytest.mark.parametrize("codes", [INT8, FP8, INT4], ids=["int8", "fp8", "int4"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@triton.jit
def to_code_kernel(x, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, to_code(tl.load(x + index), out.dtype.element_ty))


@triton.jit
def decode_kernel(codes, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, decode(tl.load(codes + index), tl.load(out + index)))


@every_code
def test_codes_are_the_nearest_ones_and_halves_go_to_the_even_one(codes):
    every = torch.arange(256, dtype=torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every > -128 if codes is INT8 else every == every)].sort().values
    middle = (every[1:] + every[:-1]) / 2  # exact in float32
    above, below = (torch.nextafter(middle, torch.tensor(end)) for end in (1e9, -1e9))
    x = torch.cat(
        [every, -every, middle, above, below, torch.tensor([0.0, -0.0, 1e-9, -1e-9, 126.6, 448.4, -449.0, 1e9])]
    )
    x = torch.cat([x, torch.linspace(-500, 500, 2048 - len(x))]).to(device())
    largest = 127 if codes is INT8 else 448
    expected = x.clamp(-largest, largest)
    expected = as_bytes((expected.round() if codes is INT8 else expected).to(codes))
    out = torch.zeros(2048, dtype=INT8 if codes is INT8 else torch.uint8, device=device())
    to_code_kernel[(1,)](x, out, SIZE=2048)
    assert x[as_bytes(out) != expected].tolist() == []


@every_code
@every_dtype
def test_every_code_comes_back_exactly(codes, dtype):
    given = torch.arange(256, dtype=torch.uint8, device=device())
    out = torch.zeros(256, dtype=dtype, device=device())
    decode_kernel[(1,)](given.view(INT8) if codes is INT8 else given, out, SIZE=256)
    expected = given.view(codes).to(dtype)
    finite = expected.isfinite()  # fp8 has two NaNs, which nobody writes for a number
    assert torch.equal(out[finite], expected[finite]) and finite.sum() >= 254


@triton.jit
def pairs_kernel(codes, pairs, even, odd, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    rows, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    both = tl.load(codes + rows * 2 * PAIRS + tl.arange(0, 2 * PAIRS)[None, :])
    tl.store(pairs + rows * PAIRS + columns, to_pairs(both, HEADS, PAIRS))
    low, high = from_pairs(tl.load(pairs + rows * PAIRS + columns), tl.load(even))
    tl.store(even + rows * PAIRS + columns, low)
    tl.store(odd + rows * PAIRS + columns, high)


@every_dtype
def test_two_codes_share_a_byte_as_in_the_cache(dtype):
    """All 225 pairs, and the even dimension below."""
    codes = torch.zeros(8, 64, dtype=INT8, device=device())
    codes.view(-1)[:450] = torch.cartesian_prod(*[torch.arange(-7, 8, dtype=INT8)] * 2).flatten()
    pairs = torch.zeros(8, 32, dtype=torch.uint8, device=device())
    even, odd = torch.zeros(2, 8, 32, dtype=dtype, device=device())
    pairs_kernel[(1,)](codes, pairs, even, odd, HEADS=8, PAIRS=32)
    assert torch.equal(pairs, pack_nibbles(codes))
    assert torch.equal(even, codes[:, ::2].to(dtype)) and torch.equal(odd, codes[:, 1::2].to(dtype))
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(torch_decode(every), unpack_nibbles(every).float())


@every_kind
@every_dtype
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(1, 1, 16), (8, 2, 64), (9, 3, 80), (4, 4, 128)])
def test_stored_codes_are_those_of_what_another_cache_holds(heads, kv_heads, head_dim, dtype, codes):
    """Bit for bit, whatever the norm and the rotation round:
    `quantize_vectors` of an unquantized cache of the same step."""
    block_size, num_blocks = 4, 16
    matrix = projection(6, heads + 2 * kv_heads, head_dim, dtype)
    matrix[3, heads:] = 0  # vectors of zeros
    matrix[4, heads:] *= 1e-3
    q, k, v, _ = matrix.split([heads, kv_heads, kv_heads, 1], dim=1)
    rotation = angles(6, head_dim, dtype)
    weights = (random((head_dim,), dtype, 6), random((head_dim,), dtype, 7), 1e-6)
    slots = torch.tensor([3, -1, 63, 16, 17, 40], device=device())
    real = slots >= 0
    blocks, offsets = slots[real] // block_size, slots[real] % block_size
    shapes = (num_blocks, kv_heads, head_dim, block_size), (num_blocks, kv_heads, block_size, head_dim)
    plain = [torch.zeros(shape, dtype=dtype, device=device()) for shape in shapes]
    rotate_and_store(q.clone(), k, v, *rotation, *plain, slots, *weights)
    expected = [
        quantize_vectors(plain[0][blocks, :, :, offsets], codes), quantize_vectors(plain[1][blocks, :, offsets], codes)
    ]  # fmt: skip

    def filled() -> tuple[list[Tensor], list[Tensor]]:
        pages = [torch.full(shape, 85, dtype=torch.uint8, device=device()).view(codes) for shape in shapes]
        return pages, [framed((num_blocks, kv_heads, block_size), torch.float32) for _ in range(2)]

    width = head_dim // 2 if codes is INT4 else head_dim
    shapes = (num_blocks, kv_heads, width, block_size), (num_blocks, kv_heads, block_size, width)
    pages, scales = filled()
    given = q.clone()
    rotate_and_store(given, k, v, *rotation, *pages, slots, *weights, *scales)
    written = [as_bytes(pages[0])[blocks, :, :, offsets], as_bytes(pages[1])[blocks, :, offsets]]
    for (wanted_codes, wanted_scales), got, got_scales in zip(expected, written, scales):
        assert torch.equal(got, as_bytes(wanted_codes))
        assert torch.equal(got_scales[blocks, :, offsets], wanted_scales)
        assert (~whole(got_scales).isnan()).sum() == wanted_scales.numel(), "a scale that no token has was written"
    assert (expected[1][1][2] == 1).all() and (as_bytes(expected[1][0][2]) == 0).all(), "zeros have scale 1 and codes 0"
    for page, got in zip(pages, written):
        assert (as_bytes(page) != 85).sum() == (got != 85).sum(), "a slot that no token has was written"

    twin_pages, twin_scales = filled()
    twin_q = q.clone()
    torch_rotate_and_store(twin_q, k, v, *rotation, *twin_pages, slots, *weights, *twin_scales)
    torch.testing.assert_close(given[real], twin_q[real], rtol=2e-3, atol=2e-3)
    for page, twin, scale, twin_scale in zip(pages, twin_pages, scales, twin_scales):
        difference = (torch_decode(page) - torch_decode(twin)).abs()
        assert (difference <= (32 if codes is FP8 else 1)).all() and (difference > 0).float().mean() < 0.01
        torch.testing.assert_close(scale, twin_scale, rtol=2e-3, atol=0, equal_nan=True)


def test_the_twin_encodes_as_the_cache_does():
    x = torch.cat([torch.randn(50, 3, 40) * 10 ** torch.linspace(-6, 6, 50)[:, None, None], torch.zeros(1, 3, 40)])
    for codes in (INT8, FP8, INT4):
        for got, expected in zip(torch_encode(x, codes), quantize_vectors(x, codes)):
            assert torch.equal(got.float(), expected.float())


def quantized_pages(lengths, kv_heads, dim, block_size, codes, value_size: float = 1.0):
    """Random pages of codes with their scales, NaN where no sequence is, and what they stand for, in float64."""
    keys, values, seq_lens, table = paged(lengths, kv_heads, dim, block_size, torch.float32)
    empty = values.isnan().any(-1)
    pages, scales, exact = [], [], []
    for page, size in ((keys.transpose(2, 3), 1.0), (values, value_size)):
        code, scale = quantize_vectors(page.nan_to_num(0) * size, codes)
        if codes is FP8:
            as_bytes(code)[empty] = 0x7F  # NaN
        scale[empty] = float("nan")
        pages.append(code), scales.append(scale), exact.append(torch_decode(code).double() * scale.double()[..., None])
    pages[0], exact[0] = (as_bytes(pages[0]).transpose(2, 3).contiguous().view(codes), exact[0].transpose(2, 3))
    return pages, scales, exact, seq_lens, table


PAGED_SHAPES = [  # lengths, tokens each brings, query heads, KV heads, head_dim, block size, window
    ([1], [1], 2, 1, 16, 16, None),
    ([5, 70, 33], [5, 1, 20], 6, 2, 64, 16, None),
    ([130, 3, 50], [7, 3, 0], 7, 1, 64, 16, 20),
    ([100], [40], 3, 1, 80, 8, 30),
    ([65], [65], 2, 2, 128, 32, 64),
]


@every_kind
@every_dtype
@pytest.mark.parametrize("lengths, brings, heads, kv_heads, dim, block_size, window", PAGED_SHAPES)
def test_paged_prefill_of_codes(lengths, brings, heads, kv_heads, dim, block_size, window, dtype, codes):
    torch.manual_seed(1)
    pages, scales, exact, seq_lens, table = quantized_pages(lengths, kv_heads, dim, block_size, codes)
    q = qkv(sum(brings), heads, kv_heads, dim, dtype)[0]
    index = starts(brings), seq_lens, table, max(brings), window
    out = poisoned((sum(brings), heads, dim), dtype)
    paged_prefill(q, *pages, *index, None, out, *scales)
    reference = torch_paged_prefill(q.double(), *exact, *index)
    assert error(out, reference) < TOLERANCE[dtype]
    assert error(torch_paged_prefill(q, *pages, *index, None, None, *scales), reference) < TOLERANCE[dtype]


@every_kind
@every_dtype
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("lengths, brings, heads, kv_heads, dim, block_size, window", PAGED_SHAPES)
def test_paged_decode_of_codes(lengths, brings, heads, kv_heads, dim, block_size, window, num_splits, dtype, codes):
    torch.manual_seed(2)
    pages, scales, exact, seq_lens, table = quantized_pages([*lengths, 0], kv_heads, dim, block_size, codes)
    q = qkv(len(seq_lens), heads, kv_heads, dim, dtype)[0]
    index = seq_lens, table, num_splits, window
    out = poisoned(q.shape, dtype)
    paged_decode(q, *pages, *index, None, out, *scales)
    reference = torch_paged_decode(q.double(), *exact, *index)
    assert error(out, reference) < TOLERANCE[dtype]
    assert (out[-1] == 0).all()
    assert error(torch_paged_decode(q, *pages, *index, None, None, *scales), reference) < TOLERANCE[dtype]


@every_kind
@pytest.mark.parametrize("value_size", [2e-4, 1e4])
def test_scales_of_small_and_large_values_stay_within_float16(value_size, codes):
    """A weight times a scale of 10^-6 would be a float16 of one digit; the largest ones must not overflow."""
    torch.manual_seed(3)
    pages, scales, exact, seq_lens, table = quantized_pages([90], 1, 64, 16, codes, value_size)
    q = qkv(1, 2, 1, 64, torch.float16)[0]
    reference = torch_paged_decode(q.double(), *exact, seq_lens, table)
    assert error(paged_decode(q, *pages, seq_lens, table, 1, None, None, None, *scales), reference) < 2e-3
    assert error(paged_prefill(q, *pages, starts([1]), seq_lens, table, 1, None, None, None, *scales), reference) < 2e-3


def test_pages_of_4_bits_by_a_plan_with_drafts_and_sinks(monkeypatch):
    """Splits that are merged, two tokens of a sequence in one item, and the sinks' own queries."""
    monkeypatch.setattr(decode_plan, "MIN_SPLIT", 16)
    torch.manual_seed(4)
    pages, scales, exact, lengths, table = quantized_pages([100, 41], 2, 32, 16, INT4)
    q, q_sink = qkv(4, 4, 2, 32, torch.float32)[0], random((4, 4, 32), torch.float32)
    rows, index = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=device())
    each, tables = lengths[rows] - 1 + index, table[rows]
    plan = plan_decode(each, 2, 128, 8, None, index, 2)
    used = plan.items[:, plan.items[0] >= 0]
    assert used[5].max() > 1 and used[1].min() == 2
    found = paged_decode(q, *pages, each, tables, 1, None, None, None, *scales, plan=plan)
    assert error(found, torch_paged_decode(q.double(), *exact, each, tables)) < 2e-6
    kept = dict(window=20, sinks=3, q_sink=q_sink)
    found = paged_decode(q, *pages, each, tables, 2, key_scales=scales[0], value_scales=scales[1], **kept)
    reference = torch_paged_decode(q.double(), *exact, each, tables, 1, **kept | {"q_sink": q_sink.double()})
    assert error(found, reference) < 2e-6
    chunk = starts([2, 2]), lengths, table, 2
    found = paged_prefill(q, *pages, *chunk, key_scales=scales[0], value_scales=scales[1], **kept)
    assert error(found, reference) < 2e-6


def test_what_does_not_belong_together_is_refused_by_name():
    pages, scales, exact, seq_lens, table = quantized_pages([9], 2, 16, 4, INT8)
    q = qkv(1, 2, 2, 16, torch.float32)[0].contiguous()
    plain = [page.float() for page in exact]
    cases = [
        ("needs key_scales", pages, (None, None)),
        ("key_scales must be float32", pages, [scales[0].double(), scales[1]]),
        ("value_scales must be float32", pages, [scales[0], scales[1][:, :1]]),
        ("torch.float32, which has none", plain, scales),
        ("torch.float8_e5m2 cannot be read", [page.view(torch.float8_e5m2) for page in pages], (None, None)),
        ("keys are torch.int8 and values torch.float32", [pages[0], plain[1]], scales),
    ]
    for said, given, given_scales in cases:
        for attend in (
            lambda: paged_decode(q, *given, seq_lens, table, 1, None, None, None, *given_scales),
            lambda: paged_prefill(q, *given, starts([1]), seq_lens, table, 1, None, None, None, *given_scales),
            lambda: rotate_and_store(
                q, q, q, *angles(1, 16, torch.float32), *given, seq_lens, None, None, 0.0, *given_scales
            ),
        ):
            with pytest.raises(ValueError, match=said):
                attend()
    for said, window, sinks, q_sink in (
        ("sinks=4 and window=None", None, 4, q), ("sinks=-1", 8, -1, q), ("sinks=4 needs q_sink", 8, 4, None),
        ("shape and dtype of q", 8, 4, q.half()), ("one piece", 8, 4, q.expand(3, 2, 16)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            paged_decode(q, *plain, seq_lens, table, 1, window, sinks=sinks, q_sink=q_sink)
