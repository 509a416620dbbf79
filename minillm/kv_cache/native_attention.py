"""NativeAttention: attention over pages by a CPU kernel that reads them in place. Built in chapter 14.

Its PyTorch twin is `TorchAttention`, which says the same in tensor operations and serves where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kv_cache.paged import PagedKVCache

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch


class NativeAttention:
    """The AttentionBackend over a `PagedKVCache` in host memory, for prompts and single tokens alike: no padding, no
    gathered copy, no score matrix. Raises ValueError where there are no kernels for the cache."""

    def __init__(self, cache: PagedKVCache, layer_windows: Sequence[int | None]):
        if not native.serves(cache.keys[0]):
            where = f"{cache.keys[0].dtype} on {cache.keys[0].device}"
            raise ValueError(
                f"attention_backend='native' has no kernels for {where}: they need Linux, a C compiler with OpenMP, and "
                f"float32 or bfloat16 on a CPU; use attention_backend='torch'"
            )
        self.cache = cache
        self.layer_windows = layer_windows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`."""
        return native.paged_attention(
            _heads_side_by_side(q),
            _heads_side_by_side(k),
            _heads_side_by_side(v),
            self.cache.keys[layer],
            self.cache.values[layer],
            _plain(batch.query_start_loc),
            _plain(batch.seq_lens),
            _plain(batch.block_table),
            _plain(batch.slot_mapping),
            batch.max_seq_len,
            self.layer_windows[layer],
        )


    def run_layer(self, weights: native.Layer, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int, batch: ForwardBatch):
        """A whole decoder layer in one call, in place on `hidden` [num_tokens, hidden_size]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        index = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
        native.decoder_layer(weights, hidden, *rotary, keys, values, *map(_plain, index), batch.max_seq_len)


def _heads_side_by_side(x: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim] as the kernel reads it: any distance from token to token, none within."""
    head_dim = x.shape[2]
    return x if x.stride(2) == 1 and x.stride(1) == head_dim else x.contiguous()


def _plain(index: Tensor) -> Tensor:
    return index if index.dtype is torch.int64 and index.is_contiguous() else index.long().contiguous()
