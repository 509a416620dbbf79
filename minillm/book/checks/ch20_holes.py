"""The hole in the text of chapter 20: the book's answer, and what is wrong with others. Built in chapter 20."""

from __future__ import annotations

from collections.abc import Callable


def kv_heads_of(rank, world_size, num_heads, num_kv_heads):
    queries = num_heads // world_size
    group = num_heads // num_kv_heads
    first, last = rank * queries, (rank + 1) * queries - 1
    return range(first // group, last // group + 1)


def check_kv_heads(function: Callable) -> str | None:
    for world_size, num_heads, num_kv_heads in ((2, 8, 4), (4, 8, 4), (8, 8, 4), (8, 32, 2), (2, 6, 6), (3, 12, 1)):
        for rank in range(world_size):
            got = function(rank, world_size, num_heads, num_kv_heads)
            expected = kv_heads_of(rank, world_size, num_heads, num_kv_heads)
            if got is None or list(got) != list(expected):
                shown = got if got is None else list(got)
                return (
                    f"rank {rank} of {world_size}, {num_heads} query heads and {num_kv_heads} KV heads: "
                    f"it returns {shown}, expected {list(expected)}"
                )
    return None
