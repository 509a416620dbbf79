"""Judges an online softmax that rescales only when it must, as FlashAttention-4 does. Built in chapter 12."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker


def lazily(
    scores: Tensor,
    values: Tensor,
    tile: int,
    slack: float,
    *,
    always: bool = False,
    at_slack: bool = False,
    moves: bool = False,
    together: bool = False,
    counts_first: bool = False,
    capped: bool = False,
    natural: bool = False,
    drifts: bool = False,
) -> tuple[Tensor, Tensor]:
    """(answer [queries, dims], rescales [queries]); the switches are mistakes."""
    queries = len(scores)
    reference = torch.full((queries,), -math.inf, dtype=torch.float64)
    best = reference.clone()  # of a mistake that compares with the largest score, not with the reference
    total, acc = torch.zeros(queries, dtype=torch.float64), torch.zeros(queries, values.shape[1], dtype=torch.float64)
    rescales = torch.zeros(queries, dtype=torch.int64)
    power = torch.exp if natural else torch.exp2
    for start in range(0, scores.shape[1], tile):
        part = scores[:, start : start + tile]
        largest = torch.maximum(reference, part.amax(1))
        unseen, seen = reference == -math.inf, largest > -math.inf
        higher = largest - torch.where(unseen, largest, best if drifts else reference).nan_to_num(0, 0, 0)
        raised = ((higher >= slack) & (higher > 0) if at_slack else higher > slack) | (unseen & seen)
        if always:
            raised = largest > reference
        if together and bool((raised & ~unseen).any()):
            raised = raised | ((largest > reference) & ~unseen)
        best = torch.maximum(best, largest)
        rescales += raised if counts_first else raised & ~unseen
        new = torch.where(raised | (largest > reference) if moves else raised, largest, reference)
        shift = torch.where(new == -math.inf, 0.0, new)
        factor = torch.where(raised & ~unseen, power(reference - shift), 1.0)
        weights = power(part - shift[:, None])
        weights = weights.clamp(max=1.0) if capped else weights
        total, acc, reference = (
            total * factor + weights.sum(1),
            acc * factor[:, None] + weights @ values[start : start + tile],
            new,
        )
    return acc / torch.where(total == 0, 1.0, total)[:, None], rescales


def rising(steps: list[float]) -> Tensor:
    """Scores of one query that change by these steps from key to key: [1, keys] float64."""
    return torch.tensor([steps], dtype=torch.float64).cumsum(1)


def _values(keys: int, dims: int = 3) -> Tensor:
    return torch.arange(keys * dims, dtype=torch.float64).view(keys, dims) % 7 - 2


def _some_scores(draw: Draw) -> tuple:
    queries, keys, tile = draw.randint(1, 6), draw.randint(1, 40), draw.randint(1, 9)
    scores = draw.randn(queries, keys).double() * draw.rng.choice((1.0, 4.0, 12.0))
    scores = scores + draw.rng.choice((0.0, 0.6, -0.4)) * torch.arange(keys)
    scores = scores.round() if draw.rng.random() < 0.5 else scores  # steps that meet the slack exactly
    for query in range(queries):
        if draw.rng.random() < 0.3:
            scores[query, : draw.randint(0, keys)] = -math.inf
    if draw.rng.random() < 0.3:
        scores[draw.randint(0, queries), :] = -math.inf
    return scores, draw.randn(keys, draw.randint(1, 5)).double(), tile, float(draw.rng.choice((0, 1, 2, 4, 8)))


check_attend_lazily = FunctionChecker(
    "attend_lazily",
    lazily,
    returns=("answer", "rescales"),
    atol=1e-10,
    rtol=1e-10,
    examples=[(rising([0, 3, 3, 3]), _values(4), 1, 4.0), (rising([2, 1, 9, -4, 1, 1]), _values(6), 2, 8.0)],
    edges={
        "the scores rise by exactly the slack": (rising([1, 4, 4, 1]), _values(4), 1, 4.0),
        "the scores rise by a little each time": (rising([1] * 12), _values(12), 1, 4.0),
        "the slack is 0": (rising([0, 1, -2, 3, 0, 1]), _values(6), 2, 0.0),
        "there is one tile": (rising([5, -9, 8]), _values(3), 5, 8.0),
        "the scores only fall": (rising([50, -3, -3, -30]), _values(4), 1, 2.0),
        "a query sees nothing at all": (torch.full((2, 5), -math.inf, dtype=torch.float64), _values(5), 2, 8.0),
        "a query sees nothing in its first tiles": (
            torch.tensor([[-math.inf, -math.inf, -math.inf, -40.0, -31.0, -20.0], [0, 1, 2, 3, 4, -math.inf]]).double(),
            _values(6),
            2,
            8.0,
        ),
        "one query of two rises": (torch.cat([rising([0, 9, 1, 1]), rising([0, 1, 1, 9])]), _values(4), 1, 8.0),
        "scores are in the thousands": (rising([2000, 5, 900, 3]), _values(4), 1, 8.0),
    },
    random=_some_scores,
    trials=60,
    hint="Each query has a reference. It moves only when the largest score of a tile exceeds it by more than slack.",
    misconceptions={
        "This rescales whenever a larger score comes. Up to the slack, keep the reference.": dict(always=True),
        "A score that exceeds the reference by exactly the slack does not move it.": dict(at_slack=True),
        "Where nothing is rescaled, the reference stays: this tile's weights are relative to the old one.": dict(
            moves=True
        ),
        "Each query decides for itself.": dict(together=True),
        "The first score that a query sees rescales nothing: there was nothing before.": dict(counts_first=True),
        "A weight may exceed 1, up to 2 to the power of slack: do not cut it off.": dict(capped=True),
        "Scores are powers of two: exp2.": dict(natural=True),
        "Compare with the reference, not with the largest score so far: many small steps add up.": dict(drifts=True),
    },
)
