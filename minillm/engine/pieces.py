"""Piecewise CUDA graphs for steps with prompts: what stands between the calls of attention is recorded.
Built in chapter 14.

Attention of prompts depends on lengths that no two steps share, so it is launched anew in every step.
Everything else in a layer depends on the number of tokens alone, and is a graph. A layer costs two or three calls to
the driver then, however many kernels it has:

    recorded     embed, norm, qkv, rotate, store |       o_proj ... qkv, rotate, store |       o_proj ... down_proj
    launched                                     | attend                              | attend
                          queries -> attended    ^             queries -> attended     ^          (once a layer)

The pieces hand each other their tensors in buffers that stay where they are. A step is filled up to the next recorded
size with tokens whose slot is -1: they are computed, attend to nothing and are written nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.engine.graphs import Recorder
from minillm.kernels.norm import rms_norm
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.model.fused import (
    FusedAttention,
    after_attention,
    before_attention,
    last_norm,
    tell,
)

PIECE_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)  # tokens; beyond, the launches hide behind the arithmetic


def piece_sizes(most_tokens: int) -> list[int]:
    """The sizes to record, in tokens, rising; the last one holds `most_tokens`, or is 512."""
    return [size for before, size in zip((0, *PIECE_SIZES), PIECE_SIZES) if before < most_tokens]


class PieceGraphs:
    """Forward passes of steps of at most `sizes[-1]` tokens, of any mixture of prompts and decodes.

    On a GPU every size is recorded at once; elsewhere a "replay" runs the same pieces on the same buffers.
    """

    def __init__(
        self,
        model: Decoder,
        attention: FusedAttention,
        sizes: Sequence[int] = PIECE_SIZES,
        recorder: Recorder | None = None,
    ):
        config, device, dtype = model.config, model.device, model.dtype
        self.model, self.attention, self.sizes = model, attention, sorted(sizes)
        self.recorder = recorder or Recorder(device)
        most = self.sizes[-1]
        self.token_ids, self.positions = torch.zeros(2, most, dtype=torch.int64, device=device).unbind()
        self.slot_mapping = torch.full((most,), -1, device=device)
        self.residual = torch.empty(most, config.hidden_size, dtype=dtype, device=device)
        self.hidden = torch.empty_like(self.residual)  # of the last layer
        self.rotary = torch.stack(model.rotary(self.positions))  # cos, sin; [2, most, 1, head_dim], or of several kinds
        self.queries = torch.empty(most, config.num_heads, config.head_dim, dtype=dtype, device=device)
        self.attended = torch.zeros_like(self.queries)  # never a NaN in rows of padding
        self.pieces: dict[int, list[Callable[[], object]]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self.pieces[size] = self._record(size)

    def serves(self, batch: ForwardBatch) -> bool:
        """Whether the step is small enough."""
        return batch.num_tokens <= self.sizes[-1]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """What `Decoder.forward` gives: [num_logits, vocab_size] float32."""
        count = batch.num_tokens
        size = next(size for size in self.sizes if size >= count)
        buffers = [x[:count] for x in (self.token_ids, self.positions, self.slot_mapping)]
        torch._foreach_copy_(buffers, [batch.token_ids, batch.positions, batch.slot_mapping])
        self.slot_mapping[count:size].fill_(-1)
        first, *others = self.pieces[size]
        first()
        for layer, piece in enumerate(others):
            self.attention.attend_stored(self.queries[:count], layer, batch, out=self.attended[:count])
            piece()
        return self.model.logits(last_norm(self.model, self.hidden, self.residual, batch.logits_indices))

    def _record(self, size: int) -> list[Callable[[], object]]:
        """What comes before the first call of attention, then what follows each of them."""
        layers = list(self.model.layers)
        pieces = [lambda: self._begin(layers[0], size)]
        for layer, following in zip(layers, [*layers[1:], None]):
            pieces.append(lambda layer=layer, following=following: self._go_on(layer, following, size))
        return [self.recorder.record(torch.inference_mode()(piece)) for piece in pieces]

    def _begin(self, layer, size: int) -> None:
        residual = self.residual[:size].copy_(self.model.embed(self.token_ids[:size]))
        for buffer, angles in zip(self.rotary, self.model.rotary(self.positions[:size])):
            buffer[..., :size, :, :].copy_(angles)
        self._project(layer, rms_norm(residual, layer.input_layernorm.weight, self.model.config.rms_norm_eps), size)

    def _go_on(self, layer, following, size: int) -> None:
        hidden = after_attention(self.model, layer, following, self.attended[:size], self.residual[:size])
        tell(layer, following, hidden, self.residual[:size])
        if following is None:
            self.hidden[:size].copy_(hidden)
        else:
            self._project(following, hidden, size)

    def _project(self, layer, hidden: Tensor, size: int) -> None:
        rotary = tuple(angles[..., :size, :, :] for angles in self.rotary)
        queries = before_attention(self.model, layer, hidden, rotary, self.attention, self.slot_mapping[:size])
        self.queries[:size].copy_(queries)
