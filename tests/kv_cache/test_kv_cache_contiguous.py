"""The contiguous cache returns what was written, and its attention equals the plain reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.attention import causal_attention
from minillm.model.batch import ForwardBatch


def cache_of(max_len: int = 12, layers: int = 2, heads: int = 2, head_dim: int = 6) -> ContiguousKVCache:
    return ContiguousKVCache(layers, heads, head_dim, max_len, torch.float32)


def test_append_returns_all_positions_so_far():
    cache = cache_of()
    k, v = torch.randn(2, 7, 2, 6)
    for start, end in [(0, 4), (4, 5), (5, 7)]:
        for layer in (0, 1):
            keys, values = cache.append(layer, k[start:end] + layer, v[start:end] - layer, start)
            assert torch.equal(keys, k[:end] + layer) and torch.equal(values, v[:end] - layer)
            assert keys.data_ptr() == cache.keys[layer].data_ptr()  # views: nothing is copied
        assert cache.length == end


def test_rewinding_overwrites():
    cache = cache_of(layers=1)
    k, v = torch.randn(2, 6, 2, 6)
    cache.append(0, k, v, 0)
    cache.truncate(2)
    assert cache.length == 2
    keys, _ = cache.append(0, -k[2:4], v[2:4], 2)
    assert torch.equal(keys, torch.cat([k[:2], -k[2:4]])) and cache.length == 4
    cache.append(0, k[:1], v[:1], 1)  # without truncate too: what came after is no longer this sequence
    assert cache.length == 2


def test_limits_are_named():
    cache = cache_of(max_len=4)
    row = torch.zeros(3, 2, 6)
    with pytest.raises(ValueError, match=r"start=1.*only 0 positions"):
        cache.append(0, row, row, 1)
    cache.append(0, row, row, 0)
    with pytest.raises(ValueError, match=r"6 positions.*max_len=4"):
        cache.append(0, row, row, 3)
    assert cache.length == 3
    for length in (-1, 4):
        with pytest.raises(ValueError, match=rf"truncate\({length}\).*3 positions"):
            cache.truncate(length)


def test_num_bytes_are_those_of_its_tensors():
    cache = ContiguousKVCache(3, 2, 10, 7, torch.bfloat16)
    assert cache.num_bytes == sum(t.nbytes for t in (*cache.keys, *cache.values)) == 2 * 3 * 2 * 10 * 7 * 2


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [4, 4, 4], [2, 10]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 40])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (6, 2), (3, 1)])
def test_attention_equals_the_reference(cuts, window, num_heads, num_kv_heads):
    cache = cache_of(layers=2, heads=num_kv_heads)
    attention = ContiguousAttention(cache, SimpleNamespace(layer_windows=(None, window), attention_softcap=None))
    q, (k, v) = torch.randn(12, num_heads, 6), torch.randn(2, 12, num_kv_heads, 6)
    expected = [causal_attention(q, k, v, w) for w in (None, window)]
    start = 0
    for length in cuts:
        rows = slice(start, start + length)
        batch = ForwardBatch.single([0] * length, start)
        for layer in (0, 1):
            out = attention.attend(q[rows], k[rows], v[rows], layer, batch)
            assert out.shape == (length, num_heads, 6)
            torch.testing.assert_close(out, expected[layer][rows], rtol=1e-5, atol=1e-5)
        start += length


def test_one_sequence_only():
    attention = ContiguousAttention(cache_of(), SimpleNamespace(layer_windows=(None, None), attention_softcap=None))
    batch = ForwardBatch.single([1, 2])
    batch.seq_lens = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="1 sequence, the batch has 2"):
        attention.attend(torch.zeros(2, 2, 6), torch.zeros(2, 2, 6), torch.zeros(2, 2, 6), 0, batch)
