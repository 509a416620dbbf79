"""Checks of chapter 01: Gumbel top-k, and a penalty that spares the prompt. Built in chapter 01."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case, Checker

STABLE = "Ties go to the smaller token id: sort with stable=True. Other sorts and topk promise nothing about ties."
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
    holes = torch.tensor([[-math.inf, 0.0, -math.inf, -2.0]])
    for temperature in (0.0, 0.7):
        got = case.call(holes, torch.tensor([[1 - 2**-24, 0.5, 0.9, 1e-30]]), torch.tensor([temperature]), 2)
        case.equal(
            got,
            torch.tensor([[1, 3]]),
            f"the tokens with -inf logits at temperature {temperature}",
            hint="A token with logit -inf is never drawn, however large its noise.",
        )
    tie = case.call(torch.zeros(1, 3), torch.full((1, 3), 0.3), torch.ones(1), 3)
    case.equal(tie, torch.tensor([[0, 1, 2]]), "the order of equal scores", hint=STABLE)
    for temperature in (0.0, 1.0):
        for mode in (contextlib.nullcontext(), OtherTies()):
            with mode:
                ties = case.call(torch.zeros(1, 96), torch.full((1, 96), 0.3), torch.tensor([temperature]), 40)
            case.equal(
                ties,
                torch.arange(40)[None],
                f"the order of 40 of 96 equal scores at temperature {temperature}",
                hint=STABLE,
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
        "A token of the prompt is never penalised.",
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


class OtherTies(TorchDispatchMode):
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


def _uniform(case: Case, rows: int, vocab: int) -> Tensor:
    return torch.distributions.Normal(0.0, 1.0).cdf(case.randn(rows, vocab)).clamp(1e-6, 1 - 1e-6)


def _gumbel_reference(logits: list[float], uniform: list[float], temperature: float, k: int) -> list[int]:
    scores = [z if temperature == 0 else z / temperature - math.log(-math.log(u)) for z, u in zip(logits, uniform)]
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k]
