"""EagleHead: one layer over the target's own features. Built in chapter 18.

    low, mid, high of token p-1 ── fuse ── g ──┬───────────────────────── + ── layer ── h ── norm ── output matrix
                                               └─ norm ── mix ─┐          │             │
    token p ── embedding in the head's width ──────────────────┴──────────┘             └── is g of the next draft step

EAGLE (Li et al. 2024, https://arxiv.org/abs/2401.15077) drafts with the target's features; EAGLE-3 (Li et al. 2025,
https://arxiv.org/abs/2503.01840) fuses those of three layers, and trains the head on its own outputs. EAGLE combines
embedding and feature by one matrix in front of a Llama layer, EAGLE-3 widens the layer's projections. Ours may be
narrower than its target: the target's embedding and output matrix, each times a projection that was trained, become
matrices of the head's width when it is loaded, so that a draft step reads these and not the target's.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.kernels.norm import rms_norm
from minillm.kernels.softcap import soft_cap
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
    """A decoder of one layer to everything that serves decoders; `prepare` makes its embedding and output matrix of
    those of `target`.

    Before a pass `given` [most_tokens, hidden_size] holds each token's feature, that of the token before it; after it
    `made` holds what stands for the token's own. Raises ValueError where the target has other sizes.
    """

    stream = lora = None  # see Decoder
    skipped = 0  # tokens at the beginning of a text, which it does not read

    def __init__(self, head: HeadConfig, target: Decoder, most_tokens: int):
        super().__init__()
        check_sizes(head, target)
        self.head, self.config, self.dtype, self.device = head, head.layer, target.dtype, target.device
        kind, size, wide = (target.dtype, target.device), head.hidden_size, head.target_hidden_size
        self.fuse = Linear(len(head.feature_layers) * wide, size, False, *kind)
        self.embed_proj, self.mix = Linear(wide, size, False, *kind), Linear(size, size, False, *kind)
        self.out_proj = Linear(size, wide, False, *kind)
        self.embed_norm = RMSNorm(wide, head.rms_norm_eps, *kind)
        self.feature_norm, self.norm = (RMSNorm(size, head.rms_norm_eps, *kind) for _ in ("feature", "last"))
        self.rotary = Rotary(self.config.rope, head.head_dim, *kind)
        self.layers = nn.ModuleList([DecoderLayer(self.config, 0, *kind, target.device)])
        self.given, self.made = torch.zeros(2, most_tokens, size, dtype=target.dtype, device=target.device).unbind()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None) -> Tensor:
        """As `Decoder.forward`: [num_logits, vocab_size] float32."""
        count = batch.num_tokens
        logits, made = self.run(batch, attention, self.given[:count], out)
        self.made[:count].copy_(made)
        return logits

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, attention: AttentionBackend, features: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits, and what stands for each token's own feature, [num_tokens, hidden_size]."""
        hidden = self._layer(self.combine(batch.token_ids, features), attention, batch)
        every = len(batch.logits_indices) == batch.num_tokens
        wanted = hidden if every else hidden.index_select(0, batch.logits_indices)
        logits = soft_cap(self.lm_head(self.norm(wanted)), self.logit_softcap)
        return logits.float() if out is None else out.copy_(logits), hidden

    def combine(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """What the layer begins with, [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.embed_tokens).add_(self.mix(self.feature_norm(features))).add_(features)

    def _layer(self, hidden: Tensor, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        [layer], rotary = self.layers, self.rotary(batch.positions)
        if not can(attention, "fused_store"):
            return layer(hidden, rotary, attention, batch)
        normed = rms_norm(hidden, layer.input_layernorm.weight, self.config.rms_norm_eps)
        queries = before_attention(self, layer, normed, rotary, attention, batch.slot_mapping)
        change = after_attention(self, layer, None, attention.attend_stored(queries, 0, batch), hidden)
        return hidden + change

    @torch.inference_mode()
    def prepare(self, target: Decoder) -> EagleHead:
        """Take the target's embedding and output matrix over in the head's width, and let every Linear choose how it
        computes; after the weights are filled. Returns self."""
        words = target.embed(torch.arange(self.head.vocab_size, device=self.device))
        self.embed_tokens = self.embed_proj(self.embed_norm(words))  # [vocab_size, hidden_size]
        self.lm_head = Linear(self.head.hidden_size, self.head.vocab_size, False, self.dtype, self.device)
        narrow = target.lm_head.weight.float() @ self.out_proj.plain.float() * target.config.logit_scale
        self.lm_head.plain.copy_(narrow)
        self.logit_softcap = target.config.logit_softcap
        del self.embed_proj, self.embed_norm, self.out_proj
        for linear in (self.fuse, self.mix, self.lm_head, *self.layers[0].linears().values()):
            linear.prepare(in_cache=True)
        self.layers[0].prepare(self.config)
        return self

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Where each tensor of the folder goes."""
        views = {f"{name}.weight": getattr(self, name).plain for name in ("fuse", "embed_proj", "mix", "out_proj")}
        views |= {f"{name}.weight": getattr(self, name).weight for name in ("embed_norm", "feature_norm", "norm")}
        return views | {f"layers.0.{name}": view for name, view in self.layers[0].checkpoint_views().items()}


def load_head(path: Path, target: Decoder, most_tokens: int) -> EagleHead:
    """The head in a folder, for `target`. Raises CheckpointError for a damaged one, ValueError for one that does not
    fit."""
    head = EagleHead(HeadConfig.load(path), target, most_tokens)
    fill(head.checkpoint_views(), read_tensors(path), path)
    return head.prepare(target)


def check_sizes(head: HeadConfig, target: Decoder) -> None:
    """Raise ValueError unless the head reads and writes what the target has."""
    for name, of_target in (("target_hidden_size", "hidden_size"), ("vocab_size", "vocab_size")):
        ours, theirs = getattr(head, name), getattr(target.config, of_target)
        if ours != theirs:
            raise ValueError(
                f"speculative_config: the draft head has {name}={ours}, the model's {of_target} is {theirs}; "
                "a head serves the model that it was trained for"
            )
    if max(head.feature_layers) > target.config.num_layers:
        raise ValueError(
            f"speculative_config: the draft head reads feature_layers={list(head.feature_layers)}, the model has "
            f"{target.config.num_layers} layers; a head serves the model that it was trained for"
        )
