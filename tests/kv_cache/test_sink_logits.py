"""Learned sink logits in the backends over pages, against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from minillm.kernels import native
from minillm.kernels.softcap import explicit_attention, sink_softmax
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.retention import RetentionPolicy, SinkTurn
from minillm.kv_cache.sink_logits import with_sink_logits
from minillm.kv_cache.torch_attention import TorchAttention
from tests.helpers.tiny import examples
from tests.kv_cache.test_kv_cache_quantized import LENGTHS, batch_of

BACKENDS = (TorchAttention, NativeAttention) if native.library() is not None else (TorchAttention,)


def formula(q, k, v, window, sinks):
    """q [new, heads, dim], k and v [all, kv_heads, dim], sinks [heads]: float64, one query and head after the other."""
    group, out = q.shape[1] // k.shape[1], torch.empty(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        end = len(k) - len(q) + row + 1
        first = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            keys, values = (x[first:end, head // group].double() for x in (k, v))
            scores = keys @ q[row, head].double() / math.sqrt(q.shape[2])
            most = max(float(scores.max()), float(sinks[head]))
            weights = (scores - most).exp()
            out[row, head] = weights @ values / (weights.sum() + math.exp(float(sinks[head]) - most))
    return out


def attend(backend, cache, window, num_heads, sinks, *tensors, turn=None):
    heads = [num_heads] if backend is TorchAttention else []
    attention = with_sink_logits(backend(cache, [window], *heads, turn), [sinks])
    return attention.attend(*tensors[:3], 0, tensors[3])


@examples(40)
@given(
    LENGTHS,
    st.sampled_from([(1, 1, 16), (4, 2, 18), (9, 3, 64)]),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([None, 1, 5, 17]),
    st.sampled_from(["auto", "int8", "int4"]),
    st.integers(0, 1000),
)
def test_the_backends_equal_the_formula(lengths, heads, block_size, window, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    lengths = sorted(lengths, key=lambda length: length[1] > 1)  # decoding rows stand first
    sinks = torch.randn(num_heads, generator=generator) * 3  # some far above all scores, some far below
    counts = [-(-sum(length) // block_size) for length in lengths]
    blocks = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    caches = [
        PagedKVCache(1, num_kv_heads, head_dim, sum(counts), block_size, torch.float32, kv_dtype=kind) for _ in BACKENDS
    ]
    q, k, v, slots, expected = [], [], [], [], []
    for (before, new), own, row in zip(lengths, blocks, table):
        row[: len(own)] = own
        positions = torch.arange(before + new)
        places = own[positions // block_size] * block_size + positions % block_size
        keys, values = torch.randn(2, before + new, num_kv_heads, head_dim, generator=generator)
        queries = torch.randn(new, num_heads, head_dim, generator=generator) * 2
        for cache in caches:
            cache.write(0, keys[:before], values[:before], places[:before])
        read = PagedKVCache(1, num_kv_heads, head_dim, before + new, 1, torch.float32, kv_dtype=kind)
        read.write(0, keys, values, positions + 1)
        seen_keys, seen_values = (x.squeeze(-1) if x.shape[-1] == 1 else x.squeeze(2)
                                  for x in read.gather(0, positions + 1))  # fmt: skip
        expected.append(formula(queries, seen_keys, seen_values, window, sinks))
        q.append(queries), k.append(keys[before:]), v.append(values[before:]), slots.append(places[before:])
    batch = batch_of([new for _, new in lengths], [sum(length) for length in lengths], table, torch.cat(slots))
    for backend, cache in zip(BACKENDS, caches):
        tensors = (*map(torch.cat, (q, k, v)), batch)
        out = attend(backend, cache, window, num_heads, sinks, *tensors)
        torch.testing.assert_close(out, torch.cat(expected).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sink_is_minus_infinity_and_a_large_one_silences_the_head(backend):
    q, k, v = torch.randn(40, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    batch = batch_of([40], [40], torch.arange(1, 11)[None], torch.arange(4, 44))

    def run(sinks):
        cache = PagedKVCache(1, 2, 16, 12, 4, torch.float32)
        return attend(backend, cache, None, 4, torch.tensor(sinks), q, k, v, batch)

    heads = [4] if backend is TorchAttention else []
    plain = backend(PagedKVCache(1, 2, 16, 12, 4, torch.float32), [None], *heads).attend(q, k, v, 0, batch)
    torch.testing.assert_close(run([-math.inf] * 4), plain, rtol=0, atol=1e-6)
    silenced = run([-math.inf, 200.0, -math.inf, 0.0])
    torch.testing.assert_close(silenced[:, [0, 2]], plain[:, [0, 2]], rtol=0, atol=1e-6)
    assert silenced[:, 1].abs().max() < 1e-20 and (silenced[:, 3] - plain[:, 3]).abs().max() > 0.01


@pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
def test_kept_first_tokens_and_learned_logits_go_together():
    policy = RetentionPolicy(2, 7)
    q, k, v = torch.randn(40, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    batch, sinks = batch_of([40], [40], torch.arange(1, 11)[None], torch.arange(4, 44)), torch.randn(4)
    frequencies = torch.rand(8).repeat(2)
    made = [
        attend(backend, PagedKVCache(1, 2, 16, 12, 4, torch.float32), 7, 4, sinks, q, k, v, batch,
               turn=SinkTurn(policy, frequencies))
        for backend in BACKENDS
    ]  # fmt: skip
    torch.testing.assert_close(made[0], made[1], rtol=1e-5, atol=1e-5)


def test_the_weights_of_a_query_sum_to_less_than_one():
    scores, sinks = torch.randn(3, 4, 5, 6), torch.tensor([-1.0, 0.0, 2.0, 5.0])
    weights = sink_softmax(scores, sinks)
    assert weights.shape == scores.shape
    lost = 1 - weights.sum(-1)
    expected = torch.sigmoid(sinks[:, None] - scores.logsumexp(-1))  # the sink against all keys together
    torch.testing.assert_close(lost, expected)
    assert torch.equal(sink_softmax(scores, None), scores.softmax(-1))


def test_two_parts_of_the_keys_merge_with_the_sink_counted_once():
    """As split decoding merges them: by their log-sum-exps, where the sink is a third part without a value."""
    q, k, v, sinks = torch.randn(4, 3, 16), torch.randn(2, 10, 16), torch.randn(2, 10, 16), torch.randn(4)
    seen = torch.ones(1, 3, 10, dtype=torch.bool)
    whole = explicit_attention(q, k, v, seen, 0.25, sink_logits=sinks)
    scores = (q @ k.repeat_interleave(2, 0).transpose(-1, -2)) * 0.25
    parts = [slice(0, 4), slice(4, 10)]
    sums = torch.stack([scores[..., part].logsumexp(-1) for part in parts] + [sinks[:, None].expand(4, 3)])
    outs = [scores[..., part].softmax(-1) @ v.repeat_interleave(2, 0)[:, part] for part in parts]
    shares = sums.softmax(0)
    torch.testing.assert_close(whole, shares[0][..., None] * outs[0] + shares[1][..., None] * outs[1])


def test_a_backend_wants_the_logits_of_every_layer():
    attention = TorchAttention(PagedKVCache(3, 2, 16, 4, 4, torch.float32), [None] * 3, 4)
    with pytest.raises(ValueError, match="sink_logits are of 2 layers, the cache has 3; give each its own"):
        with_sink_logits(attention, [torch.zeros(4)] * 2)
