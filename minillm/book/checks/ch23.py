"""Checks of chapter 23: chunks for a slow reader, a parser, admission by tokens, adapters packed by rank, a service
that leaks, a client that reconnects. Built in chapter 23.

`ch23_events`, `ch23_resume`, `ch23_packed` and `ch23_service` have one exercise each; the other two are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from minillm.book.checks import Draw, FunctionChecker, Raised
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.ch23_events import Event, check_event_reader
from minillm.book.checks.ch23_packed import check_packed_lora
from minillm.book.checks.ch23_resume import check_resume
from minillm.book.checks.ch23_service import check_repair_service
from minillm.book.checks.ch23_toy import Client, ToyEngine, trace_of

__all__ = [
    "Client",
    "Event",
    "ToyEngine",
    "check_admission",
    "check_event_reader",
    "check_merge_pieces",
    "check_packed_lora",
    "check_repair_service",
    "check_resume",
    "trace_of",
]

Piece = tuple[int, str, str | None]  # which sample, its text, why it ended

# 1 · chunks for a slow reader


def merged(
    waiting: list[Piece], most: int, *, reason_first: bool = False, empty: bool = False, by_number: bool = False,
    ends: bool = True, in_bytes: bool = False, full: int = 0,
) -> tuple[list[Piece], list[Piece]]:  # fmt: skip
    """What to send now, and what goes on waiting. The keywords are mistakes."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for index, text, reason in waiting:
        texts[index] = texts.get(index, "") + text
        reasons[index] = reason or reasons.get(index)
    chunks, rest = [], []
    for index, text in sorted(texts.items()) if by_number else texts.items():
        now = text.encode()[:most].decode("utf-8", "ignore") if in_bytes else text[:most]
        if text[len(now) :] or (full and len(text) == most):
            chunks.append((index, now, reasons[index] if reason_first else None))
            rest.append((index, text[len(now) :], reasons[index]))
        elif text or (reasons[index] and ends) or empty:
            chunks.append((index, text, reasons[index]))
    return chunks, rest


def _random_pieces(draw: Draw) -> tuple:
    open_samples, waiting = list(range(draw.randint(1, 5))), []
    for _ in range(draw.randint(0, 12)):
        if not open_samples:
            break
        index = draw.rng.choice(open_samples)
        reason = draw.rng.choice(("stop", "length")) if draw.rng.random() < 0.15 else None
        waiting.append((index, "".join(draw.rng.choice("abcdé ") for _ in range(draw.randint(0, 5))), reason))
        if reason:
            open_samples.remove(index)
    return waiting, draw.randint(1, 9)


check_merge_pieces = FunctionChecker(
    "merge_pieces",
    merged,
    returns=("chunks", "rest"),
    examples=[
        ([(0, "Once", None), (0, " upon", None), (0, " a time", None)], 100),
        ([(0, "Once", None), (1, "There", None), (0, " upon", "length"), (1, " was", None)], 100),
        ([(0, "Once upon a time", "stop"), (1, "Hi", "stop")], 9),
    ],
    edges={
        "nothing waits": ([], 10),
        "the samples do not come in the order of their numbers": (
            [(2, "b", None), (0, "a", None), (2, "c", None)], 10,
        ),
        "one sample has nothing to send, and the other ends without text": ([(0, "", None), (1, "", "stop")], 10),
        "a chunk is exactly full, so the finish reason goes with it": ([(0, "abc", None), (0, "", "length")], 3),
        "one character is left, and the finish reason waits with it": ([(0, "abcd", None), (0, "", "length")], 3),
        "the first piece of a sample is empty": ([(1, "", None), (0, "a", None), (1, "b", None)], 1),
        "`most` counts characters, and é has two bytes": ([(0, "é☕é", None), (0, "☕", "stop")], 1),
    },
    random=_random_pieces,
    trials=200,
    hint="One chunk for each sample: all of its text that waits, cut at `most`; what is cut off waits.",
    misconceptions={
        "A finish reason is sent with the last character: while text of the sample waits, so does its reason.":
            dict(reason_first=True),
        "The chunks are in the order of each sample's first piece.": dict(by_number=True),
        "Leave out a chunk without text and without a finish reason.": dict(empty=True),
        "`most` counts characters, not bytes.": dict(in_bytes=True),
        "A chunk without text is sent if it has a finish reason.": dict(ends=False),
        "A text of exactly `most` characters fits: nothing of it waits.": dict(full=1),
    },
)  # fmt: skip

# 3 · admission by tokens


class Budget:
    """The requests under way and their work. The keywords are mistakes."""

    def __init__(
        self, max_tokens: int, tokens_per_second: float, reserve: int = 0, *, alone: str = "no request",
        computes: bool = True, least: int = 0, keeps: bool = False, reserves: bool = True, up: str = "ceil",
        cuts: bool = True, twice: bool = False,
    ) -> None:  # fmt: skip
        self.max_tokens, self.rate, self.reserve = max_tokens, tokens_per_second, reserve * reserves
        self.left: dict[str, int] = {}
        self.alone, self.computes, self.least, self.keeps = alone, computes, least, keeps
        self.up, self.cuts, self.twice = up, cuts, twice

    def ask(self, name: str, prompt_tokens: int, max_tokens: int, urgent: bool = False) -> int:
        if name in self.left and not self.twice:
            raise ValueError(name)
        claim, limit = prompt_tokens + max_tokens, self.max_tokens - (0 if urgent else self.reserve)
        work = sum(self.left.values())
        empty = {"no request": not self.left, "no work": not work, "never": False}[self.alone]
        fits = empty or work + claim <= limit
        if fits or self.keeps:
            self.left[name] = claim
        if fits:
            return 0
        over = (work if claim > limit and self.cuts else work + claim - limit) / self.rate
        return max(1, {"ceil": math.ceil(over), "floor": int(over), "floor + 1": int(over) + 1}[self.up])

    def computed(self, name: str, count: int) -> None:
        if name in self.left and self.computes:
            self.left[name] = max(self.least, self.left[name] - count)

    def leave(self, name: str) -> None:
        self.left.pop(name, None)


def _why_asked(got: Any, expected: Any, budget: Budget, call: tuple) -> str | None:
    if call[0] != "ask":
        return "A name that is not under way: the message came late, and there is nothing to do."
    if isinstance(expected, Raised):
        return "A name that is under way is refused, and nothing changes."
    work, claim = sum(budget.left.values()), call[2] + call[3]
    limit = budget.max_tokens - (0 if call[4:] == (True,) else budget.reserve)
    told = f"{work} tokens of work are under way, this request claims {claim}, and its limit is {limit}"
    if not expected:
        return f"{told}: it is admitted." if budget.left else f"No request is under way: it is admitted. {told}."
    if not got:
        return f"{told}: that is too many."
    if claim > limit:
        return f"{told}. Alone it exceeds the limit: it waits for all the work, {work} / {budget.rate:g} s, rounded up."
    return f"{told}. The excess is {work + claim - limit}; divide it by {budget.rate:g} a second, and round up."


def _asks(draw: Draw) -> Story:
    most = draw.randint(10, 400)

    def calls(budget: Budget) -> Iterator[tuple]:
        for _ in range(40):
            name, chance = f"r{draw.randint(0, 9)}", draw.rng.random()
            if chance < 0.5 and (name not in budget.left or chance < 0.1):
                yield "ask", name, draw.randint(1, 120), draw.randint(0, 120), draw.rng.random() < 0.3
            elif chance < 0.8:
                yield "computed", name, draw.randint(1, 80)
            else:
                yield "leave", name

    rate, reserve = draw.rng.choice((1.0, 3.0, 12.5, 100.0)), draw.rng.choice((0, 0, most // 4, most))
    return Story((most, rate, reserve), calls)


check_admission = ClassChecker(
    "admission",
    Budget,
    what="admission",
    shows=(),
    raises=(ValueError,),
    examples=[
        Story(
            (1000, 100.0),
            "ask('a', 200, 300) · ask('b', 100, 300) · ask('c', 50, 100) ·"  # the last one 50 too many: a second
            "computed('a', 200) · ask('c', 50, 100) · leave('b') · ask('d', 100, 300)",
        )
    ],
    edges={
        "a request is larger than the limit, and admitted if it is alone": Story(
            (100, 10.0),
            "ask('large', 500, 500) · ask('a', 1, 1) · computed('large', 1000) · ask('a', 50, 50) · leave('large') ·"
            "ask('b', 1, 0) · ask('huge', 60, 60) · ask('a', 1, 1) · computed('a', 30) · computed('unknown', 3) ·"
            "leave('unknown') · leave('a') · leave('a') · ask('a', 40, 60) · computed('a', 70) · computed('a', 70) ·"
            "ask('c', 50, 50)",
        ),
        "some tokens are reserved for urgent requests": Story(
            (100, 7.0, 40),
            "ask('a', 30, 30) · ask('b', 1, 0) · ask('b', 20, 20, True) · ask('c', 1, 0, True) · ask('d', 30, 40) ·"
            "leave('b') · ask('d', 0, 1)",
        ),
        "all tokens are reserved, and the server is empty": Story(
            (100, 10.0, 100), "ask('a', 100, 100) · ask('b', 5, 5)"
        ),
        "all work is done, and the request has not left: it is under way": Story(
            (10, 1.0), "ask('a', 9, 1) · computed('a', 10) · ask('b', 9, 9) · ask('c', 5, 5)"
        ),
    },
    random=_asks,
    trials=40,
    explain=_why_asked,
    hint="Keep for each request the tokens that are still to be computed; their sum is the work under way.",
    misconceptions={
        "Computed tokens are not work any more: subtract them.": dict(computes=False),
        "The work of a request never falls below 0, however many tokens are computed.": dict(least=-(10**9)),
        "An empty server admits anything: otherwise a large request would wait for ever.": dict(alone="never"),
        "A request without work left is under way until it leaves: the server is not empty.": dict(alone="no work"),
        "A refused request changes nothing: it is not under way, and its claim is no work.": dict(keeps=True),
        "The reserve is for urgent requests.": dict(reserves=False),
        "The excess divided by the rate is rounded up to whole seconds.": dict(up="floor"),
        "A whole number is not rounded up: math.ceil(excess / rate), not int(excess / rate) + 1.": dict(up="floor + 1"),
        "Its claim alone exceeds the limit, so it has to wait for all the work under way, and no longer.": dict(
            cuts=False
        ),
        "A name that is under way raises ValueError.": dict(twice=True),
    },
    forbid=("minillm.serving.gate.Gate",),
)
