"""Attention whose scores are capped, as Gemma 2 has it, in torch: our kernels have no caps. Built in chapter 12."""

from __future__ import annotations

import torch
from torch import Tensor


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    """Attention whose scores become cap * tanh(score / cap).

    q [..., num_heads, num_queries, head_dim]; k and v [..., num_kv_heads, num_keys, head_dim]; `seen` is True where a
    query may look, [..., 1, num_queries, num_keys] or without the leading dimensions. As q.
    """
    grouped = q.unflatten(-3, (k.shape[-3], -1)).float()  # [..., num_kv_heads, group, num_queries, head_dim]
    scores = soft_cap(grouped @ k.float().unsqueeze(-3).transpose(-1, -2) * scale, cap)
    seen = seen.unsqueeze(-3) if seen.dim() > 2 else seen
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ v.float().unsqueeze(-3)).flatten(-4, -3).to(q.dtype)


def soft_cap(scores: Tensor, cap: float | None) -> Tensor:
    """The same where small, and never beyond `cap`."""
    return scores if cap is None else torch.tanh(scores / cap) * cap
