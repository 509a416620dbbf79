"""A decoder in one call of C. Built in chapter 14.

Between two layers, and before and behind them, a Python program does little, but slowly: the weights have pushed it out
of the CPU's caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from minillm.kernels import native
from minillm.model import decoder_layer
from minillm.model.attention import AttentionBackend, can
from minillm.model.layers import Linear, RMSNorm, Rotary
from minillm.model.packed import native_matrix

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch
    from minillm.model.decoder import Decoder

JOINED_MODEL = True  # whether the whole model is one call where it can be: chapter 14 compares


class JoinedDecoder:
    """Computes what `Decoder.forward` says in one call, where that can be. It looks at the modules anew in every step:
    one may have got a hook or other weights meanwhile, or have been told to run in parts."""

    def __init__(self):
        self.made: tuple[list[object], native.DecoderWeights | None] = [], None  # of what, and what C reads

    def logits(
        self, decoder: Decoder, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None
    ) -> Tensor | None:
        """As `Decoder.forward`; None where the modules have to be called one by one."""
        weights = self._weights(decoder, batch, attention)
        if weights is None:
            return None
        logits = _room(out, len(batch.logits_indices), decoder.config.vocab_size)
        attention.run_decoder(weights, decoder.embed(batch.token_ids), batch, logits)
        return logits if out is None or logits is out else out.copy_(logits)

    def _weights(
        self, decoder: Decoder, batch: ForwardBatch, attention: AttentionBackend
    ) -> native.DecoderWeights | None:
        """What C computes this batch with, adapters included."""
        if not (JOINED_MODEL and decoder_layer.WHOLE_LAYERS and can(attention, "fused_layer")):
            return None
        if decoder.stream is not None or not (_is_index(batch.positions) and _is_index(batch.logits_indices)):
            return None
        layers, around = list(decoder.layers), (decoder.norm, decoder.rotary, decoder.lm_head)
        if tuple(map(type, around)) != (RMSNorm, Rotary, Linear) or "logits" in decoder.__dict__:
            return None
        if _has_any_global_hook() or any(map(_is_changed, (*layers, *around, decoder.lm_head.quantized))):
            return None
        made_of = [*(layer.whole for layer in layers), *_parts_of(*around)]
        known, weights = self.made
        if made_of != known:
            weights = decoder_weights_of(decoder)
            self.made = made_of, weights  # at once: another thread may ask
        if weights is None or (batch.token_slots is not None and not all(layer.whole.adapters for layer in layers)):
            return None
        return weights


def _room(out: Tensor | None, *shape: int) -> Tensor:
    """Where C writes: `out` if that is what C knows."""
    if out is not None and out.is_cpu and out.dtype is torch.float32 and out.is_contiguous() and out.shape == shape:
        return out
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype is torch.int64 and tensor.dim() == 1 and tensor.is_contiguous()


def _is_changed(module: nn.Module | None) -> bool:
    """Whether a hook, or another `forward`, has a part in what it computes."""
    own = {} if module is None else module.__dict__
    return bool(own.get("_forward_hooks") or own.get("_forward_pre_hooks") or "forward" in own)


def _parts_of(norm: RMSNorm, rotary: Rotary, head: Linear) -> list[object]:
    """What may change of them, by value or by its place in memory."""
    tensors = norm.weight, rotary.frequencies, rotary.sin_scale, head.panels, head.bias
    places = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    scale = rotary.cos_scale if isinstance(rotary.cos_scale, float) else None
    return [*places, scale, norm.eps, head.out_features, head.quantized and native_matrix(head)]


def decoder_weights_of(decoder: Decoder) -> native.DecoderWeights | None:
    """What a call of C computes it with; None where there is more to it than C knows."""
    config, norm, rotary, head = decoder.config, decoder.norm, decoder.rotary, decoder.lm_head
    matrix = native_matrix(head)
    if matrix is None or (matrix.in_features, matrix.out_features) != (config.hidden_size, config.vocab_size):
        return None
    if head.bias is not None or config.logit_scale != 1.0 or config.logit_softcap is not None:
        return None
    if not isinstance(rotary.cos_scale, float):
        return None
    for at, layer in enumerate(decoder.layers):
        if layer.whole is None or layer.mixture is not None or layer.kind is not None or layer.index != at:
            return None
    angles = rotary.frequencies, rotary.sin_scale, rotary.cos_scale
    weights = native.DecoderWeights.of(
        [layer.whole for layer in decoder.layers], norm.weight, norm.eps, *angles, matrix
    )
    weights.head_memory = head.panels if head.quantized is None else head.quantized.matrix
    return weights
