"""All layers of a decoder in one call of C. Built in chapter 14.

Between two layers a Python program does little, but slowly: the layer's weights have pushed it out of the CPU's caches.
With 30 layers that is 5% of a step of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

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
        self.kept: tuple[list[native.Layer], native.Places] = [], native.Places.of([])  # weights, and where they lie

    def in_order(self, *step) -> Iterable[DecoderLayer | JoinedLayers]:
        """The layers; or itself, where it can compute the `step`, attention and batch."""
        return (self,) if step and self.serves(*step) else self.layers

    def serves(self, attention: AttentionBackend, batch: ForwardBatch) -> bool:
        """Whether one call computes what `batch` needs."""
        if not (JOINED_LAYERS and can(attention, "fused_layer")) or _has_any_global_hook():
            return False
        if not all(_joins(layer, at, batch) for at, layer in enumerate(self.layers)):
            return False
        weights = [layer.whole for layer in self.layers]
        if self.kept[0] != weights:
            self.kept = weights, native.Places.of(weights)  # at once: another thread may ask
        return True

    def __call__(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionBackend, batch: ForwardBatch
    ) -> Tensor:
        """As a `DecoderLayer`; only where it `serves`."""
        attention.run_layers(self.kept[1], hidden, rotary, batch)
        return hidden


def _joins(layer: DecoderLayer, at: int, batch: ForwardBatch) -> bool:
    """Whether a call that computes other layers too can compute this one, number `at`, which nothing listens to."""
    is_plain = layer.kind is None and layer.mixture is None and layer.index == at and "forward" not in layer.__dict__
    return is_plain and not layer._forward_hooks and not layer._forward_pre_hooks and layer.runs_whole(batch)
