"""Checks of chapter 20: a row-parallel layer, the parts of a QKV matrix, a ring to the left. Built in chapter 20.

`ch20_hang` has the workers that hang, `ch20_pipeline` the schedule with the fewest bubbles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.checks.ch20_hang import Comm, check_repair_worker, trace_of
from minillm.book.checks.ch20_oracle import even_bounds
from minillm.book.checks.ch20_pipeline import check_fewest_bubbles
from minillm.parallel.collectives import direct_all_reduce
from minillm.parallel.links import Hang, ThreadLink, run_threads

__all__ = [
    "Comm",
    "check_fewest_bubbles",
    "check_left_ring",
    "check_repair_worker",
    "check_row_parallel",
    "check_split_qkv",
    "trace_of",
]

check_row_parallel = Checker(
    "row_parallel", hint="One all_reduce of the partial products; the bias belongs to the sum.",
    forbid=("minillm.parallel.layers.RowParallelLinear",))  # fmt: skip
check_left_ring = Checker(
    "left_ring", hint="In the first half a chunk collects every rank's part, in the second the sums go around.",
    forbid=tuple(f"minillm.parallel.collectives.{name}" for name in (
        "ring_all_reduce", "tree_all_reduce", "direct_all_reduce", "all_gather", "reduce_scatter")))  # fmt: skip


def on_ranks(case: Case, function: Callable[..., Any], parts: Sequence[tuple]) -> list[Any]:
    """`run_threads`, where a hang fails the case."""
    try:
        return run_threads(function, parts)
    except Hang as error:
        case.fail(f"with {len(parts)} ranks {error}", hint="Every rank has to make the calls that the others wait for.")


# 1 · the bias of a row-parallel layer


@check_row_parallel.part("example")
def _row_example(case: Case) -> None:
    _row(case, [4, 4], 3, 5)
    _row(case, [4, 4], 3, 5, bias=False)


@check_row_parallel.part("edges")
def _row_edges(case: Case) -> None:
    _row(case, [6], 2, 3)
    _row(case, [2, 5, 1], 3, 4)
    _row(case, [3, 0, 2], 3, 4)  # a rank without columns
    _row(case, [4, 4], 0, 5)  # a step without tokens
    for world_size in (3, 5, 6, 7):
        _row(case, [2] * world_size, 2, 9)  # a bias divided by the ranks does not add up to itself
    _row(case, [2, 2], 3, 4, dtype=torch.float64)
    _row(case, [2, 3], 3, 4, dtype=torch.float16)


@check_row_parallel.part("random")
def _row_random(case: Case) -> None:
    for _ in range(25):
        widths = [case.randint(0, 6) for _ in range(case.randint(1, 6))]
        _row(case, widths, case.randint(0, 5), case.randint(1, 7), bias=case.rng.random() < 0.7)


def _row(case: Case, widths: list[int], tokens: int, out: int, bias: bool = True, dtype=torch.float32) -> None:
    """Whole numbers, so that every order of adding gives the same bits."""
    x, weight = (case.randint(-9, 10, rows, sum(widths)).to(dtype) for rows in (tokens, out))
    x = x * (2**30 + 1) if dtype == torch.float64 else x  # sums that float32 would round
    added = (case.randint(1, 400 if dtype == torch.float16 else 10**6, out) * 2 + 1).to(dtype) if bias else None
    ends = [sum(widths[: rank + 1]) for rank in range(len(widths))]
    calls: list[list[Tensor]] = [[] for _ in widths]

    def work(link: ThreadLink) -> Tensor:
        columns = slice(ends[link.rank] - widths[link.rank], ends[link.rank])

        def all_reduce(tensor: Tensor) -> Tensor:
            calls[link.rank].append(tensor.clone())
            return direct_all_reduce(link, tensor)

        own = x[:, columns].clone(), weight[:, columns].clone()
        return case.call(*own, added, link.rank, len(widths), all_reduce)

    told = f"{len(widths)} ranks with {widths} columns, {tokens} tokens{'' if bias else ', no bias'}"
    results = on_ranks(case, work, [()] * len(widths))
    for rank, (got, made) in enumerate(zip(results, calls)):
        case.equal(len(made), 1, f"the number of all_reduce calls of rank {rank}", hint=f"Here: {told}. One is enough.")
        case.equal(list(made[0].shape), [tokens, out], f"the shape that rank {rank} hands to all_reduce",
                   hint=f"Here: {told}. A partial product has every output.")  # fmt: skip
        case.is_a(got, dtype, f"what rank {rank} returns")
        expected = x @ weight.T + (0 if added is None else added)
        hint = f"Here: {told}."
        if added is not None and got.shape == expected.shape and tokens and not torch.equal(got, expected):
            times = ((got - x @ weight.T)[0, 0] / added[0]).item()
            hint += f" The bias was added {times:.7g} times; it has to be in the sum exactly once."
        case.equal(got, expected, f"what rank {rank} returns", hint=hint)


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
        "There are 1 to num_heads ranks, numbered from 0: raise ValueError otherwise.": partial(split, refuses=False),
        "The query heads of rank r begin at num_heads * r // world_size.": partial(
            split, bound=lambda size, part, parts: min(size, part * -(-size // parts))
        ),
        "Query head h reads KV head h // (num_heads // num_kv_heads), wherever the rank begins.": partial(
            split, kv_of=lambda head, heads, kv_heads: head % kv_heads
        ),
        "A rank has just those KV heads that its query heads read.": partial(split, extra=1),
        "kv_of_query counts in the rank's own KV heads, from 0.": partial(split, own=False),
        "The keys come before the values.": partial(split, order="qvk"),
    },
    forbid=("minillm.parallel.layout.cut_of", "minillm.parallel.layout.Layout"),
)


# 3 · a ring to the left


@check_left_ring.part("example")
def _ring_example(case: Case) -> None:
    _ring(case, 3, 6)
    _ring(case, 4, 8)


@check_left_ring.part("edges")
def _ring_edges(case: Case) -> None:
    _ring(case, 1, 5)  # alone: no message
    _ring(case, 2, 7)
    _ring(case, 4, 10)  # chunks of 2 and 3 elements
    _ring(case, 5, 3)  # chunks without an element
    _ring(case, 3, 0)
    _ring(case, 8, 64)
    _ring(case, 3, 8, torch.float64)
    _ring(case, 2, 5, torch.float16)


@check_left_ring.part("random")
def _ring_random(case: Case) -> None:
    for _ in range(15):
        _ring(case, case.randint(1, 8), case.randint(0, 40))


def _ring(case: Case, n: int, size: int, dtype: torch.dtype = torch.float32) -> None:
    """Numbers of 0 to 4 digits in float32; in another dtype fractions of 64, which every order adds up to the same."""
    values = [case.randn(size) * 10 ** case.randint(0, 4) for _ in range(n)]
    if dtype != torch.float32:
        values = [(case.randint(-64, 65, size) / 64).to(dtype) for _ in range(n)]
    if dtype == torch.float64:
        values = [part * (2**30 + 1) for part in values]
    sent: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    sources: list[set[int]] = [set() for _ in range(n)]

    def work(link: ThreadLink) -> Tensor:
        def send(tensor: Tensor, to: int) -> None:
            sent[link.rank].append((to, tensor.numel()))
            link.send(tensor, to)

        def recv(source: int) -> Tensor:
            sources[link.rank].add(source)
            return link.take(source)

        return case.run(answer, link.rank, n, values[link.rank], send, recv)

    @wraps(case.student)
    def answer(rank: int, n: int, own: Tensor, *links: Callable) -> Tensor:
        got = case.student(rank, n, own, *links)
        case.is_a(got, dtype, f"the result of rank {rank}")
        shares = got.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        case.true(not (size and shares), f"rank {rank} returns its own values, or a view of them ({told})",
                  hint="The result is a new tensor, also where there is one rank.")  # fmt: skip
        return got

    told = f"{n} ranks, {size} elements"
    results = on_ranks(case, work, [()] * n)
    bounds, total = even_bounds(size, n), torch.zeros(size, dtype=torch.float64)
    for part in values:
        total += part.double()
    for rank, got in enumerate(results):
        hint = f"Here: {told}; chunks begin at {bounds[:-1]}."
        close = {"atol": 0.02, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.0, "rtol": 0.0}
        case.close(got, total.to(dtype), f"the result of rank {rank}", **close, hint=hint)
        case.true(torch.equal(got, results[0]), f"ranks 0 and {rank} have results with different bits ({told})",
                  hint="In the second half a received chunk replaces the own one; nothing is added.")  # fmt: skip
        to = {peer for peer, _ in sent[rank]}
        case.true(to <= {(rank - 1) % n} and sources[rank] <= {(rank + 1) % n},
                  f"rank {rank} of {n} sent to {sorted(to)} and received from {sorted(sources[rank])}",
                  hint="Send to the left neighbour, rank - 1, and receive from the right one.")  # fmt: skip
        lengths = [end - start for start, end in pairwise(bounds)]
        expected = [lengths[chunk % n] for chunk in [*range(rank + 1, rank + n), *range(rank, rank + n - 1)]]
        case.equal([length for _, length in sent[rank]], expected, f"the lengths that rank {rank} sends, in order,",
                   hint=f"{hint} First the chunks rank + 1, rank + 2, ...; then rank, rank + 1, ...")  # fmt: skip
