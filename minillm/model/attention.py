"""Attention: the seam every backend fills, and the plain reference. Built in chapter 02.

The decoder knows nothing of caches. It hands queries, keys and values of the step's
tokens to a backend, which stores the new keys and values wherever it keeps them and
lets each query look at its own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minillm.kernels.softcap import explicit_attention

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch
    from minillm.model.decoder import Decoder


class AttentionBackend(Protocol):
    """Owns the KV cache of every layer and attends over it.

    `attend` is all that a backend needs. What it can do beyond that, its class declares by setting one of the
    attributes below to True, and `can` reads it. A class that declares nothing is called through `attend` alone.
    """

    fused_layer: bool = False  # `run_layer` is a DecoderLayer in one call, `run_decoder` a Decoder: NativeAttention
    # Rotates, stores and attends from the projection on: `minillm.model.fused.FusedAttention`.
    fused_store: bool = False
    # Decodes without waiting for the device, and takes padding (slot -1, length 0): CUDA graphs record it.
    graph_safe: bool = False
    softcap: float | None = None  # what it caps scores at: cap * tanh(score / cap), as Gemma 2 needs
    # Of each layer, [num_heads] in the softmaxes' denominators, as gpt-oss needs: chapter 17.
    sink_logits: Sequence[Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """Store k and v of this step's tokens, then attend with q over all positions up to its own.

        q [num_tokens, num_heads, head_dim]; k and v [num_tokens, num_kv_heads, head_dim], rotated already.
        Returns [num_tokens, num_heads, head_dim]. None of the three may be assumed contiguous. With latent attention
        v is the first columns of k, and what is returned is as narrow.
        """
        ...


def can(attention: AttentionBackend, capability: str) -> bool | float | None:
    """Whether a backend declares a capability of the protocol; where it does not say, the protocol's default holds."""
    return getattr(attention, capability, getattr(AttentionBackend, capability))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """Softmax attention of one sequence, written as the formula: the oracle of every backend.

    q [num_queries, num_heads, head_dim] are the last positions of k and v [seq_len, num_kv_heads, head_dim].
    Each query sees its own position and those before it, at most `window` of them. Query heads share
    KV heads in groups (GQA, Ainslie et al. 2023): head h reads KV head h // (num_heads / num_kv_heads).
    """
    num_queries, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    scale = head_dim**-0.5 if scale is None else scale

    grouped = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))  # [num_queries, num_kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped.float(), k.float()) * scale
    scores = scores.masked_fill(~causal_mask(num_queries, seq_len, window, q.device), float("-inf"))
    weights = scores.softmax(dim=-1)  # [num_kv_heads, group, num_queries, seq_len]
    out = torch.einsum("hgqk,khd->qhgd", weights, v.float())
    return out.reshape(num_queries, num_heads, -1).to(q.dtype)


def causal_mask(num_queries: int, seq_len: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Who may look at whom, True where allowed: [num_queries, seq_len]; the queries are the last positions."""
    query = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None, :]
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


class NoCacheAttention:
    """The backend without a memory: every sequence brings all of its tokens every time (chapter 02's start)."""

    def __init__(
        self,
        layer_windows: tuple[int | None, ...],
        softcap: float | None = None,
        sink_logits: Sequence[Tensor] | None = None,
    ):
        self.layer_windows, self.softcap, self.sink_logits = layer_windows, softcap, sink_logits

    @classmethod
    def of(cls, decoder: Decoder) -> NoCacheAttention:
        """With the windows, the cap and the sink logits of a decoder."""
        return cls(decoder.config.layer_windows, decoder.config.attention_softcap, sink_logits_of(decoder))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        bounds = batch.query_start_loc.tolist()
        if batch.seq_lens.tolist() != [end - start for start, end in pairwise(bounds)]:
            raise ValueError("without a cache a sequence must bring all of its tokens; its positions start at 0")
        window, sinks = self.layer_windows[layer], self.sink_logits and self.sink_logits[layer]
        parts = [self._one(*(x[start:end] for x in (q, k, v)), window, sinks) for start, end in pairwise(bounds)]
        return torch.cat(parts)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
        if self.softcap is None and sinks is None:
            return causal_attention(q, k, v, window)
        seen = causal_mask(len(q), len(k), window, q.device)
        heads_first = (x.transpose(0, 1) for x in (q, k, v))
        return explicit_attention(*heads_first, seen, q.shape[-1] ** -0.5, self.softcap, sinks).transpose(0, 1)


def sink_logits_of(decoder: Decoder) -> list[Tensor] | None:
    """The learned sink logits of each layer, [num_heads]; None of a model without."""
    return [layer.self_attn.sinks for layer in decoder.layers] if decoder.config.sink_logits else None
