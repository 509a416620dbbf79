"""How TorchAttention goes about a batch: planned once a step, for all layers. Built in chapter 06."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.kv_cache.paged import PagedKVCache
from minillm.rounding import ceil_div
from minillm.staging import upload

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch

QUERY_TILE = 128  # queries of one sequence that share a gather; their causal half beyond the diagonal is wasted
GROUP_TOKENS = 16384  # gathered positions of a group of tiles, at most, unless one tile alone has more


@dataclass(frozen=True)
class TileGroup:
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

    def __init__(
        self, blocks: np.ndarray, counts: np.ndarray, num_heads: int, cache: PagedKVCache, device: torch.device
    ):
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

        starts = np.arange(len(place_of_bag)) * head_dim, np.cumsum(values_of_head) - values_of_head
        columns = (place_of_bag, bag_of_place, place_of_bag // max_blocks, key_rows, starts[0], value_rows, starts[1])
        sent = upload(*(column.reshape(-1).astype(np.int64, copy=False) for column in columns), device=device)
        self.place_of_bag, self.bag_of_place, self.query_of_bag = sent[:3]
        self.key_rows, self.key_bags, self.value_rows, self.value_bags = sent[3:]
        self.mask: Tensor  # [num_seqs, 1, max_blocks * block_size] float32, -inf where nothing may be seen


class Plan:
    """How one batch is attended to, for one window; made once a step and used by every layer.

    `decodes` is None where pages cannot be read in place: then `decode_groups` has the single tokens, a tile each.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        num_heads: int,
        window: int | None,
        sinks: int = 0,
        last: Plan | None = None,
    ):
        self.batch = batch
        self.device = batch.seq_lens.device
        self.block_size, self.window, self.sinks = cache.block_size, window, sinks
        index = batch.on_host or [x.cpu().numpy() for x in (batch.query_start_loc, batch.seq_lens, batch.block_table)]
        starts, seq_lens, table = (x.astype(np.int64, copy=False) for x in index)  # products of them need 64 bits
        several = np.flatnonzero(np.diff(starts) > 1)
        self.num_decodes = int(several[0]) if len(several) else len(seq_lens)
        self.decodes: DecodePlan | None = None
        self.decode_groups: list[TileGroup] = []
        if self.num_decodes and (sinks or not cache.in_place):
            self.decode_groups = self._tile_groups(range(self.num_decodes), starts, seq_lens, table)
        elif self.num_decodes:
            self._plan_decodes(seq_lens[: self.num_decodes], table, cache, num_heads, last and last.decodes)
        self.prefill_groups = self._tile_groups(range(self.num_decodes, len(seq_lens)), starts, seq_lens, table)

    def _plan_decodes(
        self, seq_lens: np.ndarray, table: np.ndarray, cache: PagedKVCache, num_heads: int, last: DecodePlan | None
    ) -> None:
        size = self.block_size
        first = np.zeros_like(seq_lens) if self.window is None else np.maximum(seq_lens - self.window, 0)
        first_block = first // size
        counts = ceil_div(seq_lens, size) - first_block  # blocks that each sequence reads
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
        self.decodes.mask = upload(mask[:, None], device=self.device)[0]

    def _tile_groups(self, seqs: range, starts: np.ndarray, seq_lens: np.ndarray, table: np.ndarray) -> list[TileGroup]:
        """Tiles of these sequences. A tile reads the blocks of the sinks,
        and from block `first` on those of its windows."""
        groups, sink_blocks = defaultdict(list), ceil_div(self.sinks, self.block_size)
        for seq in seqs:
            before = seq_lens[seq] - (starts[seq + 1] - starts[seq])  # positions computed in earlier steps
            for row in range(starts[seq], starts[seq + 1], QUERY_TILE):
                count = min(QUERY_TILE, starts[seq + 1] - row)
                position = before + row - starts[seq]
                first = 0 if self.window is None else max(0, position + 1 - self.window) // self.block_size
                first, end = max(first, sink_blocks), ceil_div(position + count, self.block_size)
                num_blocks = min(end, sink_blocks) + max(0, end - first)
                groups[int(num_blocks).bit_length()].append((seq, row, count, position, first, num_blocks))
        planned = []
        for tiles in groups.values():
            most = max(1, GROUP_TOKENS // (max(tile[-1] for tile in tiles) * self.block_size))
            parts = (np.array(tiles[start : start + most]) for start in range(0, len(tiles), most))
            planned += [self._group(part, table, sink_blocks) for part in parts]
        return planned

    def _group(self, tiles: np.ndarray, table: np.ndarray, sink_blocks: int) -> TileGroup:
        seq, row, count, position, first, num_blocks = tiles.T
        within = np.arange(count.max())
        real = within < count[:, None]  # [num_tiles, tile_len]
        column = np.arange(num_blocks.max())
        # Of blocks, in their sequence.
        index = np.where(column < sink_blocks, column, first[:, None] + column - sink_blocks)
        blocks = np.where(column < num_blocks[:, None], table[seq[:, None], np.minimum(index, table.shape[1] - 1)], 0)
        key = index.repeat(self.block_size, axis=1) * self.block_size  # positions [num_tiles, keys]
        key += np.arange(key.shape[1]) % self.block_size
        query = position[:, None] + np.minimum(within, count[:, None] - 1)  # a missing query repeats the last one
        seen = key[:, None] <= query[:, :, None]
        if self.window is not None:
            seen &= (key[:, None] > query[:, :, None] - self.window) | (key[:, None] < self.sinks)
        query_rows = np.where(real, row[:, None] + within, 0)
        tile, place = np.nonzero(real)
        columns = upload(blocks, query_rows, seen[:, None], query_rows[real], tile, place, device=self.device)
        return TileGroup(*columns[:4], places=tuple(columns[4:]))
