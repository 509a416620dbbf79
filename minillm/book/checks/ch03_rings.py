"""Checks of chapter 03: a ring for a window, and one that can go back. Built in chapter 03."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw, Raised
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.ch03_oracle import (
    BACKENDS,
    CAUSAL,
    COPIES,
    NEAR,
    OUTPUT,
    Overlap,
    attend,
    chunk,
    poisoned,
)


class Rewindable:
    """A ring that can go back by `slack` positions. The keywords are mistakes."""

    def __init__(
        self, window: int, slack: int, num_kv_heads: int, head_dim: int, *, causal: bool = True, longer: int = 0,
        written_first: bool = False, copies: bool = False, ascending: bool = False,
    ) -> None:  # fmt: skip
        self.slots = window + slack
        self.keys, self.values = (torch.zeros(self.slots, num_kv_heads, head_dim) for _ in range(2))
        self.window, self.slack, self.length, self.high = window, slack, 0, 0
        self.causal, self.reach, self.written_first = causal, max(1, window + longer), written_first
        self.copy = [torch.zeros(0, num_kv_heads, head_dim)] * 2 if copies else None
        self.ascending = ascending

    def positions(self) -> list[int]:
        """The position in each slot, -1 where there was none yet."""
        held = range(self.length)
        slots = [max((p for p in held if p % self.slots == slot), default=-1) for slot in range(self.slots)]
        return sorted(slots, key=lambda position: (position < 0, position)) if self.ascending else slots

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, before, end = len(k), self.length, self.length + len(k)
        oldest = max(0, (end if self.written_first else before) - self.slots)
        past = torch.arange(oldest, max(oldest, before)) % self.slots
        held = [
            torch.cat([one[past], new[max(0, oldest - before) :]]) for one, new in ((self.keys, k), (self.values, v))
        ]
        if self.copy:
            self.copy = [torch.cat([one[:before], new]) for one, new in zip(self.copy, (k, v))]
            held = [one[oldest:] for one in self.copy]
        seen = []
        for position in range(before, end):
            last = position if self.causal else end - 1
            seen.append([p - oldest for p in range(max(oldest, position - self.reach + 1), last + 1)])
        out = attend(q, *held, seen)
        for i in range(max(0, count - self.slots), count):
            self.keys[(before + i) % self.slots], self.values[(before + i) % self.slots] = k[i], v[i]
        self.length = end
        self.high = max(self.high, end)
        return out

    def rewind(self, k: int) -> None:
        low = max(0, self.high - self.slack)
        if k < 0 or self.length - k < low:
            raise ValueError(f"rewind({k}) from {self.length}: allowed down to {low}")
        self.length -= k


class Ring(Rewindable):
    """A ring without slack."""

    def __init__(self, window: int, num_kv_heads: int, head_dim: int, **mistakes: Any) -> None:
        super().__init__(window, 0, num_kv_heads, head_dim, **mistakes)


@contextlib.contextmanager
def _changed(case: Case, mine: Any, right: Rewindable, call: tuple) -> Iterator[None]:
    """NaN in slots without a position, another last key and value; no assignment may give one slot two tokens."""
    if call[0] == "step":
        new, last = case.randn(2, *right.keys[0].shape), right.length - 1
        empty = [slot for slot, position in enumerate(right.positions()) if position < 0]
        gone = [position % right.slots for position in range(right.length, right.high)]
        for ring in (mine, right):
            for slot in (*empty, *gone):
                ring.keys[slot] = ring.values[slot] = torch.nan
            if last >= 0:
                ring.keys[last % right.slots], ring.values[last % right.slots] = new
    address = mine.keys.data_ptr()
    with Overlap() as overlap:
        yield
    case.true(
        not overlap.found,
        f"step wrote two tokens into one slot with one assignment ({overlap.found}); which one stays is not defined",
        hint="Of a chunk longer than the ring, write only the last tokens, those that stay.",
    )
    told = "the storage was replaced; the ring keeps its slots and overwrites them"
    case.true(mine.keys.data_ptr() == address, told)


def _moves(
    draw: Draw, given: tuple, moves: Sequence[int], heads: int = 2, kv_heads: int = 2, head_dim: int = 4
) -> Story:
    """Moves are chunks to step over (positive) and rewinds (0 or negative)."""
    calls = [
        ("step", *chunk(draw, move, heads, kv_heads, head_dim)) if move > 0 else ("rewind", -move) for move in moves
    ]
    return Story((*given, kv_heads, head_dim), calls, _changed)


def _held(ring: Any, right: list[int]) -> Tensor:
    """Keys and values, slot by slot, of the slots that hold a position."""
    slots = [slot for slot, position in enumerate(right) if position >= 0]
    return torch.stack([ring.keys[slots], ring.values[slots]])


def _means(values: Sequence[float], *given: int) -> Story:
    """A query of zeros weighs all keys alike: each output is the mean of the values in the window."""
    ones, zeros = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    calls = [("rewind", value) if isinstance(value, int) else ("step", zeros, ones, value * ones) for value in values]
    return Story((*given, 1, 1), calls)


_MEANS = "a query of zeros weighs all keys that it sees alike, so each output is the mean of the values in its window"
_LONG = "The window is one too long: a query sees itself and window - 1 positions before it."
_SHORT = "The window is one too short: a query sees itself and window - 1 positions before it."
_FIRST = (
    "The first queries of the chunk missed the oldest positions of their windows: "
    "gather window - 1 positions before the chunk, and attend before you write."
)

# 3 · a ring


def _ring_edges(draw: Draw) -> dict[str, Story]:
    return {
        "the ring is never full": _moves(draw, (5,), [1, 1]),
        "the ring is exactly full, then one more token comes": _moves(draw, (4,), [4, 1]),
        "chunks go over the end of the ring": _moves(draw, (4,), [3, 3, 3]),
        "chunks are longer than the window": _moves(draw, (3,), [8, 1, 7]),
        "the window is 1, and every query sees itself only": _moves(draw, (1,), [1, 1, 3]),
        "three query heads share a KV head": _moves(draw, (4,), [2] * 6, heads=6),
        "a chunk is seven times the window": _moves(draw, (7,), [3, 50, 1], heads=4, kv_heads=4, head_dim=32),
    }


def _random_ring(draw: Draw) -> Story:
    kv_heads = draw.randint(1, 3)
    chunks = [draw.rng.choice((1, 1, 2, 3, 5, 12)) for _ in range(draw.randint(2, 9))]
    return _moves(draw, (draw.randint(1, 8),), chunks, kv_heads * draw.randint(1, 4), kv_heads)


check_ring_cache = ClassChecker(
    "ring_cache",
    Ring,
    what="ring",
    shows={
        "length": lambda ring, calls: ring.length,
        "positions()": lambda ring, calls: ring.positions(),
        "the shape of keys": lambda ring, calls: list(ring.keys.shape),
        "the key and value in each slot that holds a position": lambda ring, calls: _held(ring, ring.positions()),
    },
    examples={_MEANS: _means((1.0, 2.0, 3.0, 10.0), 3)},
    edges=_ring_edges,
    random=_random_ring,
    returns={"step": OUTPUT},
    explain=poisoned,
    hint="Position p is in KV slot p % window; a query at position p sees the positions from p - window + 1 to p.",
    misconceptions={
        CAUSAL: dict(causal=False),
        _FIRST: dict(written_first=True),
        "positions() tells of each KV slot which position is in it: slot by slot, not in ascending order.": dict(
            ascending=True
        ),
        _SHORT: dict(longer=-1),
        _LONG: dict(longer=1),
        COPIES: dict(copies=True),
    },
    forbid=BACKENDS,
    **NEAR,
)

# 5 · a ring that can go back


def _why(got: Any, expected: Any, ring: Rewindable, call: tuple) -> str | None:
    if call[0] == "step":
        return poisoned(got)
    k, now = call[1], f"The length is {ring.length}, the largest length so far {ring.high}, slack {ring.slack}"
    if not isinstance(expected, Raised):
        return f"{now}: {k} positions can be taken back."
    if k < 0:
        return "k is negative: raise ValueError."
    if k > ring.length:
        return f"The length is {ring.length}: no more can be taken back than there is."
    return f"{now}: after rewind({k}) the window may be overwritten already."


def _rewind_edges(draw: Draw) -> dict[str, Story]:
    return {
        "drafts are taken back and others come": _moves(draw, (3, 2), [3, 3, -2, 1, 1, -1, 4]),
        "the first chunk is longer than the ring": _moves(draw, (4, 3), [9, -1, -2, 2, -1, 6, -3, 1]),
        "the window is 1": _moves(draw, (1, 1), [1, -1, 1, 1, -1, 1]),
        "two back, one forward: two more back would be three": _moves(draw, (3, 2), [7, -2, 1, -2, 1]),
        "no more can be taken back than there is": _moves(draw, (3, 2), [2, -3, -2, 5, -1, -2, 2]),
        "slack is 0": _moves(draw, (2, 0), [4, -1, 1, -99, 3]),
        "two query heads share a KV head": _moves(draw, (5, 4), [20, -4, 11, -4, 3], heads=4),
        "k = 0 is allowed: nothing is taken back": _moves(draw, (3, 1), [0, 4, 0, 0, -1, 0, 2]),
        "a chunk is longer than the ring, and its end is taken back": _moves(
            draw, (7, 2), [3, 50, -2, 1], heads=4, kv_heads=4, head_dim=32
        ),
        "k is negative": Story((2, 2, 1, 1), "rewind(-1) · rewind(0)"),
    }


def _random_rewinds(draw: Draw) -> Story:
    window, slack, length, moves = draw.randint(1, 7), draw.randint(0, 5), 0, []
    for _ in range(draw.randint(4, 14)):
        forward = draw.rng.random() < 0.6 or not length
        moves.append(draw.rng.choice((1, 1, 2, 3, 9)) if forward else -draw.randint(1, slack + 3))
        length += moves[-1] if forward else 0
    return _moves(draw, (window, slack), moves)


check_rewindable_ring = ClassChecker(
    "rewindable_ring",
    Rewindable,
    what="ring",
    shows={
        "length": lambda ring, calls: ring.length,
        "the shape of keys [window + slack, KV heads, dimension]": lambda ring, calls: list(ring.keys.shape),
    },
    examples={f"{_MEANS}; rewind(2) takes back 4 and 8": _means((1.0, 2.0, 4.0, 8.0, 2, 100.0, 0.0, 3), 2, 2)},
    edges=_rewind_edges,
    random=_random_rewinds,
    trials=15,
    returns={"step": OUTPUT},
    raises=(ValueError,),
    explain=_why,
    hint="Position p is in KV slot p % (window + slack); the largest length so far says what has been overwritten.",
    misconceptions={
        CAUSAL: dict(causal=False),
        _SHORT: dict(longer=-1),
        _LONG: dict(longer=1),
        COPIES: dict(copies=True),
    },
    forbid=BACKENDS,
    **NEAR,
)
