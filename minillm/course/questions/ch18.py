"""Questions of chapter 18, speculative decoding."""

from __future__ import annotations

import torch

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.speculative.rejection import residual

BANK = Bank()


def _speed(accepted: float, length: int) -> float:
    return (1 - accepted ** (length + 1)) / (1 - accepted)


@BANK.computed(
    18,
    "predict the speed-up from the acceptance rate",
    title="Expected tokens of a step",
    minutes=4,
    unit="tokens",
    tolerance=0.01,
    within=(1.5, 5),
    rubric=(("sums the chances of each length"), "counts the target's own token", "the number"),
)
def expected_tokens(draw: Draw) -> Variant:
    rate, length = draw.number(55, 85, 5) / 100, draw.number(3, 6)
    answer = _speed(rate, length)
    return Variant(
        f"A draft of {length} tokens is verified in one step; each draft token is accepted with probability {rate}, "
        "independently, until the first is rejected. How many tokens does the step generate on average?",
        answer,
        (
            f"At least $i$ draft tokens are accepted with probability ${rate}^i$.",
            "The target adds one token of its own, after a rejection and after a full draft.",
            f"$1 + {rate} + … + {rate}^{{{length}}} = {answer:.3f}$.",
        ),
        {"the target's own token counts, too": answer - 1, "tokens after a rejection do not count": 1 + rate * length},
    )


@BANK.computed(
    18,
    "predict the speed-up from the acceptance rate",
    title="Speed-up of a draft model",
    minutes=6,
    tolerance=0.01,
    within=(1.05, 3),
    rubric=("tokens of a step", "cost of a step", "the ratio"),
)
def draft_speedup(draw: Draw) -> Variant:
    rate, length, cost = draw.until(
        lambda: (draw.number(60, 85, 5) / 100, draw.number(3, 6), draw.number(5, 20) / 100),
        lambda d: 1.15 < _speed(d[0], d[1]) / (d[1] * d[2] + 1) < 2.9,
    )
    tokens = _speed(rate, length)
    answer = tokens / (length * cost + 1)
    return Variant(
        f"A draft model takes {cost} of the target's time for a token and drafts {length} tokens, each accepted with "
        f"probability {rate}, independently. A step that verifies them takes as long as a step without a draft. What "
        "is the speed-up over decoding without a draft?",
        answer,
        (
            f"Tokens a step: $(1 - {rate}^{{{length + 1}}}) / (1 - {rate}) = {tokens:.3f}$.",
            f"Time: {length} · {cost} + 1 = {length * cost + 1:.2f} of a step.",
            f"{tokens:.3f} / {length * cost + 1:.2f} = {answer:.3f}.",
        ),
        {"drafting takes time": tokens, "the target's own token counts, too": (tokens - 1) / (length * cost + 1)},
    )


@BANK.computed(
    18,
    "sample through a draft without changing",
    title=("After a rejection"),
    minutes=6,
    tolerance=0.01,
    within=(0.15, 0.9),
    rubric=("what p has beyond q", "normalises it", "the probability"),
)
def after_a_rejection(draw: Draw) -> Variant:
    def distribution() -> list[int]:
        cuts = sorted(draw.numbers(3, 5, 95, 5))
        return [high - low for low, high in zip([0, *cuts], [*cuts, 100])]

    def rest(drawn: tuple) -> torch.Tensor:
        p, q = (torch.tensor([part], dtype=torch.float64) / 100 for part in drawn)
        return residual(p, q)[0]

    def fits(drawn: tuple) -> bool:
        left = rest(drawn)
        share = float(left.max() / left.sum())
        two = int((left > 0.04).sum()) == 2 == int((left > 0).sum())
        return two and 0.2 < share < 0.85 and abs(share - drawn[0][int(left.argmax())] / 100) > 0.05

    p, q = drawn = draw.until(lambda: (distribution(), distribution()), fits)
    left = rest(drawn)
    token = int(left.argmax())
    answer = float(left[token] / left.sum())
    return Variant(
        "Target and draft give four tokens these probabilities, in percent:\n\n"
        f"{rows_of(['token', *'abcd'], [['target p', *p], ['draft q', *q]])}\n\nThe draft token was rejected. With "
        f"which probability is the token that is drawn in its place {'abcd'[token]}?",
        answer,
        (
            f"max(p − q, 0): {each_of(f'{100 * float(x):.0f}' for x in left)}%.",
            f"Its sum: {100 * float(left.sum()):.0f}%.",
            f"{100 * float(left[token]):.0f} / {100 * float(left.sum()):.0f} = {answer:.3f}.",
        ),
        {
            "after a rejection p itself would be drawn too often": p[token] / 100,
            "the rest has to be normalised": float(left[token]),
        },
    )


@BANK.code(18, "take several tokens from one pass", title="What a verified draft adds", minutes=12)
def verified(draw: Draw) -> CodeVariant:
    stop = draw.of("is kept, and ends the request", "is dropped, and ends the request")
    bonus = draw.of("an own token of the target follows", "nothing follows")
    body = '''
def new_tokens(draft: list[int], target: list[int], stop: int) -> list[int]:
    """The tokens that a greedy step adds; `target[i]` is the target's token after i accepted draft tokens."""
    added = []
    for place, token in enumerate(target):
        accepted = place < len(draft) and draft[place] == token
        if place == len(draft) and not BONUS:
            break
        if token == stop:
            return added + [token] if KEEP else added
        added.append(token)
        if not accepted:
            break
    return added
'''
    make = lambda keep, follows: body.replace("KEEP", str(keep)).replace("BONUS", str(follows))
    keep, follows = stop.startswith("is kept"), bonus.startswith("an own")

    def call(rng):
        draft = [rng.randint(1, 3) for _ in range(rng.randint(0, 4))]
        return draft, [token if rng.random() < 0.7 else rng.randint(0, 3) for token in [*draft, 2]], 0

    return CodeVariant(
        "A draft is verified greedily: `target[i]` is the token that the target chooses after the first `i` draft "
        "tokens, so `target` has one more token than `draft`. A draft token is accepted if it equals the target's; "
        "the first that does not is replaced by the target's, and ends the step. After a draft that was accepted "
        f"whole **{bonus}**. The token `stop` **{stop}**, so that nothing follows it. Write `new_tokens(draft, "
        "target, stop)`: the tokens of the step.",
        make(keep, follows),
        (([5, 6, 7], [5, 6, 9, 4], 0), ([5, 6], [5, 6, 8], 0)),
        (([], [3], 0), ([4, 0, 4], [4, 0, 4, 1], 0), ([4], [0, 1], 0), ([4, 4], [4, 4, 0], 0), ([1], [2, 3], 0)),
        call,
        f"after a whole draft {bonus}; the stop token {stop}",
        {
            make(not keep, follows): ("the rule for the stop token"),
            make(keep, not follows): "the rule after a whole draft",
            make(keep, follows).replace(
                "        if not accepted:\n            break\n", ""
            ): "a rejection ends the step",
        },
    )


BANK.written(
    18,
    "at which batch size speculation starts to lose",
    "Speculation in a large batch",
    "A draft of four tokens makes a single request 2 times as fast. For a batch of 128 requests the same draft makes "
    "the server slower. Explain both, with the roofline.",
    "A step of one request is memory-bound: verifying five positions reads the same weights and costs almost nothing. "
    "With 128 requests the step has 640 rows and is compute-bound: rejected tokens cost as much as accepted ones, and "
    "drafting comes on top.",
    rubric=(
        "one request is memory-bound",
        "verification rides along",
        "a large batch is compute-bound",
        "rejected tokens then cost time",
    ),
)
