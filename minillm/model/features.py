"""Hidden states of some layers, copied while a forward pass makes them. Built in chapter 18.

layer 1 -> layer 2 -> layer 3 -> layer 4 -> logits
       |          |                     |
       +--- low   +--- mid              +--- high          what a draft head reads of its target (EAGLE-3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.model.decoder import Decoder


class FeatureTap:
    """Keeps the residual stream behind the first `layers[i]` layers of `model`, for the tokens of the last pass.

    `states` [most_tokens, len(layers) * hidden_size] stays where it is, so that recorded steps (chapter 14) write to it
    too; a pass of more tokens leaves it as it was. A model has one tap: a new one takes the place of the old one.
    Raises ValueError for a layer that the model does not have.
    """

    def __init__(self, model: Decoder, layers: Sequence[int], most_tokens: int):
        size = model.config.hidden_size
        if wrong := [after for after in layers if not 1 <= after <= len(model.layers)]:
            raise ValueError(
                f"feature_layers={list(layers)} names {wrong[0]}; the model has {len(model.layers)} layers, "
                f"so 1 to {len(model.layers)} are allowed"
            )
        if (old := getattr(model, "tap", None)) is not None:
            old.remove()
        self.layers, self.model = tuple(layers), model
        self.states = torch.zeros(most_tokens, len(layers) * size, dtype=model.dtype, device=model.device)
        self.handles = []
        for place, after in enumerate(layers):
            take, layer = partial(_take, self.states[:, place * size : (place + 1) * size]), model.layers[after - 1]
            self.handles.append(layer.register_forward_hook(partial(_take_output, take)))
            layer.tap = take  # fused steps do not call the layer: `minillm.model.fused`
        model.tap = self

    def remove(self) -> None:
        """Let the model's passes copy nothing any more."""
        for handle in self.handles:
            handle.remove()
        for after in self.layers:
            self.model.layers[after - 1].tap = None
        self.model.tap = None


def _take(kept: Tensor, hidden: Tensor) -> None:
    if len(hidden) <= len(kept):
        kept[: len(hidden)].copy_(hidden)


def _take_output(take: Callable[[Tensor], None], layer: object, inputs: object, hidden: Tensor) -> None:
    take(hidden)
