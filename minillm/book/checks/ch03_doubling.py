"""The check of chapter 03's cache that doubles. Built in chapter 03."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.ch03_oracle import BACKENDS, CAUSAL, COPIES, NEAR, OUTPUT, attend, chunk, poisoned


class Doubling:
    """One layer's cache, heads first. The keywords are mistakes."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, *, causal: bool = True, behind: bool = True,
        modulo: bool = False, exact: bool = False, copies: bool = False,
    ) -> None:  # fmt: skip
        self.keys, self.values = (torch.zeros(num_kv_heads, capacity, head_dim) for _ in range(2))
        self.length, self.causal, self.behind, self.modulo, self.exact = 0, causal, behind, modulo, exact
        self.copy = [torch.zeros(0, num_kv_heads, head_dim)] * 2 if copies else None

    def append(self, k: Tensor, v: Tensor) -> None:
        end, capacity = self.length + len(k), self.keys.shape[1]
        while capacity < end:
            capacity = end if self.exact else 2 * capacity
        if capacity > self.keys.shape[1]:
            more = (0, 0, 0, capacity - self.keys.shape[1])
            self.keys, self.values = (torch.nn.functional.pad(one, more) for one in (self.keys, self.values))
        for held, new in ((self.keys, k), (self.values, v)):
            held[:, self.length : end] = new.transpose(0, 1)
        if self.copy:
            self.copy = [torch.cat(pair) for pair in zip(self.copy, (k, v))]
        self.length = end

    def attend(self, q: Tensor) -> Tensor:
        first = self.length - len(q) if self.behind else 0
        ends = [first + i + 1 if self.causal else self.length for i in range(len(q))]
        keys, values = self.copy or (one.transpose(0, 1) for one in (self.keys, self.values))
        return attend(q, keys, values, [range(end) for end in ends], self.modulo)


@contextlib.contextmanager
def _changed(case: Case, mine: Any, right: Doubling, call: tuple) -> Iterator[None]:
    """NaN behind the length, another last key and value of the chunks before; and the storage stays where it is."""
    if call[0] == "attend":
        last = right.length - len(call[1]) - 1
        new = case.randn(2, *right.keys[:, 0].shape)
        for cache in (mine, right):
            cache.keys[:, right.length :] = cache.values[:, right.length :] = torch.nan
            if last >= 0:
                cache.keys[:, last], cache.values[:, last] = new
    address, room = mine.keys.data_ptr(), right.keys.shape[1]
    yield
    case.true(
        room < right.length or mine.keys.data_ptr() == address,
        f"the storage was replaced at length {right.length}, although there was room",
        hint="Write in place while the capacity suffices.",
    )


def _story(
    draw: Draw, chunks: list[int], heads: int = 2, kv_heads: int = 2, head_dim: int = 4, capacity: int = 4,
    scale: float = 1.0,
) -> Story:  # fmt: skip
    """Appends the chunks, and attends after each."""
    calls = []
    for count in chunks:
        q, k, v = chunk(draw, count, heads, kv_heads, head_dim, scale)
        calls += [("append", k, v), ("attend", q)]
    return Story((kv_heads, head_dim, capacity), calls, _changed)


def _edges(draw: Draw) -> dict[str, Story]:
    return {
        "the cache is filled to the brim, and then doubles": _story(draw, [4, 4, 8]),
        "a chunk needs more than one doubling: double until it fits": _story(draw, [1, 23, 1], capacity=2),
        "tokens come one by one": _story(draw, [1] * 7, capacity=1),
        "all query heads share one KV head": _story(draw, [3, 5], heads=6, kv_heads=1),
        "four query heads share a KV head": _story(draw, [2, 2, 5], heads=8),
        "each query head has a KV head of its own, and scores are large": _story(
            draw, [5, 1, 1], heads=3, kv_heads=3, scale=20.0
        ),
    }


def _random(draw: Draw) -> Story:
    kv_heads = draw.randint(1, 4)
    chunks = [draw.rng.choice((1, 1, 1, 2, 3, 9)) for _ in range(draw.randint(2, 9))]
    return _story(draw, chunks, kv_heads * draw.randint(1, 4), kv_heads, draw.randint(2, 9), draw.randint(1, 6))


def _two_caches(case: Case) -> None:
    one, two = (case.run(case.student, 2, 4, 4) for _ in range(2))
    case.run(one.append, torch.ones(2, 2, 4), torch.ones(2, 2, 4))
    case.equal((one.length, two.length), (2, 0), "the pair of lengths of two caches, one of them used,")


check_doubling_cache = ClassChecker(
    "doubling_cache",
    Doubling,
    what="cache",
    shows={
        "length": lambda cache, calls: cache.length,
        "the pair of shapes of keys and values": lambda cache, calls: [
            list(cache.keys.shape),
            list(cache.values.shape),
        ],
        "keys[:, :length] [KV head, position, dimension]": lambda cache, calls: cache.keys[:, : cache.length],
        "values[:, :length] [KV head, position, dimension]": lambda cache, calls: cache.values[:, : cache.length],
    },
    examples={
        "a query of zeros weighs all keys that it sees alike, so an output is the mean of values": Story(
            (1, 2, 2),
            [
                ("append", torch.ones(3, 1, 2), torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]], [[6.0, 60.0]]])),
                ("attend", torch.zeros(3, 1, 2)),
            ],
        )
    },
    edges=_edges,
    also={"edges": _two_caches},
    random=_random,
    returns={"attend": OUTPUT},
    explain=poisoned,
    hint="keys and values are [num_kv_heads, capacity, head_dim]; "
    "query i of a chunk of m is at position length - m + i.",
    misconceptions={
        CAUSAL: dict(causal=False),
        "Query i of the chunk was taken to stand at position i; it is at length - m + i.": dict(behind=False),
        "Query head h reads KV head h // (num_heads // num_kv_heads), not h % num_kv_heads.": dict(modulo=True),
        "The capacity doubles as often as needed, and is not just what is needed.": dict(exact=True),
        COPIES: dict(copies=True),
    },
    forbid=BACKENDS,
    **NEAR,
)
