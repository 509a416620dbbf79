"""Attention written out in torch, for what a library's kernel does not take: capped scores, as Gemma 2 has them, and
learned sink logits, as gpt-oss has them. Built in chapters 12 and 17.

A sink logit is one more score in the softmax of a head, of a key that has no value: weight goes there and is lost.

    weight of key j = exp(score j) / (exp(sink) + sum of exp(score i))
"""

from __future__ import annotations

import torch
from torch import Tensor


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    cap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention whose scores become cap * tanh(score / cap), and whose softmaxes have `sink_logits` [num_heads] in
    their denominators; None leaves either out.

    q [..., num_heads, num_queries, head_dim]; k and v [..., num_kv_heads, num_keys, head_dim]; `seen` is True where a
    query may look, [..., 1, num_queries, num_keys] or without the leading dimensions. As q.
    """
    grouped = q.unflatten(-3, (k.shape[-3], -1)).float()  # [..., num_kv_heads, group, num_queries, head_dim]
    scores = soft_cap(grouped @ k.float().unsqueeze(-3).transpose(-1, -2) * scale, cap)
    seen = seen.unsqueeze(-3) if seen.dim() > 2 else seen
    scores = scores.masked_fill(~seen, float("-inf")).flatten(-4, -3)  # [..., num_heads, num_queries, num_keys]
    weights = sink_softmax(scores, sink_logits).unflatten(-3, (k.shape[-3], -1))
    return (weights @ v.float().unsqueeze(-3)).flatten(-4, -3).to(q.dtype)


def soft_cap(scores: Tensor, cap: float | None) -> Tensor:
    """The same where small, and never beyond `cap`."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


def sink_softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """The softmax of scores [..., num_heads, num_queries, num_keys] with one logit of each head, sink_logits
    [num_heads], in the denominator: the weights of a query sum to less than 1. None: the usual softmax."""
    if sink_logits is None:
        return scores.softmax(dim=-1)
    sinks = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
