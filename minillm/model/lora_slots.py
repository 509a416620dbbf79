"""The adapters on the device: a batch slot each, side by side for every matrix. Built in chapter 23.

    q_proj of layer 0     lora_a [max_loras, max_rank, in_features]      lora_b [max_loras, out_features, max_rank]
                          slot 0 | slot 1 | ...                          beyond an adapter's rank there are zeros

The base product of a step is one for all its tokens; each token then adds the product of its own adapter, whose slot
`ForwardBatch.token_slots` names (Punica, Chen et al. 2023; S-LoRA, Sheng et al. 2023).

With tensor parallelism each rank keeps its own rows of the weight. Where these are outputs (q, k, v, gate, up), A is
whole on each rank and B is cut by rows; where they are inputs (o, down), A is cut by columns and B is whole, and the
sum over the ranks that the base product needs adds up the adapters' products too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minillm.kernels.lora import add_lora_
from minillm.model.decoder import Decoder
from minillm.model.lora_adapter import Adapter, Shapes, shapes_of


class AdaptedPart:
    """One matrix of a checkpoint, which is all of a `Linear` or some rows of it, with the adapters that change it."""

    def __init__(self, rows: slice, lora_a: Tensor, lora_b: Tensor):
        self.rows, self.lora_a, self.lora_b = rows, lora_a, lora_b
        self.users: set[int] = set()  # batch slots whose adapter changes it

    def add_(self, output: Tensor, x: Tensor, token_slots: Tensor) -> None:
        """Add what each token's adapter makes of x [num_tokens, in_features] to the `Linear`'s output."""
        if self.users:
            add_lora_(output[:, self.rows], x, self.lora_a, self.lora_b, token_slots)

    def put(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> None:
        if matrices is None and slot not in self.users:
            return  # there are zeros
        self.lora_a[slot].zero_()
        self.lora_b[slot].zero_()
        self.users.discard(slot)
        if matrices is not None:
            a, b = matrices
            self.lora_a[slot, : len(a)].copy_(a)
            self.lora_b[slot, :, : len(a)].copy_(b)
            self.users.add(slot)


class LoraSlots:
    """`max_loras` batch slots for adapters of at most `max_rank`, in every matrix of the decoder's layers. Its memory
    is taken here, whatever is put into it."""

    def __init__(self, decoder: Decoder, max_loras: int, max_rank: int):
        self.max_loras, self.max_rank = max_loras, max_rank
        self.shapes: Shapes = shapes_of(decoder)
        self.parts: dict[str, AdaptedPart] = {}
        make = {"dtype": decoder.dtype, "device": decoder.device}
        for place, linear in decoder.linears().items():
            named: Mapping[str, slice] = {} if place == "lm_head" else linear.checkpoint_rows(place)
            for name, rows in named.items():
                out_features, in_features = self.shapes[name]
                lora_a = torch.zeros(max_loras, max_rank, in_features, **make)
                lora_b = torch.zeros(max_loras, max_rank, out_features, **make).transpose(1, 2)  # kernels read it so
                self.parts[name] = AdaptedPart(rows, lora_a, lora_b)
            linear.adapters = tuple(self.parts[name] for name in named)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Let the tokens of `slot` have this adapter, from the next forward pass on."""
        for name, part in self.parts.items():
            part.put(slot, adapter.matrices.get(name))

    @property
    def num_bytes(self) -> int:
        return sum(part.lora_a.nbytes + part.lora_b.nbytes for part in self.parts.values())
