"""Weights larger than the GPU: the last layers stay in host memory and are streamed through two buffers.
Built in chapter 17.

    device   slot 0   | layer 20  |  layer 22  |  layer 24 ...   the matrices of a layer lie in the slot of its parity
             slot 1        | layer 21  |  layer 23  | ...
    copying           | 21   | 22   | 23   | 24   |              on a stream of its own, while the layer before computes

A step reads every streamed layer once over the bus, so it cannot take less than their bytes over its bandwidth. A large
batch shares that one reading, which is what makes streaming bearable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from minillm.device import pin_memory
from minillm.rounding import round_up

if TYPE_CHECKING:
    from minillm.model.decoder_layer import DecoderLayer

ALIGNMENT = 64  # elements: where a matrix in a slot may begin
FEWEST = 3  # layers: two of them fit into the slots anyway


class LayerStream:
    """The matrices of `layers` in host memory, page-locked where there is a GPU. Norms and biases stay on the device.

    A matrix of a streamed layer is a view of a slot, so what it holds is right only while `through` yields its layer.
    """

    def __init__(self, layers: Sequence[DecoderLayer], device: torch.device):
        self.index = {layer: index for index, layer in enumerate(layers)}
        self.linears = {linear for layer in layers for linear in layer.linears().values()}
        first = list(layers[0].linears().values())
        starts = [0]
        for linear in first:
            starts.append(starts[-1] + round_up(linear.plain.numel(), ALIGNMENT))
        dtype = first[0].plain.dtype
        self.host = torch.zeros(len(layers), starts[-1], dtype=dtype)
        self.slots = torch.zeros(2, starts[-1], dtype=dtype, device=device)
        self.layer_bytes = starts[-1] * dtype.itemsize
        self.holds: list[int | None] = [None, None]  # which layer a slot has, or is being given
        self.bytes_streamed = 0
        for index, layer in enumerate(layers):
            for linear, start in zip(layer.linears().values(), starts):
                part = slice(start, start + linear.plain.numel())
                self.host[index, part] = linear.plain.flatten()
                linear.plain = nn.Parameter(self.slots[index % 2, part].view(linear.plain.shape), requires_grad=False)
        self.copying: torch.cuda.Stream | None = None
        if device.type == "cuda":
            pin_memory(self.host)
            self.copying = torch.cuda.Stream(device)
            self.arrived = [torch.cuda.Event(), torch.cuda.Event()]

    def through(self, layers: Iterable[DecoderLayer]) -> Iterator[DecoderLayer]:
        """The layers in order, each when its matrices are there. What comes next is on its way meanwhile;
        at the end of a step, that is the beginning of the next one."""
        for layer in layers:
            index = self.index.get(layer)
            if index is None:
                yield layer
                continue
            slot = index % 2
            if self.holds[slot] != index:  # the very first step, or one after a step that failed
                self._fetch(index)
            if self.copying is not None:
                torch.cuda.current_stream().wait_event(self.arrived[slot])
            yield layer
            self._fetch(index + 2 if index + 2 < len(self.index) else slot)

    def _fetch(self, index: int) -> None:
        slot = index % 2
        self.holds[slot] = index
        self.bytes_streamed += self.layer_bytes
        if self.copying is None:
            self.slots[slot].copy_(self.host[index])
            return
        self.copying.wait_stream(torch.cuda.current_stream())  # the layer that had the slot may still be computing
        with torch.cuda.stream(self.copying):
            self.slots[slot].copy_(self.host[index], non_blocking=True)
            self.arrived[slot].record()


def offload(layers: Sequence[DecoderLayer], num_bytes: int, device: torch.device) -> LayerStream:
    """Keep as many of the last layers on the host as `num_bytes` hold, and stream them; the matrices of the others go
    to `device`, if they are not there. Raises ValueError when that saves nothing, or for low-bit weights."""
    if any(linear.quantized is not None for layer in layers for linear in layer.linears().values()):
        raise ValueError(
            f"cpu_offload_bytes={num_bytes} streams plain weights, this model's are quantized; leave one of the two out"
        )
    if any(".experts." in place for layer in layers for place in layer.linears()):
        raise ValueError(
            f"cpu_offload_bytes={num_bytes} streams layers that are all alike, this model has experts; leave it out"
        )
    layer_bytes = sum(linear.plain.numel() * linear.plain.element_size() for linear in layers[0].linears().values())
    count = min(len(layers), num_bytes // layer_bytes)
    if len(layers) < FEWEST:
        raise ValueError(
            f"cpu_offload_bytes={num_bytes} saves nothing: the model has {len(layers)} layers, "
            "and two stay on the device; leave it out"
        )
    if count < FEWEST:
        raise ValueError(
            f"cpu_offload_bytes={num_bytes} holds {count} of {len(layers)} layers of {layer_bytes} bytes, "
            f"and two layers' room stays on the device to stream through: fewer than {FEWEST} save nothing; "
            f"raise it to {FEWEST * layer_bytes} or leave it out"
        )
    for layer in layers[: len(layers) - count]:
        for linear in layer.linears().values():
            linear.move_to(device)
    return LayerStream(layers[len(layers) - count :], device)
