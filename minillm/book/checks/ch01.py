"""Checks of chapter 01: top-p with a floor, Gumbel top-k, a penalty that spares the prompt, typical sampling.
Built in chapter 01.

The references are loops over rows and tokens in float64: slow, and easy to believe. Random trials choose their
thresholds halfway between two possible sums, so that rounding never decides. Ties are judged on any machine alike:
one call runs with every sort that promises nothing about ties turned against the student.
"""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case, Checker

INF = float("inf")
_STABLE = "Ties go to the smaller token id: sort with stable=True. Other sorts and topk promise nothing about ties."
_UNDERFLOW = "Its probability is too small for float32, and rounds to 0; its logit is finite, and that is what counts."

check_top_p_mask = Checker(
    "top_p_mask",
    hint="A token stays while the probability ranked before it is under p; ties go to the smaller id.",
    forbid=("minillm.sampling.filters.top_p_filter",),
)
check_gumbel_top_k = Checker(
    "gumbel_top_k",
    hint="Scores are logits / temperature - log(-log(u)); a row at temperature 0 has no noise.",
    forbid=("minillm.sampling.noise.gumbel_noise",),
)
check_young_penalty = Checker(
    "young_penalty",
    hint="Mark the tokens first (last `window` of the output, not in the prompt), then change each once.",
    forbid=("minillm.sampling.filters.apply_penalties",),
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


@check_gumbel_top_k.part("example")
def _gumbel_example(case: Case) -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0], [1.0, 0.0, 2.0, -1.0]])
    uniform = torch.tensor([[0.5, 0.99, 0.1, 0.5], [0.5, 0.99, 0.1, 0.5]])
    # Row 0: noise 0.367, 4.600, -0.834, 0.367. Row 1: the same noise over logits ten times smaller.
    got = case.call(logits, uniform, torch.tensor([1.0, 10.0]), 3)
    case.equal(got, torch.tensor([[1, 0, 2], [1, 0, 3]]), "the tokens [row, order of drawing]")
    case.is_a(got, torch.int64, "the result")


@check_gumbel_top_k.part("edges")
def _gumbel_edges(case: Case) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    wild = torch.tensor([[1 - 2**-24, 0.5, 0.5, 0.5]])
    case.equal(
        case.call(logits, wild, torch.zeros(1), 3),
        torch.tensor([[1, 2, 3]]),
        "the tokens at temperature 0",
        hint="At temperature 0 there is no noise, and ties go to the smaller id.",
    )
    cold = case.call(torch.tensor([[0.0, 0.0, -0.01]]), torch.tensor([[0.1, 0.9, 0.5]]), torch.zeros(1), 3)
    case.equal(
        cold,
        torch.tensor([[0, 1, 2]]),
        "the tokens at temperature 0",
        hint=(
            "Temperature 0 is a case of its own. However small a number you divide by in its place, "
            "the noise decides between equal logits."
        ),
    )
    mixed = case.call(logits.expand(2, 4).clone(), wild.expand(2, 4).clone(), torch.tensor([0.0, 1.0]), 1)
    case.equal(mixed, torch.tensor([[1], [0]]), "a greedy row beside one that draws")
    holes = torch.tensor([[-INF, 0.0, -INF, -2.0]])
    for temperature in (0.0, 0.7):
        got = case.call(holes, torch.tensor([[1 - 2**-24, 0.5, 0.9, 1e-30]]), torch.tensor([temperature]), 2)
        case.equal(
            got,
            torch.tensor([[1, 3]]),
            f"the tokens with -inf logits at temperature {temperature}",
            hint="A token with logit -inf is never drawn, however large its noise.",
        )
    tie = case.call(torch.zeros(1, 3), torch.full((1, 3), 0.3), torch.ones(1), 3)
    case.equal(tie, torch.tensor([[0, 1, 2]]), "the order of equal scores", hint=_STABLE)
    for temperature in (0.0, 1.0):
        for mode in (contextlib.nullcontext(), _OtherTies()):
            with mode:
                ties = case.call(torch.zeros(1, 96), torch.full((1, 96), 0.3), torch.tensor([temperature]), 40)
            case.equal(
                ties,
                torch.arange(40)[None],
                f"the order of 40 of 96 equal scores at temperature {temperature}",
                hint=_STABLE,
            )
    tails = torch.tensor([[1e-30, 1e-20, 1e-9, 0.5, 1 - 1e-5, 1 - 2**-24]])
    case.equal(
        case.call(torch.zeros(1, 6), tails, torch.ones(1), 6),
        torch.tensor([[5, 4, 3, 2, 1, 0]]),
        "the tokens for u from 1e-30 to 1 - 2**-24, all logits equal,",
        hint="u comes as near to 0 and to 1 as float32 allows, and is neither: take the logarithms of u as it stands.",
    )


@check_gumbel_top_k.part("random")
def _gumbel_random(case: Case) -> None:
    for _ in range(20):
        rows, vocab, k = case.randint(1, 9), case.randint(8, 60), case.randint(1, 6)
        logits, temperature = (
            case.randn(rows, vocab) * 2,
            torch.tensor([case.rng.choice((0.0, 0.3, 1.0, 1.7)) for _ in range(rows)]),
        )
        uniform = _uniform(case, rows, vocab)
        expected = [_gumbel_reference(*row, k) for row in zip(logits.tolist(), uniform.tolist(), temperature.tolist())]
        case.equal(
            case.call(logits, uniform, temperature, k), torch.tensor(expected), "the tokens [row, order of drawing]"
        )
    num_draws, p = 20_000, torch.tensor([0.5, 0.25, 0.15, 0.1])
    drawn = case.call(p.log().expand(num_draws, 4).clone(), _uniform(case, num_draws, 4), torch.ones(num_draws), 2)
    for first in range(4):
        share = float((drawn[:, 0] == first).float().mean())
        case.true(
            abs(share - float(p[first])) < 5 * math.sqrt(0.25 / num_draws),
            f"the first token does not follow the softmax: token {first} was drawn in {share:.3f} of "
            f"{num_draws:,} rows, expected {float(p[first]):.3f}",
        )
    case.true((drawn[:, 0] != drawn[:, 1]).all(), "the same token was drawn twice in one row")


@check_young_penalty.part("example")
def _penalty_example(case: Case) -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 1.0]])
    got = case.call(logits, [[3]], [[0, 0, 2, 3]], torch.tensor([2.0]), 10)
    case.close(
        got,
        torch.tensor([[1.0, 2.0, -4.0, 1.0]]),
        "the logits [row, token]",
        hint="Token 0 occurred twice and is halved once; token 2 is negative; token 3 stands in the prompt.",
    )


@check_young_penalty.part("edges")
def _penalty_edges(case: Case) -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 0.0]])

    def judge(
        prompt: list[int],
        output: list[int],
        penalty: float,
        window: int,
        expected: list[float],
        what: str,
        hint: str | None = None,
    ) -> None:
        got = case.call(logits, [prompt], [output], torch.tensor([penalty]), window)
        case.close(got, torch.tensor([expected]), f"the logits {what}", hint=hint)
        case.is_a(got, torch.float32, "the result")

    judge([1], [], 2.0, 4, [2.0, 2.0, -2.0, 0.0], "after an empty output")
    judge([], [0, 1, 2, 3], 1.0, 4, [2.0, 2.0, -2.0, 0.0], "with penalty 1")
    judge(
        [],
        [2],
        2.0,
        4,
        [2.0, 2.0, -4.0, 0.0],
        "after a token with a negative logit",
        "Half of -2 is -1, and more likely than before: a logit that is not positive is multiplied.",
    )
    judge(
        [],
        [2, 0, 1],
        2.0,
        1,
        [2.0, 1.0, -2.0, 0.0],
        "with window=1",
        "Only the last `window` tokens of the output count.",
    )
    judge(
        [],
        [1, 0, 1],
        2.0,
        1,
        [2.0, 1.0, -2.0, 0.0],
        "with window=1, the last token a repeated one,",
        "The window counts tokens of the output, repeated ones as well: cut first, then make a set.",
    )
    judge(
        [0],
        [1, 0],
        2.0,
        1,
        [2.0, 2.0, -2.0, 0.0],
        "with window=1, the last token one of the prompt,",
        "The window counts tokens of the output, those of the prompt as well: cut first, then leave the prompt out.",
    )
    judge(
        [0, 2],
        [0, 2, 0, 2],
        5.0,
        4,
        [2.0, 2.0, -2.0, 0.0],
        "when the output only repeats the prompt",
        "A token of the prompt is never punished.",
    )
    judge([], [0, 2], 0.5, 4, [4.0, 2.0, -1.0, 0.0], "with a penalty under 1 (a reward)")
    two = case.call(logits.expand(2, 4).clone(), [[0], []], [[1], [1]], torch.tensor([2.0, 4.0]), 3)
    case.close(two, torch.tensor([[2.0, 1.0, -2.0, 0.0], [2.0, 0.5, -2.0, 0.0]]), "two rows with their own penalties")


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
    for mode in (contextlib.nullcontext(), _OtherTies()):
        with mode:
            got = case.call(logits, threshold, *rest)
        case.equal(
            got, expected, f"the mask of {logits.shape[1]} equal logits for {float(threshold):.3f}", hint=_STABLE
        )


class _OtherTies(TorchDispatchMode):
    """A machine that gives ties back the other way round wherever torch promises no order: unstable sorts and topk."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.name() not in ("aten::sort", "aten::sort.stable", "aten::topk") or kwargs.get("stable"):
            return function(*args, **kwargs)
        names = ("k", "dim", "largest") if function.name() == "aten::topk" else ("dim", "descending")
        asked = dict(zip(names, args[1:])) | kwargs
        x, dim, falling = args[0], asked.get("dim", -1), asked.get("largest", asked.get("descending", "k" in asked))
        values, indices = x.flip(dim).sort(dim=dim, descending=falling, stable=True)
        count = asked.get("k", x.shape[dim])
        return values.narrow(dim, 0, count), x.shape[dim] - 1 - indices.narrow(dim, 0, count)


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


def _uniform(case: Case, rows: int, vocab: int) -> Tensor:
    return torch.distributions.Normal(0.0, 1.0).cdf(case.randn(rows, vocab)).clamp(1e-6, 1 - 1e-6)


def _gumbel_reference(logits: list[float], uniform: list[float], temperature: float, k: int) -> list[int]:
    scores = [z if temperature == 0 else z / temperature - math.log(-math.log(u)) for z, u in zip(logits, uniform)]
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k]
