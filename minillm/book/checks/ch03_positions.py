"""The check of chapter 03's repaired generator: it talks to a model that records each call. Built in chapter 03."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker, Raised
from minillm.book.chips import Html, table


class Recorder:
    """A model of 40 tokens: its logits depend on every token, on its position, and on holes; each call is recorded."""

    VOCAB = 40

    def __init__(self, seed: int, max_calls: int = 1000) -> None:
        self.seed, self.max_calls, self.slots, self.calls = seed, max_calls, {}, []

    def __call__(self, token_ids: list[int], start: int) -> Tensor:
        token_ids = [int(token) for token in token_ids]
        if len(self.calls) == self.max_calls:
            raise RuntimeError(
                f"decode has been called {self.max_calls} times: the loop does not end. "
                "Does it count the tokens that it chose?"
            )
        self.calls.append((start, token_ids, max(self.slots, default=-1) + 1))
        self.slots |= {start + i: token for i, token in enumerate(token_ids)}
        return self.logits([self.slots.get(p) for p in range(start + len(token_ids))])

    def __repr__(self) -> str:
        return "decode"

    def logits(self, text: list[int | None]) -> Tensor:
        rng = random.Random(f"{self.seed}/{text}")
        return torch.tensor([rng.random() for _ in range(self.VOCAB)])


def generated(
    decode: Callable, prompt_ids: list[int], max_tokens: int, eos_id: int | None = None, *, shift: int = 0,
    whole: bool = False, needless: bool = False, stops: bool = True, keeps: bool = True, zero: bool = True,
) -> list[int]:  # fmt: skip
    """Greedy tokens; the keywords are mistakes."""
    ids, computed = list(prompt_ids), 0
    while len(ids) < len(prompt_ids) + max_tokens:
        logits = decode(ids[computed:], max(0, computed + shift * (computed > 0)))
        computed = 0 if whole else len(ids)
        token = int(logits.argmax())
        ends = stops and (zero or bool(eos_id)) and token == eos_id
        if not ends or keeps:
            ids.append(token)
        if ends:
            break
    if needless and max_tokens:
        decode(ids[computed:], computed)
    return ids[len(prompt_ids) :]


def _told(got: list[int], decode: Recorder, *rest: Any) -> tuple:
    return [(start, token_ids) for start, token_ids, _ in decode.calls], got


def _asked(seed: int, prompt_ids: Sequence[int], max_tokens: int, eos_id: int | None = None) -> tuple:
    return Recorder(seed, 2 * (len(prompt_ids) + max_tokens) + 10), list(prompt_ids), max_tokens, eos_id


def _edges(draw: Draw) -> dict[str, tuple]:
    said = [generated(Recorder(seed), [1, 2], 6) for seed in range(12)]
    zero = next(seed for seed in range(10**4) if 0 in generated(Recorder(seed), [1, 2], 5))
    return {
        "the prompt has one token": _asked(1, [7], 3),
        "one token is generated": _asked(2, [7, 2, 9], 1),
        "max_tokens=0: there is nothing to call for": _asked(3, [7, 2, 9], 0),
        **{
            f"the text ends with its token {seed % 6 + 1}, if not before": _asked(seed, [1, 2], 6, said[seed][seed % 6])
            for seed in range(4, 10)
        },
        "eos_id is 0, a token id as good as any: compare with None to see whether there is one": _asked(
            zero, [1, 2], 6, 0
        ),
    }


def _random(draw: Draw) -> tuple:
    prompt = [draw.randint(0, Recorder.VOCAB) for _ in range(draw.randint(1, 12))]
    eos_id = draw.rng.choice((None, draw.randint(0, Recorder.VOCAB)))
    return _asked(draw.randint(0, 10**6), prompt, draw.randint(0, 9), eos_id)


def _explain(got: Any, expected: Any, decode: Recorder, prompt_ids: list[int], *rest: Any) -> str | None:
    if isinstance(got, Raised):
        return None
    calls, right = got[0], expected[0]
    number = next((i for i, pair in enumerate(zip(calls, right)) if pair[0] != pair[1]), min(len(calls), len(right)))
    if not right:
        return "No token is generated, so no logits are needed, and no call."
    if number == len(right) < len(calls):
        return f"Each call gives one token: {len(right)} are enough. Logits that are never read need not be computed."
    if number == len(calls) < len(right):
        return f"Each call gives one token: {len(right)} are needed."
    if number < len(right):
        cached = right[number][0]
        before = f"the positions up to {cached - 1} are cached" if cached else "nothing is cached"
        return (
            f"Before call {number + 1} {before}, so it starts at {cached}. "
            "The first call processes the whole prompt, every later one the token that was just chosen."
        )
    return None


def trace_of(generate: Callable, prompt_ids: list[int], max_tokens: int) -> Html:
    """Run a generator on a small model that records each call, and show what it asked for and what was cached then."""
    recorder = Recorder(seed=0, max_calls=100)
    generate(recorder, prompt_ids, max_tokens)
    rows = []
    for number, (start, token_ids, cached) in enumerate(recorder.calls, 1):
        written = ", ".join(str(start + i) for i in range(len(token_ids)))
        rows.append([number, str(token_ids), written, f"up to {cached - 1}" if cached else "none"])
    return table(rows, ["call", "token_ids", "written at positions", "positions cached before"])


check_repair_positions = FunctionChecker(
    "repair_positions",
    generated,
    returns=("the list of calls (start, token_ids)", "the list of new token ids"),
    observe=_told,
    examples=[_asked(0, [3, 1, 4, 1, 5], 4)],
    edges=_edges,
    random=_random,
    trials=20,
    explain=_explain,
    hint="A token's position is the number of tokens before it.",
    misconceptions={
        "A token's position is the number of tokens before it, so the next one is at the number of tokens so far.": (
            dict(shift=1)
        ),
        "A call writes over the last position that is cached: the next token stands behind it.": dict(shift=-1),
        "What is cached is not processed again: a call has the new tokens only.": dict(whole=True),
        "The last call's logits are not read: choose a token, and call again only if one more is needed.": dict(
            needless=True
        ),
        "0 is a token id as good as any: compare with None to see whether there is an eos_id.": dict(zero=False),
        "The text ends with eos_id as soon as it is chosen.": dict(stops=False),
        "The eos_id that ends the text is the last token of the list.": dict(keeps=False),
    },
)
