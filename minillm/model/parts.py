"""Low-bit weights, put where the decoder multiplies with them. Built in chapter 15.

A checkpoint holds q, k and v apart; the decoder multiplies with one matrix of all three. Parts that are written alike
(same format, same groups) stay as they are, one under the other:

    q_proj.weight   [ q rows, in ]  ┐
    k_proj.weight   [ k rows, in ]  ├─ qkv_proj: one quantized weight [ q + k + v rows, in ]
    v_proj.weight   [ v rows, in ]  ┘

Parts that differ (v in more bits than q) are dequantized, all of them: the product is right, if not small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.model.decoder import Decoder
from minillm.model.layers import Linear
from minillm.quantization.formats import QuantizedWeight, concatenate
from minillm.quantization.linear import QuantizedLinear

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class QuantizedPart:
    """One tensor of a low-bit checkpoint; `order` is the order in which its columns take the inputs,
    if not theirs."""

    weight: QuantizedWeight
    order: Tensor | None = None  # int64 [in_features]

    @property
    def shape(self) -> torch.Size:
        return self.weight.codes.shape

    def __getitem__(self, rows: Tensor | slice) -> QuantizedPart:
        """Some of the outputs, or all in another order."""
        return QuantizedPart(self.weight[rows], self.order)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out_features, in_features], columns in the model's order."""
        return QuantizedLinear(self.weight, order=self.order).dequantize(dtype)


def install(decoder: Decoder, parts: dict[str, QuantizedPart]) -> Iterator[tuple[str, Tensor]]:
    """Give `decoder`, whose matrices wait on "meta", those whose parts are all there and alike; hand back the other
    parts dequantized, to be filled in by name like any plain tensor.

    An embedding is looked up, not multiplied with, so it is dequantized too, unless it is the output matrix as well.
    """
    parts, views = dict(parts), decoder.checkpoint_views()
    tied = decoder.config.tie_word_embeddings
    if tied and EMBEDDING in parts and parts[EMBEDDING].shape == views[EMBEDDING].shape:
        decoder.lm_head.quantize(QuantizedLinear(parts.pop(EMBEDDING).weight.to(decoder.device)))
        decoder.embed_tokens = None
    for linear, names in _matrices(decoder):
        whole = _join([parts.get(name) for name in names], [views[name].shape for name in names if name in views])
        if whole is not None:
            order = None if whole.order is None else whole.order.to(decoder.device)
            linear.quantize(QuantizedLinear(whole.weight.to(decoder.device), order=order))
            for name in names:
                del parts[name]
        elif linear.plain is not None:
            linear.move_to(decoder.device)
    return ((name, part.dequantize()) for name, part in parts.items())


def _matrices(decoder: Decoder) -> Iterator[tuple[Linear, list[str]]]:
    """Every product of the decoder, with the checkpoint's names of its weight, in the order of its rows."""
    for index, layer in enumerate(decoder.layers):
        for place, linear in layer.linears().items():
            yield linear, [f"model.layers.{index}.{name}.weight" for name in linear.checkpoint_rows(place)]
    if not decoder.config.tie_word_embeddings:
        yield decoder.lm_head, ["lm_head.weight"]


def _join(parts: list[QuantizedPart | None], shapes: list[torch.Size]) -> QuantizedPart | None:
    """The parts as one; None where one is missing, has another shape, or differs in format, groups or order."""
    first = parts[0]
    if None in parts or [part.shape for part in parts] != shapes:
        return None
    for part in parts[1:]:
        weight, wanted = part.weight, first.weight
        alike = weight.format == wanted.format and weight.scales.shape[1] == wanted.scales.shape[1]
        if not alike or weight.scales.dtype != wanted.scales.dtype or not _same(part.order, first.order):
            return None
    return QuantizedPart(concatenate([part.weight for part in parts]), first.order)


def _same(order: Tensor | None, other: Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)
