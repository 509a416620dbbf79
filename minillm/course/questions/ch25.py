"""Questions of chapter 25, the capstone: images as prefixes, and work that is counted."""

from __future__ import annotations

import math

from minillm.course.questions.question import Bank, Draw, Variant

BANK = Bank()
_IMAGES = "serve images as prefixes"
_PROJECTS = "take part in a project that is scored in counted work"


@BANK.computed(
    25,
    _IMAGES,
    title="The second question about an image",
    minutes=6,
    unit="blocks",
    within=(8, 60),
    rubric=("tokens of the image", "tokens that both prompts share", "full blocks"),
)
def image_prefix(draw: Draw) -> Variant:
    high, wide, system = draw.until(
        lambda: (draw.number(12, 24), draw.number(12, 30), draw.number(18, 90)),
        lambda d: (d[2] + d[0] * d[1]) % 16 and d[2] // 16 != (d[2] + d[0] * d[1]) // 16,
    )
    tokens = high * wide
    blocks = (system + tokens) // 16
    return Variant(
        f"A prompt begins with a system prompt of {system} tokens, then comes an image of {28 * high} × {28 * wide} "
        "pixels, then a question. The encoder cuts the image into patches of 14 × 14 pixels and merges neighbours two "
        "by two. A block holds 16 tokens. Another user asks another question about the same image, after the same "
        "system prompt; the two questions differ from their first token on. How many blocks does the prefix cache "
        "give this second prompt?",
        blocks,
        (
            f"Patches: {2 * high} · {2 * wide} = {4 * tokens}, a quarter of them tokens: {tokens}.",
            f"Both prompts share {system} + {tokens} = {system + tokens} tokens.",
            f"Full blocks: {system + tokens} / 16, rounded down: {blocks}.",
        ),
        {
            "four neighbouring patches become one token": (system + 4 * tokens) // 16,
            "a block that is not full is not cached": blocks + 1,
            "the image has the same content, so its blocks are cached, too": system // 16,
        },
    )


@BANK.computed(
    25,
    _IMAGES,
    title="A chunk that ends before an image",
    minutes=6,
    unit="steps",
    within=(3, 14),
    rubric=("the first chunk ends before the image", "tokens that remain", "steps for them, and the sum"),
)
def steps_with_an_image(draw: Draw) -> Variant:
    def steps(drawn: tuple[int, ...]) -> tuple[int, int]:
        text, image, rest, budget = drawn
        return 1 + math.ceil((image + rest) / budget), math.ceil((text + image + rest) / budget)

    text, image, rest, budget = drawn = draw.until(
        lambda: (draw.number(30, 110), draw.number(300, 1500), draw.number(15, 90), draw.of(128, 192, 256)),
        lambda d: steps(d)[1] < steps(d)[0] and 3 <= steps(d)[0] <= 14,
    )
    answer, without = steps(drawn)
    return Variant(
        f"A prompt has {text} tokens of text, then an image of {image} tokens, then {rest} tokens of text. A step "
        f"processes {budget} tokens of it at most. In the first step another request has spent the encoder's budget; "
        "in each later step the image may be encoded. In how many steps is the prompt processed?",
        answer,
        (
            f"The first chunk ends before the image: {text} tokens.",
            f"Then {image} + {rest} = {image + rest} tokens remain.",
            f"{image + rest} / {budget}, rounded up, is {answer - 1}; with the first step {answer}.",
        ),
        {"the first chunk may not go into an image that is not encoded": without},
    )


@BANK.computed(
    25,
    _PROJECTS,
    title="A gain over two seeds",
    minutes=6,
    tolerance=0.005,
    within=(1.2, 3),
    rubric=("how many times better on each seed", "the geometric mean", "the number"),
)
def gain_of_two_seeds(draw: Draw) -> Variant:
    first, second, own, other = draw.until(
        lambda: (draw.number(80, 160), draw.number(200, 390), draw.number(60, 130), draw.number(75, 150)),
        lambda d: 1.1 < d[0] / d[2] < 1.6 and 2.2 < d[1] / d[3] < 3.6,
    )
    ratios = first / own, second / other
    gain = math.sqrt(ratios[0] * ratios[1])
    return Variant(
        f"The router project counts milliseconds, and fewer are better. On the first seed the baseline scores {first} "
        f"ms and an entry {own} ms; on the second the baseline scores {second} ms and the entry {other} ms. What is "
        "the entry's gain?",
        gain,
        (
            f"Better by {first} / {own} = {ratios[0]:.4f} and {second} / {other} = {ratios[1]:.4f} times.",
            f"Their product is {ratios[0] * ratios[1]:.4f}.",
            f"Its square root: {gain:.4f}.",
        ),
        {
            "the mean of ratios is the geometric one": sum(ratios) / 2,
            "fewer milliseconds are better: the baseline's stand above": 1 / gain,
            "a gain is a mean over the seeds, not their product": gain * gain,
        },
    )


BANK.written(
    25,
    _PROJECTS,
    "A score that is attacked",
    "The leaderboard ranks schedulers by a counted score. Name three ways in which an entry could earn a good score "
    "without scheduling well, and say for each what the harness does against it.",
    "An entry could look at answers that are still to come: a view holds the requests that have arrived, and the "
    "length of an answer stays with the harness. It could change the accounts or the clock: a view is a frozen copy of "
    "plain numbers, and a plan that does not fit the engine's accounts ends the run. It could be fitted to the known "
    "trace: the ranking uses other seeds. It could replace the harness: the stored source runs in a fresh process, "
    "with the imports of a list.",
    rubric=(
        "a first way, and what prevents it",
        "a second way, and what prevents it",
        "a third way, and what prevents it",
        "the score is counted, so that any reader can repeat it",
    ),
)
