"""Checks of chapter 20: a row-parallel layer, the parts of a QKV matrix, a ring to the left. Built in chapter 20.

`ch20_ranks` has the layer and the ring, `ch20_hang` the workers that hang, `ch20_pipeline` the schedule with the fewest
bubbles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch20_hang import Comm, check_repair_worker, trace_of
from minillm.book.checks.ch20_pipeline import check_fewest_bubbles
from minillm.book.checks.ch20_ranks import check_left_ring, check_row_parallel

__all__ = [
    "Comm",
    "check_fewest_bubbles",
    "check_left_ring",
    "check_repair_worker",
    "check_row_parallel",
    "check_split_qkv",
    "trace_of",
]

# 2 · the parts of a QKV matrix


def split(
    weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    world_size: int,
    rank: int,
    *,
    bound: Callable[[int, int, int], int] = lambda size, part, parts: size * part // parts,
    kv_of: Callable[[int, int, int], int] = lambda head, heads, kv_heads: head * kv_heads // heads,
    extra: int = 0,
    own: bool = True,
    order: str = "qkv",
    refuses: bool = True,
) -> tuple[Tensor, list[int]]:
    """The rows of a rank, head by head, and the own KV head of each query head. The keywords are mistakes."""
    if refuses and not (1 <= world_size <= num_heads and 0 <= rank < world_size):
        raise ValueError(f"rank {rank} of {world_size}")
    queries = range(bound(num_heads, rank, world_size), bound(num_heads, rank + 1, world_size))
    read = [kv_of(head, num_heads, num_kv_heads) for head in queries]
    kv_heads = sorted({*read, *(min(max(read) + extra, num_kv_heads - 1),)}) if read else []
    heads = {"q": queries, "k": [num_heads + kv for kv in kv_heads]}
    heads["v"] = [num_kv_heads + head for head in heads["k"]]
    rows = [head * head_dim + i for kind in order for head in heads[kind] for i in range(head_dim)]
    return weight[rows], [kv_heads.index(kv) if own else kv for kv in read]


def _random_split(draw: Draw) -> tuple:
    kv_heads, group = draw.randint(1, 6), draw.randint(1, 6)
    world_size = draw.randint(1, kv_heads * group + 1)
    return _qkv(draw, kv_heads * group, kv_heads, draw.rng.choice((2, 4)), world_size, draw.randint(0, world_size))


def _qkv(draw: Draw, num_heads: int, num_kv_heads: int, head_dim: int, world_size: int, rank: int) -> tuple:
    weight = draw.randn((num_heads + 2 * num_kv_heads) * head_dim, 6)
    return weight, num_heads, num_kv_heads, head_dim, world_size, rank


def _all_ranks(*shapes: tuple[int, int, int, int]) -> Callable[[Draw], list[tuple]]:
    return lambda draw: [_qkv(draw, *shape, rank) for shape in shapes for rank in range(shape[-1])]


def _split_edges(draw: Draw) -> list[tuple]:
    shapes = ((4, 2, 8, 1), (4, 4, 8, 3), (5, 1, 4, 3), (8, 2, 4, 8), (12, 4, 4, 5), (7, 7, 4, 7))
    refused = ((0, 0), (5, 0), (2, 2), (2, -1), (-1, 0))
    dtypes = (torch.float64, torch.bfloat16)
    return [
        *_all_ranks(*shapes)(draw),
        *(_qkv(draw, 4, 2, 4, *ranks) for ranks in refused),
        *((weight.to(dtype), *sizes) for dtype in dtypes for weight, *sizes in [_qkv(draw, 6, 3, 4, 2, 1)]),
    ]


def _heads(got: object, expected: object, weight: Tensor, heads: int, kv: int, dim: int, ranks: int, rank: int) -> str:
    queries = range(heads * rank // ranks, heads * (rank + 1) // ranks)
    read = sorted({head * kv // heads for head in queries})
    return (
        f"Rank {rank} has the query heads {list(queries)}, which read the KV heads {read}: rows of q, then k, then v."
    )


check_split_qkv = FunctionChecker(
    "split_qkv",
    split,
    returns=("shard", "kv_of_query"),
    examples=_all_ranks((4, 2, 8, 2), (6, 2, 8, 4)),
    edges=_split_edges,
    random=_random_split,
    raises=(ValueError,),
    explain=_heads,
    misconceptions={
        "There are 1 to num_heads ranks, numbered from 0: raise ValueError otherwise.": dict(refuses=False),
        "The query heads of rank r begin at num_heads * r // world_size.": dict(
            bound=lambda size, part, parts: min(size, part * -(-size // parts))
        ),
        "Query head h reads KV head h // (num_heads // num_kv_heads), wherever the rank begins.": dict(
            kv_of=lambda head, heads, kv_heads: head % kv_heads
        ),
        "A rank has just those KV heads that its query heads read.": dict(extra=1),
        "kv_of_query counts in the rank's own KV heads, from 0.": dict(own=False),
        "The keys come before the values.": dict(order="qvk"),
    },
    forbid=("minillm.parallel.layout.cut_of", "minillm.parallel.layout.Layout"),
)
