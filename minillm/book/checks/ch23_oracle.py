"""Reference answers and stand-ins for the checks of chapter 23. Built in chapter 23."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Event(NamedTuple):
    """One event of a stream: its type, its data, and the last id that the stream has named."""

    type: str
    data: str
    id: str


Piece = tuple[int, str, str | None]  # which sample, its text, why it ended


def merged(waiting: list[Piece], most: int) -> tuple[list[Piece], list[Piece]]:
    """What to send now, and what goes on waiting."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for index, text, reason in waiting:
        texts[index] = texts.get(index, "") + text
        reasons[index] = reason or reasons.get(index)
    chunks, rest = [], []
    for index, text in texts.items():
        if text[most:]:
            chunks.append((index, text[:most], None))
            rest.append((index, text[most:], reasons[index]))
        elif text or reasons[index]:
            chunks.append((index, text, reasons[index]))
    return chunks, rest


def events_of(data: bytes) -> tuple[list[Event], int | None, bool, int]:
    """All of a stream at once: events, the last `retry`, whether it said [DONE], how many comments it has."""
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
    events, retry, comments, lines = [], None, 0, text.split("\n")[:-1]
    kind, parts, last = "", [], ""
    for line in lines:
        if not line:
            if parts == ["[DONE]"]:
                return events, retry, True, comments
            if parts:
                events.append(Event(kind or "message", "\n".join(parts), last))
            kind, parts = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            comments += 1
        elif name == "data":
            parts.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last = value
        elif name == "retry" and value.isascii() and value.isdigit():
            retry = int(value)
    return events, retry, False, comments


class Budget:
    """The admission of exercise 3."""

    def __init__(self, max_tokens: int, tokens_per_second: float, reserve: int = 0):
        self.max_tokens, self.rate, self.reserve = max_tokens, tokens_per_second, reserve
        self.left: dict[str, int] = {}

    def ask(self, name: str, prompt_tokens: int, max_tokens: int, urgent: bool = False) -> int:
        if name in self.left:
            raise ValueError(name)
        claim, limit = prompt_tokens + max_tokens, self.max_tokens - (0 if urgent else self.reserve)
        work = sum(self.left.values())
        if not self.left or work + claim <= limit:
            self.left[name] = claim
            return 0
        over = work if claim > limit else work + claim - limit
        return max(1, math.ceil(over / self.rate))

    def computed(self, name: str, count: int) -> None:
        if name in self.left:
            self.left[name] = max(0, self.left[name] - count)

    def leave(self, name: str) -> None:
        self.left.pop(name, None)


def packed(x, a, b, starts, scales, slots):
    """Token by token, in float64."""
    out = x.new_zeros(x.shape[0], b.shape[1]).double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rank = slice(starts[slot], starts[slot + 1])
            out[row] = scales[slot] * (x[row].double() @ a[rank].double().T @ b[rank].double())
    return out


class Line:
    """A connection of exercise 6: gives its events, then breaks, ends, or goes on as `end` says."""

    def __init__(self, events: list[tuple[int, str | None]], breaks: bool):
        self.events, self.breaks, self.given, self.num_closed = events, breaks, 0, 0

    def __iter__(self) -> Iterator[tuple[int, str | None]]:
        for one in self.events:
            self.given += 1
            yield one
        if self.breaks:
            raise ConnectionError("the connection is lost")

    def close(self) -> None:
        self.num_closed += 1
