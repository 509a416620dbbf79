"""What the checks of chapter 03's caches have in common: attention in float64, and what is changed between two calls.
Built in chapter 03.

What a cache holds beyond its valid positions is overwritten with NaN before it may attend, so that reading it shows.
And a stored key and value are changed before each call, so that attending to another copy shows too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Draw

BACKENDS = (
    "minillm.model.attention.causal_attention",
    "minillm.kv_cache.contiguous.ContiguousKVCache",
    "minillm.kv_cache.contiguous.ContiguousAttention",
)
OUTPUT = "the output [query, head, dimension]"
NEAR = {"atol": 1e-4, "rtol": 1e-4}
CAUSAL = "These are the values for queries without a causal mask: inside the chunk, a query sees no later position."
COPIES = (
    "The check changed the last stored key and value, in keys and values, before this call, "
    "and the output does not follow: attend to these tensors, not to another copy."
)


def chunk(
    draw: Draw, count: int, heads: int = 2, kv_heads: int = 2, head_dim: int = 4, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """q, k and v as a decoder hands them over: three views into one tensor, none of them contiguous."""
    return (draw.randn(count, heads + 2 * kv_heads, head_dim) * scale).split([heads, kv_heads, kv_heads], dim=1)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Sequence[Sequence[int]], modulo: bool = False) -> Tensor:
    """Query i over the places seen[i] of keys and values, one head at a time, in float64."""
    kv_heads, out = keys.shape[1], torch.empty(q.shape)
    for i, places in enumerate(seen):
        for head in range(q.shape[1]):
            kv = head % kv_heads if modulo else head // (q.shape[1] // kv_heads)
            weights = (keys[places, kv].double() @ q[i, head].double() / q.shape[2] ** 0.5).softmax(0)
            out[i, head] = weights @ values[places, kv].double()
    return out


def poisoned(got: Any, *rest: Any) -> str | None:
    """The hint for an output that holds NaN."""
    held = isinstance(got, Tensor) and got.isnan().any()
    return "NaN: slots that hold no valid position were read." if held else None


class Overlap(TorchDispatchMode):
    """Notes an assignment through an index that names one place twice; torch does not say which value stays then."""

    found = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, writes = function.name(), ()
        if name == "aten::index_put_" and not (args[3] if len(args) > 3 else (kwargs or {}).get("accumulate", False)):
            writes = [index for index in args[1] if index is not None and index.dtype != torch.bool]
        elif name == "aten::index_copy_":
            writes = [args[2]]
        if writes:
            places = torch.stack(torch.broadcast_tensors(*writes)).flatten(1)  # [num_indices, num_places]
            if places.unique(dim=1).shape[1] < places.shape[1]:
                self.found = f"{places.shape[1]} writes, {places.unique(dim=1).shape[1]} places"
        return function(*args, **(kwargs or {}))
