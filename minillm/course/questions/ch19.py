"""Questions of chapter 19, structured output."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.sampling.grammar.automaton import build_automaton
from minillm.sampling.grammar.regex import parse_regex

BANK = Bank()


@BANK.computed(
    19,
    "turn a regular expression into an automaton",
    title="Tokens under a mask",
    minutes=6,
    unit="token ids",
    within=(3, 26),
    rubric=("follows each token through the pattern", "allows what can still be completed", "the ids"),
)
def masked_tokens(draw: Draw) -> Variant:
    pattern, seen, options = draw.of(
        (r"-?[0-9]+(\.[0-9]+)?", "1", ("2", "23", ".", ".5", "-", "a", "5.", "..", "0.1", "-2", "7.", "4.4.")),
        (r"[a-z]+(_[a-z]+)*", "ab", ("c", "_", "_x", "de", "__", "A", "x_", "9", "f_g", "_h_", "k__", " l")),
        (r"\{(\"[a-z]+\":[0-9]+)?\}", '{"a', ("b", '"', '":', '":1', "}", "c9", '":12}', '""', "xy", '":a', "1", '"}')),
    )
    automaton = build_automaton(parse_regex(pattern))

    def allowed(tokens: list[str], whole: bool = False) -> list[int]:
        state = automaton.walk(seen.encode())
        return [i for i, token in enumerate(tokens) if automaton.walk(token.encode(), state) >= 0
                and (not whole or automaton.matches(seen + token))]  # fmt: skip

    tokens = draw.until(
        lambda: draw.rng.sample(options, 8),
        lambda t: (
            3 <= len(allowed(t)) <= 4
            and 3 <= sum(allowed(t)) <= 26
            and allowed(t) != allowed(t, whole=True)
            and len(allowed(t, whole=True)) >= 1
        ),
    )
    answer = allowed(tokens)
    return Variant(
        f"The output has to match `{pattern}` and begins with `{seen}`. The vocabulary is:\n\n"
        f"{rows_of(['token id', *range(8)], [['text', *(f'`{token}`' for token in tokens)]])}\n\nWhich tokens does "
        "the mask allow next? Give their ids in ascending order.",
        answer,
        (
            (
                "A token is allowed if all of its characters can be read from the present state, and the text "
                "can still be completed."
            ),
            "It need not complete the text.",
            f"Allowed: {each_of(f'{i} ({tokens[i]})' for i in answer)}.",
        ),
        {"a token need not complete the text": allowed(tokens, whole=True)},
    )


@BANK.computed(
    19,
    "skip the text that is forced",
    title="Passes that a jump saves",
    minutes=5,
    unit="passes",
    within=(12, 60),
    rubric=("passes without the jump", "forced tokens ride along with a pass", "the difference"),
)
def jump_forward(draw: Draw) -> Variant:
    forced = draw.until(lambda: draw.numbers(4, 2, 19), lambda n: 15 < sum(n) < 55)
    free = draw.numbers(3, 2, 9)
    return Variant(
        f"An answer consists of forced pieces of {each_of(forced)} tokens; between them stand three values that the "
        f"model chooses, with {each_of(free)} tokens. How many passes of the model fewer does the whole answer take "
        "if forced pieces are appended at once, instead of one masked token a pass? The prompt's pass counts in both "
        "cases.",
        sum(forced),
        (
            (
                f"Without the jump each token is sampled in a pass: {sum(forced)} + {sum(free)} = "
                f"{sum(forced) + sum(free)}."
            ),
            (
                "With it a forced piece is processed in the pass that samples the token behind it: "
                f"{sum(free)} passes. The last piece needs none."
            ),
            f"{sum(forced)} fewer.",
        ),
        {"a forced piece needs no pass of its own": sum(forced) - 4, "these are the passes that are left": sum(free)},
    )


@BANK.computed(
    19,
    "the model's own distribution",
    title="A mask against the model's distribution",
    minutes=7,
    tolerance=0.01,
    within=(0.1, 0.95),
    rubric=("what the mask makes of the first token", "what the model gives valid texts", "conditions on validity"),
)
def masked_probability(draw: Draw) -> Variant:
    def make() -> tuple[int, int, int]:
        return draw.number(20, 80, 5), draw.number(5, 45, 5), draw.number(55, 95, 5)

    def both(drawn: tuple[int, int, int]) -> tuple[float, float]:
        first, a_valid, b_valid = drawn
        a, b = first * a_valid, (100 - first) * b_valid
        return a / (a + b), first / 100

    drawn = draw.until(make, lambda d: 0.12 < both(d)[0] < 0.9 and abs(both(d)[0] - both(d)[1]) > 0.1)
    first, a_valid, b_valid = drawn
    answer, masked = both(drawn)
    return Variant(
        f"A model begins an answer with `a` in {first}% and with `b` in {100 - first}% of its samples. Texts that "
        f"begin with `a` are valid in {a_valid}% of the samples, those with `b` in {b_valid}%. A mask allows both "
        "beginnings and later strikes out what makes a text invalid. Given that its answer is valid, with which "
        "probability does the model without a mask begin with `a`?",
        answer,
        (
            f"With the mask it begins with `a` in {first}%: the first step allows both.",
            f"Valid and `a`: {first * a_valid / 100:.2f}%. Valid and `b`: {(100 - first) * b_valid / 100:.2f}%.",
            f"{first * a_valid / 100:.2f} / {(first * a_valid + (100 - first) * b_valid) / 100:.2f} = {answer:.3f}.",
        ),
        {"this is what the mask gives": masked, "valid texts alone count": first * a_valid / 1e4},
    )


BANK.written(
    19,
    "name what a mask cannot give",
    "Valid and wrong",
    "A grammar mask makes every answer valid JSON. Name two things that it cannot guarantee. Why is the distribution "
    "of masked answers not the model's distribution of valid answers?",
    "Right values, and an end within the token limit. The mask looks at the next token alone: it allows beginnings "
    "after which the model rarely writes something valid, and does not weigh them by the chance that they end well.",
    rubric=(
        "right content",
        "a second one: the end, the meaning of fields, truthfulness",
        "the mask decides token by token",
        "beginnings are not weighed by how they end",
    ),
)
