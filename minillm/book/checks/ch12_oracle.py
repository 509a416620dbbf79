"""References of chapter 12: states of a softmax, masks, attention in float64. Built in chapter 12."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TILE_M, TILE_N = 32, 16  # of the kernels: queries of a program, keys of a step
Sees = Callable[[Tensor, Tensor], Tensor]


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


def merged(best: Tensor, total: Tensor, acc: Tensor, *, mean: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The states of all parts in one, computed in float64; the keyword is a mistake."""
    largest = best.amax(0)
    empty = best == -torch.inf
    factor = torch.where(empty, 0.0, torch.exp((best - largest).double()))
    whole = torch.where(empty, 0.0, total.double() * factor).sum(0)
    weighted = torch.where(empty[:, :, None], 0.0, acc.double() * factor[:, :, None]).sum(0)
    if mean:
        weighted = weighted / whole[:, None]
    return largest, whole.to(best.dtype), weighted.to(best.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, cap: float | None = None, scale: float | None = None
) -> Tensor:
    """One head in float64: q [num_queries, head_dim], k and v [num_keys, head_dim], seen [num_queries, num_keys]."""
    scores = q.double() @ k.double().T * (q.shape[1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double()


def documents_attended(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, *, sees: Sees = operator.eq) -> Tensor:
    """Attention inside of documents; the keyword is for mistakes."""
    return attention(q, k, v, sees(documents[:, None], documents[None, :]))


def sink_mask(num_queries: int, num_keys: int, sink: int, window: int) -> Tensor:
    """[num_queries, num_keys]: the first `sink` keys and the last `window`, none ahead of the query."""
    position, key = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)[None, :]
    return (key <= position) & ((key < sink) | (key > position - window))


def sink_attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: int,
    window: int,
    *,
    sinks: bool = True,
    longer: int = 0,
    windowed: bool = True,
    causal: bool = True,
    scaled: bool = True,
) -> Tensor:
    """Attention with a sink and a window; the keywords are mistakes. A mask that is too wide sees what is loaded."""
    right = sink_mask(len(q), len(k), sink, window)
    loaded = torch.cat([rows.any(0, keepdim=True).expand(len(rows), -1) for rows in right.split(TILE_M)])
    position, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))[None, :]
    seen = sink_mask(len(q), len(k), sink if sinks else 0, max(window + longer, 1))
    if longer > 0:
        seen = seen & loaded
    if not windowed:
        seen = loaded & (key <= position)
    if not causal:
        seen = loaded & ((key < sink) | (key > position - window))
    return attention(q, k, v, seen, scale=None if scaled else 1.0)


def capped_attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cap: float,
    *,
    caps: bool = True,
    multiplies: bool = True,
    scales_first: bool = True,
    causal: bool = True,
    masks_last: bool = True,
) -> Tensor:
    """Causal attention of [num_queries, heads, head_dim] at the last positions, with shared KV heads and capped scores,
    in float64. The keywords are mistakes."""
    group, past, each = q.shape[1] // k.shape[1], len(k) - len(q), TILE_M * k.shape[1] // q.shape[1]
    token, key = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    end_of_tile = (token // each * each + each).clamp(max=len(q)) - 1
    loaded, seen = key <= past + end_of_tile, key <= past + token
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        mine = q[:, head].double(), k[:, head // group].double(), v[:, head // group].double()
        if not masks_last:
            out[:, head] = _masked_first(*mine, seen, loaded, cap)
        elif not multiplies:
            out[:, head] = attention(mine[0] / cap, *mine[1:], seen, cap=1.0)
        else:
            told = cap if scales_first else cap * q.shape[2] ** -0.5
            out[:, head] = attention(*mine, seen if causal else loaded, cap=told if caps else None)
    return out


def _masked_first(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, loaded: Tensor, cap: float) -> Tensor:
    """What comes of -inf that is capped to -cap: keys ahead keep a weight, as far as the program's tiles go."""
    scores = torch.where(seen, cap * torch.tanh(q @ k.T * q.shape[1] ** -0.5 / cap), -cap)
    weights = torch.where(loaded, scores.exp(), 0.0)
    behind_the_end = (-loaded.sum(1) % TILE_N) * torch.exp(torch.tensor(-cap, dtype=torch.float64))
    return weights @ v / (weights.sum(1) + behind_the_end)[:, None]


def documents_of(lengths: Sequence[int]) -> Tensor:
    """The document of each token, int32, for documents of these lengths one after the other."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)


def levelled(randn, num_tokens: int, head_dim: int, level: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, with `level` added to each score that q · k / sqrt(head_dim) gives:
    a first dimension sees to it."""
    q, k, v = (randn(num_tokens, head_dim).to(dtype) for _ in range(3))
    q[:, 0], k[:, 0] = 16.0, level * head_dim**0.5 / 16
    return q, k, v
