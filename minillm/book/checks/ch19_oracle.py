"""What the checks of chapter 19 expect: references written for plainness. Built in chapter 19."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

Moves = list[dict[int, int]]


class Slot(NamedTuple):
    """A gap of a template: from `low` to `high` bytes, each of them out of `allowed`."""

    allowed: frozenset[int]
    low: int
    high: int


def alive_states(targets: list[set[int]], may_end: set[int]) -> set[int]:
    """From which states one that may end can be reached. targets: state -> states that one step leads to."""
    alive, grown = set(may_end), True
    while grown:
        more = {state for state, reached in enumerate(targets) if state not in alive and reached & alive}
        alive |= more
        grown = bool(more)
    return alive


def walk(moves: Moves, state: int | None, data: bytes) -> int | None:
    for byte in data:
        state = None if state is None else moves[state].get(byte)
    return state


def lengths(moves: Moves, may_end: set[int], text: bytes, dead: bool = True) -> tuple[int, int]:
    """(valid, viable); dead=False forgets that a state may be dead."""
    alive = alive_states([set(row.values()) for row in moves], may_end) if dead else set(range(len(moves)))
    ends = [walk(moves, 0, text[:n]) for n in range(len(text) + 1)]
    valid = [n for n, state in enumerate(ends) if state in may_end]
    viable = [n for n, state in enumerate(ends) if state in alive]
    return max(valid, default=-1), max(viable, default=-1)


def lists(moves: Moves, may_end: set[int], vocabulary: list[bytes], end: int, by: str = "tokens") -> list[list[int]]:
    """The reference; `by` "bytes" asks whether an end can be reached byte by byte, "nothing" does not ask."""
    leads = [
        {
            token: target
            for token, data in enumerate(vocabulary)
            if data and token != end and (target := walk(moves, state, data)) is not None
        }
        for state in range(len(moves))
    ]
    alive = set(range(len(moves)))
    if by != "nothing":
        alive = alive_states(
            [set((row if by == "bytes" else leads[state]).values()) for state, row in enumerate(moves)], may_end
        )
    return [
        sorted([token for token, target in leads[state].items() if target in alive] + [end] * (state in may_end))
        for state in range(len(moves))
    ]


class Places:
    """A template by the places where its text may be: (part, bytes of it that were read)."""

    def __init__(self, parts: list[str | Slot]) -> None:
        self.parts = [part.encode() if isinstance(part, str) else part for part in parts]

    def start(self) -> set[tuple[int, int]]:
        return self._settle({(0, 0)})

    def read(self, places: set[tuple[int, int]], token: bytes) -> set[tuple[int, int]]:
        for byte in token:
            places = self._settle({(part, count + 1) for part, count in places if byte in self._next(part, count)})
        return places

    def may_end(self, places: set[tuple[int, int]]) -> bool:
        return (len(self.parts), 0) in places

    def _next(self, part: int, count: int) -> frozenset[int] | bytes:
        if part == len(self.parts):
            return b""
        here = self.parts[part]
        return here[count : count + 1] if isinstance(here, bytes) else here.allowed if count < here.high else b""

    def _settle(self, places: set[tuple[int, int]]) -> set[tuple[int, int]]:
        for part, here in enumerate(self.parts):  # in order, so that several empty parts are left at once
            least = len(here) if isinstance(here, bytes) else here.low
            if any(place == part and count >= least for place, count in places):
                places = places | {(part + 1, 0)}
        return places


def gains_of(after: Callable, prompt: tuple, neutral: tuple, choices: list[tuple]) -> list[float]:
    asked, anyway = (
        [sum(after(start + choice[:k])[token] for k, token in enumerate(choice)) for choice in choices]
        for start in (prompt, neutral)
    )
    return [one if one == -math.inf else one - other for one, other in zip(asked, anyway)]


def needed(prompt: tuple, neutral: tuple, choices: list[tuple]) -> set[tuple]:
    """The ids after which the model must be asked."""
    return {start + choice[:k] for start in (prompt, neutral) for choice in choices for k in range(len(choice))}


def jumped(
    said: list[int],
    forced: bytes,
    vocabulary: list[bytes],
    encode: Callable,
    may_follow: set[int],
    most_back: int,
    look: str = "all",
) -> tuple[int, list[int]]:
    """The reference; `look` "last" holds back the last token only, "none" holds back nothing."""
    text = b"".join(vocabulary[token] for token in said)
    if not forced:
        return len(said), []
    ids = encode(text + forced)
    keep = next((n for n, (old, new) in enumerate(zip(said, ids)) if old != new), min(len(said), len(ids)))
    if len(said) - keep > most_back:
        keep, ids = len(said), said + encode(forced)
    begin = {"all": keep, "last": max(keep, len(ids) - 1), "none": len(ids)}[look]
    cut = next((n for n in range(begin, len(ids)) if any(_beyond(ids[n:], vocabulary, may_follow))), len(ids))
    ids = ids[:cut]
    if sum(len(vocabulary[token]) for token in ids) < len(text):
        return len(said), []
    return keep, ids[keep:]


def _beyond(ids: list[int], vocabulary: list[bytes], may_follow: set[int]) -> Iterator[bool]:
    rest = b"".join(vocabulary[token] for token in ids)
    for data in vocabulary:
        yield data[: len(rest)] == rest and len(data) > len(rest) and data[len(rest)] in may_follow


def longest_match(vocabulary: list[bytes]) -> Callable[[bytes], list[int]]:
    """A tokenizer: always the longest token that fits, of equals the first."""
    order = sorted(range(len(vocabulary)), key=lambda token: (-len(vocabulary[token]), token))

    def encode(text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            ids.append(next(token for token in order if text.startswith(vocabulary[token], place)))
            place += len(vocabulary[ids[-1]])
        return ids

    return encode
