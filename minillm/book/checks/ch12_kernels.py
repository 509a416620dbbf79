"""Checks of chapter 12: a repaired kernel over documents, and one with a sink and a window. Built in chapter 12."""

from __future__ import annotations

import operator
from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch12_oracle import (
    TILE_M,
    TILE_N,
    documents_attended,
    documents_of,
    levelled,
    sink_attended,
    sink_mask,
)
from minillm.book.checks.launcher import KernelChecker, Launch
from minillm.book.checks.touched import Matrix, Need, Plan, rows_of, span

_LOW = (
    "Scores that all grow by the same amount have the same softmax. Here low ones lose: "
    "something in the kernel is compared with them that is no score."
)
LEAVES = (
    "acc is a sum of values, and leaves float16 (65,504) where they are large: "
    "the state is float32, also between two tiles."
)
DTYPES = {torch.float32: "float32", torch.float16: "float16"}
checker = partial(
    KernelChecker,
    near={torch.float32: (2e-4, 2e-4), torch.float16: (4e-3, 4e-3)},
    forbid=tuple(
        f"minillm.kernels.flash_attention.{name}"
        for name in ("flash_attention", "torch_flash_attention", "torch_attend")
    ),
)


def attention_plan(q: Tensor, k: Tensor, needs: list[Need], told: str, unseen: str, free: tuple[str, ...] = ()) -> Plan:
    """unseen: the hint where a program loads a key that it does not need."""
    queries = partial(
        Matrix,
        shape=tuple(q.shape),
        itemsize=q.itemsize,
        extra="That row is another program's, or none's. Which rows has this program, and of which heads? "
        "And a lane without a query of its own needs a mask.",
        missing="Of the queries named above all are this program's, with all heads that it has. "
        "The last tile may not be full; it counts all the same.",
    )
    keys = partial(
        Matrix,
        shape=tuple(k.shape),
        itemsize=q.itemsize,
        extra=unseen,
        missing="Compare where your loops begin and end with the positions of this program's first and last query.",
        twice="Once is enough. If two loops have this key in common, it also counts twice in the softmax.",
    )
    return Plan(needs, [queries("q"), keys("k"), keys("v"), queries("out")], told, free=free)


def need_of(told: str, queries: object, keys: object) -> Need:
    return Need(told, {"q": queries, "k": keys, "v": keys, "out": queries})


# 3 · a kernel over documents


def _reads_documents(
    case: Case,
    lengths: list[int],
    level: float,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    whole: bool = False,
) -> Launch:
    num_tokens, documents = sum(lengths), documents_of(lengths)
    randn = (lambda *shape: case.randint(-2, 3, *shape).float()) if whole else case.randn
    q, k, v = levelled(randn, num_tokens, head_dim, level, dtype)
    told = f"for documents of {lengths} tokens, scores around {level:g}, {DTYPES[dtype]}"
    every = rows_of(range(num_tokens), head_dim)
    tiles = [range(begin, min(begin + TILE_M, num_tokens)) for begin in range(0, num_tokens, TILE_M)]
    needs = [need_of(f"queries {span(rows, ' to ')}", rows_of(rows, head_dim), every) for rows in tiles]
    unseen = "Every program reads all keys and values here, once."

    def hint(got: Tensor, wanted: Tensor) -> str | None:
        if got.isnan().any() and len(lengths) > 1 and not whole:
            return (
                "NaN: a query that has seen nothing yet has the best score -inf, and -inf minus -inf is not a number. "
                "Which tile is the first that its document is in?"
            )
        return _LOW if level < 0 else None

    plan = attention_plan(q, k, needs, told, unseen, free=("documents",))
    # Scores of 131,072 have few digits left behind the point, in powers of two fewer.
    return Launch((q, k, v, documents), told, plan, hint=hint, near=(5e-2, 5e-2) if whole else None)


def _random_documents(draw: Draw, dtype: torch.dtype) -> tuple:
    lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 5))]
    return lengths, draw.rng.choice((-24, -12, 8)), dtype, draw.rng.choice((16, 32))


check_document_kernel = checker(
    "document_kernel",
    documents_attended,
    _reads_documents,
    examples=[([20, 30, 14], 0)],
    edges=[
        ([40], -20, torch.float16),  # one document: every query sees the first tile
        ([40], -200),
        ([40], 200),
        ([33, 40], 0),
        ([33, 40], -20, torch.float16),
        ([3, 1, 60, 2], -300),
        ([1], -300),
        ([17, 30], -(2.0**17), torch.float32, 16, True),  # lower than float16 goes, and than is often "masked"
    ],
    random=_random_documents,
    trials=tuple(DTYPES),
    hint="What is the best score of a query that has seen no key yet? And what is exp(best - best) then?",
    misconceptions={
        "Here tokens see documents before their own.": partial(documents_attended, sees=operator.ge),
        "Here tokens see documents behind their own.": partial(documents_attended, sees=operator.le),
        "Here tokens see all documents.": partial(documents_attended, sees=lambda mine, other: mine + other >= 0),
    },
)


# 4 · a sink and a window


def _sinks(
    case: Case,
    num_queries: int,
    num_keys: int,
    sink: int,
    window: int,
    dtype: torch.dtype = torch.float32,
    level: float = 0.0,
    values: float = 1.0,
    head_dim: int = 16,
) -> Launch:
    q, k, v = levelled(case.randn, num_keys, head_dim, level, dtype)
    v = v if values == 1.0 else values + 1000 * v
    past = num_keys - num_queries
    q = q[past:].contiguous()
    told = f"for {num_queries} queries, {num_keys} keys, sink={sink}, window={window}"
    seen = sink_mask(num_queries, num_keys, sink, window)
    needs = []
    for begin in range(0, num_queries, TILE_M):
        rows = range(begin, min(begin + TILE_M, num_queries))
        keys = seen[begin : rows[-1] + 1].any(0).nonzero().flatten().tolist()
        who = f"the queries at positions {span(range(past + rows[0], past + rows[-1] + 1), ' to ')}"
        needs.append(need_of(who, rows_of(rows, head_dim), rows_of(keys, head_dim)))
    unseen = (
        "None of its queries sees that key. The first query's window begins at its position minus "
        f"{window - 1}; the sink ends before key {sink}; no query sees ahead."
    )

    def hint(got: Tensor, wanted: Tensor) -> str | None:
        if values > 1:
            return LEAVES
        if level < 0:
            return _LOW
        if got.isnan().any():
            return (
                "NaN, where a query sees nothing of the first tile that its program loads: "
                "its best is still -inf there, and -inf minus -inf is not a number."
            )
        if past == 0 and (got[:TILE_N].double() - wanted[:TILE_N]).abs().max() < 1e-3:
            return (
                "The queries that have all their keys in a single tile are right. "
                "What does the next tile do to best, total and acc?"
            )
        return None

    return Launch((q, k, v, sink, window), told, attention_plan(q, k, needs, told, unseen), hint=hint)


def _random_sinks(draw: Draw, dtype: torch.dtype) -> tuple:
    num_queries = draw.randint(1, 70)
    num_keys = num_queries + draw.randint(0, 60)
    sink, window = draw.rng.choice((0, 4, draw.randint(0, 40))), draw.randint(1, 50)
    return num_queries, num_keys, sink, window, dtype, 0.0, 1.0, draw.rng.choice((16, 32, 64))


check_sink_window = checker(
    "sink_window",
    sink_attended,
    _sinks,
    examples=[(70, 70, 4, 20)],
    edges=[
        (50, 50, 0, 5),
        (70, 70, 0, 33),
        (40, 90, 4, 16),
        (1, 60, 4, 16),
        (1, 1, 0, 1),
        (33, 33, 40, 1),
        (64, 64, 20, 100),
        (1, 41, 17, 24),
        (1, 42, 17, 24),
        (3, 70, 33, 1),
        (36, 60, 10, 40),
        (40, 100, 5, 12, torch.float16, -20),
        (70, 70, 0, 5, torch.float32, -200),
        (40, 64, 3, 20, torch.float32, 200),
        (33, 64, 3, 30, torch.float16, 0, 20_000),
    ],
    random=_random_sinks,
    trials=(torch.float32, torch.float16, torch.float32),
    hint="Keys below both the sink and the window's first key, then the window's: no key twice.",
    misconceptions={
        "This is the window alone: the first keys are missing.": partial(sink_attended, sinks=False),
        "A window of w sees w keys, the query's own among them: this is one more.": partial(sink_attended, longer=1),
        "A window of w sees w keys, the query's own among them: this is one fewer.": partial(sink_attended, longer=-1),
        "This is plain causal attention over what was loaded: each query has a window of its own.": partial(
            sink_attended, windowed=False
        ),
        "A query sees no key ahead of its own position.": partial(sink_attended, causal=False),
        "The scores are not scaled by 1 / sqrt(head_dim).": partial(sink_attended, scaled=False),
    },
)
