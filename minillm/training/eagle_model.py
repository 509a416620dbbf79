"""The draft head as it learns: whole rows at once, several steps of a draft unrolled, with gradients.
Built in chapter 18.

In unrolled step 0 every token comes with the target's feature of the token before it, in step s with the one that the
head itself made in step s - 1. A query of step s at position p sees

    keys of step 0 at positions 0 ... p-s,   of step 1 at p-s+1,   of step 2 at p-s+2,   ...   of step s at p

which are the keys that it would find in its cache after drafting s tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.batch import ForwardBatch
from ..model.decoder import Decoder
from ..model.features import FeatureTap
from ..model.layers import rope_frequencies
from ..speculative.eagle_config import HeadConfig


class HeadModel(nn.Module):
    """`minillm.speculative.eagle_head.EagleHead` for `target`, whose embedding and output matrix stay as they are."""

    def __init__(self, head: HeadConfig, target: Decoder):
        super().__init__()
        size, dim, wide = head.hidden_size, head.head_dim, head.target_hidden_size
        self.head = head
        matrices = {
            "fuse": (size, len(head.feature_layers) * wide),
            "embed_proj": (size, wide),
            "mix": (size, size),
            "out_proj": (wide, size),
            "layers.0.self_attn.q_proj": (head.num_attention_heads * dim, size),
            "layers.0.self_attn.k_proj": (head.num_key_value_heads * dim, size),
            "layers.0.self_attn.v_proj": (head.num_key_value_heads * dim, size),
            "layers.0.self_attn.o_proj": (size, head.num_attention_heads * dim),
            "layers.0.mlp.gate_proj": (head.intermediate_size, size),
            "layers.0.mlp.up_proj": (head.intermediate_size, size),
            "layers.0.mlp.down_proj": (size, head.intermediate_size),
        }
        norms = ("feature_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
        self.weights = nn.ParameterDict()
        for name, shape in matrices.items():
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.randn(shape) * shape[1] ** -0.5)
        for name in ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
            nn.init.zeros_(self.weights[name.replace(".", "/")])  # at first the layer adds nothing
        for name in norms:
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.ones(size))
        self.weights["embed_norm"] = nn.Parameter(torch.ones(wide))
        self.register_buffer("frequencies", rope_frequencies(head.layer.rope, dim), persistent=False)
        with torch.no_grad():
            words = target.embed(torch.arange(head.vocab_size, device=target.device)).float().cpu()
            table = target.lm_head.weight.float().cpu() * target.config.logit_scale
            # Embedding and output begin as the best of their rank that the target's matrices allow.
            main = torch.linalg.svd(F.rms_norm(words, (wide,)), full_matrices=False).Vh[:size]
            self.weights["embed_proj"][: len(main)] = main
            scale = target.norm.weight.float().cpu()
            main = torch.linalg.svd(table * scale, full_matrices=False).Vh[:size].T  # [wide, at most size]
            self.weights["out_proj"][:, : main.shape[1]] = scale[:, None] * main
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("table", table, persistent=False)

    def forward(self, states: Tensor, tokens: Tensor, unroll: int) -> list[Tensor]:
        """Logits of each unrolled step, [rows, length, vocab_size] each. states [rows, length, layers * wide] are the
        target's behind each of tokens [rows, length]."""
        embedded = F.embedding(tokens, self._linear("embed_proj", self._norm("embed_norm", self.words)))
        output = F.linear(self.table, self.weights["out_proj"].T)  # [vocab_size, size]
        feature, keys, logits = _shift(self._linear("fuse", states)), [], []
        for step in range(unroll):
            hidden = self._step(feature, embedded, keys, step)
            logits.append(F.linear(self._norm("norm", hidden), output))
            feature = _shift(hidden)
        return logits

    def _step(self, feature: Tensor, embedded: Tensor, keys: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        hidden = feature + embedded + self._linear("mix", self._norm("feature_norm", feature))
        normed, at = self._norm("layers.0.input_layernorm", hidden), "layers.0.self_attn."
        q, k, v = (self._heads(self._linear(f"{at}{name}_proj", normed), name != "v") for name in "qkv")
        keys.append((k, v))
        hidden = hidden + self._linear(f"{at}o_proj", attend(q, keys).transpose(1, 2).flatten(2))
        normed, at = self._norm("layers.0.post_attention_layernorm", hidden), "layers.0.mlp."
        gated = F.silu(self._linear(f"{at}gate_proj", normed)) * self._linear(f"{at}up_proj", normed)
        return hidden + self._linear(f"{at}down_proj", gated)

    def _heads(self, x: Tensor, rotated: bool) -> Tensor:
        """[rows, heads, length, head_dim], of all query heads; rotated by position."""
        x = x.unflatten(-1, (-1, self.head.head_dim)).transpose(1, 2)
        if x.shape[1] < self.head.num_attention_heads:
            x = x.repeat_interleave(self.head.num_attention_heads // x.shape[1], dim=1)
        if not rotated:
            return x
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * self.frequencies  # [length, head_dim / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name.replace(".", "/")])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name.replace(".", "/")]
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.head.rms_norm_eps)

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the head's folder."""
        return {f"{name.replace('/', '.')}.weight": weight.detach() for name, weight in self.weights.items()}


NEVER = -1e9  # a score


def attend(q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the last unrolled step, [rows, heads, length, head_dim]; `keys` has keys and values of every step so
    far. What a row's first tokens would see before its beginning is masked."""
    step, length = len(keys) - 1, q.shape[2]
    q = q * q.shape[3] ** -0.5
    at = torch.arange(length, device=q.device)
    first, values = keys[0]
    hidden = at[None, :] > at[:, None] - step
    scores = [(q @ first.transpose(2, 3)).masked_fill_(hidden, NEVER)]
    moved = []
    for number, (k, v) in enumerate(keys[1:], 1):
        back = step - number
        k, v = (F.pad(x, (0, 0, back, 0))[:, :, :length] for x in (k, v))  # row p has what stands at p - back
        scores.append((q * k).sum(-1, keepdim=True).masked_fill((at < back)[:, None], NEVER))
        moved.append(v)
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., :length] @ values
    for place, v in enumerate(moved):
        out = out + weights[..., length + place, None] * v
    return out


def _shift(x: Tensor) -> Tensor:
    """Each position gets what stands at the one before it; the first a zero."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


class RowAttention:
    """Attention of a target over whole rows of one length, all at once."""

    def __init__(self, length: int):
        self.length = length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def read_target(target: Decoder, tap: FeatureTap, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [rows, length, layers * hidden_size] and logits [rows, length, vocab_size] of the target."""
    rows, length = tokens.shape
    at = torch.arange(rows + 1, device=tokens.device) * length
    lengths = torch.full((rows,), length, device=tokens.device)
    flat = torch.arange(rows * length, device=tokens.device)
    batch = ForwardBatch(tokens.flatten(), flat % length, at, lengths, None, None, length, flat, length)
    logits = target(batch, RowAttention(length))
    return tap.states[: rows * length].float().view(rows, length, -1).clone(), logits.view(rows, length, -1).clone()
