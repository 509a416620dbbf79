"""Keys and values in 8 and 4 bits: the codes, the pages, and attention on them by both roads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from minillm.kernels import native
from minillm.kv_cache.manager import BlockMoves
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache, bytes_per_block
from minillm.kv_cache.quantized import (
    INT4,
    KV_DTYPES,
    LARGEST_CODE,
    dequantize_vectors,
    quantize_vectors,
    unpack_nibbles,
)
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.model.batch import ForwardBatch
from tests.helpers.tiny import seeded

KINDS = tuple(KV_DTYPES)
ROADS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(native.library() is None, reason="no C compiler here")),
]
both_kinds = pytest.mark.parametrize("kind", KINDS)
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")


def numbers(codes: torch.Tensor) -> torch.Tensor:
    """What codes [..., head_dim] say in units of their scale, float64; of int4 there are half as many bytes."""
    return (unpack_nibbles(codes) if codes.dtype is INT4 else codes).double()


def grid_of(dtype: torch.dtype) -> torch.Tensor:
    every = torch.arange(256, dtype=torch.uint8)
    grid = unpack_nibbles(every).double().unique() if dtype is INT4 else every.view(dtype).double()
    return grid[grid.isfinite() & (grid.abs() <= LARGEST_CODE[dtype])]


@both_kinds
def test_each_number_goes_to_the_nearest_code_of_its_vector(kind):
    dtype = KV_DTYPES[kind]
    x = torch.randn(50, 3, 64) * 10.0 ** torch.randint(-30, 30, (50, 3, 1))
    codes, scales = quantize_vectors(x, dtype)
    width = 32 if kind == "int4" else 64
    assert codes.shape == (50, 3, width) and codes.dtype is dtype
    assert scales.shape == (50, 3) and scales.dtype is torch.float32
    torch.testing.assert_close(scales, x.abs().amax(-1) / LARGEST_CODE[dtype], rtol=1e-6, atol=0)
    said, wanted = numbers(codes), (x.double() / scales.double()[..., None]).unsqueeze(-1)
    nearest = (wanted - grid_of(dtype)).abs().amin(-1)
    torch.testing.assert_close((wanted[..., 0] - said).abs(), nearest, rtol=0, atol=1e-4 * LARGEST_CODE[dtype] / 127)
    assert torch.equal(said.abs().amax(-1), torch.full((50, 3), LARGEST_CODE[dtype], dtype=torch.float64))
    back = dequantize_vectors(codes, scales[..., None], torch.float32)
    worst = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 0.5 / 8}[kind]  # of the largest number; fp8: of the number
    assert ((back - x).abs() / x.abs().amax(-1, keepdim=True)).max() <= worst * 1.001


@both_kinds
def test_zeros_ties_and_what_is_no_number(kind):
    dtype = KV_DTYPES[kind]
    codes, scales = quantize_vectors(torch.zeros(2, 16), dtype)
    assert torch.equal(scales, torch.ones(2)) and not codes.float().any()
    tie, even = {
        "int8": ([127.0, 2.5, 3.5, -2.5], [127, 2, 4, -2]),
        "int4": ([7.0, 2.5, 3.5, -2.5], [7, 2, 4, -2]),
        "fp8": ([448.0, 17.0, 19.0, -17.0], [448, 16, 20, -16]),
    }[kind]
    assert numbers(quantize_vectors(torch.tensor(tie), dtype)[0]).tolist() == even
    for broken in (float("nan"), float("inf")):
        codes, scales = quantize_vectors(torch.tensor([1.0, broken]), dtype)
        # Never a number that hides it.
        assert not dequantize_vectors(codes, scales[..., None], torch.float32).isfinite().all()
    tiny = torch.tensor([1e-44, -1e-42, 0.0, 0.0])
    codes, scales = quantize_vectors(tiny, dtype)
    assert (dequantize_vectors(codes, scales[..., None], torch.float32) - tiny).abs().max() <= 1e-43


@both_kinds
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_memory_is_what_the_formula_says(kind, head_dim):
    vector = (head_dim // 2 if kind == "int4" else head_dim) + 4  # bytes, its scale included
    cache = PagedKVCache(3, 2, head_dim, 5, 16, torch.float32, num_host_blocks=4, kv_dtype=kind)
    for parts, count in ((cache.parts, 6), (cache.host_parts, 4)):
        held = sum(layer.numel() * layer.itemsize for layers in parts.values() for layer in layers)
        assert held == count * 2 * 3 * 16 * 2 * vector == count * cache.bytes_per_block
    assert bytes_per_block(3, 2, head_dim, 16, torch.bfloat16) / cache.bytes_per_block == 2 * head_dim / vector
    assert [layer.shape for layer in cache.key_scales + cache.value_scales] == [(6, 2, 16)] * 6


@both_kinds
def test_scales_move_with_their_blocks(kind):
    cache = PagedKVCache(2, 2, 16, 6, 4, torch.float32, num_host_blocks=3, kv_dtype=kind)
    for layer in range(2):
        cache.write(layer, torch.randn(24, 2, 16), torch.randn(24, 2, 16), torch.arange(4, 28))

    def block(index: int) -> dict:
        return {name: rows.float() for name, rows in cache.read_blocks([index]).items()}

    before = {index: block(index) for index in range(1, 7)}
    assert set(before[1]) == {"keys", "values", "key_scales", "value_scales"}
    cache.move(BlockMoves(swap_out=[(1, 2), (2, 0)], copies=[(3, 1), (4, 2)], swap_in=[(2, 3), (0, 5)]))
    for now, then in ((1, 3), (2, 4), (3, 1), (5, 2), (6, 6)):
        assert all(torch.equal(block(now)[name], before[then][name]) for name in before[1]), (now, then)
    assert not any(rows.any() for rows in block(0).values())  # the null block stays zero
    other = PagedKVCache(2, 2, 16, 6, 4, torch.float32, kv_dtype=kind)
    other.write_blocks([5, 1], cache.read_blocks([6, 3]))
    assert all(torch.equal(other.read_blocks([5])[name].float(), before[6][name]) for name in before[1])


def batch_of(news: list[int], seq_lens: list[int], table: torch.Tensor, slots: torch.Tensor) -> ForwardBatch:
    return ForwardBatch(
        token_ids=torch.zeros(sum(news), dtype=torch.int64),
        positions=torch.cat([torch.arange(end - new, end) for new, end in zip(news, seq_lens)]),
        query_start_loc=torch.tensor([0, *torch.tensor(news).cumsum(0)]),
        seq_lens=torch.tensor(seq_lens),
        block_table=table,
        slot_mapping=slots,
        max_query_len=max(news),
        logits_indices=torch.tensor([0]),
        max_seq_len=max(seq_lens),
    )


@needs_compiler
@both_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 18, 64, 80, 128])
def test_the_kernel_writes_what_its_twin_writes(kind, dtype, head_dim):
    """Bit for bit: so a page filled by one road may be read by the other."""
    caches = [PagedKVCache(1, 2, head_dim, 12, 4, dtype, kv_dtype=kind) for _ in range(2)]
    k, v = (torch.randn(2, 44, 2, head_dim) * 10.0 ** torch.randint(-40, 30, (2, 44, 2, 1))).to(dtype)
    k[3], v[5] = 0, 0
    k[7, 0, : head_dim // 2] = torch.arange(head_dim // 2) * 2.5  # ties
    slots = torch.randperm(44) + 4
    out = NativeAttention(caches[0], [None]).attend(
        torch.randn(44, 2, head_dim).to(dtype), k, v, 0, batch_of([44], [44], torch.arange(1, 12)[None], slots)
    )
    caches[1].write(0, k, v, slots)
    assert out.shape == (44, 2, head_dim)
    for name, [written] in caches[0].parts.items():
        assert torch.equal(written.view(torch.uint8), caches[1].parts[name][0].view(torch.uint8)), name


@needs_compiler
def test_the_kernel_reads_every_e4m3_number():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    v = torch.full((32, 1, 16), 448.0)  # every vector has the largest, so its scale is 1
    v[:, 0, 1:] = torch.cat([numbers, numbers[:226]]).view(32, 15)
    attention = NativeAttention(PagedKVCache(1, 1, 16, 32, 1, torch.float32, kv_dtype="fp8"), [None])
    batch = batch_of([1] * 32, [1] * 32, torch.arange(1, 33)[:, None], torch.arange(1, 33))
    out = attention.attend(torch.randn(32, 1, 16), torch.randn(32, 1, 16), v, 0, batch)
    assert torch.equal(out, v)  # one key: its weight is 1


CACHED = st.integers(0, 40) | st.sampled_from([383, 384, 770])  # more than one block of keys
LENGTHS = st.lists(st.tuples(CACHED, st.integers(1, 20)), min_size=1, max_size=6)


@seeded
@given(
    LENGTHS,
    st.sampled_from([(1, 1, 16), (4, 2, 18), (9, 3, 64), (2, 2, 80), (20, 2, 128)]),
    st.sampled_from([1, 7, 16, 32]),
    st.sampled_from([None, 1, 5, 17, 100]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(KINDS),
    st.integers(0, 1000),
)
def test_both_attentions_on_codes_equal_the_formula(lengths, heads, block_size, window, dtype, kind, seed):
    """Ragged batches of (positions cached, new tokens), pages scattered, everything unwritten poisoned;
    the formula gets the same codes and scales as numbers, in float64."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    lengths = sorted(lengths, key=lambda length: length[1] > 1)  # decoding rows stand first
    counts = [-(-(before + new) // block_size) for before, new in lengths]
    blocks = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, own in zip(table, blocks):
        row[: len(own)] = own

    def random(*shape):
        x = torch.randn(*shape, generator=generator)
        return (x * 4.0 ** torch.randint(-2, 3, (*shape[:2], 1), generator=generator)).to(dtype)

    def rounded(x):
        codes, scales = quantize_vectors(x, KV_DTYPES[kind])
        return numbers(codes) * scales.double()[..., None]

    caches = {TorchAttention: PagedKVCache(1, num_kv_heads, head_dim, sum(counts), block_size, dtype, kv_dtype=kind)}
    if native.library() is not None:
        caches[NativeAttention] = PagedKVCache(1, num_kv_heads, head_dim, sum(counts), block_size, dtype, kv_dtype=kind)
    for road, cache in caches.items():  # the kernel must never look there; torch masks it, so there it is merely wrong
        poison, scale = (0x7F, float("nan")) if road is NativeAttention else (0x55, 1e4)
        for name, [layer] in cache.parts.items():
            layer[1:].fill_(scale) if "scales" in name else layer[1:].view(torch.uint8).fill_(poison)
    slots, q, k, v, expected, sizes = [], [], [], [], [], []
    for (before, new), own in zip(lengths, blocks):
        positions = torch.arange(before + new)
        places = own[positions // block_size] * block_size + positions % block_size
        keys, values = random(before + new, num_kv_heads, head_dim), random(before + new, num_kv_heads, head_dim)
        queries = random(new, num_heads, head_dim) / 4
        for cache in caches.values():
            cache.write(0, keys[:before], values[:before], places[:before])
        expected.append(formula(queries, rounded(keys), rounded(values), window))
        sizes.append(sizes_of(queries, rounded(keys), rounded(values), window))
        slots.append(places[before:])
        q.append(queries), k.append(keys[before:]), v.append(values[before:])
    batch = batch_of([new for _, new in lengths], [sum(length) for length in lengths], table, torch.cat(slots))
    expected, (score, value) = torch.cat(expected), map(torch.cat, zip(*sizes))
    for road, cache in caches.items():
        attention = road(cache, [window], *([num_heads] if road is TorchAttention else []))
        out = attention.attend(torch.cat(q), torch.cat(k), torch.cat(v), 0, batch).double()
        # A score of terms this large is off by so much, a weight by the exponential of that up and the sum down,
        # and then values are off by their own roundings. Torch's bfloat16 rounds scaled queries, keys and scores;
        # ours adds in float32.
        fine, coarse = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
        inside = 3 * coarse if road is TorchAttention else 0.0
        weight = torch.expm1(2 * score * (inside + (head_dim + 8) * fine)).clamp(max=2.0)  # at worst another key wins
        assert (
            (out - expected).abs() <= (value * (weight + 4 * coarse + (max(map(sum, lengths)) + 8) * fine))[..., None]
        ).all(), road


def sizes_of(q, k, v, window):
    """[queries, heads]: the largest sum of |q| * |k| * scale, and the largest |v|, among the keys that a query sees."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).abs(), v.repeat_interleave(group, 1).abs()
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    unseen = (distance < 0) | (distance >= (window or len(k)))
    scores = torch.einsum("qhd,khd->qhk", q.double().abs(), k) * q.shape[2] ** -0.5
    values = v.amax(2).T[None].expand(len(q), -1, -1)
    return tuple(x.masked_fill(unseen[:, None], 0.0).amax(2) for x in (scores, values))


def formula(q, k, v, window):
    """`causal_attention` in float64."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    unseen = (distance < 0) | (distance >= (window or len(k)))
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v.repeat_interleave(group, 1)
    )
