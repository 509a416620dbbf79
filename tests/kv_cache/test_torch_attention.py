"""Grouped heads under a mask in torch's kernels: the rows that a GPU's kernel takes give what the CPU's grouped heads
give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minillm.kv_cache import torch_attention
from minillm.kv_cache.torch_attention import folded_attention

SHAPES = [  # tiles, query heads, KV heads, queries, keys, head_dim of queries and keys, of values
    (1, 4, 1, 5, 16, 16, 16),
    (3, 6, 2, 7, 24, 16, 16),
    (2, 4, 4, 1, 8, 32, 32),  # a group of one
    (2, 8, 2, 3, 16, 32, 16),  # queries twice as wide: both rotations side by side, for sinks
]


@pytest.mark.parametrize("tiles, heads, kv_heads, queries, num_keys, dim, value_dim", SHAPES)
def test_folded_groups_are_grouped_heads(tiles, heads, kv_heads, queries, num_keys, dim, value_dim):
    torch.manual_seed(0)
    q = torch.randn(tiles, queries, heads, dim).transpose(1, 2)  # strided as a gather leaves it
    keys, values = torch.randn(tiles, kv_heads, num_keys, dim), torch.randn(tiles, kv_heads, num_keys, value_dim)
    seen = torch.rand(tiles, 1, queries, num_keys) > 0.4
    seen[..., 0] = True
    out = folded_attention(q, keys, values, seen, 0.3)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_no_grouped_heads_and_no_strided_rows_reach_torchs_kernel(monkeypatch):
    """What the kernel that takes masks asks for: as many heads of q as of k and v, dimensions side by side,
    and rows of the mask that start at multiples of 8 keys."""
    calls = []

    def record(q, k, v, attn_mask, scale, **more):
        calls.append((q, k, v, attn_mask, more))
        return q

    monkeypatch.setattr(torch_attention.F, "scaled_dot_product_attention", record)
    q, keys = torch.randn(2, 7, 6, 16).transpose(1, 2), torch.randn(2, 2, 24, 16)
    folded_attention(q, keys, keys, torch.ones(2, 1, 7, 24, dtype=torch.bool), 0.3)
    ((q, k, v, mask, more),) = calls
    assert not more and q.shape == (2, 2, 21, 16) and k.shape[1] == v.shape[1] == q.shape[1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == mask.stride(-1) == 1
    assert mask.shape == (2, 1, 21, 24) and mask.stride(-2) % 8 == 0
