"""Questions of chapter 01, one token at a time."""

from __future__ import annotations

import math

import torch

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.sampling.filters import top_p_filter

BANK = Bank()


ORDER = {"last": "the token with the larger id", "first": "the token with the smaller id"}


@BANK.computed(
    1,
    "temperature, top-k, top-p",
    title="The nucleus",
    minutes=4,
    within=(3, 15),
    rubric=("sorts by probability", "adds up to the threshold, and keeps the token that crosses it", "the ids"),
)
def top_p_kept(draw: Draw) -> Variant:
    def percents() -> list[int]:
        cuts = sorted(draw.numbers(5, 3, 97))
        return [high - low for low, high in zip([0, *cuts], [*cuts, 100])]

    def kept_by(shares: list[int], p: int) -> list[int]:
        logits = torch.tensor([shares], dtype=torch.float64).log()
        return (
            (top_p_filter(logits, torch.tensor([p / 100], dtype=torch.float64))[0] > -math.inf).nonzero()[:, 0].tolist()
        )

    def fits(drawn: tuple[list[int], int]) -> bool:
        shares, p = drawn
        sums = [sum(sorted(shares, reverse=True)[:count]) for count in range(1, 7)]
        return len(set(shares)) == 6 and p not in sums and len(kept_by(shares, p)) == 3 and min(shares) > 1 and (
            3 <= sum(kept_by(shares, p)) and kept_by(shares, p) != [0, 1, 2]
        )  # fmt: skip

    shares, p = draw.until(lambda: (percents(), draw.number(60, 90, 5)), fits)
    kept, order = kept_by(shares, p), sorted(range(6), key=lambda i: -shares[i])
    return Variant(
        "A step's distribution over six tokens, in "
        f"percent:\n\n{rows_of(['token id', *range(6)], [['%', *shares]])}\n\nWhich tokens does top-p with $p = "
        f"{p / 100:g}$ keep? Give their ids in ascending order.",
        kept,
        (
            f"By probability: {each_of(f'{i} ({shares[i]}%)' for i in order)}.",
            f"The sum passes {p}% with the third of them: {sum(shares[i] for i in order[:3])}%.",
            f"The token that crosses the threshold stays: {kept}.",
        ),
        {
            "the token that crosses the threshold is left out": sorted(order[:2]),
            "one token more than needed is kept": sorted(order[:4]),
        },
    )


@BANK.computed(
    1,
    "temperature, top-k, top-p",
    title="Temperature and two tokens",
    minutes=5,
    unit="",
    tolerance=0.02,
    within=(2, 15),
    rubric=("divides the logits by the temperature", "takes a ratio of exponentials", "the ratio"),
)
def temperature_ratio(draw: Draw) -> Variant:
    temperature, low = draw.of(0.5, 0.6, 0.75, 1.25, 1.5), draw.number(11, 39) / 10
    gap = draw.until(lambda: draw.number(11, 29) / 10, lambda g: 2.2 < math.exp(g / temperature) < 14)
    high = round(low + gap, 1)
    odds = torch.tensor([high, low], dtype=torch.float64).div(temperature).softmax(0)
    answer = float(odds[0] / odds[1])
    return Variant(
        f"Two tokens have the logits {high} and {low}. How many times as probable as the second is the first at "
        f"temperature {temperature}?",
        answer,
        (
            f"The difference of the logits is {gap:.1f}; divided by the temperature it is {gap / temperature:.3f}.",
            f"$e^{{{gap / temperature:.3f}}} = {answer:.2f}$. The softmax's denominator is the same for both.",
        ),
        {
            "the logits were multiplied by the temperature": math.exp(gap * temperature),
            "the temperature was left out": math.exp(gap),
        },
    )


@BANK.computed(
    1,
    "write the loop",
    title="Perplexity of four tokens",
    minutes=4,
    tolerance=0.02,
    within=(2, 12),
    rubric=("the mean, with its sign", "the exponential"),
)
def perplexity(draw: Draw) -> Variant:
    losses = draw.until(lambda: [n / 10 for n in draw.numbers(4, 2, 49)], lambda n: 1 < sum(n) / 4 < 2.3 and max(n) > 2)
    mean = sum(losses) / 4
    return Variant(
        "A model gives the four tokens of a text the log-probabilities (natural logarithm) "
        f"{each_of(f'−{loss}' for loss in losses)}. What is the perplexity of the text?",
        math.exp(mean),
        (
            f"The mean loss is {sum(losses):.1f} / 4 = {mean:.3f} nats a token.",
            f"$e^{{{mean:.3f}}} = {math.exp(mean):.2f}$",
        ),
        {"the sum was taken, not the mean": math.exp(sum(losses)), "the base 2 belongs to bits, not nats": 2**mean},
    )


@BANK.code(1, "temperature, top-k, top-p", title="Top-k with a rule for ties", minutes=15)
def top_k_ties(draw: Draw) -> CodeVariant:
    tie, order = draw.of("last", "first"), draw.of("ascending", "descending")
    sign, back = ("-" if tie == "last" else ""), ("" if order == "ascending" else ", reverse=True")
    body = '''
def top_k(probs: list[float], k: int, floor: float) -> list[int]:
    """The ids of the k most probable tokens whose probability is at least `floor`."""
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], {sign}i))
    return sorted([i for i in ranked[:k] if probs[i] >= floor]{back})
'''
    solution = body.format(sign=sign, back=back)
    return CodeVariant(
        "Write `top_k(probs, k, floor)`: the ids of the `k` most probable tokens, without those whose probability is "
        f"below `floor`. Of equal probabilities **{ORDER[tie]}** goes first. Return a list of ids in **{order}** "
        "order. `k` may be 0 or larger than the vocabulary; nothing that falls below the floor is replaced by another "
        "token.",
        solution,
        (([0.1, 0.4, 0.1, 0.4], 3, 0.0), ([0.5, 0.2, 0.3], 2, 0.25)),
        (([], 2, 0.0), ([0.5, 0.5], 0, 0.0), ([0.25] * 4, 2, 0.25), ([0.5, 0.5], 9, 0.0), ([0.25] * 4, 3, 0.3)),
        lambda rng: (
            [rng.choice((0.05, 0.1, 0.2, 0.3)) for _ in range(rng.randint(1, 8))],
            rng.randint(0, 6),
            rng.choice((0.0, 0.1, 0.2)),
        ),
        f"ties go to {ORDER[tie]}, ids in {order} order",
        {
            body.format(sign="" if sign else "-", back=back): "the tie-break is the wrong way round",
            body.format(
                sign=sign, back="" if back else ", reverse=True"
            ): "the order of the ids is the wrong way round",
            solution.replace(">= floor", "> floor"): "a probability equal to the floor stays",
        },
    )


BANK.written(
    1,
    "a seeded request generates the same",
    "A seed in a batch",
    "A request with temperature 1 and a seed generates the same text alone and in a batch of 60 others, although the "
    "sampler draws for all of them at once. Explain how, and name one change to the sampler that would break it.",
    "The noise of a token is a function of the request's seed, the position in the output and the token id. It does "
    "not depend on the row, the batch or what was drawn before. A generator whose state is shared by the rows breaks "
    "it: the draw of a request then depends on how many draws the others made.",
    rubric=(
        "what the noise depends on",
        "what it does not depend on: row, batch, history",
        "a change that breaks it, with the reason",
    ),
)
