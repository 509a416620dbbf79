"""The check of chapter 13's prefix, merged into the sequences that share it. Built in chapter 13."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch13_oracle import PAGED


def state_of(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, log) of scores [num_heads, num_keys] over values [num_keys, head_dim], natural;
    of no keys: NaN and -inf."""
    if not scores.shape[1]:
        return scores.new_full((len(scores), values.shape[1]), torch.nan), scores.new_full((len(scores),), -torch.inf)
    return scores.softmax(1) @ values, scores.logsumexp(1)


def with_prefix(
    own_mean: Tensor,
    own_log: Tensor,
    prefix_mean: Tensor,
    prefix_log: Tensor,
    rows: Tensor,
    *,
    in_order: bool = False,
    largest: bool = False,
    of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """(mean, log) of each sequence, those in `rows` behind the prefix; in float64. The keywords are mistakes."""
    places = torch.arange(len(rows)) if in_order else rows
    other_mean, other_log = torch.zeros_like(own_mean).double(), torch.full_like(own_log, -torch.inf).double()
    other_mean[places], other_log[places] = prefix_mean.double().transpose(0, 1), prefix_log.double().T
    own = own_log.double()
    add = torch.maximum if largest else torch.logaddexp2 if of_two else torch.logaddexp
    log = add(own, other_log)
    mean = torch.zeros_like(own_mean).double()
    for part, part_log in ((own_mean.double(), own), (other_mean, other_log)):
        empty = part_log == -torch.inf
        weight = torch.where(empty, 0.0, torch.exp(part_log - log))
        mean += torch.where(empty[:, :, None], 0.0, part) * weight[:, :, None]
    return mean.to(own_mean.dtype), log.to(own_log.dtype)


def _given(
    draw: Draw,
    num_heads: int,
    lengths: list[int],
    rows: list[int],
    shared: int,
    own_level: float = 0.0,
    prefix_level: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> tuple:
    """Sequences with keys of their own, those in `rows` behind `shared` keys of a prefix. Heads have 4 dimensions."""
    values = draw.randn(shared, 4).double()
    own, prefix = [], []
    for length in lengths:
        own.append(state_of(draw.randn(num_heads, length).double() + own_level, draw.randn(length, 4).double()))
        prefix.append(state_of(draw.randn(num_heads, shared).double() + prefix_level, values))
    grouped = [prefix[row] for row in rows]
    prefix_mean, prefix_log = torch.zeros(num_heads, 0, 4, dtype=dtype), torch.zeros(num_heads, 0, dtype=dtype)
    if rows:
        prefix_mean = torch.stack([mean for mean, _ in grouped], 1).to(dtype)
        prefix_log = torch.stack([log for _, log in grouped], 1).to(dtype)
    own_mean, own_log = (torch.stack(parts).to(dtype) for parts in zip(*own))
    return own_mean, own_log, prefix_mean, prefix_log, torch.tensor(rows, dtype=torch.int64)


def _examples(draw: Draw) -> list[tuple]:
    return [_given(draw, 2, [4, 2, 3], [2, 0], 5), _given(draw, 1, [1, 2], [0, 1], 3)]


def _edges(draw: Draw) -> list[tuple]:
    levels = (300.0, -300.0), (-300.0, 300.0), (2000.0, 2000.0), (-2000.0, -2000.0), (88.0, 89.0)
    return [
        _given(draw, 2, [2, 3, 1], [], 4),  # no two sequences share anything
        _given(draw, 2, [0, 3, 0], [2, 1], 4),  # nothing of one's own, and nothing at all
        _given(draw, 3, [2, 0], [1, 0], 0),  # an empty prefix
        _given(draw, 1, [1], [0], 1),
        *(_given(draw, 2, [2, 1, 3], [1, 2], 4, *both) for both in levels),
        _given(draw, 2, [3, 3, 3, 3], [3, 1, 0, 2], 3, dtype=torch.float64),
    ]


def _random(draw: Draw) -> tuple:
    num_seqs = draw.randint(1, 7)
    rows = draw.rng.sample(range(num_seqs), draw.randint(0, num_seqs + 1))
    lengths = [draw.rng.choice((0, 1, draw.randint(1, 12))) for _ in range(num_seqs)]
    levels = draw.rng.choice((0.0, 50.0, -50.0)), draw.rng.choice((0.0, 50.0, -50.0))
    return _given(draw, draw.randint(1, 5), lengths, rows, draw.randint(0, 9), *levels)


def _near(own_mean: Tensor, own_log: Tensor, prefix_mean: Tensor, prefix_log: Tensor, rows: Tensor) -> float:
    """Large logarithms have fewer digits behind the point."""
    if own_mean.dtype is torch.float64:
        return 1e-10
    known = torch.cat([own_log.flatten(), prefix_log.flatten(), torch.zeros(1)])
    return 2e-5 * max(1.0, float(known[known.isfinite()].abs().max()) / 40)


def _explain(got: Any, expected: tuple, own_mean: Tensor, own_log: Tensor, *rest: Tensor) -> str | None:
    mean, log = got
    if mean.shape != own_mean.shape or log.shape != own_log.shape:
        return "The result has the layout of the sequences' own states, not that of the prefix."
    if log.isnan().any() or mean.isnan().any():
        if (expected[1][log.isnan() | mean.isnan().any(2)] == -torch.inf).all():
            return "-inf minus -inf is not a number: where both parts are empty, the mean is 0 and the log -inf."
        return (
            "The mean of an empty part was never stored, and 0 times NaN is NaN: "
            "leave it out by torch.where, not by a product."
        )
    if log.isinf().logical_and(expected[1].isfinite()).any():
        return (
            "exp(log) overflows at 89 in float32, and is 0 at -104: raise e to differences only. torch.logaddexp does."
        )
    alone = [seq for seq in range(len(own_log)) if seq not in rest[-1].tolist()]
    if alone and not torch.allclose(log[alone], own_log[alone]):
        return f"Sequence {alone[0]} is not in `rows`: it has no prefix, and its state stays as it is."
    return None


check_merge_prefix = FunctionChecker(
    "merge_prefix",
    with_prefix,
    returns=("mean", "log"),
    examples=_examples,
    edges=_edges,
    random=_random,
    trials=30,
    atol=_near,
    rtol=1e-5,
    explain=_explain,
    hint="A part weighs exp(its log - the log of both); the log of both is log(exp(a) + exp(b)).",
    misconceptions={
        "Column i of the prefix belongs to sequence rows[i], not to sequence i.": dict(in_order=True),
        "The larger of two logs is not the log of the sum.": dict(largest=True),
        "The logarithms are natural here: powers of e, not of 2.": dict(of_two=True),
    },
    forbid=PAGED,
)
