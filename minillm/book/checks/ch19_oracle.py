"""What the checks of chapter 19 expect of automata and templates: references, with switches for known mistakes.
Built in chapter 19."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Moves = list[dict[int, int]]


class Slot(NamedTuple):
    """A gap of a template: from `low` to `high` bytes, each of them out of `allowed`."""

    allowed: frozenset[int]
    low: int
    high: int


def alive_states(targets: list[Iterable[int]], may_end: set[int]) -> set[int]:
    """From which states one that may end can be reached. targets: state -> states that one step leads to."""
    sources: list[list[int]] = [[] for _ in targets]
    for state, reached in enumerate(targets):
        for target in reached:
            sources[target].append(state)
    alive, queue = set(may_end), list(may_end)
    while queue:
        new = [state for state in sources[queue.pop()] if state not in alive]
        alive.update(new)
        queue += new
    return alive


def alive_by_rounds(targets: list[Iterable[int]], may_end: set[int]) -> set[int]:
    """The same, slowly: all states are looked at again until nothing new turns up."""
    alive, grown = set(may_end), True
    while grown:
        more = {state for state, reached in enumerate(targets) if state not in alive and not alive.isdisjoint(reached)}
        alive |= more
        grown = bool(more)
    return alive


def lengths(
    moves: Moves, may_end: set[int], text: bytes, *, dead: bool = True, empty: bool = True, alive=alive_states
) -> tuple[int, int]:
    """(valid, viable); dead=False forgets that a state may be dead, empty=False the empty beginning."""
    good = alive([row.values() for row in moves], may_end) if dead else set(range(len(moves)))
    valid, viable, state = -1, -1, 0
    for count in range(len(text) + 1):
        if state not in good:
            break
        viable = count
        valid = count if state in may_end and (empty or count) else valid
        state = moves[state].get(text[count]) if count < len(text) else None
    return valid, viable


def walk(moves: Moves, state: int | None, data: bytes) -> int | None:
    for byte in data:
        state = moves[state].get(byte)
        if state is None:
            return None
    return state


def lists(
    moves: Moves,
    may_end: set[int],
    vocabulary: list[bytes],
    end: int,
    *,
    by: str = "tokens",
    empty: bool = False,
    spelled_end: bool = False,
    anywhere: bool = False,
) -> list[list[int]]:
    """The ids that are allowed in each state.

    by: how a token's target must reach an end: by "tokens", by "bytes", by "one" token at most, or it need "not".
    empty: tokens without bytes lead somewhere. spelled_end: the end token's bytes are walked. anywhere: it may come
    in any state.
    """
    tokens = [(t, data) for t, data in enumerate(vocabulary) if (data or empty) and (t != end or spelled_end)]
    leads = [
        {token: target for token, data in tokens if (target := walk(moves, state, data)) is not None}
        for state in range(len(moves))
    ]
    steps = [row.values() for row in (moves if by == "bytes" else leads)]
    good = alive_states(steps, may_end) if by != "not" else set(range(len(moves)))
    if by == "one":
        good = set(may_end) | {state for state, reached in enumerate(steps) if not may_end.isdisjoint(reached)}
    return [
        sorted(
            {token for token, target in leads[state].items() if target in good}
            | ({end} if anywhere or state in may_end else set())
        )
        for state in range(len(moves))
    ]


def lists_again(moves: Moves, may_end: set[int], vocabulary: list[bytes], end: int) -> list[list[int]]:
    """The same, slowly: every round walks every token again."""

    def leads(state: int) -> dict[int, int]:
        tokens = ((t, walk(moves, state, data)) for t, data in enumerate(vocabulary) if data and t != end)
        return {token: target for token, target in tokens if target is not None}

    alive, grown = set(may_end), True
    while grown:
        more = {state for state in range(len(moves)) if not alive.isdisjoint(leads(state).values())} - alive
        alive |= more
        grown = bool(more)
    allowed = [[token for token, target in leads(state).items() if target in alive] for state in range(len(moves))]
    return [sorted(found + [end] * (state in may_end)) for state, found in enumerate(allowed)]


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
