"""The adapters on the device: a batch slot each, side by side for every matrix. Built in chapter 23.

    q_proj of layer 0     lora_a [max_loras, max_rank, in_features]      lora_b [max_loras, out_features, max_rank]
                          slot 0 | slot 1 | ...                          beyond an adapter's rank there are zeros

In memory the outputs of a rank lie side by side, as the kernels read them: lora_b is a transposed view. On a CPU
a product takes as many ranks as the largest adapter of the matrix has; on a GPU all, so that its kernels stay the same.

The base product of a step is one for all its tokens; each token then adds the product of its own adapter, whose slot
`ForwardBatch.token_slots` names (Punica, Chen et al. 2023; S-LoRA, Sheng et al. 2023). On a GPU a step with adapters is
launched kernel by kernel: recorded steps (CUDA graphs) are for the others. On a CPU, layers that run as a whole in C
have the adapters as an array of `native_structs.Adapters` for each matrix, which `put` keeps up to date.

With tensor parallelism each rank keeps its own rows of the weight. Where these are outputs (q, k, v, gate, up), A is
whole on each rank and B is cut by rows; where they are inputs (o, down), A is cut by columns and B is whole, and the
sum over the ranks that the base product needs adds up the adapters' products too.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from minillm.kernels import native_structs
from minillm.kernels.lora import MANY_TOKENS, TokenSlots, add_lora_
from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer
from minillm.model.lora_adapter import Adapter, Shapes, shapes_of, takes_adapters


class AdaptedPart:
    """One matrix of a checkpoint, which is all of a `Linear` or some rows of it, with the adapters that change it."""

    def __init__(self, rows: slice, lora_a: Tensor, lora_b: Tensor):
        self.rows, self.lora_a, self.lora_b = rows, lora_a, lora_b
        self.users: dict[int, int] = {}  # batch slots whose adapter changes it, with its rank there
        self.used = lora_a, lora_b  # as many ranks of both as a product takes
        self.native: native_structs.Adapters | None = None  # the same for a layer that runs as a whole

    def add_(self, output: Tensor, x: Tensor, token_slots: TokenSlots) -> None:
        """Add what each token's adapter makes of x [num_tokens, in_features] to the `Linear`'s output."""
        if self.users:
            add_lora_(output[:, self.rows], x, *self.used, *token_slots)

    def put(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> None:
        if matrices is None and slot not in self.users:
            return  # there are zeros
        self.lora_a[slot].zero_()
        self.lora_b[slot].zero_()
        self.users.pop(slot, None)
        if matrices is not None:
            a, b = matrices
            send(a, self.lora_a[slot, : len(a)])
            send(b.t(), self.lora_b[slot].t()[: len(a)])
            self.users[slot] = len(a)
        if self.lora_a.is_cpu:
            rank = max(self.users.values(), default=0)
            self.used = self.lora_a[:, :rank], self.lora_b[:, :, :rank]
            if self.native is not None:
                self.native.rank = rank

    def native_struct(self) -> native_structs.Adapters:
        """What the C of a layer reads; rank 0 while no adapter changes this part."""
        made = native_structs.Adapters.of(*self.used, self.rows.start)
        made.rank = max(self.users.values(), default=0)
        return made


def send(matrix: Tensor, place: Tensor) -> None:
    """Copy a matrix of the host to its place on the device, without a wait for a GPU."""
    if place.is_cuda:
        matrix = matrix.contiguous().pin_memory()  # torch keeps it until the copy has ended
    place.copy_(matrix, non_blocking=place.is_cuda)


class LoraSlots:
    """`max_loras` batch slots for adapters of at most `max_rank`, in every matrix of the decoder's layers. Its memory
    is taken here, whatever is put into it."""

    def __init__(self, decoder: Decoder, max_loras: int, max_rank: int):
        if decoder.rotated:
            raise ValueError(
                "enable_lora=True is not allowed with a model that was quantized with rotate=True: an adapter was "
                "trained on inputs that are not rotated; quantize without rotate"
            )
        self.max_loras, self.max_rank = max_loras, max_rank
        self.held: OrderedDict[str, int] = OrderedDict()  # key of an adapter -> its batch slot
        self.shapes: Shapes = shapes_of(decoder)
        self.parts: dict[str, AdaptedPart] = {}
        make = {"dtype": decoder.dtype, "device": decoder.device}
        for place, linear in decoder.linears().items():
            named: Mapping[str, slice] = linear.checkpoint_rows(place) if takes_adapters(place) else {}
            for name, rows in named.items():
                out_features, in_features = self.shapes[name]
                lora_a = torch.zeros(max_loras, max_rank, in_features, **make)
                lora_b = torch.zeros(max_loras, max_rank, out_features, **make).transpose(1, 2)
                self.parts[name] = AdaptedPart(rows, lora_a, lora_b)
            linear.adapters = tuple(self.parts[name] for name in named)
        for layer in decoder.layers:
            if isinstance(layer, DecoderLayer) and layer.whole is not None:
                layer.whole.adapters = ctypes.pointer(native_adapters(layer))  # which also keeps them alive

    def put(self, slot: int, adapter: Adapter) -> None:
        """Let the tokens of `slot` have this adapter, from the next forward pass on."""
        self.held = OrderedDict((key, place) for key, place in self.held.items() if place != slot)
        for name, part in self.parts.items():
            part.put(slot, adapter.matrices.get(name))
        self.held[adapter.key] = slot

    def free_slot(self) -> int | None:
        """One that holds no adapter."""
        return next(iter(set(range(self.max_loras)) - set(self.held.values())), None)

    def warm_up(self, decoder: Decoder) -> None:
        """Launch the GPU's kernels for few tokens and for many, none of which has an adapter: Triton compiles a kernel
        at its first launch."""
        make = {"dtype": decoder.dtype, "device": decoder.device}
        for num_tokens in (1, MANY_TOKENS):
            token_slots = TokenSlots.on(decoder.device, np.full(num_tokens, -1, np.int32), self.max_loras)
            for linear in decoder.linears().values():
                for part in linear.adapters:
                    output = torch.zeros(num_tokens, linear.out_features, **make)[:, part.rows]
                    x = torch.zeros(num_tokens, linear.in_features, **make)
                    add_lora_(output, x, part.lora_a, part.lora_b, *token_slots)

    @property
    def num_bytes(self) -> int:
        return sum(part.lora_a.nbytes + part.lora_b.nbytes for part in self.parts.values())


def native_adapters(layer: DecoderLayer) -> native_structs.LayerAdapters:
    """The adapters of a layer that runs as a whole; `AdaptedPart.put` changes them in place."""
    arrays, linears = {}, layer.linears()
    places = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    for name, place in zip(native_structs.LayerAdapters.MATRICES, places):
        parts = linears[place].adapters if place in linears else ()  # a mixture of experts has no such MLP
        arrays[name] = (native_structs.Adapters * len(parts))(*(part.native_struct() for part in parts))
        for index, part in enumerate(parts):
            part.native = arrays[name][index]
    return native_structs.LayerAdapters.of(arrays)
