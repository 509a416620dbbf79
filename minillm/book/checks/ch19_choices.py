"""Checks of chapter 19: a select by gain, and a jump that may look back. Built in chapter 19."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker

__all__ = ["check_jump", "check_select_by_gain"]

# 4 · the select


class Model:
    """Log-probabilities out of a table, or out of a seed; notes what it is asked.

    never: the share of tokens that cannot come.
    """

    def __init__(self, size: int, seed: int, never: float = 0.0, table: dict[tuple, list[float]] | None = None) -> None:
        self.size, self.seed, self.never, self.table, self.asked = size, seed, never, table or {}, []

    def __call__(self, ids: tuple) -> list[float]:
        self.asked.append(ids)
        if self.table:
            return [math.log(p) for p in self.table.get(ids, [1.0] * self.size)]
        rng = random.Random(f"{self.seed}/{ids}")
        weights = [0.0 if rng.random() < self.never else rng.random() ** 3 + 1e-3 for _ in range(self.size)]
        total = sum(weights) or 1.0
        return [math.log(weight / total) if weight else -math.inf for weight in weights]

    def __repr__(self) -> str:
        return "logprobs_after"


Score = Callable[[float, float, tuple], float]  # what the prompt gives, what the neutral prompt gives, the choice


def _gain(asked: float, anyway: float, choice: tuple) -> float:
    return asked if asked == -math.inf else asked - anyway


def gains(
    after: Callable[[tuple], list[float]],
    prompt: tuple,
    neutral: tuple,
    choices: list[tuple],
    *,
    score: Score = _gain,
    best: Callable[[list[float]], int] = lambda found: found.index(max(found)),
    late: int = 0,
    known: bool = True,
) -> tuple[int, list[float]]:
    """The place of the best gain, and all of them; late: how many tokens too many stand before each question."""
    answers: dict[tuple, list[float]] = {}

    def ask(ids: tuple) -> list[float]:
        if ids not in answers or not known:
            answers[ids] = after(ids)
        return answers[ids]

    def total(start: tuple, choice: tuple) -> float:
        return sum(ask(start + choice[: k + late])[token] for k, token in enumerate(choice))

    found = [score(total(prompt, choice), total(neutral, choice), choice) for choice in choices]
    return best(found), found


def _with_the_end(after, prompt, neutral, choices) -> tuple[int, list[float]]:
    after(prompt + choices[0] + (0,))
    return gains(after, prompt, neutral, choices)


def _asked_once(case: Case, got: Any, after: Model, prompt: tuple, neutral: tuple, choices: list[tuple]) -> None:
    wanted = {start + choice[:k] for start in (prompt, neutral) for choice in choices for k in range(len(choice))}
    for ids in after.asked:
        case.true(
            ids in wanted, f"the model was asked after {ids}, whose answer is not needed", hint=_ASKS_BEHIND_THE_END
        )
        times = after.asked.count(ids)
        case.true(times == 1, f"the model was asked {times} times after {ids}", hint=_ASKS_AGAIN)


_ASKS_AGAIN = "Keep every result in a dictionary, by the whole tuple of ids."
_ASKS_BEHIND_THE_END = "No call is needed after the last token of a choice."
_TABLE = {(9,): [0.5, 0.3, 0.2], (8,): [0.8, 0.1, 0.1], (9, 0): [0.1, 0.1, 0.8], (8, 0): [0.1, 0.1, 0.8]}


def _gain_edges(draw: Draw) -> Iterator[tuple]:
    def model(size: int, never: float = 0.0) -> Model:
        return Model(size, draw.randint(0, 10**6), never)

    yield model(4), (1,), (2,), [(3,)]
    yield model(4), (1,), (2,), [(3,), (3,), (3, 0), (3, 0, 1), (0, 3)]  # twice the same, one begins with another
    yield model(4), (), (1,), [(1, 2), (2, 1)]  # the neutral prompt begins with the prompt, and with a choice
    yield model(4), (1, 2), (1,), [(2, 3), (2, 0, 3), (1,)]
    for never in (0.5, 0.9, 1.0):
        for _ in range(5):
            yield model(3, never), (5,), (6,), [(0,), (1,), (2, 0), (2, 1)]


def _random_choices(draw: Draw) -> tuple:
    size = draw.randint(2, 6)

    def ids(low: int, high: int) -> tuple:
        return tuple(draw.randint(0, size) for _ in range(draw.randint(low, high)))

    model = Model(size, draw.randint(0, 10**6), draw.rng.choice((0.0, 0.0, 0.2)))
    return model, ids(0, 4), (7, draw.randint(0, size)), [ids(1, 6) for _ in range(draw.randint(1, 9))]


check_select_by_gain = FunctionChecker(
    "select_by_gain",
    gains,
    hint="The log-probability of token k is in the list for the prompt and the choice's first k tokens.",
    examples=[(Model(3, 0, table=_TABLE), (9,), (8,), [(0, 2), (1,), (2,)])],
    edges=_gain_edges,
    random=_random_choices,
    returns=("best", "gains"),
    atol=1e-9,
    misconceptions={
        "-inf minus -inf is not a number: if the choice cannot follow the prompt, its gain is -inf.": dict(
            score=lambda asked, anyway, choice: asked - anyway
        ),
        "No division by the number of tokens here.": dict(
            score=lambda asked, anyway, choice: _gain(asked, anyway, choice) / len(choice)
        ),
        "Subtract what the choice scores after the neutral prompt.": dict(score=lambda asked, anyway, choice: asked),
        "The largest gain; ties go to the first.": dict(
            best=lambda found: len(found) - 1 - found[::-1].index(max(found))
        ),
        "The log-probability of token k comes from the choice's first k tokens, without token k itself.": dict(late=1),
        _ASKS_AGAIN: dict(known=False),
        _ASKS_BEHIND_THE_END: _with_the_end,
    },
    also=_asked_once,
    forbid=("minillm.programs.State", "minillm.programs.select"),
)


# 5 · the jump

PIECES = [b"a", b"b", b'"', b":", b" ", b'":', b' "', b'": "',
          b"ab", b"aba", b"1", b"{", b'{"', b"e", b"pet", b"p", b"t", b"pe"]  # fmt: skip


class LongestMatch:
    """A tokenizer: always the longest token that fits, of equals the first. Notes how often it was called."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        self.vocabulary, self.calls = vocabulary, 0
        self._order = sorted(range(len(vocabulary)), key=lambda token: (-len(vocabulary[token]), token))

    def __call__(self, text: bytes) -> list[int]:
        self.calls += 1
        ids, place = [], 0
        while place < len(text):
            ids.append(next(token for token in self._order if text.startswith(self.vocabulary[token], place)))
            place += len(self.vocabulary[ids[-1]])
        return ids

    def __repr__(self) -> str:
        return "encode"


def jumped(
    said: list[int],
    forced: bytes,
    vocabulary: list[bytes],
    encode: Callable[[bytes], list[int]],
    may_follow: set[int],
    most_back: int,
    *,
    look: str = "all",
    limit: bool = True,
    least: bool = True,
) -> tuple[int, list[int]]:
    """look: which of the new tokens may be held back, "all", the "last" or "none"; "any" byte may follow.

    limit: most_back is kept. least: the jump is given up rather than to spell less than was said.
    """
    text = b"".join(vocabulary[token] for token in said)
    if not forced:
        return len(said), []
    ids = encode(text + forced)
    keep = next((n for n, (old, new) in enumerate(zip(said, ids)) if old != new), min(len(said), len(ids)))
    if limit and len(said) - keep > most_back:
        keep, ids = len(said), said + encode(forced)
    begin = {"last": max(keep, len(ids) - 1), "none": len(ids)}.get(look, keep)
    follow = set(range(256)) if look == "any" else may_follow
    cut = next((n for n in range(begin, len(ids)) if any(_beyond(ids[n:], vocabulary, follow))), len(ids))
    ids = ids[:cut]
    if least and sum(len(vocabulary[token]) for token in ids) < len(text):
        return len(said), []
    return keep, ids[keep:]


def _beyond(ids: list[int], vocabulary: list[bytes], may_follow: set[int]) -> Iterator[bool]:
    rest = b"".join(vocabulary[token] for token in ids)
    for data in vocabulary:
        yield data[: len(rest)] == rest and len(data) > len(rest) and data[len(rest)] in may_follow


def _told(said, forced, vocabulary, encode, may_follow, most_back) -> str:
    return (
        f"(keep, new) for said {[vocabulary[token] for token in said]}, forced {forced!r}, "
        f"may follow {bytes(sorted(may_follow))!r}, most_back={most_back}\n  the result"
    )


def _encodes_twice(case: Case, got: Any, said, forced, vocabulary, encode, may_follow, most_back) -> None:
    case.true(encode.calls <= 2, f"encode was called {encode.calls} times", hint=_ENCODES_AGAIN)


def _encodes_again(said, forced, vocabulary, encode, may_follow, most_back) -> tuple[int, list[int]]:
    for token in said:
        encode(vocabulary[token])
    return jumped(said, forced, vocabulary, encode, may_follow, most_back)


_ENCODES_AGAIN = "Once for the whole text, and once for the forced text if too much would be taken back."


def _piece(said: list[int], forced: bytes, may_follow: bytes, most_back: int) -> tuple:
    return said, forced, PIECES, LongestMatch(PIECES), set(may_follow), most_back


def _random_jump(draw: Draw) -> tuple:
    letters = b"ab" if draw.rng.random() < 0.7 else b"abc"

    def text(low: int, high: int) -> bytes:
        return bytes(draw.rng.choice(letters) for _ in range(draw.randint(low, high)))

    vocabulary = [bytes([byte]) for byte in b"abc"] + sorted({text(2, 5) for _ in range(draw.randint(0, 7))})
    said = [draw.randint(0, len(vocabulary)) for _ in range(draw.randint(0, 4))]
    if draw.rng.random() < 0.5:
        said = LongestMatch(vocabulary)(b"".join(vocabulary[token] for token in said))
    may_follow = set(draw.rng.sample(b"abc", draw.randint(0, 4)))
    return said, text(0, 5), vocabulary, LongestMatch(vocabulary), may_follow, draw.randint(0, 3)


check_jump = FunctionChecker(
    "jump",
    jumped,
    hint="Cut the whole text, keep what agrees, then hold back from the first token where a longer one could begin.",
    examples=[
        _piece([12], b'pet": ', b"1", 0),
        _piece([12], b'pet": ', b'1"', 0),  # a quote would merge with what stands before
        _piece([12, 17, 16], b'":', b" ", 2),  # {" pe t: the tokenizer has one token for it
        _piece([12, 17, 16], b'":', b" ", 1),  # too many to take back
    ],
    edges=[
        _piece([], b'{"', b"p", 0),
        _piece([], b"", b"p", 3),
        _piece([12], b"", b"p", 3),
        _piece([0], b"b", b"a", 1),  # ab or aba: held back, and then less is left than was said
        _piece([0], b"b", b"b", 1),
        _piece([0], b"b", b"", 1),
        _piece([0], b"b", b"b", 0),
        _piece([2], b': "', b"", 1),
        _piece([2], b': "', b"1", 0),
        _piece([12, 14, 2], b": ", b'"', 0),
        _piece([12, 14, 5], b" ", b'"', 1),  # what could be begins in a said token that stays
        _piece([12, 17], b"t", b'"', 5),
        _piece([0, 1, 0, 1], b"a", b"1", 4),
    ],
    random=_random_jump,
    trials=200,
    returns=_told,
    misconceptions={
        "Look at every new token, not at the last one only: a longer token may begin further ahead.": dict(look="last"),
        "A token that could go on with a byte of may_follow has to be held back.": dict(look="none"),
        "A longer token counts only if its next byte may follow.": dict(look="any"),
        "At most most_back tokens may be taken back; otherwise keep all, and encode the forced text alone.": dict(
            limit=False
        ),
        "That is less text than `said` has. Then there is no jump: (len(said), []).": dict(least=False),
        _ENCODES_AGAIN: _encodes_again,
    },
    also=_encodes_twice,
    forbid=("minillm.sampling.grammar.jump.JumpForward",),
)
