"""Checks of chapter 01: Gumbel top-k, and a penalty that spares the prompt. Built in chapter 01."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case, Draw, FunctionChecker
from minillm.book.checks.snapshot import detached

STABLE = "Ties go to the smaller token id: sort with stable=True. Other sorts and topk promise nothing about ties."


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


def any_machine(case: Case, got: Tensor, *given: object) -> None:
    """Where there are many ties, the answer is the same with other sorts."""
    if given[0].shape[1] < 96:
        return
    with OtherTies():
        again = case.run(case.student, *detached(given))
    case.equal(again, got, "the result on a machine that sorts ties in another way", hint=STABLE)


# 2 · Gumbel top-k


def drawn(logits: Tensor, uniform: Tensor, temperature: Tensor, k: int, *, mistake: str = "") -> Tensor:
    """The k best scores of each row, the best first: int64 [num_rows, k]."""
    rows = []
    for row, us, warmth in zip(logits.tolist(), uniform.tolist(), temperature.tolist()):
        if mistake == "cold" and warmth == 0:
            warmth = 1e-6
        noise = [-math.log(-math.log(u)) for u in us]
        if mistake == "one logarithm":
            noise = [-math.log(u) for u in us]
        if mistake == "noise first" and warmth:
            noise = [one / warmth for one in noise]
        if warmth == 0:
            noise = [0.0] * len(us)
        scores = [z / (warmth or 1.0) + one for z, one in zip(row, noise)]
        sign = -1 if mistake == "larger ids" else 1
        rows.append(sorted(range(len(scores)), key=lambda j: (-scores[j], sign * j))[:k])
    return torch.tensor(rows)


def _uniform(draw: Draw, rows: int, vocab: int) -> Tensor:
    return torch.distributions.Normal(0.0, 1.0).cdf(draw.randn(rows, vocab)).clamp(1e-6, 1 - 1e-6)


def _random_scores(draw: Draw, kind: str) -> tuple:
    if kind == "many":
        logits = torch.tensor(_SHARES).log().expand(_DRAWS, 4).clone()
        return logits, _uniform(draw, _DRAWS, 4), torch.ones(_DRAWS), 2
    rows, vocab = draw.randint(1, 9), draw.randint(8, 60)
    temperature = torch.tensor([draw.rng.choice((0.0, 0.3, 1.0, 1.7)) for _ in range(rows)])
    return draw.randn(rows, vocab) * 2, _uniform(draw, rows, vocab), temperature, draw.randint(1, 6)


def _follows_the_softmax(case: Case, got: Tensor, *given: object) -> None:
    any_machine(case, got, *given)
    if len(got) != _DRAWS:
        return
    for token, expected in enumerate(_SHARES):
        share = float((got[:, 0] == token).float().mean())
        case.true(
            abs(share - expected) < 5 * math.sqrt(0.25 / _DRAWS),
            f"the first token does not follow the softmax: token {token} was drawn in {share:.3f} of "
            f"{_DRAWS:,} rows, expected {expected:.3f}",
        )
    case.true((got[:, 0] != got[:, 1]).all(), "the same token was drawn twice in one row")


def _why_drawn(
    got: Tensor, expected: Tensor, logits: Tensor, uniform: Tensor, temperature: Tensor, k: int
) -> str | None:
    if logits.shape[1] == 96:
        return STABLE
    if uniform.min() < 1e-20:
        return "u comes as near to 0 and to 1 as float32 allows, and is neither: take the logarithms of u as it stands."
    if (temperature == 0).all():
        return _COLD
    return None


_COLD = (
    "The temperature 0 is a case of its own: there is no noise, and ties go to the smaller id. "
    "However small a number you divide by in its place, the noise decides between equal logits."
)
_SHARES, _DRAWS = (0.5, 0.25, 0.15, 0.1), 20_000
_LOGITS, _WILD = torch.tensor([[0.0, 3.0, 3.0, 1.0]]), torch.tensor([[1 - 2**-24, 0.5, 0.5, 0.5]])
_HOLES = torch.tensor([[-math.inf, 0.0, -math.inf, -2.0]]), torch.tensor([[1 - 2**-24, 0.5, 0.9, 1e-9]])
_TIES = torch.zeros(1, 96), torch.full((1, 96), 0.3)
_TAILS = torch.tensor([[1e-30, 1e-20, 1e-9, 0.5, 1 - 1e-5, 1 - 2**-24]])
check_gumbel_top_k = FunctionChecker(
    "gumbel_top_k",
    drawn,
    returns="the tokens [row, order of drawing]",
    examples=[
        (  # noise 0.367, 4.600, -0.834, 0.367 in both rows, in the second over logits ten times smaller
            torch.tensor([[1.0, 0.0, 2.0, -1.0]] * 2),
            torch.tensor([[0.5, 0.99, 0.1, 0.5]] * 2),
            torch.tensor([1.0, 10.0]),
            3,
        )
    ],
    edges=[
        (_LOGITS, _WILD, torch.zeros(1), 3),
        (torch.tensor([[0.0, 0.0, -0.01]]), torch.tensor([[0.1, 0.9, 0.5]]), torch.zeros(1), 3),
        (_LOGITS.repeat(2, 1), _WILD.repeat(2, 1), torch.tensor([0.0, 1.0]), 1),  # a greedy row beside one that draws
        (*_HOLES, torch.zeros(1), 2),
        (*_HOLES, torch.tensor([0.7]), 2),
        (torch.zeros(1, 3), torch.full((1, 3), 0.3), torch.ones(1), 3),
        (*_TIES, torch.zeros(1), 40),
        (*_TIES, torch.ones(1), 40),
        (torch.zeros(1, 6), _TAILS, torch.ones(1), 6),
    ],
    random=_random_scores,
    trials=("few",) * 20 + ("many",),
    also=_follows_the_softmax,
    explain=_why_drawn,
    hint="Scores are logits / temperature - log(-log(u)); a row at temperature 0 has no noise.",
    misconceptions={
        _COLD: dict(mistake="cold"),
        "Equal scores: ties go to the smaller id.": dict(mistake="larger ids"),
        "Gumbel noise has two logarithms: -log(-log(u)).": dict(mistake="one logarithm"),
        "The temperature divides the logits, not the noise.": dict(mistake="noise first"),
    },
    forbid=("minillm.sampling.noise.gumbel_noise",),
)


# 3 · a penalty that spares the prompt


def penalized(
    logits: Tensor,
    prompt_ids: list[list[int]],
    output_ids: list[list[int]],
    penalty: Tensor,
    window: int,
    *,
    mistake: str = "",
) -> Tensor:
    """The logits after the penalty."""
    result = logits.clone()
    for row, (prompt, output) in enumerate(zip(prompt_ids, output_ids)):
        if mistake == "prompt before the cut":
            output = [token for token in output if token not in prompt]
        if mistake == "set before the cut":
            output = list(dict.fromkeys(output))
        recent = output if mistake == "no window" else output[-window:]
        spared = () if mistake == "prompt" else prompt
        tokens = [token for token in recent if token not in spared]
        for token in tokens if mistake == "each time" else set(tokens):
            z, r = float(result[row, token]), float(penalty[row])
            result[row, token] = z / r if z > 0 or mistake == "divides" else z * r
    return result


def _random_texts(draw: Draw) -> tuple:
    rows, vocab, window = draw.randint(1, 7), draw.randint(6, 40), draw.randint(1, 15)
    logits = draw.randn(rows, vocab) * 3
    texts = [[[draw.randint(0, vocab) for _ in range(draw.randint(0, 20))] for _ in range(rows)] for _ in range(2)]
    return logits, *texts, torch.tensor([draw.rng.choice((0.7, 1.0, 1.3, 2.0)) for _ in range(rows)]), window


def _one_row(prompt: list[int], output: list[int], penalty: float, window: int) -> tuple:
    return torch.tensor([[2.0, 2.0, -2.0, 0.0]]), [prompt], [output], torch.tensor([penalty]), window


check_young_penalty = FunctionChecker(
    "young_penalty",
    penalized,
    returns="the logits [row, token]",
    atol=1e-5,
    rtol=1e-5,
    examples=[(torch.tensor([[2.0, 2.0, -2.0, 1.0]]), [[3]], [[0, 0, 2, 3]], torch.tensor([2.0]), 10)],
    edges={
        "the output is empty": _one_row([1], [], 2.0, 4),
        "the penalty is 1": _one_row([], [0, 1, 2, 3], 1.0, 4),
        "a token has a negative logit": _one_row([], [2], 2.0, 4),
        "the window is 1": _one_row([], [2, 0, 1], 2.0, 1),
        "the window is 1, and the last token a repeated one": _one_row([], [1, 0, 1], 2.0, 1),
        "the window is 1, and the last token one of the prompt": _one_row([0], [1, 0], 2.0, 1),
        "the output only repeats the prompt": _one_row([0, 2], [0, 2, 0, 2], 5.0, 4),
        "the penalty is under 1, a reward": _one_row([], [0, 2], 0.5, 4),
        "two rows have their own penalties": (
            torch.tensor([[2.0, 2.0, -2.0, 0.0]] * 2),
            [[0], []],
            [[1], [1]],
            torch.tensor([2.0, 4.0]),
            3,
        ),
    },
    random=_random_texts,
    trials=20,
    hint="Mark the tokens first (last `window` of the output, not in the prompt), then change each once.",
    misconceptions={
        "Token 0 occurred twice and is halved once, like every token of the window.": dict(mistake="each time"),
        "Half of -2 is -1, and more likely than before: a logit that is not positive is multiplied.": dict(
            mistake="divides"
        ),
        "A token that stands in the prompt is never penalised.": dict(mistake="prompt"),
        "Only the last `window` tokens of the output count.": dict(mistake="no window"),
        "The window counts tokens of the output, those of the prompt as well: cut first, then leave the prompt out.": (
            dict(mistake="prompt before the cut")
        ),
        "The window counts tokens of the output, repeated ones as well: cut first, then make a set.": dict(
            mistake="set before the cut"
        ),
    },
    forbid=("minillm.sampling.filters.apply_penalties",),
)
