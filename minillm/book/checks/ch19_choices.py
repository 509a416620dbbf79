"""Checks of chapter 19: a select by gain, and a jump that may look back. Built in chapter 19."""

from __future__ import annotations

import math
import random

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch19_oracle import gains_of, jumped, longest_match, needed

__all__ = ["check_jump", "check_select_by_gain"]

check_select_by_gain = Checker(
    "select_by_gain",
    hint="Token k of a choice is asked for after the prompt and the choice's first k tokens.",
    forbid=("minillm.programs.State", "minillm.programs.select"),
)
check_jump = Checker(
    "jump",
    hint="Cut the whole text, keep what agrees, then hold back from the first token where a longer one could begin.",
    forbid=("minillm.sampling.grammar.jump.JumpForward",),
)


class _Model:
    """Log-probabilities out of a table or a seed; notes what it was asked."""

    def __init__(self, case: Case, size: int, never: float = 0.0) -> None:
        self.size, self.never, self.seed, self.asked = size, never, case.randint(0, 10**6), []

    def __call__(self, ids: tuple) -> list[float]:
        self.asked.append(ids)
        return self.look(ids)

    def look(self, ids: tuple) -> list[float]:
        rng = random.Random(f"{self.seed}/{ids}")
        weights = [0.0 if rng.random() < self.never else rng.random() ** 3 + 1e-3 for _ in range(self.size)]
        total = sum(weights) or 1.0
        return [math.log(weight / total) if weight else -math.inf for weight in weights]


@check_select_by_gain.part("example")
def _gain_example(case: Case) -> None:
    table = {(9,): [0.5, 0.3, 0.2], (8,): [0.8, 0.1, 0.1], (9, 0): [0.1, 0.1, 0.8], (8, 0): [0.1, 0.1, 0.8]}
    asked = []

    def logprobs_after(ids):
        asked.append(ids)
        return [math.log(p) for p in table[ids]]

    best, gains = case.call(logprobs_after, (9,), (8,), [(0, 2), (1,), (2,)])
    case.close(gains, [math.log(0.5 / 0.8), math.log(3), math.log(2)], "gains", atol=1e-9)
    case.equal(best, 1, "best")
    case.equal(sorted(asked), sorted(table), "the ids that the model was asked for")


@check_select_by_gain.part("edges")
def _gain_edges(case: Case) -> None:
    model = _Model(case, 4)
    _gains(case, model, (1,), (2,), [(3,)])
    _gains(case, model, (1,), (2,), [(3,), (3,), (3, 0), (3, 0, 1), (0, 3)])  # twice the same, one begins with another
    _gains(case, model, (), (1,), [(1, 2), (2, 1)])  # the neutral prompt begins with the prompt, and with a choice
    _gains(case, model, (1, 2), (1,), [(2, 3), (2, 0, 3), (1,)])
    for never in (0.5, 0.9, 1.0):
        for _ in range(5):
            _gains(case, _Model(case, 3, never), (5,), (6,), [(0,), (1,), (2, 0), (2, 1)])


@check_select_by_gain.part("random")
def _gain_random(case: Case) -> None:
    for _ in range(40):
        model = _Model(case, size := case.randint(2, 6), case.rng.choice((0.0, 0.0, 0.2)))
        choices = [tuple(case.randint(0, size) for _ in range(case.randint(1, 6))) for _ in range(case.randint(1, 9))]
        _gains(
            case,
            model,
            tuple(case.randint(0, size) for _ in range(case.randint(0, 4))),
            (7, case.randint(0, size)),
            choices,
        )


def _gains(case: Case, model: _Model, prompt: tuple, neutral: tuple, choices: list[tuple]) -> None:
    model.asked.clear()
    got = case.call(model, prompt, neutral, choices)
    case.true(isinstance(got, tuple) and len(got) == 2, "the result is not a tuple (best, gains)")
    expected = gains_of(model.look, prompt, neutral, choices)
    case.close(
        list(got[1]), expected, "gains", atol=1e-9, hint=_gain_hint(list(got[1]), model, prompt, neutral, choices)
    )
    case.equal(
        got[0],
        expected.index(max(expected)),
        f"best for the gains {[round(gain, 3) for gain in expected]}",
        hint="The largest gain; ties go to the first.",
    )
    wanted = needed(prompt, neutral, choices)
    for ids in model.asked:
        case.true(
            ids in wanted,
            f"the model was asked after {ids}, whose answer is not needed",
            hint="After the last token of a choice nothing is asked.",
        )
        case.true(
            model.asked.count(ids) == 1,
            f"the model was asked {model.asked.count(ids)} times after {ids}",
            hint="Keep its answers in a dictionary, by the whole tuple of ids.",
        )


def _gain_hint(gains: list, model: _Model, prompt: tuple, neutral: tuple, choices: list[tuple]) -> str | None:
    expected = gains_of(model.look, prompt, neutral, choices)
    if any(isinstance(gain, float) and math.isnan(gain) for gain in gains):
        return "-inf minus -inf is not a number: if the choice cannot follow the prompt, its gain is -inf."
    per_token = [gain / len(choice) for gain, choice in zip(expected, choices)]
    if len(gains) == len(per_token) and all(a == b or abs(a - b) < 1e-9 for a, b in zip(gains, per_token)):
        return "No division by the number of tokens here."
    if gains == gains_of(
        lambda ids: model.look(ids) if ids[: len(prompt)] == prompt else [0.0] * model.size, prompt, neutral, choices
    ):
        return "Subtract what the choice scores after the neutral prompt."
    return None


# 5 · the jump

PIECES = [b"a", b"b", b'"', b":", b" ", b'":', b' "', b'": "',
          b"ab", b"aba", b"1", b"{", b'{"', b"e", b"pet", b"p", b"t", b"pe"]  # fmt: skip


@check_jump.part("example")
def _jump_example(case: Case) -> None:
    encode = longest_match(PIECES)
    _jumps(case, encode(b'{"'), b'pet": ', PIECES, set(b"1"), 0)
    _jumps(case, encode(b'{"'), b'pet": ', PIECES, set(b'1"'), 0)  # a quote would merge with what stands before
    _jumps(case, [12, 17, 16], b'":', PIECES, set(b" "), 2)  # {" pe t: the tokenizer has one token for it
    _jumps(case, [12, 17, 16], b'":', PIECES, set(b" "), 1)  # too many to take back


@check_jump.part("edges")
def _jump_edges(case: Case) -> None:
    _jumps(case, [], b'{"', PIECES, set(b"p"), 0)
    _jumps(case, [], b"", PIECES, set(b"p"), 3)
    _jumps(case, [12], b"", PIECES, set(b"p"), 3)
    _jumps(case, [0], b"b", PIECES, set(b"a"), 1)  # ab or aba: held back, and then less is left than was said
    _jumps(case, [0], b"b", PIECES, set(b"b"), 1)
    _jumps(case, [0], b"b", PIECES, set(), 1)
    _jumps(case, [0], b"b", PIECES, set(b"b"), 0)
    _jumps(case, [2], b': "', PIECES, set(), 1)
    _jumps(case, [2], b': "', PIECES, set(b"1"), 0)
    _jumps(case, [12, 14, 2], b": ", PIECES, set(b'"'), 0)
    _jumps(case, [12, 14, 5], b" ", PIECES, set(b'"'), 1)  # what could be begins in a said token that stays
    _jumps(case, [12, 17], b"t", PIECES, set(b'"'), 5)
    _jumps(case, [0, 1, 0, 1], b"a", PIECES, set(b"1"), 4)


@check_jump.part("random")
def _jump_random(case: Case) -> None:
    for _ in range(200):
        letters = b"ab" if case.rng.random() < 0.7 else b"abc"
        more = {bytes(case.rng.choice(letters) for _ in range(case.randint(2, 5))) for _ in range(case.randint(0, 7))}
        vocabulary = [bytes([byte]) for byte in b"abc"] + sorted(more)
        said = [case.randint(0, len(vocabulary)) for _ in range(case.randint(0, 4))]
        if case.rng.random() < 0.5:
            said = longest_match(vocabulary)(b"".join(vocabulary[token] for token in said))
        forced = bytes(case.rng.choice(letters) for _ in range(case.randint(0, 5)))
        _jumps(case, said, forced, vocabulary, set(case.rng.sample(b"abc", case.randint(0, 4))), case.randint(0, 3))


def _jumps(
    case: Case, said: list[int], forced: bytes, vocabulary: list[bytes], may_follow: set[int], most_back: int
) -> None:
    encode, calls = longest_match(vocabulary), []

    def counted(text: bytes) -> list[int]:
        calls.append(text)
        return encode(text)

    got = case.call(said, forced, vocabulary, counted, may_follow, most_back)
    case.true(
        isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], list),
        "the result is not a tuple (keep, new) with a list",
    )
    expected = jumped(said, forced, vocabulary, encode, may_follow, most_back)
    told = (
        f"said {[vocabulary[token] for token in said]}, forced {forced!r}, "
        f"may follow {bytes(sorted(may_follow))!r}, most_back={most_back}"
    )
    case.true(
        0 <= got[0] <= len(said),
        f"{told}: keep={got[0]}, but {len(said)} tokens were said",
        hint="keep counts tokens from the beginning.",
    )
    case.true(
        got[0] >= len(said) - most_back,
        f"{told}: {len(said) - got[0]} tokens are taken back",
        hint=f"At most {most_back} may be; otherwise keep all, and encode the forced text alone.",
    )
    least = sum(len(vocabulary[token]) for token in said)
    left = sum(len(vocabulary[token]) for token in [*said[: got[0]], *got[1]])
    case.true(
        left >= least,
        f"{told}: the result spells less than what was said",
        hint="Then the jump is given up: (len(said), []).",
    )
    hint = next(
        (
            text
            for look, text in (
                ("last", "Look at every new token, not at the last one only: a longer token may begin further ahead."),
                ("none", "A token that could go on with a byte of may_follow has to be held back."),
            )
            if got == jumped(said, forced, vocabulary, encode, may_follow, most_back, look) != expected
        ),
        None,
    )
    case.equal(got, expected, f"(keep, new) for {told}\n  the result", hint=hint)
    case.true(
        len(calls) <= 2,
        f"encode was called {len(calls)} times",
        hint="Once for the whole text, and once for the forced text if too much would be taken back.",
    )
