"""A decoder in one call of C. Built in chapter 14.

Between two layers, and before and behind them, a Python program does little, but slowly: the weights have pushed it out
of the CPU's caches. With 30 layers that is 10% of a step of one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from minillm.kernels import native
from minillm.model import decoder_layer
from minillm.model.attention import AttentionBackend, can
from minillm.model.layers import Rotary
from minillm.model.packed import native_matrix

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch
    from minillm.model.decoder import Decoder

JOINED_LAYERS = True  # whether layers are computed together where they can: chapter 14 compares


class JoinedDecoder:
    """Computes what `Decoder.forward` says in one call, where that can be. It asks all modules anew in every step: one
    may have got a hook or other weights meanwhile, or have been told to run in parts."""

    def __init__(self):
        self.kept: tuple[list[object], native.Decoder | None] = [], None  # what it is made of, and itself

    def logits(
        self, decoder: Decoder, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None
    ) -> Tensor | None:
        """As `Decoder.forward`; None where the modules have to be called one by one."""
        whole = self._serving(decoder, batch, attention)
        if whole is None:
            return None
        if out is None:
            out = torch.empty(len(batch.logits_indices), decoder.config.vocab_size)
        attention.run_decoder(whole, decoder.embed(batch.token_ids), batch, out)
        return out

    def _serving(self, decoder: Decoder, batch: ForwardBatch, attention: AttentionBackend) -> native.Decoder | None:
        """What computes this batch in one call, adapters included."""
        if not (JOINED_LAYERS and decoder_layer.WHOLE_LAYERS and can(attention, "fused_layer")):
            return None
        layers, head, rotary = list(decoder.layers), decoder.lm_head, decoder.rotary
        if _has_any_global_hook() or any(map(_is_heard, (*layers, decoder.norm, head, rotary))):
            return None
        weights = [layer.whole for layer in layers]
        made_of = [*weights, decoder.norm.weight, head.panels, head.quantized, rotary]
        kept, whole = self.kept
        if list(map(id, kept)) != list(map(id, made_of)):
            whole = native_decoder_of(decoder)
            self.kept = made_of, whole  # at once: another thread may ask
        if batch.token_slots is not None and not all(layer.adapters for layer in weights):
            return None
        return whole


def _is_heard(module: nn.Module) -> bool:
    """Whether more than the module itself has a part in what it computes."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own)


def native_decoder_of(decoder: Decoder) -> native.Decoder | None:
    """What a call of C computes it with; None where there is more to it than C knows."""
    config, rotary, head = decoder.config, decoder.rotary, native_matrix(decoder.lm_head)
    if decoder.stream is not None or config.logit_scale != 1.0 or config.logit_softcap is not None:
        return None
    if type(rotary) is not Rotary or not isinstance(rotary.cos_scale, float):
        return None
    for at, layer in enumerate(decoder.layers):
        if layer.whole is None or layer.mixture is not None or layer.kind is not None or layer.index != at:
            return None
    if head is None or head.in_features != config.hidden_size or decoder.lm_head.bias is not None:
        return None
    angles = rotary.frequencies, rotary.sin_scale, rotary.cos_scale
    weights = [layer.whole for layer in decoder.layers]
    return native.Decoder.of(weights, decoder.norm.weight, *angles, head, config.rms_norm_eps)
