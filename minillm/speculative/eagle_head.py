"""EagleHead: one layer over the target's own features. Built in chapter 18.

    low, mid, high of token p-1 ── fuse ── g ──┬─────────────────────── + ── layer ── h ── norm ── the target's head
                                               └─ norm ┐                │             │
    token p ── the target's embedding ─────────── norm ┴── mix ─────────┘             └── is g of the next draft step

EAGLE (Li et al. 2024, https://arxiv.org/abs/2401.15077) drafts with the target's features; EAGLE-3 (Li et al. 2025,
https://arxiv.org/abs/2503.01840) fuses those of three layers, and trains the head on its own outputs. Ours combines
embedding and feature by a matrix in front of a Llama layer, as EAGLE does; EAGLE-3 widens the layer's projections.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.kernels.norm import rms_norm
from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer
from minillm.model.fitting import fill
from minillm.model.fused import after_attention, before_attention
from minillm.model.layers import Linear, RMSNorm, Rotary
from minillm.model.weights import read_tensors
from minillm.speculative.eagle_config import HeadConfig


class EagleHead(nn.Module):
    """A decoder of one layer to everything that serves decoders; embedding and output matrix are `target`'s.

    Before a pass `given` [most_tokens, hidden_size] holds each token's feature, that of the token before it; after it
    `made` holds what stands for the token's own. Raises ValueError where the target has other sizes.
    """

    stream = lora = None  # see Decoder

    def __init__(self, head: HeadConfig, target: Decoder, most_tokens: int):
        super().__init__()
        check_sizes(head, target)
        self.head, self.config, self.dtype, self.device = head, head.layer, target.dtype, target.device
        kind, size = (target.dtype, target.device), head.hidden_size
        self.embed, self.read_out = target.embed, target.logits
        self.fuse = Linear(len(head.feature_layers) * size, size, False, *kind)
        self.mix = Linear(2 * size, size, False, *kind)
        self.embed_norm, self.feature_norm, self.norm = (
            RMSNorm(size, head.rms_norm_eps, *kind) for _ in ("embedding", "feature", "last")
        )
        self.rotary = Rotary(self.config.rope, head.head_dim, *kind)
        self.layers = nn.ModuleList([DecoderLayer(self.config, 0, *kind, target.device)])
        self.given, self.made = torch.zeros(2, most_tokens, size, dtype=target.dtype, device=target.device).unbind()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None) -> Tensor:
        """As `Decoder.forward`: [num_logits, vocab_size] float32."""
        count = batch.num_tokens
        hidden = self.combine(self.embed(batch.token_ids), self.given[:count])
        hidden = self._layer(hidden, attention, batch)
        self.made[:count].copy_(hidden)
        return self.read_out(self.norm(hidden.index_select(0, batch.logits_indices)), out)

    def combine(self, embedded: Tensor, features: Tensor) -> Tensor:
        """What the layer begins with, [num_tokens, hidden_size]."""
        both = torch.cat([self.embed_norm(embedded), self.feature_norm(features)], dim=-1)
        return features + self.mix(both)

    def _layer(self, hidden: Tensor, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        [layer], rotary = self.layers, self.rotary(batch.positions)
        if not can(attention, "fused_store"):
            return layer(hidden, rotary, attention, batch)
        normed = rms_norm(hidden, layer.input_layernorm.weight, self.config.rms_norm_eps)
        queries = before_attention(self, layer, normed, rotary, attention, batch.slot_mapping)
        change = after_attention(self, layer, None, attention.attend_stored(queries, 0, batch), hidden)
        return hidden + change

    def prepare(self) -> EagleHead:
        """Let every Linear choose how it computes; after the weights are filled. Returns self."""
        for linear in (self.fuse, self.mix, *self.layers[0].linears().values()):
            linear.prepare(in_cache=True)
        self.layers[0].prepare(self.config)
        return self

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Where each tensor of the folder goes."""
        views = {f"{name}.weight": getattr(self, name).plain for name in ("fuse", "mix")}
        views |= {f"{name}.weight": getattr(self, name).weight for name in ("embed_norm", "feature_norm", "norm")}
        return views | {f"layers.0.{name}": view for name, view in self.layers[0].checkpoint_views().items()}


def load_head(path: Path, target: Decoder, most_tokens: int) -> EagleHead:
    """The head in a folder, for `target`. Raises CheckpointError for a damaged one, ValueError for one that does not
    fit."""
    head = EagleHead(HeadConfig.load(path), target, most_tokens)
    fill(head.checkpoint_views(), read_tensors(path), path)
    return head.prepare()


def check_sizes(head: HeadConfig, target: Decoder) -> None:
    """Raise ValueError unless the head reads and writes what the target has."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(head, name), getattr(target.config, name)
        if ours != theirs:
            raise ValueError(
                f"speculative_config: the draft head has {name}={ours}, the model has {theirs}; "
                "a head serves the model that it was trained for"
            )
    if max(head.feature_layers) > target.config.num_layers:
        raise ValueError(
            f"speculative_config: the draft head reads feature_layers={list(head.feature_layers)}, the model has "
            f"{target.config.num_layers} layers; a head serves the model that it was trained for"
        )
