"""Checks of chapter 01: top-p with a floor, Gumbel top-k, a penalty that spares the prompt, typical sampling.
Built in chapter 01.

The references are loops over rows and tokens in float64: slow, and easy to believe. Random trials choose their
thresholds halfway between two possible sums, so that rounding never decides. Ties are judged on any machine alike:
one call runs with every sort that promises nothing about ties turned against the student.
`ch01_draws` has Gumbel top-k and the penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch01_draws import STABLE, any_machine, check_gumbel_top_k, check_young_penalty

__all__ = ["check_gumbel_top_k", "check_top_p_mask", "check_typical_mask", "check_young_penalty"]

INF = float("inf")
_UNDERFLOW = "Its probability is too small for float32, and rounds to 0; its logit is finite, and that is what counts."
_CROSSES = "The token that carries the sum across the threshold stays in: keep while the sum before it is under it."
_EXACTLY = (
    "Two of these tokens hold exactly 0.5, and that is enough: keep where the sum before is less than the threshold, "
    "not where it equals it."
)
_LARGER_IDS = "Ties go to the smaller token id."
Rank = Callable[[Tensor], Tensor]  # probabilities -> what they are ranked by, the smallest first


def _by_probability(probs: Tensor) -> Tensor:
    return -probs


def _by_distance(probs: Tensor) -> Tensor:
    """How far a token's surprisal is from the entropy."""
    surprisal = -probs.log()
    return (surprisal - torch.where(probs > 0, probs * surprisal, 0.0).sum()).abs()


def masked(rank: Rank, logits: Tensor, threshold: Tensor, min_keep: int = 1, *, mistake: str = "") -> Tensor:
    """Go down each row's ranking until the sum reaches the threshold: bool [num_rows, vocab_size]."""
    rows = []
    for row, limit in zip(logits.double(), threshold.tolist()):
        probs = row.softmax(-1)
        place = {token: -token if mistake == "larger ids" else token for token in range(len(row))}
        rank_by = rank(probs)
        keep, total = [False] * len(row), 0.0
        for count, token in enumerate(sorted(place, key=lambda j: (float(rank_by[j]), place[j]))):
            after = total + float(probs[token])
            least = 0 if mistake == "no floor" else min_keep
            is_over = {"stops early": after > limit, "one too many": total > limit}.get(mistake, total >= limit)
            if mistake == "rounds":
                is_over = total > 1 - 2**-24
            if is_over and limit < 1 and count >= least:
                break
            if mistake == "rounds" and is_over and count >= least:
                break
            keep[token], total = True, after
        possible = row.isfinite()
        if mistake == "underflow":
            possible = row.float().softmax(-1) > 0
        rows.append(torch.tensor(keep) & (possible | (mistake == "-inf")))
    return torch.stack(rows)


def _between_sums(draw: Draw, ranked: list[float]) -> float:
    """A threshold halfway between two sums of the ranked probabilities that lie well apart."""
    sums = [0.0]
    for probability in ranked:
        sums.append(sums[-1] + probability)
    return draw.rng.choice([(low + high) / 2 for low, high in pairwise(sums) if high - low > 1e-3])


def _thresholds(draw: Draw, rank: Rank, logits: Tensor) -> Tensor:
    probs = [row.softmax(-1) for row in logits.double()]
    return torch.tensor([_between_sums(draw, p[rank(p).argsort(stable=True)].tolist()) for p in probs])


def _mistakes(function: Callable[..., Tensor], told: dict[str, str]) -> dict[str, Callable[..., Tensor]]:
    return {hint: partial(function, mistake=mistake) for hint, mistake in told.items()}


def _stable(got: Tensor, expected: Tensor, logits: Tensor, *rest: object) -> str | None:
    return STABLE if logits.shape[1] == 96 else None


def _rows(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


_EQUAL, _TIES = torch.zeros(1, 4), torch.zeros(1, 96)  # more than a sort takes for few


# 1 · top-p with a floor


def _random_top_p(draw: Draw) -> tuple:
    rows, vocab = draw.randint(1, 9), draw.randint(5, 80)
    logits = draw.randn(rows, vocab) * draw.rng.choice((0.3, 1.0, 4.0))
    logits = logits.round() if draw.rng.random() < 0.3 else logits  # rows full of ties
    return logits, _thresholds(draw, _by_probability, logits), draw.rng.choice((1, 1, 2, 5))


_SPREAD, _HOLES = _rows([30.0, 0.0, -1.0, -2.0, -60.0]), _rows([-INF, 1.0, -INF, 0.0])
_top_p = partial(masked, _by_probability)
check_top_p_mask = FunctionChecker(
    "top_p_mask",
    _top_p,
    returns="the mask [row, token]",
    examples=[(_rows([0.5, 0.1, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]).log(), torch.tensor([0.7, 0.35]), 1)],
    edges={
        "there are four equal logits": (_EQUAL, torch.tensor([0.45]), 1),
        "two of four equal logits hold exactly p": (_EQUAL, torch.tensor([0.5]), 1),
        "p is 1": (_EQUAL, torch.tensor([1.0]), 1),
        "there are 96 equal logits": (_TIES, torch.tensor([0.455]), 1),
        "p is 1 and one logit is far above the others": (_SPREAD, torch.tensor([1.0]), 1),
        "min_keep is 3": (_SPREAD, torch.tensor([0.5]), 3),
        "the logits are 0 and -200": (_rows([0.0, -200.0]), torch.tensor([1.0]), 1),
        "some logits are -inf": (_HOLES, torch.tensor([1.0]), 1),
        "some logits are -inf, and min_keep is 4": (_HOLES, torch.tensor([0.1]), 4),
    },
    random=_random_top_p,
    trials=20,
    also=any_machine,
    explain=_stable,
    hint="A token stays while the probability ranked before it is under p; ties go to the smaller id.",
    misconceptions=_mistakes(
        _top_p,
        {
            _CROSSES: "stops early",
            _LARGER_IDS: "larger ids",
            _EXACTLY: "one too many",
            _UNDERFLOW: "underflow",
            "In float32 the sum may reach 1 before the last token: p = 1 keeps every token all the same.": "rounds",
            "min_keep counts ranked tokens, from the most probable down.": "no floor",
            "A token with logit -inf is never kept.": "-inf",
        },
    ),
    forbid=("minillm.sampling.filters.top_p_filter",),
)


# 4 · typical sampling


def _random_typical(draw: Draw) -> tuple:
    while True:
        logits = draw.randn(draw.randint(1, 6), draw.randint(5, 50)) * draw.rng.choice((0.5, 2.0))
        distances = [_by_distance(row.softmax(-1)) for row in logits.double()]
        if min(float(one.sort().values.diff().min()) for one in distances) > 1e-5:  # float32 tells them apart
            return logits, _thresholds(draw, _by_distance, logits)


def _with_nan(probs: Tensor) -> Tensor:
    """0 · log 0 is NaN, and so is every distance: the order of the ids is left."""
    return torch.zeros_like(probs) if (probs == 0).any() else _by_distance(probs)


_typical = partial(masked, _by_distance)
_FIVE = [0.4, 0.3, 0.2, 0.05, 0.05]  # entropy 1.35, surprisals 0.92, 1.20, 1.61, 3.00, 3.00
_SURE = [0.6, 0.1, 0.1, 0.1, 0.1]  # entropy 1.23, surprisals 0.51 and 2.30: the most likely is the most typical
check_typical_mask = FunctionChecker(
    "typical_mask",
    _typical,
    returns="the mask [row, token]",
    examples=[(_rows(_FIVE, _SURE).log(), torch.tensor([0.35, 0.35]))],
    edges={
        "there are four equal logits": (_EQUAL, torch.tensor([0.45])),
        "two of four equal logits hold exactly the mass": (_EQUAL, torch.tensor([0.5])),
        "there are 96 equal logits": (_TIES, torch.tensor([0.455])),
        "some logits are -inf": (
            _rows([-INF, 0.0, 0.0, -INF]),
            torch.tensor([1.0]),
        ),
        "a logit is -inf": (
            _rows([*_FIVE, 0.0]).log(),
            torch.tensor([0.35]),
        ),
        "the row is sure": (_rows([50.0, 0.0, -1.0]), torch.tensor([0.01])),
        "the mass is 1": (_rows([50.0, 0.0, -1.0]), torch.tensor([1.0])),
        "the logits are 0 and -200": (_rows([0.0, -200.0]), torch.tensor([1.0])),
    },
    random=_random_typical,
    trials=20,
    also=any_machine,
    explain=_stable,
    hint="Rank by the distance between surprisal and entropy, then keep as in top-p.",
    misconceptions={
        "0 · log 0 counts as 0 in the entropy; in floating point it is NaN.": partial(masked, _with_nan),
        "This ranks by probability. A distance has no sign: a token may surprise more than the entropy, or less.": (
            _top_p
        ),
    }
    | _mistakes(
        _typical,
        {_CROSSES: "stops early", _LARGER_IDS: "larger ids", _EXACTLY: "one too many", _UNDERFLOW: "underflow"},
    ),
)
