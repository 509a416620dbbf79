"""Checks of chapter 20: the bias of a row-parallel layer, and a ring to the left. Built in chapter 20.

All ranks of a case run at once, in a thread each. What they return and what they send is compared with the book's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw, FunctionChecker, Raised
from minillm.parallel.collectives import direct_all_reduce
from minillm.parallel.links import Hang, ThreadLink, run_threads

_WAITS = "Every rank has to make the calls that the others wait for."

# 1 · the bias of a row-parallel layer


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, world_size: int, all_reduce: Callable, *,
    adds: Callable[[int], bool] = lambda rank: rank == 0, equal_parts: bool = False, twice: bool = False,
    everywhere: bool = True,
) -> Tensor:  # fmt: skip
    """The product with all columns, plus the bias once. The keywords are mistakes."""
    partial_sum = x @ weight.T
    if bias is not None and adds(rank):
        partial_sum = partial_sum + (bias / world_size if equal_parts else bias)
    total = all_reduce(partial_sum)
    if twice and bias is not None:
        total = total + all_reduce(bias * (rank == 0))
    return total if everywhere or rank == 0 else partial_sum


def _on_rows(answer: Callable) -> Callable:
    def of_all_ranks(xs: list[Tensor], weights: list[Tensor], bias: Tensor | None) -> tuple:
        shapes: list[list[list[int]]] = [[] for _ in xs]

        def work(link: ThreadLink) -> Tensor:
            def all_reduce(tensor: Tensor) -> Tensor:
                shapes[link.rank].append(list(tensor.shape))
                return direct_all_reduce(link, tensor)

            return answer(xs[link.rank], weights[link.rank], bias, link.rank, len(xs), all_reduce)

        return shapes, run_threads(work, [()] * len(xs))

    return of_all_ranks


def _rows(
    draw: Draw, widths: list[int], tokens: int, out: int, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple:
    """Whole numbers, so that every order of adding gives the same bits."""
    x, weight = (draw.randint(-9, 10, rows, sum(widths)).to(dtype) for rows in (tokens, out))
    x = x * (2**30 + 1) if dtype == torch.float64 else x  # sums that float32 would round
    added = (draw.randint(1, 400 if dtype == torch.float16 else 10**6, out) * 2 + 1).to(dtype) if bias else None
    return *([part.clone() for part in one.split(widths, 1)] for one in (x, weight)), added


def _row_edges(draw: Draw) -> dict[str, tuple]:
    return {
        "there is one rank": _rows(draw, [6], 2, 3),
        "the ranks have different widths": _rows(draw, [2, 5, 1], 3, 4),
        "a rank has no columns": _rows(draw, [3, 0, 2], 3, 4),
        "there are no tokens": _rows(draw, [4, 4], 0, 5),
        **{  # a bias divided by the ranks does not add up to itself
            f"there are {world_size} ranks": _rows(draw, [2] * world_size, 2, 9) for world_size in (3, 5, 6, 7)
        },
        "the dtype is float64": _rows(draw, [2, 2], 3, 4, dtype=torch.float64),
        "the dtype is float16": _rows(draw, [2, 3], 3, 4, dtype=torch.float16),
    }


def _random_rows(draw: Draw) -> tuple:
    widths = [draw.randint(0, 6) for _ in range(draw.randint(1, 6))]
    return _rows(draw, widths, draw.randint(0, 5), draw.randint(1, 7), bias=draw.rng.random() < 0.7)


def _times_added(got: Any, expected: Any, xs: list[Tensor], weights: list[Tensor], bias: Tensor | None) -> str | None:
    if isinstance(got, Raised):
        return _WAITS if got.kind is Hang else None
    if any(len(calls) != 1 for calls in got[0]):
        return "One all_reduce is enough, of a partial product with every output."
    if bias is None or not len(xs[0]):
        return None
    rank = next(rank for rank, (one, right) in enumerate(zip(got[1], expected[1])) if not torch.equal(one, right))
    without = sum(x @ weight.T for x, weight in zip(xs, weights))
    times = ((got[1][rank] - without)[0, 0] / bias[0]).item()
    return f"On rank {rank} the bias was added {times:.7g} times; it has to be in the sum exactly once."


check_row_parallel = FunctionChecker(
    "row_parallel",
    row_product,
    adapt=_on_rows,
    returns=("the shapes that the ranks hand to all_reduce", "what the ranks return"),
    examples=lambda draw: [_rows(draw, [4, 4], 3, 5), _rows(draw, [4, 4], 3, 5, bias=False)],
    edges=_row_edges,
    random=_random_rows,
    trials=25,
    explain=_times_added,
    hint="One all_reduce of the partial products; the bias belongs to the sum.",
    misconceptions={
        "Every rank adds the bias, and all_reduce adds up what they have: one of them is enough.": dict(
            adds=lambda rank: True
        ),
        "Parts of the bias do not add up to it, since each is rounded: one rank adds all of it.": dict(
            adds=lambda rank: True, equal_parts=True
        ),
        "The bias is missing: one rank adds it to its partial product.": dict(adds=lambda rank: False),
        "One all_reduce is enough: the bias of one rank is in the sum.": dict(adds=lambda rank: False, twice=True),
        "Every rank returns the sum, not rank 0 alone.": dict(everywhere=False),
    },
    forbid=("minillm.parallel.layers.RowParallelLinear",),
)

# 3 · a ring to the left


def ring(
    rank: int, world_size: int, values: Tensor, send: Callable, recv: Callable, *, way: int = -1,
    replaces: bool = False,
    adds: bool = False, short: int = 0, equal: bool = False, turn: int = 1,
) -> Tensor:  # fmt: skip
    """The sum over all ranks. The keywords are mistakes; `way` is -1 to the left, 1 to the right."""
    n, size = world_size, len(values)
    bounds = [size * chunk // n for chunk in range(n + 1)]
    if equal:
        bounds = [chunk * (size // n) for chunk in range(n)] + [size]
    chunks = [values[begin:end].clone() for begin, end in pairwise(bounds)]
    to, source = (rank + way) % n, (rank - way) % n

    def pass_on(own: int, other: int, add: bool) -> None:
        send(chunks[own % n], to)
        taken = recv(source)
        chunks[other % n] = chunks[other % n] + taken if add else taken

    for step in range(n - 1):
        place = turn + step
        pass_on(rank - way * place, rank - way * (place + 1), not replaces)
    for step in range(n - 1 - short):
        pass_on(rank - way * (turn - 1 + step), rank - way * (turn + step), adds)
    return torch.cat(chunks)


def around(rank: int, world_size: int, values: Tensor, send: Callable, recv: Callable) -> Tensor:
    """A mistake: all values around the ring."""
    total, passing = values.clone(), values
    for _ in range(world_size - 1):
        send(passing, (rank - 1) % world_size)
        passing = recv((rank + 1) % world_size)
        total += passing
    return total


def _on_ring(answer: Callable) -> Callable:
    def of_all_ranks(values: list[Tensor]) -> tuple:
        n = len(values)
        sent: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        sources: list[set[int]] = [set() for _ in range(n)]

        def work(link: ThreadLink) -> Tensor:
            def send(tensor: Tensor, to: int) -> None:
                sent[link.rank].append((to, tensor.numel()))
                link.send(tensor, to)

            def recv(source: int) -> Tensor:
                sources[link.rank].add(source)
                return link.take(source)

            return answer(link.rank, n, values[link.rank], send, recv)

        results = run_threads(work, [()] * n)
        return results, [_is_new(got, own) for got, own in zip(results, values)], sources, sent

    return of_all_ranks


def _is_new(got: Any, own: Tensor) -> bool:
    if not isinstance(got, Tensor) or not own.numel():
        return True
    return got.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()


def _same_bits(case: Case, got: tuple, values: list[Tensor]) -> None:
    for rank, one in enumerate(got[0]):
        case.true(
            torch.equal(one, got[0][0]),
            f"ranks 0 and {rank} of {len(values)} have results with different bits",
            hint="In the second half a received chunk replaces the own one; nothing is added.",
        )


def _numbers(draw: Draw, n: int, size: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Numbers of 0 to 4 digits in float32; in another dtype fractions of 64, which every order adds up to the same."""
    if dtype == torch.float32:
        return ([draw.randn(size) * 10 ** draw.randint(0, 4) for _ in range(n)],)
    values = [(draw.randint(-64, 65, size) / 64).to(dtype) for _ in range(n)]
    return ([part * (2**30 + 1) if dtype == torch.float64 else part for part in values],)


def _ring_edges(draw: Draw) -> dict[str, tuple]:
    return {
        "one rank is alone: no message, and a new tensor all the same": _numbers(draw, 1, 5),
        "there are two ranks": _numbers(draw, 2, 7),
        "chunks have 2 and 3 elements": _numbers(draw, 4, 10),
        "some chunks have no element": _numbers(draw, 5, 3),
        "there are no values": _numbers(draw, 3, 0),
        "there are eight ranks": _numbers(draw, 8, 64),
        "the dtype is float64": _numbers(draw, 3, 8, torch.float64),
        "the dtype is float16": _numbers(draw, 2, 5, torch.float16),
    }


def _why_ring(got: Any, expected: Any, values: list[Tensor]) -> str | None:
    if isinstance(got, Raised):
        return f"{_WAITS} Send before you receive." if got.kind is Hang else None
    n, size = len(values), len(values[0])
    told = f"{n} ranks, {size} elements; chunks begin at {[size * chunk // n for chunk in range(n)]}"
    if not all(got[1]):
        return "The result is a new tensor, and no view of the own values, also where there is one rank."
    if got[2] != expected[2] or any(to != (rank - 1) % n for rank, own in enumerate(got[3]) for to, _ in own):
        return "Send to the left neighbour, rank - 1, and receive from the right one."
    if got[3] != expected[3]:
        return f"{told}. Rank r sends first the chunks r + 1, r + 2, ...; then r, r + 1, ..."
    return f"{told}."


check_left_ring = FunctionChecker(
    "left_ring",
    ring,
    adapt=_on_ring,
    returns=(
        "the list of the ranks' results",
        "the list that says whether each rank's result is a new tensor",
        "the list of the ranks that each rank receives from",
        "the list of (receiver, elements) of what each rank sends",
    ),
    examples=lambda draw: [_numbers(draw, 3, 6), _numbers(draw, 4, 8)],
    edges=_ring_edges,
    random=lambda draw: _numbers(draw, draw.randint(1, 8), draw.randint(0, 40)),
    trials=15,
    # Sums of up to 8 numbers of 5 digits, in another order.
    atol=lambda values: 0.1 if values[0].dtype == torch.float32 else 0.0,
    explain=_why_ring,
    also=_same_bits,
    hint="In the first half a chunk collects every rank's part, in the second the sums go around.",
    misconceptions={
        "This ring goes to the right: send to the left neighbour, rank - 1, and receive from the right one.": dict(
            way=1
        ),
        "In the first half a received chunk is added to the own one: it collects every rank's part.": dict(
            replaces=True
        ),
        "In the second half a received chunk replaces the own one; nothing is added.": dict(adds=True),
        "A chunk needs world_size - 1 steps to reach every rank, in the second half as in the first.": dict(short=1),
        "Chunk c begins at size * c // world_size, so that the chunks differ by one element at most.": dict(equal=True),
        "After the first half rank r has the sum of chunk r, so it sends chunk r + 1 first.": dict(turn=0),
        "Send one chunk in each step, not all values: every rank sends fewer elements then.": around,
    },
    forbid=tuple(
        f"minillm.parallel.collectives.{name}"
        for name in ("ring_all_reduce", "tree_all_reduce", "direct_all_reduce", "all_gather", "reduce_scatter")
    ),
)
