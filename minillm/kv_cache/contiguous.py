"""KV cache, contiguous: one growing sequence. Built in chapter 03.

    keys[layer]   | 0 | 1 | 2 | 3 | 4 | . | . | . |     max_len positions are reserved at once,
                    ^---- length ---^   ^-- empty     whether the sequence ever needs them or not

Reserving is what makes it simple, and what chapter 06 does away with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.softcap import explicit_attention

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch
    from minillm.model.config import ModelConfig


class ContiguousKVCache:
    """Keys and values of one sequence, for every layer; `length` positions are valid. With `value_dim` the values are
    the first so many columns of the keys, and take no memory: latent attention."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        value_dim: int | None = None,
    ):
        shape = (num_layers, max_len, num_kv_heads, head_dim)
        keys = torch.empty(shape, dtype=dtype, device=device)
        values = torch.empty_like(keys) if value_dim is None else keys[..., :value_dim]
        self.keys, self.values = keys.unbind(), values.unbind()
        self.max_len = max_len
        self.num_bytes = keys.nbytes + (values.nbytes if value_dim is None else 0)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write k and v, [num_tokens, num_kv_heads, head_dim], at positions `start` onwards.

        Returns views of all keys and values of that layer so far, [start + num_tokens, num_kv_heads, head_dim].
        Positions from `start` on that were there are overwritten. Raises ValueError beyond `max_len`, or when
        `start` would leave a hole.
        """
        end = start + k.shape[0]
        if end > self.max_len:
            raise ValueError(f"{end} positions do not fit a cache of max_len={self.max_len}; make it larger")
        # Within a step the first layer moves `length` on, so the later ones see it at `end` already.
        if start > self.length:
            raise ValueError(f"start={start} leaves a hole: only {self.length} positions are cached")
        keys, values = self.keys[layer], self.values[layer]
        keys[start:end] = k
        values[start:end] = v
        self.length = end
        return keys[:end], values[:end]

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on; nothing is moved or cleared."""
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate({length}): the cache holds {self.length} positions, it can only shrink")
        self.length = length


class ContiguousAttention:
    """The AttentionBackend over a `ContiguousKVCache`: torch's own attention on views of the cache."""

    def __init__(self, cache: ContiguousKVCache, config: ModelConfig):
        self.cache = cache
        self.layer_windows, self.softcap = config.layer_windows, config.attention_softcap
        self._masks: dict[tuple, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`. Raises ValueError for more than one sequence."""
        if batch.num_seqs != 1:
            raise ValueError(f"a contiguous cache holds 1 sequence, the batch has {batch.num_seqs}")
        num_tokens, num_heads, head_dim = q.shape
        end = batch.max_seq_len
        keys, values = self.cache.append(layer, k, v, end - num_tokens)
        window = self.layer_windows[layer]
        if window is not None and end - num_tokens + 1 > window:
            # What even the first query cannot see is not read at all.
            first = end - num_tokens + 1 - window
            keys, values = keys[first:], values[first:]
        if self.softcap is not None:
            seen = _seen(num_tokens, len(keys), window, q.device)
            heads_first = (x.transpose(0, 1) for x in (q, keys, values))
            return explicit_attention(*heads_first, seen, head_dim**-0.5, self.softcap).transpose(0, 1)
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, num_kv_heads, seq_len, head_dim]
        if num_tokens == 1:
            # The one query sees every key, so the heads that share a KV head may pose as its queries: no copy of K.
            grouped = q.reshape(1, keys.shape[1], -1, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(1, num_heads, -1)
        mask = self._mask(num_tokens, keys.shape[2], window, q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _mask(self, num_queries: int, seq_len: int, window: int | None, device: torch.device) -> Tensor | None:
        """Who sees whom, [num_queries, seq_len]; None where plain causality says it all. Kept for the other layers."""
        if num_queries == seq_len and (window is None or window >= seq_len):
            return None
        key = (num_queries, seq_len, window)
        if key not in self._masks:
            mask = _seen(num_queries, seq_len, window, device)
            self._masks = {key: mask} if len(self._masks) > 1 else self._masks | {key: mask}
        return self._masks[key]


def _seen(num_queries: int, seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """True where a query may look, [num_queries, seq_len]; the queries are the last positions."""
    query_position = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    distance = query_position - torch.arange(seq_len, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
