"""NativeLatentAttention: latents in pages, single tokens by a CPU kernel that reads them in place. Built in chapter 14.

Its PyTorch twin is `LatentAttention`, to which prompts are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from minillm.kernels import native
from minillm.kernels.native_structs import LANES
from minillm.kv_cache.latent import LatentAttention, LatentKVCache
from minillm.kv_cache.triton_attention import count_decodes
from minillm.rounding import round_up

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch


class NativeLatentAttention(LatentAttention):
    """The AttentionBackend over a `LatentKVCache` in host memory. Raises ValueError where there is no kernel for it."""

    def __init__(self, cache: LatentKVCache, layer_windows: Sequence[int | None], num_heads: int, value_dim: int):
        if (why := self.why_not(cache, value_dim)) is not None:
            raise ValueError(f"attention_backend='native' has no kernels for {why}; use attention_backend='torch'")
        if any(window is not None for window in layer_windows):
            raise ValueError(
                f"attention_backend='native' reads all latents of a text, not layer_windows={list(layer_windows)}; "
                "use attention_backend='torch'"
            )
        super().__init__(cache, layer_windows, num_heads)
        self.pages = [native.Latents.of(latents, value_dim) for latents in cache.keys]
        self._kept: tuple[ForwardBatch, native.Sequences] | None = None

    @staticmethod
    def why_not(cache: LatentKVCache, value_dim: int) -> str | None:
        """What of this cache and machine the kernel does not serve, in words; None where it serves."""
        latents = cache.keys[0]
        if not latents.is_cpu or native.library(cache.model_dtype) is None:
            return f"{cache.model_dtype} on {latents.device} (they need Linux, a C compiler with OpenMP, and a CPU)"
        if cache.quantized:
            return f"latents in pages of {latents.dtype}"
        dim = latents.shape[-1]
        if dim % 2 or round_up(value_dim, LANES) > dim:
            return f"latents of {dim} columns, {value_dim} of them values"
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `LatentAttention`."""
        num_decodes = count_decodes(batch)
        k = k if k.stride(-1) == 1 else k.contiguous()
        out = native.latent_attention(q.contiguous(), k, self.pages[layer], self._sequences(batch, layer), num_decodes)
        if num_decodes < batch.num_tokens:
            self._attend_tiles(q, layer, batch, self._plan(None, batch).prefill_groups, out)
        return out

    def _sequences(self, batch: ForwardBatch, layer: int) -> native.Sequences:
        """The same for all layers of a step: made by layer 0."""
        if layer == 0 or self._kept is None or self._kept[0] is not batch:
            index = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
            self._kept = batch, native.Sequences.of(*index, batch.max_seq_len)
        return self._kept[1]
