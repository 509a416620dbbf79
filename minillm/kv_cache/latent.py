"""Latents in pages, and attention over them: one vector a token, read by all heads. Built in chapter 13.

    keys[layer]         [num_blocks + 1, block_size, latent_dim]       a latent and its rotary key, see `model.mla`
    key_scales[layer]   [num_blocks + 1, block_size] float32           in 8 bits only

There are no values: they are the first columns of the latents. All heads of a token read one vector, so they are rows
of one matrix product, and a page is gathered once for all of them:

    queries [heads, latent_dim] @ latents.T [latent_dim, positions] -> softmax -> @ latents -> first columns
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from minillm.kv_cache.paged import PagedKVCache, as_bytes
from minillm.kv_cache.quantized import dequantize_vectors, quantize_vectors
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.torch_plan import TileGroup

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch


class LatentKVCache(PagedKVCache):
    """A `PagedKVCache` of one latent per token; made with the same arguments, `num_kv_heads` being 1."""

    def shapes_of_a_block(self, num_kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads={num_kv_heads} of latents is not allowed: all heads read the same one")
        shapes: dict[str, tuple[int, ...]] = {"keys": (self.block_size, head_dim)}
        return shapes | {"key_scales": (self.block_size,)} if self.quantized else shapes

    @property
    def in_place(self) -> bool:
        return False

    def write(self, layer: int, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        """Put each token's latent k [num_tokens, 1, latent_dim] into its slot [num_tokens] int64; v is part of it."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        latents = k[:, 0]
        if self.quantized:
            latents, self.key_scales[layer][blocks, offsets] = quantize_vectors(latents, self.dtype)
        as_bytes(self.keys[layer])[blocks, offsets] = as_bytes(latents)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """A copy of the latents of some blocks, in the model's dtype: [len(blocks), block_size, latent_dim]."""
        latents = as_bytes(self.keys[layer]).index_select(0, blocks).view(self.dtype)
        if not self.quantized:
            return latents
        return dequantize_vectors(latents, self.key_scales[layer][blocks][..., None], self.model_dtype)


class LatentAttention(TorchAttention):
    """The AttentionBackend over a `LatentKVCache`, absorbed for prompts and single tokens alike."""

    cache: LatentKVCache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`: k are latents, v their first columns."""
        plan = self._plan(self.layer_windows[layer], batch)
        self.cache.write(layer, k, None, batch.slot_mapping)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        self._attend_tiles(q, layer, batch, plan.decode_groups + plan.prefill_groups, out)
        return out

    def _attend_tiles(self, q: Tensor, layer: int, batch: ForwardBatch, groups: list[TileGroup], out: Tensor) -> None:
        for group in groups:
            latents = self.cache.gather(layer, group.block_table.flatten())
            latents = latents.view(len(group.block_table), -1, q.shape[-1])
            found = latent_attention(q[group.query_rows], latents, group.seen, out.shape[-1])
            out[group.rows] = found[group.places]


def latent_attention(q: Tensor, latents: Tensor, seen: Tensor, value_dim: int) -> Tensor:
    """Absorbed attention of some sequences: [num_seqs, num_queries, num_heads, value_dim].

    q [num_seqs, num_queries, num_heads, latent_dim]; latents [num_seqs, positions, latent_dim]; seen bool
    [num_seqs, 1, num_queries, positions]. Scores are divided by sqrt(latent_dim). The latents are keys and values: what
    attention makes of the columns from `value_dim` on is dropped, which is cheaper than a copy without them.
    """
    num_seqs, num_queries, num_heads, latent_dim = q.shape
    rows = q.reshape(num_seqs, 1, num_queries * num_heads, latent_dim)
    mask = seen[:, :, :, None].expand(-1, -1, -1, num_heads, -1).reshape(num_seqs, 1, num_queries * num_heads, -1)
    shared = latents[:, None]
    out = F.scaled_dot_product_attention(rows, shared, shared, attn_mask=mask)
    return out.view(num_seqs, num_queries, num_heads, latent_dim)[..., :value_dim]
