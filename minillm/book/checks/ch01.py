"""Checks of chapter 01: top-p with a floor, Gumbel top-k, a penalty that spares the prompt, typical sampling. Built in chapter 01.

The references are loops over rows and tokens in float64: slow, and easy to believe. Random trials choose their
thresholds halfway between two possible sums, so that rounding never decides.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker

INF = float("inf")

check_top_p_mask = Checker(
    "top_p_mask", hint="A token stays while the probability ranked before it is under p; ties go to the smaller id.",
    forbid=("minillm.sampling.filters.top_p_filter",))
check_gumbel_top_k = Checker(
    "gumbel_top_k", hint="Scores are logits / temperature - log(-log(u)); a row at temperature 0 has no noise.",
    forbid=("minillm.sampling.noise.gumbel_noise",))
check_young_penalty = Checker(
    "young_penalty", hint="Mark the tokens first (last `window` of the output, not in the prompt), then change each once.",
    forbid=("minillm.sampling.filters.apply_penalties",))
check_typical_mask = Checker(
    "typical_mask", hint="Rank by the distance between surprisal and entropy, then keep as in top-p.")


@check_top_p_mask.part("example")
def _top_p_example(case: Case) -> None:
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()
    got = case.call(logits, torch.tensor([0.7, 0.35]), 1)
    case.equal(got, torch.tensor([[True, False, True, False], [False, False, False, True]]), "the mask [row, token]")


@check_top_p_mask.part("edges")
def _top_p_edges(case: Case) -> None:
    equal = torch.zeros(1, 4)
    case.equal(case.call(equal, torch.tensor([0.45]), 1), torch.tensor([[True, True, False, False]]),
               "the mask of four equal logits", hint="Ties go to the smaller token id: use a stable sort.")
    case.equal(case.call(equal, torch.tensor([1.0]), 1), torch.ones(1, 4, dtype=torch.bool), "the mask for p = 1")
    spread = torch.tensor([[30.0, 0.0, -1.0, -2.0, -60.0]])
    case.equal(case.call(spread, torch.tensor([1.0]), 1), torch.ones(1, 5, dtype=torch.bool), "the mask for p = 1",
               hint="In float32 the sum may reach 1 before the last token: p = 1 keeps every token all the same.")
    case.equal(case.call(spread, torch.tensor([0.5]), 3), torch.tensor([[True, True, True, False, False]]),
               "the mask with min_keep=3", hint="min_keep counts ranked tokens, from the most probable down.")
    holes = torch.tensor([[-INF, 1.0, -INF, 0.0]])
    for p, keep in ((1.0, 1), (0.1, 4)):
        case.equal(case.call(holes, torch.tensor([p]), keep), torch.tensor([[False, True, False, True]]),
                   f"the mask with -inf logits, p={p}, min_keep={keep}", hint="A token with logit -inf is never kept.")


@check_top_p_mask.part("random")
def _top_p_random(case: Case) -> None:
    for _ in range(20):
        rows, vocab = case.randint(1, 9), case.randint(5, 80)
        logits = case.randn(rows, vocab) * case.rng.choice((0.3, 1.0, 4.0))
        min_keep = case.rng.choice((1, 1, 2, 5))
        p = torch.tensor([_between_sums(case, _ranked(row.softmax(-1))) for row in logits.double()])
        expected = [_keep_ranked(row.softmax(-1), -row, float(q), min_keep) for row, q in zip(logits.double(), p)]
        case.equal(case.call(logits, p, min_keep), torch.tensor(expected), "the mask [row, token]")


@check_gumbel_top_k.part("example")
def _gumbel_example(case: Case) -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0], [1.0, 0.0, 2.0, -1.0]])
    uniform = torch.tensor([[0.5, 0.99, 0.1, 0.5], [0.5, 0.99, 0.1, 0.5]])
    # Row 0: noise 0.367, 4.600, -0.834, 0.367. Row 1: the same noise over logits ten times smaller.
    case.equal(case.call(logits, uniform, torch.tensor([1.0, 10.0]), 3), torch.tensor([[1, 0, 2], [1, 0, 3]]),
               "the tokens [row, order of drawing]")


@check_gumbel_top_k.part("edges")
def _gumbel_edges(case: Case) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    wild = torch.tensor([[1 - 2**-24, 0.5, 0.5, 0.5]])
    case.equal(case.call(logits, wild, torch.zeros(1), 3), torch.tensor([[1, 2, 3]]), "the tokens at temperature 0",
               hint="At temperature 0 there is no noise, and ties go to the smaller id.")
    mixed = case.call(logits.expand(2, 4).clone(), wild.expand(2, 4).clone(), torch.tensor([0.0, 1.0]), 1)
    case.equal(mixed, torch.tensor([[1], [0]]), "a greedy row beside one that draws")
    holes = torch.tensor([[-INF, 0.0, -INF, -2.0]])
    for temperature in (0.0, 0.7):
        got = case.call(holes, torch.tensor([[1 - 2**-24, 0.5, 0.9, 1e-30]]), torch.tensor([temperature]), 2)
        case.equal(got, torch.tensor([[1, 3]]), f"the tokens with -inf logits at temperature {temperature}",
                   hint="A token with logit -inf is never drawn, however large its noise.")
    tie = case.call(torch.zeros(1, 3), torch.full((1, 3), 0.3), torch.ones(1), 3)
    case.equal(tie, torch.tensor([[0, 1, 2]]), "the order of equal scores")


@check_gumbel_top_k.part("random")
def _gumbel_random(case: Case) -> None:
    for _ in range(20):
        rows, vocab, k = case.randint(1, 9), case.randint(8, 60), case.randint(1, 6)
        logits, temperature = case.randn(rows, vocab) * 2, torch.tensor([case.rng.choice((0.0, 0.3, 1.0, 1.7)) for _ in range(rows)])
        uniform = _uniform(case, rows, vocab)
        expected = [_gumbel_reference(*row, k) for row in zip(logits.tolist(), uniform.tolist(), temperature.tolist())]
        case.equal(case.call(logits, uniform, temperature, k), torch.tensor(expected), "the tokens [row, order of drawing]")
    num_draws, p = 20_000, torch.tensor([0.5, 0.25, 0.15, 0.1])
    drawn = case.call(p.log().expand(num_draws, 4).clone(), _uniform(case, num_draws, 4), torch.ones(num_draws), 2)
    for first in range(4):
        share = float((drawn[:, 0] == first).float().mean())
        case.true(abs(share - float(p[first])) < 5 * math.sqrt(0.25 / num_draws),
                  f"the first token does not follow the softmax: token {first} was drawn in {share:.3f} of "
                  f"{num_draws:,} rows, expected {float(p[first]):.3f}")
    case.true((drawn[:, 0] != drawn[:, 1]).all(), "the same token was drawn twice in one row")


@check_young_penalty.part("example")
def _penalty_example(case: Case) -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 1.0]])
    got = case.call(logits, [[3]], [[0, 0, 2, 3]], torch.tensor([2.0]), 10)
    case.close(got, torch.tensor([[1.0, 2.0, -4.0, 1.0]]), "the logits [row, token]",
               hint="Token 0 occurred twice and is halved once; token 2 is negative; token 3 stands in the prompt.")


@check_young_penalty.part("edges")
def _penalty_edges(case: Case) -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 0.0]])
    case.close(case.call(logits, [[1]], [[]], torch.tensor([2.0]), 4), logits, "the logits after an empty output")
    case.close(case.call(logits, [[]], [[0, 1, 2, 3]], torch.tensor([1.0]), 4), logits, "the logits with penalty 1")
    case.close(case.call(logits, [[]], [[0, 1, 2]], torch.tensor([2.0]), 1), torch.tensor([[2.0, 2.0, -4.0, 0.0]]),
               "the logits with window=1", hint="Only the last `window` tokens of the output count.")
    case.close(case.call(logits, [[0, 2]], [[0, 2, 0, 2]], torch.tensor([5.0]), 4), logits,
               "the logits when the output only repeats the prompt", hint="A token of the prompt is never punished.")
    two = case.call(logits.expand(2, 4).clone(), [[0], []], [[1], [1]], torch.tensor([2.0, 4.0]), 3)
    case.close(two, torch.tensor([[2.0, 1.0, -2.0, 0.0], [2.0, 0.5, -2.0, 0.0]]), "two rows with their own penalties")
    case.close(case.call(logits, [[]], [[0, 2]], torch.tensor([0.5]), 4), torch.tensor([[4.0, 2.0, -1.0, 0.0]]),
               "the logits with a penalty under 1 (a reward)")


@check_young_penalty.part("random")
def _penalty_random(case: Case) -> None:
    for _ in range(20):
        rows, vocab, window = case.randint(1, 7), case.randint(6, 40), case.randint(1, 15)
        logits = case.randn(rows, vocab) * 3
        texts = [[[case.randint(0, vocab) for _ in range(case.randint(0, 20))] for _ in range(rows)] for _ in range(2)]
        penalty = torch.tensor([case.rng.choice((0.7, 1.0, 1.3, 2.0)) for _ in range(rows)])
        expected = logits.clone()
        for row, (prompt, output) in enumerate(zip(*texts)):
            for token in set(output[-window:]) - set(prompt):
                z, r = float(logits[row, token]), float(penalty[row])
                expected[row, token] = z / r if z > 0 else z * r
        case.close(case.call(logits, *texts, penalty, window), expected, "the logits [row, token]")


@check_typical_mask.part("example")
def _typical_example(case: Case) -> None:
    # Row 0: entropy 1.35, surprisals 0.92, 1.20, 1.61, 3.00, 3.00: token 1 is closest, then token 2.
    # Row 1: entropy 1.23, surprisals 0.51 and four times 2.30: here the most likely token is the most typical one.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05], [0.6, 0.1, 0.1, 0.1, 0.1]]).log()
    got = case.call(logits, torch.tensor([0.35, 0.35]))
    case.equal(got, torch.tensor([[False, True, True, False, False], [True, False, False, False, False]]), "the mask [row, token]")


@check_typical_mask.part("edges")
def _typical_edges(case: Case) -> None:
    case.equal(case.call(torch.zeros(1, 4), torch.tensor([0.45])), torch.tensor([[True, True, False, False]]),
               "the mask of equal logits", hint="All distances are equal: ties go to the smaller token id.")
    holes = torch.tensor([[-INF, 0.0, 0.0, -INF]])
    case.equal(case.call(holes, torch.tensor([1.0])), torch.tensor([[False, True, True, False]]), "the mask with -inf logits",
               hint="0 · log 0 counts as 0 in the entropy; in floating point it is NaN.")
    mixed = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05, 0.0]]).log()
    case.equal(case.call(mixed, torch.tensor([0.35])), torch.tensor([[False, True, True, False, False, False]]),
               "the mask of the example with a -inf logit beside it", hint="0 · log 0 counts as 0 in the entropy; in floating point it is NaN.")
    sure = torch.tensor([[50.0, 0.0, -1.0]])
    case.equal(case.call(sure, torch.tensor([0.01])), torch.tensor([[True, False, False]]), "the mask of a row that is sure")
    case.equal(case.call(sure, torch.tensor([1.0])), torch.ones(1, 3, dtype=torch.bool), "the mask for mass = 1")


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


def _ranked(probs: Tensor) -> list[float]:
    return sorted(probs.tolist(), reverse=True)


def _between_sums(case: Case, ranked: list[float]) -> float:
    """A threshold halfway between two sums of the ranked probabilities that lie well apart."""
    sums = [0.0]
    for probability in ranked:
        sums.append(sums[-1] + probability)
    gaps = [(low + high) / 2 for low, high in zip(sums, sums[1:]) if high - low > 1e-3]
    return case.rng.choice(gaps)


def _keep_ranked(probs: Tensor, rank_by: Tensor, threshold: float, min_keep: int) -> list[bool]:
    """The plain loop: go down the ranking until the sum reaches the threshold."""
    keep, total = [False] * len(probs), 0.0
    for count, token in enumerate(sorted(range(len(probs)), key=lambda j: (float(rank_by[j]), j))):
        if total >= threshold and count >= min_keep:
            break
        keep[token], total = True, total + float(probs[token])
    return keep


def _uniform(case: Case, rows: int, vocab: int) -> Tensor:
    return torch.distributions.Normal(0.0, 1.0).cdf(case.randn(rows, vocab)).clamp(1e-6, 1 - 1e-6)


def _gumbel_reference(logits: list[float], uniform: list[float], temperature: float, k: int) -> list[int]:
    scores = [z if temperature == 0 else z / temperature - math.log(-math.log(u)) for z, u in zip(logits, uniform)]
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k]
