"""References of chapter 12: states of a softmax, masks, attention in float64. Built in chapter 12."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def state_of(scores: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(best, total, acc) of scores [num_queries, num_keys] and values [num_keys, head_dim];
    of no keys: nothing seen."""
    num_queries, num_keys = scores.shape
    if not num_keys:
        return (
            scores.new_full((num_queries,), -torch.inf).to(dtype),
            torch.zeros(num_queries, dtype=dtype),
            torch.zeros(num_queries, values.shape[1], dtype=dtype),
        )
    best = scores.amax(1)
    weights = torch.where(best[:, None] == -torch.inf, 0.0, torch.exp(scores - best[:, None])).double()
    return best.to(dtype), weights.sum(1).to(dtype), (weights @ values).to(dtype)


def sink_mask(num_queries: int, num_keys: int, sink: int, window: int) -> Tensor:
    """[num_queries, num_keys]: the first `sink` keys and the last `window`, none ahead of the query."""
    position, key = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)[None, :]
    return (key <= position) & ((key < sink) | (key > position - window))


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, cap: float | None = None, scale: float | None = None
) -> Tensor:
    """One head in float64: q [num_queries, head_dim], k and v [num_keys, head_dim], seen [num_queries, num_keys]."""
    scores = q.double() @ k.double().T * (q.shape[1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double()


def capped_attention(q: Tensor, k: Tensor, v: Tensor, cap: float | None, *, tile: int = 1, **how) -> Tensor:
    """Causal attention of [num_queries, heads, head_dim] at the last positions, with shared KV heads and capped scores,
    in float64.

    With a `tile` a query sees as far as the last one of its tile: a mistake that a hint can name.
    """
    past = len(k) - len(q)
    last = past + torch.tensor([min(i // tile * tile + tile, len(q)) - 1 for i in range(len(q))])
    group, seen = q.shape[1] // k.shape[1], torch.arange(len(k))[None, :] <= last[:, None]
    heads = [
        attention(q[:, head], k[:, head // group], v[:, head // group], seen, cap=cap, **how)
        for head in range(q.shape[1])
    ]
    return torch.stack(heads, dim=1)


def documents_of(lengths: Sequence[int]) -> Tensor:
    """The document of each token, int32, for documents of these lengths one after the other."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)


def levelled(randn, num_tokens: int, head_dim: int, level: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, with `level` added to each score that q · k / sqrt(head_dim) gives:
    a first dimension sees to it."""
    q, k, v = (randn(num_tokens, head_dim).to(dtype) for _ in range(3))
    q[:, 0], k[:, 0] = 16.0, level * head_dim**0.5 / 16
    return q, k, v
