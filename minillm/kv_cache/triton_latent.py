"""TritonLatentAttention: latents in pages, single tokens by our own GPU kernel. Built in chapter 13.

    one token a sequence    latent_decode     reads the latents of a page once, for 16 heads at a time
    prompts                 LatentAttention   gathers them and leaves the products to torch

A prompt has work enough to pay for the copy of its latents. A decode step has not: gathering would write and read again
all that the kernel reads once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from minillm.device import triton_has_tensor_cores
from minillm.kernels.decode_plan import DecodePlan, plan_decode
from minillm.kernels.latent_decode import MOST_VALUES, PAGE_DTYPES, head_tiles, latent_decode
from minillm.kv_cache.latent import LatentAttention, LatentKVCache
from minillm.kv_cache.triton_attention import check_runs_on, count_decodes, count_sms

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch


class TritonLatentAttention(LatentAttention):
    """The AttentionBackend over a `LatentKVCache`, on a GPU, or interpreted on a CPU.

    Raises ValueError where no kernel can run, for windows, and for what `why_not` names.
    """

    def __init__(self, cache: LatentKVCache, layer_windows: Sequence[int | None], num_heads: int, value_dim: int):
        check_runs_on(cache.keys[0])
        if (why := self.why_not(cache, value_dim)) is not None:
            raise ValueError(f"attention_backend='triton' has no kernels for {why}; use attention_backend='torch'")
        if any(window is not None for window in layer_windows):
            raise ValueError(
                f"attention_backend='triton' reads all latents of a text, not layer_windows={list(layer_windows)}; "
                "use attention_backend='torch'"
            )
        super().__init__(cache, layer_windows, num_heads)
        self.num_sms = count_sms(cache.keys[0])
        self._decodes: tuple[ForwardBatch, DecodePlan] | None = None  # of the last batch

    @staticmethod
    def why_not(cache: LatentKVCache, value_dim: int) -> str | None:
        """What of this cache the kernel cannot read, in words; None where it reads all of it."""
        latents = cache.keys[0]
        if latents.dtype not in PAGE_DTYPES:
            return f"latents in pages of {latents.dtype}"
        if value_dim > MOST_VALUES:
            return f"latents whose values have {value_dim} columns, more than {MOST_VALUES}"
        if latents.is_cuda and not triton_has_tensor_cores(latents.device):
            return "latents on a GPU whose tensor cores Triton cannot use"
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `LatentAttention`."""
        self.cache.write(layer, k, None, batch.slot_mapping)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        num_decodes = count_decodes(batch)
        if num_decodes:
            rows = slice(num_decodes)
            scales = self.cache.key_scales[layer] if self.cache.quantized else None
            latent_decode(
                q[rows], self.cache.keys[layer], batch.seq_lens[rows], batch.block_table[rows], v.shape[-1],
                out=out[rows], scales=scales, plan=self._decode_plan(layer, batch, num_decodes),
            )  # fmt: skip
        if num_decodes < batch.num_tokens:
            self._attend_tiles(q, layer, batch, self._plan(None, batch).prefill_groups, out)
        return out

    def _decode_plan(self, layer: int, batch: ForwardBatch, num_decodes: int) -> DecodePlan:
        """Made by the first layer, for all layers of a step."""
        if layer == 0 or self._decodes is None or self._decodes[0] is not batch:
            seq_lens, tiles = batch.seq_lens[:num_decodes], head_tiles(self.num_heads)
            self._decodes = batch, plan_decode(seq_lens, tiles, batch.max_seq_len, self.num_sms)
        return self._decodes[1]
