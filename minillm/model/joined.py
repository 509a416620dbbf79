"""All layers of a decoder in one call of C. Built in chapter 14.

Between two layers a Python program does little, but slowly: the layer's weights have pushed it out of the CPU's caches.
With 30 layers that is 5% of a step of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from minillm.kernels import native
from minillm.model.attention import AttentionBackend, can

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch
    from minillm.model.decoder_layer import DecoderLayer

JOINED_LAYERS = True  # whether layers are computed together where they can: chapter 14 compares


class JoinedLayers:
    """Layers that are called as one. It asks them anew in every step: a layer may have got a hook meanwhile, or have
    been told to run in parts."""

    def __init__(self, layers: Sequence[DecoderLayer]):
        self.layers = layers
        self.weights: list[native.Layer] = []
        self.places: native.Places | None = None  # of `weights`, as C reads them

    def in_order(self, *step) -> Iterable[DecoderLayer | JoinedLayers]:
        """The layers; or itself, where it can compute the `step`, attention and batch."""
        return (self,) if step and self.serve(*step) else self.layers

    def serve(self, attention: AttentionBackend, batch: ForwardBatch) -> bool:
        """Whether one call computes what `batch` needs."""
        if not (JOINED_LAYERS and can(attention, "fused_layer")):
            return False
        weights = [layer.whole for layer in self.layers if _joins(layer, batch)]
        if len(weights) < len(self.layers):
            return False
        if self.weights != weights:
            self.weights, self.places = weights, native.Places.of(weights)
        return True

    def __call__(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionBackend, batch: ForwardBatch
    ) -> Tensor:
        """As a `DecoderLayer`; only where they `serve`."""
        attention.run_layers(self.places, hidden, rotary, batch)
        return hidden


def _joins(layer: DecoderLayer, batch: ForwardBatch) -> bool:
    """Whether a call that computes other layers too can compute this one, which nothing listens to."""
    is_plain = layer.kind is None and layer.mixture is None
    return is_plain and not layer._forward_hooks and not layer._forward_pre_hooks and layer.runs_whole(batch)
