"""TorchAttention: attention over pages in plain torch, for many sequences at once. Built in chapter 06.

A sequence that brings one token (decode) reads its pages in place. What attention does with values is a weighted sum
of rows of a table, one sum for each head of each sequence, and torch has a fast kernel for exactly that: an
embedding bag. With the keys of a block transposed, its scores are one too: the rows are the head's dimensions, the
weights are the query. Nothing is gathered and nothing is padded but the scores.

A sequence that brings several tokens (prefill) has work enough to pay for gathering its pages: tiles of queries with
pasts of similar length go through torch's own attention together. Single tokens go that way too where pages hold codes,
or where a query meets the sinks turned (chapter 17): gathered pages are dequantized, and a bag has but one query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.softcap import explicit_attention, sink_softmax, soft_cap
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.retention import SinkTurn, turn_queries
from minillm.kv_cache.torch_plan import DecodePlan, Plan, TileGroup

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch


class TorchAttention:
    """The AttentionBackend over a `PagedKVCache`. What depends on the batch only is planned once, for all layers."""

    def __init__(
        self,
        cache: PagedKVCache,
        layer_windows: Sequence[int | None],
        num_heads: int,
        sink_turn: SinkTurn | None = None,
        softcap: float | None = None,
    ):
        self.cache, self.softcap = cache, softcap
        self.sink_logits: Sequence[Tensor] | None = None  # see `minillm.kv_cache.sink_logits`
        self.layer_windows = layer_windows
        self.num_heads = num_heads
        self.sink_turn = sink_turn
        self.sinks = sink_turn.policy.sinks if sink_turn else 0
        self._plans: dict[int | None, Plan] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`."""
        plan = self._plan(self.layer_windows[layer], batch)
        self.cache.write(layer, k, v, batch.slot_mapping)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        changes = plan.decodes, self.softcap, self._learned(layer)
        if plan.decodes is not None and plan.num_decodes == batch.num_tokens:
            return decode_attention(q, keys, values, *changes)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if plan.decodes is not None:
            out[: plan.num_decodes] = decode_attention(q[: plan.num_decodes], keys, values, *changes)
        self._attend_tiles(q, layer, batch, plan.decode_groups + plan.prefill_groups, out)
        return out

    def prefill(self, q: Tensor, layer: int, batch: ForwardBatch, out: Tensor) -> None:
        """The rows of `out` that belong to sequences bringing several tokens;
        their keys and values are in their slots."""
        self._attend_tiles(q, layer, batch, self._plan(self.layer_windows[layer], batch).prefill_groups, out)

    def _attend_tiles(self, q: Tensor, layer: int, batch: ForwardBatch, groups: list[TileGroup], out: Tensor) -> None:
        turned = turn_queries(q, self.sink_turn.of(batch, layer)) if self.sink_turn else None
        changes = turned, self.sinks, self.softcap, self._learned(layer)
        for group in groups:
            gathered = self.cache.gather(layer, group.block_table.flatten())
            out[group.rows] = tile_attention(q, *gathered, group, *changes)[group.places]

    def _learned(self, layer: int) -> Tensor | None:
        return self.sink_logits and self.sink_logits[layer]

    def _plan(self, window: int | None, batch: ForwardBatch) -> Plan:
        plan = self._plans.get(window)
        if plan is None or plan.batch is not batch:
            plan = self._plans[window] = Plan(batch, self.cache, self.num_heads, window, self.sinks, plan)
        return plan


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: DecodePlan,
    cap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """One query for each sequence. q [num_seqs, num_heads, head_dim]; keys and values as `PagedKVCache` keeps them;
    sink_logits [num_heads].

    A bag is one block of one head of one sequence.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size = keys.shape[-1]
    weights = (q * head_dim**-0.5).view(-1, head_dim).index_select(0, plan.query_of_bag)  # [num_bags, head_dim]
    scores = embedding_bag(keys.view(-1, block_size), plan.key_rows, plan.key_bags, weights)  # [num_bags, block_size]
    scores = soft_cap(scores, cap)
    # Bags side by side, as many for each head as the longest sequence has; what is too many is masked.
    padded = scores.index_select(0, plan.bag_of_place).view(num_seqs, num_heads, -1)
    padded = padded.add_(plan.mask.to(q.dtype))
    probs = sink_softmax(padded[:, :, None], sink_logits).reshape(-1, block_size)
    weights = probs.index_select(0, plan.place_of_bag)  # [num_bags, block_size]
    out = embedding_bag(values.view(-1, head_dim), plan.value_rows, plan.value_bags, weights)
    return out.view(num_seqs, num_heads, head_dim)


def tile_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: TileGroup,
    turned: Tensor | None = None,
    sinks: int = 0,
    cap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """A group of query tiles over its gathered blocks: [num_tiles, tile_len, num_heads, head_dim].

    The first `sinks` keys of every tile meet `turned` in place of q. sink_logits [num_heads] are learned.
    """
    num_tiles, num_blocks = group.block_table.shape
    _, num_kv_heads, head_dim, block_size = keys.shape
    keys = keys.view(num_tiles, num_blocks, num_kv_heads, head_dim, block_size)
    keys = keys.permute(0, 2, 1, 4, 3).reshape(num_tiles, num_kv_heads, -1, head_dim)
    values = values.view(num_tiles, num_blocks, num_kv_heads, block_size, head_dim)
    values = values.transpose(1, 2).reshape(num_tiles, num_kv_heads, -1, head_dim)
    tiles = q[group.query_rows].transpose(1, 2)  # [num_tiles, num_heads, tile_len, head_dim]
    if turned is not None:
        # Both queries side by side, and each key beside zeros on the side of the query that it does not meet.
        tiles = torch.cat([tiles, turned[group.query_rows].transpose(1, 2)], dim=-1)
        keys = torch.cat([F.pad(keys[:, :, :sinks], (head_dim, 0)), F.pad(keys[:, :, sinks:], (0, head_dim))], dim=2)
    if cap is not None or sink_logits is not None:
        out = explicit_attention(tiles, keys, values, group.seen, head_dim**-0.5, cap, sink_logits)
        return out.transpose(1, 2)
    if q.is_cuda:
        return folded_attention(tiles, keys, values, group.seen, head_dim**-0.5).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        tiles, keys, values, attn_mask=group.seen, scale=head_dim**-0.5, enable_gqa=True
    )
    return out.transpose(1, 2)


def folded_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Masked attention of grouped heads for torch's CUDA kernels: [num_tiles, num_heads, tile_len, head_dim], as q.

    The kernel that takes a mask ("memory-efficient") takes no `enable_gqa` before torch's releases of 2026:
    torch falls back to products in float32, without tensor cores. So the query heads of a KV head become more rows of
    that head, with the mask repeated. That kernel reads rows of the mask at multiples of 8 keys;
    torch pads a copy where the block size is none.
    """
    num_tiles, num_heads, tile_len, head_dim = q.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    group = num_heads // num_kv_heads
    rows = q.reshape(num_tiles, num_kv_heads, group * tile_len, head_dim)
    mask = seen[:, :, None].expand(-1, -1, group, -1, -1).reshape(num_tiles, 1, group * tile_len, num_keys)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(num_tiles, num_heads, tile_len, values.shape[-1])


def embedding_bag(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Sums of weights * table[rows], one from each offset in `bags` to the next: [num_bags, width of the table]."""
    return torch.embedding_bag(table, rows, bags, False, 0, False, weights.view(-1))[0]
