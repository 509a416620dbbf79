"""The check of chapter 12's merged softmax states: any grouping, any order, parts that saw nothing.
Built in chapter 12."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch12_oracle import merged, state_of

States = tuple[Tensor, Tensor, Tensor]  # best and total [num_parts, num_queries], acc [num_parts, num_queries, dim]
_NEVER_STORED = ((torch.nan, torch.nan), (3.0, torch.inf), (torch.inf, -5.0))  # (total, acc) of an empty part


def _states(scores: Tensor, values: Tensor, parts: list[list[int]]) -> States:
    """The state of each part of the keys. Of an empty one the best alone means something."""
    found = [state_of(scores[:, keys].double(), values[keys].double(), scores.dtype) for keys in parts]
    for number, (best, total, acc) in enumerate(found):
        empty = best == -torch.inf
        total[empty], acc[empty] = _NEVER_STORED[number % 3]
    return _stacked(found)


def _stacked(states: list[States]) -> States:
    return tuple(torch.stack(parts) for parts in zip(*states))


def _examples(draw: Draw) -> Iterator[States]:
    yield _states(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), [[0, 1], [2, 3]])
    scores = torch.tensor([[2.0, 5.0, 1.0], [0.0, -1.0, 4.0]])
    yield _states(scores, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), [[2], [], [0, 1]])


def _edges(draw: Draw) -> Iterator[States]:
    values = draw.randn(6, 3)
    yield _states(draw.randn(2, 6), values, [list(range(6))])  # a single part
    yield _states(draw.randn(4, 6), values, [[], [], []])  # no query saw a key
    for level in (200.0, -200.0, 3000.0, -3000.0):
        yield _states(draw.randint(-3, 4, 3, 6) + level, values, [[0], [1, 2, 3], [], [4, 5]])
    yield _states(torch.tensor([[0.0, 300.0, -300.0, 1.0, 2.0, 299.0]]), values, [[0], [2], [3, 4], [1, 5]])
    yield _states(torch.full((2, 6), 7.0), values, [[0, 1], [2, 3], [4, 5]])  # equal bests
    masked = draw.randn(3, 6)  # one query sees one part, one the other, one neither
    masked[0, :3], masked[1, 3:], masked[2] = -torch.inf, -torch.inf, -torch.inf
    yield _states(masked, values, [[0, 1, 2], [3, 4, 5]])
    yield _states(draw.randn(5, 6).double(), values.double(), [[0, 3], [1], [2, 4, 5]])


def _random(draw: Draw, way: str) -> States:
    """way: what is merged: all parts, some of them, or two groups that were merged before."""
    num_queries, num_keys = draw.randint(1, 6), draw.randint(1, 30)
    scores = draw.rng.choice((1, 10, 100)) * draw.randn(num_queries, num_keys)
    scores = scores.masked_fill(draw.randn(num_queries, num_keys) > 0.8, -torch.inf)
    parts: list[list[int]] = [[] for _ in range(draw.randint(1, 7))]
    for key in range(num_keys):
        draw.rng.choice(parts).append(key)
    states = _states(scores, draw.randn(num_keys, draw.randint(1, 5)), parts)
    cut = draw.randint(1, len(parts) + 1)
    if way == "some":
        return tuple(one[:cut] for one in states)
    if way == "two groups" and cut < len(parts):
        return _stacked([merged(*(one[part] for one in states)) for part in (slice(cut), slice(cut, None))])
    return states


def _explain(got: Any, expected: States, *states: Tensor) -> str | None:
    best, total, acc = got
    if total.shape != expected[1].shape or acc.shape != expected[2].shape:
        return "Parts are the first dimension, and merging ends it."
    if not torch.equal(best, expected[0]):
        return "The largest score of all parts; -inf where no part has seen any."
    if total.isnan().any() or acc.isnan().any():
        empty = expected[0][(total.isnan() | acc.isnan().any(1))] == -torch.inf
        if empty.any():
            return "-inf minus -inf is not a number: take away something else where no part has seen anything."
        return (
            "The total and the acc of an empty part were never stored, and 0 times NaN, or infinity, "
            "is NaN: leave them out by torch.where, not by a product."
        )
    if total.isinf().any():
        return "exp(best) overflows at 89 in float32: only a difference to the largest best may be raised."
    if not acc.abs().amax() and expected[2].abs().amax():
        return "Everything vanished: exp(best) underflows at -104 in float32. Take the largest best away first."
    return None


def _near(best: Tensor, total: Tensor, acc: Tensor) -> float:
    return 1e-11 if best.dtype is torch.float64 else 1e-4


def _names(best: Tensor, total: Tensor, acc: Tensor) -> tuple[str, ...]:
    return tuple(f"{name} for {len(best)} parts" for name in ("best", "total", "acc"))


check_merge_states = FunctionChecker(
    "merge_states",
    merged,
    returns=_names,
    examples=_examples,
    edges=_edges,
    random=_random,
    trials=("all", "all", "some", "two groups") * 20,
    atol=_near,
    explain=_explain,
    hint="Everything relative to the largest best of all parts: total and acc of a part times exp(its best - that).",
    misconceptions={
        "acc is a sum, not a mean: it is divided by total when it is used, and not before.": dict(mean=True),
    },
    forbid=tuple(f"minillm.kernels.paged_decode.{name}" for name in ("merge_splits", "torch_merge_splits")),
)
