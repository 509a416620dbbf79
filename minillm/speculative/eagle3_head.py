"""Eagle3Head: the hub's EAGLE-3 draft heads in the engine. Built in chapter 18.

    low, mid, high of token p-1 ── fc ── g ──┬───────────────────────────── + ── + ── h ── norm ── lm_head
                                             └─ hidden_norm ───┐            │    │    └─ is g of the next draft step
    token p ── embedding ── input_layernorm ───────────────────┴─ attention ┘    │
                                                                  norm ── mlp ───┘

The book's own head (`minillm.speculative.eagle_head`) adds embedding and feature. Here attention reads both side by
side, so q, k and v have twice the inputs, and the output matrix has rows for the most frequent tokens only. The first
token of a text has no feature, and such a head never reads it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer
from minillm.model.errors import CheckpointError, naming
from minillm.model.fitting import fill
from minillm.model.fused import after_attention, before_attention
from minillm.model.hub_format import INTEGERS, told
from minillm.model.layers import Linear, RMSNorm, Rotary, empty_parameter
from minillm.model.weights import read_tensors
from minillm.speculative.eagle3_config import EMBEDDING, Eagle3Config
from minillm.speculative.eagle_head import EagleHead, check_sizes

# The logit of a token that the head has no row for. Its probability is 0 beside that of any other, whatever the
# temperature; and where a request allows no other token it is still one to draw from, as -inf would not be.
ABSENT = -1e4


class Eagle3Head(EagleHead):
    """Serves as `EagleHead` does. Raises ValueError where the target has other sizes."""

    skipped = 1  # tokens at the beginning of a text, which it does not read

    def __init__(self, head: Eagle3Config, target: Decoder, most_tokens: int):
        nn.Module.__init__(self)
        check_sizes(head, target)
        self.head, self.config, self.dtype, self.device = head, head.layer, target.dtype, target.device
        kind, size, config = (target.dtype, target.device), head.hidden_size, head.layer
        self.fuse = Linear(len(head.feature_layers) * head.target_hidden_size, size, False, *kind)
        self.feature_norm, self.norm = (RMSNorm(size, config.rms_norm_eps, *kind) for _ in ("feature", "last"))
        self.rotary = Rotary(config.rope, config.head_dim, *kind)
        layer = DecoderLayer(config, 0, *kind, target.device)
        parts = {name: rows.stop - rows.start for name, rows in layer.self_attn.qkv_proj.parts.items()}
        layer.self_attn.qkv_proj = Linear(2 * size, sum(parts.values()), False, *kind, parts=parts)
        self.layers = nn.ModuleList([layer])
        self.lm_head = Linear(size, head.draft_vocab_size, False, *kind)
        self.embed_tokens = empty_parameter(head.vocab_size, size, dtype=target.dtype, device=target.device)
        self.token_of: Tensor | None = None  # int64 [draft_vocab_size]: the target's id; None where they are the same
        self.given, self.made = torch.zeros(2, most_tokens, size, dtype=target.dtype, device=target.device).unbind()

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, attention: AttentionBackend, features: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [num_logits, vocab_size] float32, and what stands for each token's own feature, [num_tokens,
        hidden_size]."""
        hidden = self.combine_and_attend(batch, features, attention)
        every = len(batch.logits_indices) == batch.num_tokens
        wanted = hidden if every else hidden.index_select(0, batch.logits_indices)
        return self._logits(self.norm(wanted), out), hidden

    def combine_and_attend(self, batch: ForwardBatch, features: Tensor, attention: AttentionBackend) -> Tensor:
        """The one layer, [num_tokens, hidden_size]: attention reads embedding and feature side by side."""
        [layer], rotary = self.layers, self.rotary(batch.positions)
        normed = self.feature_norm(features)
        both = torch.cat([layer.input_layernorm(F.embedding(batch.token_ids, self.embed_tokens)), normed], dim=-1)
        residual = normed if self.head.norm_before_residual else features
        if can(attention, "fused_store"):
            residual = residual.clone()  # which is added to in place
            queries = before_attention(self, layer, both, rotary, attention, batch.slot_mapping)
            return after_attention(self, layer, None, attention.attend_stored(queries, 0, batch), residual).add_(
                residual
            )
        hidden = residual + layer.self_attn(both, rotary, attention, batch)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _logits(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        logits = self.lm_head(hidden).float()  # [num_logits, draft_vocab_size]
        if self.token_of is None:
            return logits if out is None else out.copy_(logits)
        if out is None:
            out = torch.empty(len(hidden), self.head.vocab_size, device=hidden.device)
        return out.fill_(ABSENT).index_copy_(1, self.token_of, logits)

    @torch.inference_mode()
    def prepare(self, target: Decoder) -> Eagle3Head:
        """After the weights are filled: share the target's embedding if the head has none, and let every Linear choose
        how it computes. Returns self."""
        if not self.head.own_embedding:
            self.embed_tokens = target.embed_tokens
            if target.embed_tokens is None:  # rows of its quantized output matrix
                ids = torch.arange(self.head.vocab_size, device=self.device)
                self.embed_tokens = target.embed(ids) / target.embedding_scale
        for linear in (self.fuse, self.lm_head, *self.layers[0].linears().values()):
            linear.prepare(in_cache=True)
        return self

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Where each tensor of the folder goes."""
        views = {"fc.weight": self.fuse.plain, "lm_head.weight": self.lm_head.plain, "norm.weight": self.norm.weight}
        views["midlayer.hidden_norm.weight"] = self.feature_norm.weight
        if self.head.own_embedding:
            views[EMBEDDING] = self.embed_tokens
        return views | {f"midlayer.{name}": view for name, view in self.layers[0].checkpoint_views().items()}


def load_eagle3(path: Path, target: Decoder, most_tokens: int) -> Eagle3Head:
    """The head in a folder, for `target`. Raises CheckpointError for a damaged one, ValueError for one that does not
    fit."""
    config = Eagle3Config.load(path, target.config)
    head, tensors = Eagle3Head(config, target, most_tokens), {}
    for name, tensor in read_tensors(path):
        ours = name.removeprefix("model.").replace("layers.0.", "midlayer.")
        if ours in tensors:
            raise CheckpointError(f"the weights in {path} have {ours} twice, once as {name}; keep one of them")
        tensors[ours] = tensor
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    with naming(path):
        head.token_of = _token_of(offsets, config, target.device)
    fill(head.checkpoint_views(), tensors.items(), path)
    return head.prepare(target)


def _token_of(offsets: Tensor | None, config: Eagle3Config, device: torch.device) -> Tensor | None:
    """The target's id of each draft token. Raises ValueError where d2t is missing, misshapen, or leads to a token twice
    or to none."""
    small, vocab = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if small == vocab:
            return None
        raise ValueError(
            f"d2t is missing: it says which {small} of {vocab} tokens the rows of lm_head.weight are; fetch it again"
        )
    if list(offsets.shape) != [small] or offsets.dtype not in INTEGERS:
        raise ValueError(f"d2t is {told(offsets)}; draft_vocab_size={small} needs whole numbers [{small}]")
    ids = torch.arange(small) + offsets.long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab or len(ids.unique()) != small:
        raise ValueError(
            f"d2t leads to tokens {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} different ones; needed are "
            f"{small} different tokens from 0 to {vocab - 1}: it holds the differences of the two ids, not the ids"
        )
    return ids.to(device)
