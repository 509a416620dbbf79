"""Attention over sinks and a window, by both roads: against the formula, with the blocks between them gone."""

from __future__ import annotations

import math

import torch
from hypothesis import given, strategies as st

from minillm.kernels import native
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.quantized import KV_DTYPES, dequantize_vectors, quantize_vectors
from minillm.kv_cache.retention import RetentionPolicy, SinkTurn
from minillm.kv_cache.torch_attention import TorchAttention
from tests.helpers.tiny import seeded
from tests.kv_cache.test_kv_cache_quantized import batch_of

LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=5)


@seeded
@given(
    LENGTHS,
    st.sampled_from([(1, 1, 16), (4, 2, 18), (9, 3, 20), (20, 2, 40)]),
    st.sampled_from([1, 3, 7, 16, 32]),
    st.sampled_from([(4, 12), (1, 1), (5, 30), (0, 9), (17, 3)]),
    st.sampled_from(["auto", "int8", "fp8"]),
    st.integers(0, 1000),
)
def test_both_attentions_equal_the_formula(lengths, heads, block_size, policy, kind, seed):
    """Ragged batches whose blocks between sinks and window are gone: there stands the null block, here poisoned too."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    sinks, window = policy
    lengths = sorted(lengths, key=lambda length: length[1] > 1)
    counts = [-(-(before + new) // block_size) for before, new in lengths]
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, own in zip(table, (torch.randperm(sum(counts), generator=generator) + 1).split(counts)):
        row[: len(own)] = own
    frequencies = (10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))).repeat(2)
    turn = SinkTurn(RetentionPolicy(sinks, window), frequencies) if sinks else None
    roads = [TorchAttention] + [NativeAttention] * (native.library() is not None)
    caches = [
        PagedKVCache(1, num_kv_heads, head_dim, sum(counts), block_size, torch.float32, kv_dtype=kind) for _ in roads
    ]
    slots, q, k, v, expected = [], [], [], [], []
    for (before, new), own in zip(lengths, table):
        positions = torch.arange(before + new)
        places = own[positions // block_size] * block_size + positions % block_size
        raw_k, values, raw_q = (
            torch.randn(before + new, n, head_dim, generator=generator) for n in (num_kv_heads, num_kv_heads, num_heads)
        )
        keys = turned(raw_k, positions, frequencies)
        for cache in caches:
            cache.write(0, keys[:before], values[:before], places[:before])
        slots.append(places[before:]), k.append(keys[before:]), v.append(values[before:])
        q.append(turned(raw_q, positions, frequencies)[before:])
        first = max(0, before - window + 1) // block_size
        own[-(-sinks // block_size) : max(first, -(-sinks // block_size))] = 0
        keys, values = (x if kind == "auto" else through(x, kind) for x in (keys, values))
        expected += [
            formula(raw_q[t], t, keys[: t + 1], values[: t + 1], sinks, window, frequencies)
            for t in range(before, before + new)
        ]
    batch = batch_of([new for _, new in lengths], [sum(length) for length in lengths], table, torch.cat(slots))
    for road, cache in zip(roads, caches):
        for part in cache.parts.values():
            part[0][0].view(torch.uint8).fill_(0x55)  # large, and no NaN, which torch could not mask
        attention = road(cache, [window], *([num_heads] if road is TorchAttention else []), turn)
        out = attention.attend(torch.cat(q), torch.cat(k), torch.cat(v), 0, batch)
        torch.testing.assert_close(out, torch.stack(expected).float(), rtol=1e-4, atol=1e-4)


def turned(x, positions, frequencies):
    angles = (positions[:, None] * frequencies).double()[:, None]
    first, second = x.double().chunk(2, -1)
    return (x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).float()


def through(x, kind):
    codes, scales = quantize_vectors(x, KV_DTYPES[kind])
    return dequantize_vectors(codes, scales[..., None], torch.float32)


def formula(q, t, keys, values, sinks, window, frequencies):
    """One query; its keys as they are stored, rotated by their position in the text,
    and so the sinks' query by its place."""
    group = len(q) // keys.shape[1]
    places = torch.tensor([t, min(t, sinks + window - 1)])
    far, near = turned(q[None].expand(2, -1, -1), places, frequencies).double()
    kept = torch.tensor([key for key in range(t + 1) if key < sinks or key > t - window])
    keys, values = (x[kept].double().repeat_interleave(group, 1) for x in (keys, values))
    query = torch.where((kept < sinks)[:, None, None], near, far)
    weights = ((query * keys).sum(-1) / math.sqrt(q.shape[1])).softmax(0)
    return (weights[..., None] * values).sum(0)


def test_far_into_a_text_the_turn_undoes_what_the_decoder_did():
    """Angles of a million radians have lost their low bits; the turn knows which."""
    policy, frequencies = RetentionPolicy(4, 60), (500_000.0 ** -(torch.arange(32) / 32)).repeat(2)
    positions = torch.tensor([0, 63, 64, 1000, 131_071, 3_000_017])
    batch = batch_of([6], [6], torch.ones(1, 1, dtype=torch.int64), torch.arange(6))
    batch.positions = positions
    cos, sin = SinkTurn(policy, frequencies).of(batch)
    x = torch.randn(6, 1, 64)
    there = turned(x, positions, frequencies)
    back = there * cos[:, None] + there.roll(32, -1) * sin[:, None]
    torch.testing.assert_close(back, turned(x, positions.clamp(max=63), frequencies), rtol=0, atol=1e-5)
