"""The check of chapter 02's window mask of a ragged batch. Built in chapter 02."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker


def bias(
    query_lens: list[int], seq_lens: list[int], window: int | None, *, narrow: int = 0, last: bool = True,
    future: bool = False, checks: bool = True, low: float = -torch.inf,
) -> Tensor:  # fmt: skip
    """Query by query, key by key. The keywords are mistakes."""
    for query_len, seq_len in zip(query_lens, seq_lens):
        if checks and query_len > seq_len:
            raise ValueError(f"query_len={query_len} is more than its seq_len={seq_len}")
    queries = [(last * (n - m) + j, n) for m, n in zip(query_lens, seq_lens) for j in range(m)]
    rows = [
        [
            0.0 if (future or key <= position) and (window is None or key >= position - window + narrow) else low
            for key in range(max(seq_lens))
        ]
        for position, length in queries
    ]
    return torch.tensor(rows, dtype=torch.float32).view(len(queries), max(seq_lens))


def _of_a_row(
    got: Tensor, expected: Tensor, query_lens: list[int], seq_lens: list[int], window: int | None
) -> str | None:
    """Whose row is the first wrong one, and what that query may see."""
    if got.shape != expected.shape:
        return "One row for each new token, one column for each position of the longest sequence."
    row, key = (int(i) for i in (got != expected).nonzero()[0])
    queries = [(i, n - m + j) for i, (m, n) in enumerate(zip(query_lens, seq_lens)) for j in range(m)]
    sequence, position = queries[row]
    back = f", {window} back" if window is not None else ""
    may = "may" if expected[row, key] == 0 else "may not"
    return (
        f"Row {row} is sequence {sequence}, position {position}. It sees positions up to its own{back}: "
        f"it {may} see key {key}, so the bias there is {float(expected[row, key])}."
    )


def _random(draw: Draw) -> tuple:
    seq_lens = [draw.randint(1, 14) for _ in range(draw.randint(1, 5))]
    return [draw.randint(1, n + 1) for n in seq_lens], seq_lens, draw.rng.choice((None, 0, 1, 2, 5, 20))


check_window_bias = FunctionChecker(
    "window_bias",
    bias,
    returns="the bias",
    raises=(ValueError,),
    # Sequence 0 is new and brings its 3 tokens; sequence 1 has 4 positions and brings the last of them.
    examples=[([3, 1], [3, 4], 1)],
    edges=[
        ([4], [4], None),
        ([4], [4], 0),
        ([2, 5], [9, 5], 100),
        ([1, 1, 1], [1, 7, 3], 2),
        ([0, 2], [6, 3], 1),
        ([2, 14, 5], [2, 13, 39], None),
    ],
    named=lambda query_lens, seq_lens, window: next(pair for pair in zip(query_lens, seq_lens) if pair[0] > pair[1]),
    random=_random,
    trials=20,
    explain=_of_a_row,
    hint="New token j of a sequence is at position p = seq_len - query_len + j and sees positions p - window to p.",
    misconceptions={
        "Both ends of the window count: with window=1 a query sees itself and one position before it.": dict(narrow=1),
        "The new tokens of a sequence are its last ones: the first one is at position seq_len - query_len.": dict(
            last=False
        ),
        "A query sees no position behind its own, whatever the window is.": dict(future=True),
        "A sequence cannot have more new tokens than it is long: raise ValueError.": dict(checks=False),
        "What a query may not see is -inf: a large negative number is no minus infinity.": dict(low=-1e9),
    },
    forbid=("minillm.model.attention.causal_mask",),
)
