"""The plain reference against a loop over heads and positions; the backend without a cache on ragged batches."""

from __future__ import annotations

import pytest
import torch

from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.attention import NoCacheAttention, can, causal_attention, causal_mask
from minillm.model.batch import ForwardBatch


def by_hand(q, k, v, window, scale):
    """One query and one head at a time, in float64."""
    num_queries, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(num_queries):
        position = seq_len - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            keys, values = (t[first : position + 1, kv_head].double() for t in (k, v))
            out[i, head] = (keys @ q[i, head].double() * scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("num_queries, seq_len", [(9, 9), (1, 9), (4, 9)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_causal_attention(num_heads, num_kv_heads, num_queries, seq_len, window):
    q = torch.randn(num_queries, num_heads, 10)
    k, v = torch.randn(2, seq_len, num_kv_heads, 10)
    out = causal_attention(q, k, v, window, scale=0.7)
    torch.testing.assert_close(out.double(), by_hand(q, k, v, window, 0.7), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(causal_attention(q, k, v, window), causal_attention(q, k, v, window, 10**-0.5))


def test_causal_mask_of_the_last_queries():
    assert causal_mask(2, 4, None).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(2, 4, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def ragged(lengths: list[int], seq_lens: list[int] | None = None) -> ForwardBatch:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ForwardBatch(
        token_ids=positions,
        positions=positions,
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        seq_lens=torch.tensor(seq_lens or lengths),
        block_table=None,
        slot_mapping=None,
        max_query_len=max(lengths),
        logits_indices=torch.arange(len(positions)),
        max_seq_len=max(seq_lens or lengths),
    )


def test_sequences_of_one_batch_do_not_see_each_other():
    lengths = [3, 1, 5]
    q, (k, v) = torch.randn(9, 4, 8), torch.randn(2, 9, 2, 8)
    out = NoCacheAttention((None, 2)).attend(q, k, v, 1, ragged(lengths))
    for rows in (slice(0, 3), slice(3, 4), slice(4, 9)):
        torch.testing.assert_close(out[rows], causal_attention(q[rows], k[rows], v[rows], window=2))


def test_without_a_cache_nothing_can_be_cached():
    with pytest.raises(ValueError, match="positions start at 0"):
        NoCacheAttention((None,)).attend(
            torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2), 0, ragged([1], [5])
        )


class OnlyAttend:
    """What a notebook writes."""

    def attend(self, q, k, v, layer, batch):
        return q


@pytest.mark.parametrize("backend, declared", [
    (OnlyAttend, set()), (NoCacheAttention, set()), (TorchAttention, set()),
    (NativeAttention, {"fused_layer"}), (TritonAttention, {"fused_store", "graph_safe"}),
])  # fmt: skip
def test_backends_declare_what_they_can_do(backend, declared):
    methods = {
        "fused_layer": ["run_layer", "run_decoder"],
        "fused_store": ["rotate_and_store", "attend_stored"],
        "graph_safe": ["attend"],
    }
    assert {name for name in methods if can(backend, name)} == declared
    assert all(callable(getattr(backend, method)) for name in declared for method in methods[name])


def test_a_capability_that_the_protocol_does_not_have_is_not_a_no():
    with pytest.raises(AttributeError, match="graph_save"):
        can(OnlyAttend(), "graph_save")


def test_single_batch():
    batch = ForwardBatch.single([4, 5, 6], start=7)
    assert (batch.num_tokens, batch.num_seqs, batch.max_query_len, batch.max_seq_len) == (3, 1, 3, 10)
    assert batch.positions.tolist() == [7, 8, 9] and batch.query_start_loc.tolist() == [0, 3]
    assert batch.seq_lens.tolist() == [10] and batch.logits_indices.tolist() == [2]
    assert ForwardBatch.single([4, 5, 6], all_logits=True).logits_indices.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="0 tokens"):
        ForwardBatch.single([])
