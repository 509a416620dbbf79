"""Checks of chapter 01: top-p with a floor, Gumbel top-k, a penalty that spares the prompt, typical sampling.
Built in chapter 01.

The references are loops over rows and tokens in float64: slow, and easy to believe. Random trials choose their
thresholds halfway between two possible sums, so that rounding never decides. Ties are judged on any machine alike:
one call runs with every sort that promises nothing about ties turned against the student.
`ch01_draws` has Gumbel top-k and the penalty.
"""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch01_draws import STABLE, OtherTies, check_gumbel_top_k, check_young_penalty

__all__ = ["check_gumbel_top_k", "check_top_p_mask", "check_typical_mask", "check_young_penalty"]

INF = float("inf")
_UNDERFLOW = "Its probability is too small for float32, and rounds to 0; its logit is finite, and that is what counts."

check_top_p_mask = Checker(
    "top_p_mask",
    hint="A token stays while the probability ranked before it is under p; ties go to the smaller id.",
    forbid=("minillm.sampling.filters.top_p_filter",),
)
check_typical_mask = Checker(
    "typical_mask", hint="Rank by the distance between surprisal and entropy, then keep as in top-p."
)


@check_top_p_mask.part("example")
def _top_p_example(case: Case) -> None:
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()
    got = case.call(logits, torch.tensor([0.7, 0.35]), 1)
    case.equal(got, torch.tensor([[True, False, True, False], [False, False, False, True]]), "the mask [row, token]")


@check_top_p_mask.part("edges")
def _top_p_edges(case: Case) -> None:
    equal, two = torch.zeros(1, 4), torch.tensor([[True, True, False, False]])
    _mask_equal(
        case,
        case.call(equal, torch.tensor([0.45]), 1),
        two,
        "the mask of four equal logits for p = 0.45",
        {
            "The token that carries the sum across p stays in: keep while the sum before it is under p.": [
                True,
                False,
                False,
                False,
            ],
            "Ties go to the smaller token id.": [False, False, True, True],
        },
    )
    _mask_equal(
        case,
        case.call(equal, torch.tensor([0.5]), 1),
        two,
        "the mask of four equal logits for p = 0.5",
        {
            (
                "Two of these tokens hold exactly 0.5, and that is enough: keep where the sum before is less than "
                "p, not where it equals p."
            ): [
                True,
                True,
                True,
                False,
            ]
        },
    )
    case.equal(case.call(equal, torch.tensor([1.0]), 1), torch.ones(1, 4, dtype=torch.bool), "the mask for p = 1")
    _many_ties(case, torch.zeros(1, 96), torch.tensor([0.455]), 1)
    spread = torch.tensor([[30.0, 0.0, -1.0, -2.0, -60.0]])
    case.equal(
        case.call(spread, torch.tensor([1.0]), 1),
        torch.ones(1, 5, dtype=torch.bool),
        "the mask for p = 1",
        hint="In float32 the sum may reach 1 before the last token: p = 1 keeps every token all the same.",
    )
    case.equal(
        case.call(spread, torch.tensor([0.5]), 3),
        torch.tensor([[True, True, True, False, False]]),
        "the mask with min_keep=3",
        hint="min_keep counts ranked tokens, from the most probable down.",
    )
    case.equal(
        case.call(torch.tensor([[0.0, -200.0]]), torch.tensor([1.0]), 1),
        torch.ones(1, 2, dtype=torch.bool),
        "the mask of logits 0 and -200 for p = 1",
        hint=_UNDERFLOW,
    )
    holes = torch.tensor([[-INF, 1.0, -INF, 0.0]])
    for p, keep in ((1.0, 1), (0.1, 4)):
        case.equal(
            case.call(holes, torch.tensor([p]), keep),
            torch.tensor([[False, True, False, True]]),
            f"the mask with -inf logits, p={p}, min_keep={keep}",
            hint="A token with logit -inf is never kept.",
        )


@check_top_p_mask.part("random")
def _top_p_random(case: Case) -> None:
    for _ in range(20):
        rows, vocab = case.randint(1, 9), case.randint(5, 80)
        logits = case.randn(rows, vocab) * case.rng.choice((0.3, 1.0, 4.0))
        logits = logits.round() if case.rng.random() < 0.3 else logits  # rows full of ties
        min_keep = case.rng.choice((1, 1, 2, 5))
        p = torch.tensor([_between_sums(case, _ranked(row.softmax(-1))) for row in logits.double()])
        expected = [_keep_ranked(row.softmax(-1), -row, float(q), min_keep) for row, q in zip(logits.double(), p)]
        case.equal(case.call(logits, p, min_keep), torch.tensor(expected), "the mask [row, token]")


@check_typical_mask.part("example")
def _typical_example(case: Case) -> None:
    # Row 0: entropy 1.35, surprisals 0.92, 1.20, 1.61, 3.00, 3.00: token 1 is closest, then token 2.
    # Row 1: entropy 1.23, surprisals 0.51 and four times 2.30: here the most likely token is the most typical one.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05], [0.6, 0.1, 0.1, 0.1, 0.1]]).log()
    got = case.call(logits, torch.tensor([0.35, 0.35]))
    case.equal(
        got,
        torch.tensor([[False, True, True, False, False], [True, False, False, False, False]]),
        "the mask [row, token]",
    )


@check_typical_mask.part("edges")
def _typical_edges(case: Case) -> None:
    two = torch.tensor([[True, True, False, False]])
    for mass in (0.45, 0.5):
        _mask_equal(
            case,
            case.call(torch.zeros(1, 4), torch.tensor([mass])),
            two,
            f"the mask of four equal logits for mass = {mass}",
            {
                "The token that carries the sum across the mass stays in.": [True, False, False, False],
                "All distances are equal: ties go to the smaller token id.": [False, False, True, True],
                (
                    "Two of these tokens hold exactly 0.5, and that is enough: "
                    "keep where the sum before is less than mass, not where it equals mass."
                ): [
                    True,
                    True,
                    True,
                    False,
                ],
            },
        )
    _many_ties(case, torch.zeros(1, 96), torch.tensor([0.455]))
    holes = torch.tensor([[-INF, 0.0, 0.0, -INF]])
    case.equal(
        case.call(holes, torch.tensor([1.0])),
        torch.tensor([[False, True, True, False]]),
        "the mask with -inf logits",
        hint="0 · log 0 counts as 0 in the entropy; in floating point it is NaN.",
    )
    mixed = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05, 0.0]]).log()
    case.equal(
        case.call(mixed, torch.tensor([0.35])),
        torch.tensor([[False, True, True, False, False, False]]),
        "the mask of the example with a -inf logit beside it",
        hint="0 · log 0 counts as 0 in the entropy; in floating point it is NaN.",
    )
    sure = torch.tensor([[50.0, 0.0, -1.0]])
    case.equal(
        case.call(sure, torch.tensor([0.01])), torch.tensor([[True, False, False]]), "the mask of a row that is sure"
    )
    case.equal(case.call(sure, torch.tensor([1.0])), torch.ones(1, 3, dtype=torch.bool), "the mask for mass = 1")
    case.equal(
        case.call(torch.tensor([[0.0, -200.0]]), torch.tensor([1.0])),
        torch.ones(1, 2, dtype=torch.bool),
        "the mask of logits 0 and -200 for mass = 1",
        hint=_UNDERFLOW,
    )


@check_typical_mask.part("random")
def _typical_random(case: Case) -> None:
    checked = 0
    while checked < 20:
        rows, vocab = case.randint(1, 6), case.randint(5, 50)
        logits = case.randn(rows, vocab) * case.rng.choice((0.5, 2.0))
        probs = [row.softmax(-1) for row in logits.double()]
        distances = [(-p.log() + (p * p.log()).sum()).abs() for p in probs]
        if min(float(d.sort().values.diff().min()) for d in distances) < 1e-5:
            continue  # two distances that float32 could not tell apart
        mass = torch.tensor([_between_sums(case, p[d.argsort()].tolist()) for p, d in zip(probs, distances)])
        expected = [_keep_ranked(p, d, float(m), 1) for p, d, m in zip(probs, distances, mass)]
        case.equal(case.call(logits, mass), torch.tensor(expected), "the mask [row, token]")
        checked += 1


def _mask_equal(case: Case, got: Tensor, expected: Tensor, what: str, guesses: dict[str, list[bool]]) -> None:
    """As case.equal, with the hint whose mask was returned."""
    masks = got.tolist() if isinstance(got, Tensor) else None
    case.equal(got, expected, what, hint=next((hint for hint, mask in guesses.items() if masks == [mask]), None))


def _many_ties(case: Case, logits: Tensor, threshold: Tensor, *rest: int) -> None:
    """Equal logits, more than a sort takes for few: once as this machine sorts, once as another one may."""
    expected = torch.arange(logits.shape[1])[None] < math.ceil(float(threshold) * logits.shape[1])
    for mode in (contextlib.nullcontext(), OtherTies()):
        with mode:
            got = case.call(logits, threshold, *rest)
        case.equal(got, expected, f"the mask of {logits.shape[1]} equal logits for {float(threshold):.3f}", hint=STABLE)


def _ranked(probs: Tensor) -> list[float]:
    return sorted(probs.tolist(), reverse=True)


def _between_sums(case: Case, ranked: list[float]) -> float:
    """A threshold halfway between two sums of the ranked probabilities that lie well apart."""
    sums = [0.0]
    for probability in ranked:
        sums.append(sums[-1] + probability)
    gaps = [(low + high) / 2 for low, high in pairwise(sums) if high - low > 1e-3]
    return case.rng.choice(gaps)


def _keep_ranked(probs: Tensor, rank_by: Tensor, threshold: float, min_keep: int) -> list[bool]:
    """The plain loop: go down the ranking until the sum reaches the threshold."""
    keep, total = [False] * len(probs), 0.0
    for count, token in enumerate(sorted(range(len(probs)), key=lambda j: (float(rank_by[j]), j))):
        if total >= threshold and count >= min_keep:
            break
        keep[token], total = True, total + float(probs[token])
    return keep
