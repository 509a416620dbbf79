"""NativeAttention: attention over pages by a CPU kernel that reads them in place. Built in chapter 14.

Its PyTorch twin is `TorchAttention`, which says the same in tensor operations and serves where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from minillm.kernels import native, native_decoder, native_structs
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.retention import SinkTurn

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch


class NativeAttention:
    """The AttentionBackend over a `PagedKVCache` in host memory, for prompts and single tokens alike: no padding, no
    gathered copy, no score matrix; 8-bit pages are read as they are. Raises ValueError where there are no kernels for
    the cache."""

    fused_layer = True

    def __init__(self, cache: PagedKVCache, layer_windows: Sequence[int | None], sink_turn: SinkTurn | None = None):
        if not self.serves(cache):
            where = f"{cache.model_dtype} on {cache.keys[0].device}"
            raise ValueError(
                f"attention_backend='native' has no kernels for {where}: "
                "they need Linux, a C compiler with OpenMP, and float32 or bfloat16 on a CPU; "
                "use attention_backend='torch'"
            )
        self.cache = cache
        self.kernels = native.library(cache.model_dtype, cache.dtype if cache.quantized else None)
        self.sink_turn = sink_turn
        self._kept: tuple[ForwardBatch, native.Sequences] | None = None
        sinks = sink_turn.policy.sinks if sink_turn else 0
        scales = zip(cache.key_scales, cache.value_scales) if cache.quantized else [None] * len(cache.keys)
        self.pages = [native.Pages.of(*layer, sinks) for layer in zip(cache.keys, cache.values, scales, layer_windows)]
        self.places = native_structs.addresses_of(self.pages), self.pages[0].dtype

    @staticmethod
    def serves(cache: PagedKVCache) -> bool:
        """Whether there are kernels for a model and a cache of these dtypes on this machine."""
        kv_dtype = cache.dtype if cache.quantized else None
        return cache.keys[0].is_cpu and native.library(cache.model_dtype, kv_dtype) is not None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`."""
        return native.paged_attention(
            *map(native.heads_side_by_side, (q, k, v)),
            self.pages[layer],
            self._sequences(batch, layer),
            self._turn(batch, layer),
        )

    def run_layer(
        self, weights: native.Layer, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int, batch: ForwardBatch
    ):
        """A whole decoder layer in one call, in place on `hidden` [num_tokens, hidden_size]."""
        sequences, turn = self._sequences(batch, layer), self.sink_turn and self._turn(batch, layer)
        native.decoder_layer(weights, hidden, *rotary, self.pages[layer], sequences, turn)

    def run_decoder(self, weights: native.DecoderWeights, hidden: Tensor, batch: ForwardBatch, out: Tensor):
        """A whole Decoder: from its embeddings, which are overwritten, to logits in `out`, [num_logits, vocab_size]."""
        sequences, turn, wanted = self._sequences(batch, 0), self._turn(batch, 0), batch.logits_indices
        native_decoder.logits(weights, hidden, batch.positions, *self.places, sequences, turn, wanted, out)

    def _sequences(self, batch: ForwardBatch, layer: int) -> native.Sequences:
        """The same for all layers of a step: made by layer 0."""
        kept = self._kept
        if layer == 0 or kept is None or kept[0] is not batch:
            index = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
            token_slots = None if batch.token_slots is None else batch.token_slots.slots
            kept = self._kept = (batch, native.Sequences.of(*index, batch.max_seq_len, token_slots))
        return kept[1]

    def _turn(self, batch: ForwardBatch, layer: int) -> Tensor | None:
        return self.sink_turn and self.sink_turn.of(batch, layer)
