"""TorchAttention: attention over pages in plain torch, for many sequences at once. Built in chapter 06.

A sequence that brings one token (decode) reads its pages in place. What attention does with values is a weighted sum
of rows of a table, one sum for each head of each sequence, and torch has a fast kernel for exactly that: an
embedding bag. With the keys of a block transposed, its scores are one too: the rows are the head's dimensions, the
weights are the query. Nothing is gathered and nothing is padded but the scores.

A sequence that brings several tokens (prefill) has work enough to pay for gathering its pages: tiles of queries with
pasts of similar length go through torch's own attention together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kv_cache.paged import PagedKVCache

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch

QUERY_TILE = 128  # queries of one sequence that share a gather; their causal half beyond the diagonal is wasted
GROUP_TOKENS = 16384  # gathered positions of a group of tiles, at most, unless one tile alone has more


class TorchAttention:
    """The AttentionBackend over a `PagedKVCache`. What depends on the batch only is planned once, for all layers."""

    def __init__(self, cache: PagedKVCache, layer_windows: Sequence[int | None], num_heads: int):
        self.cache = cache
        self.layer_windows = layer_windows
        self.num_heads = num_heads
        self._plans: dict[int | None, Plan] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`."""
        plan = self._plan(self.layer_windows[layer], batch)
        self.cache.write(layer, k, v, batch.slot_mapping)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if plan.num_decodes == batch.num_tokens:
            return decode_attention(q, keys, values, plan.decodes)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if plan.num_decodes:
            out[: plan.num_decodes] = decode_attention(q[: plan.num_decodes], keys, values, plan.decodes)
        self.prefill(q, layer, batch, out)
        return out

    def prefill(self, q: Tensor, layer: int, batch: ForwardBatch, out: Tensor) -> None:
        """The rows of `out` that belong to sequences bringing several tokens; their keys and values are in their slots."""
        for group in self._plan(self.layer_windows[layer], batch).prefill_groups:
            out[group.rows] = prefill_attention(q, self.cache.keys[layer], self.cache.values[layer], group)[group.places]

    def _plan(self, window: int | None, batch: ForwardBatch) -> Plan:
        plan = self._plans.get(window)
        if plan is None or plan.batch is not batch:
            plan = self._plans[window] = Plan(batch, self.cache, self.num_heads, window, plan)
        return plan


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, plan: DecodePlan) -> Tensor:
    """One query for each sequence. q [num_seqs, num_heads, head_dim]; keys and values as `PagedKVCache` keeps them.

    A bag is one block of one head of one sequence.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size = keys.shape[-1]
    weights = (q * head_dim**-0.5).view(-1, head_dim).index_select(0, plan.query_of_bag)  # [num_bags, head_dim]
    scores = embedding_bag(keys.view(-1, block_size), plan.key_rows, plan.key_bags, weights)  # [num_bags, block_size]
    # Bags side by side, as many for each head as the longest sequence has; what is too many is masked.
    padded = scores.index_select(0, plan.bag_of_place).view(num_seqs, num_heads, -1)
    probs = padded.add_(plan.mask.to(q.dtype)).softmax(dim=-1).view(-1, block_size)
    weights = probs.index_select(0, plan.place_of_bag)  # [num_bags, block_size]
    out = embedding_bag(values.view(-1, head_dim), plan.value_rows, plan.value_bags, weights)
    return out.view(num_seqs, num_heads, head_dim)


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, group: PrefillGroup) -> Tensor:
    """A group of query tiles: [num_tiles, tile_len, num_heads, head_dim]."""
    num_tiles, num_blocks = group.block_table.shape
    _, num_kv_heads, head_dim, block_size = keys.shape
    blocks = group.block_table.flatten()
    gathered_keys = keys.index_select(0, blocks).view(num_tiles, num_blocks, num_kv_heads, head_dim, block_size)
    gathered_keys = gathered_keys.permute(0, 2, 1, 4, 3).reshape(num_tiles, num_kv_heads, -1, head_dim)
    gathered_values = values.index_select(0, blocks).view(num_tiles, num_blocks, num_kv_heads, block_size, head_dim)
    gathered_values = gathered_values.transpose(1, 2).reshape(num_tiles, num_kv_heads, -1, head_dim)
    tiles = q[group.query_rows].transpose(1, 2)  # [num_tiles, num_heads, tile_len, head_dim]
    out = F.scaled_dot_product_attention(tiles, gathered_keys, gathered_values, attn_mask=group.seen, enable_gqa=True)
    return out.transpose(1, 2)


def embedding_bag(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Sums of weights * table[rows], one from each offset in `bags` to the next: [num_bags, width of the table]."""
    return torch.embedding_bag(table, rows, bags, False, 0, False, weights.view(-1))[0]


@dataclass(frozen=True)
class PrefillGroup:
    """Tiles of queries whose pasts have about the same length, padded to the longest."""

    block_table: Tensor  # [num_tiles, num_blocks]
    query_rows: Tensor  # [num_tiles, tile_len], the token of the batch that each query is; 0 where there is none
    seen: Tensor  # bool [num_tiles, 1, tile_len, num_blocks * block_size]
    rows: Tensor  # the tokens of the batch that this group answers for, [num_queries]
    places: tuple[Tensor, Tensor]  # and where in the output each one is: tile and place in the tile


class DecodePlan:
    """Which rows of the cache every head of every decoding sequence reads, for one window.

    Bags are numbered by sequence, head and block. From one step to the next only the mask changes, until a sequence
    gets another block.
    """

    def __init__(self, blocks: np.ndarray, counts: np.ndarray, num_heads: int, cache: PagedKVCache, device: torch.device):
        """blocks [num_seqs, max_blocks], of which sequence i reads the first counts[i]."""
        _, num_kv_heads, head_dim, size = cache.keys[0].shape
        self.blocks, self.counts = blocks, counts
        num_seqs, max_blocks = blocks.shape
        kv_heads = np.arange(num_heads) // (num_heads // num_kv_heads)
        wanted = np.arange(max_blocks) < counts[:, None]  # [num_seqs, max_blocks]
        places = np.broadcast_to(wanted[:, None], (num_seqs, num_heads, max_blocks)).reshape(-1)
        place_of_bag = np.flatnonzero(places)  # [num_bags]
        bag_of_place = np.maximum(np.cumsum(places) - 1, 0)
        block_of_bag = np.broadcast_to(blocks[:, None], (num_seqs, num_heads, max_blocks)).reshape(-1)[place_of_bag]
        head_of_bag = place_of_bag // max_blocks % num_heads
        kv_head_of_bag = kv_heads[head_of_bag]
        key_rows = (block_of_bag * num_kv_heads + kv_head_of_bag)[:, None] * head_dim + np.arange(head_dim)
        value_rows = (block_of_bag * num_kv_heads + kv_head_of_bag)[:, None] * size + np.arange(size)
        values_of_head = counts.repeat(num_heads) * size

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.reshape(-1).astype(np.int64, copy=False)).to(device)

        self.place_of_bag, self.bag_of_place = tensor(place_of_bag), tensor(bag_of_place)
        self.query_of_bag = tensor(place_of_bag // max_blocks)
        self.key_rows, self.key_bags = tensor(key_rows), tensor(np.arange(len(place_of_bag)) * head_dim)
        self.value_rows, self.value_bags = tensor(value_rows), tensor(np.cumsum(values_of_head) - values_of_head)
        self.mask: Tensor  # [num_seqs, 1, max_blocks * block_size] float32, -inf where nothing may be seen


class Plan:
    """How one batch is attended to, for one window; made once a step and used by every layer."""

    def __init__(
        self, batch: ForwardBatch, cache: PagedKVCache, num_heads: int, window: int | None, last: Plan | None = None
    ):
        self.batch = batch
        self.device = batch.seq_lens.device
        self.block_size, self.window = cache.block_size, window
        starts, seq_lens = batch.query_start_loc.cpu().numpy(), batch.seq_lens.cpu().numpy()
        table = batch.block_table.cpu().numpy()
        several = np.flatnonzero(np.diff(starts) > 1)
        self.num_decodes = int(several[0]) if len(several) else len(seq_lens)
        self.decodes: DecodePlan | None = None
        if self.num_decodes:
            self._plan_decodes(seq_lens[: self.num_decodes], table, cache, num_heads, last and last.decodes)
        self.prefill_groups: list[PrefillGroup] = []
        if len(several):
            self._plan_prefills(starts, seq_lens, table)

    def _plan_decodes(
        self, seq_lens: np.ndarray, table: np.ndarray, cache: PagedKVCache, num_heads: int, last: DecodePlan | None
    ) -> None:
        size = self.block_size
        first = np.zeros_like(seq_lens) if self.window is None else np.maximum(seq_lens - self.window, 0)
        first_block = first // size
        counts = -(-seq_lens // size) - first_block  # blocks that each sequence reads
        if self.window is None:
            blocks = table[: len(seq_lens), : counts.max()]
        else:
            columns = np.minimum(first_block[:, None] + np.arange(counts.max()), table.shape[1] - 1)
            blocks = np.take_along_axis(table[: len(seq_lens)], columns, axis=1)
        if last is not None and np.array_equal(last.counts, counts) and np.array_equal(last.blocks, blocks):
            self.decodes = last
        else:
            self.decodes = DecodePlan(blocks, counts, num_heads, cache, self.device)
        position = first_block[:, None] * size + np.arange(blocks.shape[1] * size)
        seen = (position < seq_lens[:, None]) & (position >= first[:, None])
        mask = np.where(seen, np.float32(0), np.float32("-inf"))
        self.decodes.mask = torch.from_numpy(mask[:, None]).to(self.device)

    def _plan_prefills(self, starts: np.ndarray, seq_lens: np.ndarray, table: np.ndarray) -> None:
        groups = defaultdict(list)
        for seq in range(self.num_decodes, len(seq_lens)):
            before = seq_lens[seq] - (starts[seq + 1] - starts[seq])  # positions computed in earlier steps
            for row in range(starts[seq], starts[seq + 1], QUERY_TILE):
                count = min(QUERY_TILE, starts[seq + 1] - row)
                position = before + row - starts[seq]
                first = 0 if self.window is None else max(0, position + 1 - self.window) // self.block_size
                num_blocks = -(-(position + count) // self.block_size) - first
                groups[int(num_blocks).bit_length()].append((seq, row, count, position, first, num_blocks))
        for tiles in groups.values():
            most = max(1, GROUP_TOKENS // (max(tile[-1] for tile in tiles) * self.block_size))
            for start in range(0, len(tiles), most):
                self.prefill_groups.append(self._group(np.array(tiles[start : start + most]), table))

    def _group(self, tiles: np.ndarray, table: np.ndarray) -> PrefillGroup:
        seq, row, count, position, first, num_blocks = tiles.T
        within = np.arange(count.max())
        real = within < count[:, None]  # [num_tiles, tile_len]
        column = np.arange(num_blocks.max())
        blocks = table[seq[:, None], np.minimum(first[:, None] + column, table.shape[1] - 1)]
        blocks = np.where(column < num_blocks[:, None], blocks, 0)
        key = first[:, None] * self.block_size + np.arange(len(column) * self.block_size)  # positions [num_tiles, keys]
        query = position[:, None] + np.minimum(within, count[:, None] - 1)  # a missing query repeats the last one
        seen = key[:, None] <= query[:, :, None]
        if self.window is not None:
            seen &= key[:, None] > query[:, :, None] - self.window
        query_rows = np.where(real, row[:, None] + within, 0)
        tile, place = np.nonzero(real)
        return PrefillGroup(
            block_table=self._tensor(blocks),
            query_rows=self._tensor(query_rows),
            seen=self._tensor(seen[:, None]),
            rows=self._tensor(query_rows[real]),
            places=(self._tensor(tile), self._tensor(place)),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
