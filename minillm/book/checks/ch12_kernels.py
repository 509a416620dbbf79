"""Checks of chapter 12: a repaired kernel over documents, and one with a sink and a window. Built in chapter 12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch12_launches import Need, judge_programs, rows_of
from minillm.book.checks.ch12_oracle import attention, documents_of, levelled, sink_mask
from minillm.book.checks.kernels import attend

TILE_M, TILE_N = 32, 16  # of the kernels: queries of a program, keys of a step
FLASH = tuple(
    f"minillm.kernels.flash_attention.{name}" for name in ("flash_attention", "torch_flash_attention", "torch_attend")
)
LOW = (
    "Scores that all grow by the same amount have the same softmax. Here low ones lose: "
    "something in the kernel is compared with them that is no score."
)
LEAVES = (
    "acc is a sum of values, and leaves float16 (65,504) where they are large: "
    "the state is float32, also between two tiles."
)
DTYPES = {torch.float32: "float32", torch.float16: "float16"}
check_document_kernel = Checker(
    "document_kernel",
    hint="What is the best score of a query that has seen no key yet? And what is exp(best - best) then?",
    forbid=FLASH,
)
check_sink_window = Checker(
    "sink_window",
    hint="Keys below both the sink and the window's first key, then the window's: no key twice.",
    forbid=FLASH,
)


@check_document_kernel.part("example")
def _documents_example(case: Case) -> None:
    _reads_documents(case, [20, 30, 14], 0)


@check_document_kernel.part("edges")
def _documents_edges(case: Case) -> None:
    _reads_documents(case, [40], -20, torch.float16)  # one document: every query sees the first tile
    _reads_documents(case, [40], -200)
    _reads_documents(case, [40], 200)
    _reads_documents(case, [33, 40], 0)
    _reads_documents(case, [33, 40], -20, torch.float16)
    _reads_documents(case, [3, 1, 60, 2], -300)
    _reads_documents(case, [1], -300)
    # Lower than float16 goes, and than what is often taken for "masked".
    _reads_documents(case, [17, 30], -(2.0**17), whole=True)


@check_document_kernel.part("random")
def _documents_random(case: Case) -> None:
    for dtype in DTYPES:
        _reads_documents(
            case,
            [case.randint(1, 30) for _ in range(case.randint(1, 5))],
            case.rng.choice((-24, -12, 8)),
            dtype,
            head_dim=case.rng.choice((16, 32)),
        )


def _reads_documents(
    case: Case,
    lengths: list[int],
    level: float,
    dtype: torch.dtype = torch.float32,
    *,
    head_dim: int = 16,
    whole: bool = False,
) -> None:
    num_tokens, documents = sum(lengths), documents_of(lengths)
    randn = (lambda *shape: case.randint(-2, 3, *shape).float()) if whole else case.randn
    q, k, v = levelled(randn, num_tokens, head_dim, level, dtype)
    got, traffic = attend(case, q, k, v, documents)
    told = f"for documents of {lengths} tokens, scores around {level:g}, {DTYPES[dtype]}"
    every = rows_of(range(num_tokens), head_dim)
    tiles = [range(begin, min(begin + TILE_M, num_tokens)) for begin in range(0, num_tokens, TILE_M)]
    needs = [
        Need(
            f"queries {span(rows)}",
            {"q": rows_of(rows, head_dim), "k": every, "v": every, "out": rows_of(rows, head_dim)},
        )
        for rows in tiles
    ]
    judge_reads(
        case, traffic, needs, q, k, told, "Every program reads all keys and values here, once.", also=("documents",)
    )
    mistakes = {
        "Here tokens see documents before their own.": lambda: attention(
            q, k, v, documents[:, None] >= documents[None, :]
        ),
        "Here tokens see documents behind their own.": lambda: attention(
            q, k, v, documents[:, None] <= documents[None, :]
        ),
        "Here tokens see all documents.": lambda: attention(q, k, v, documents[:, None] >= 0),
    }
    first = (
        "NaN: a query that has seen nothing yet has the best score -inf, and -inf minus -inf is not a number. "
        "Which tile is the first that its document is in?"
    )
    judge_values(
        case,
        got,
        attention(q, k, v, documents[:, None] == documents[None, :]),
        dtype,
        told,
        mistakes if len(lengths) > 1 else {},
        first if got.isnan().any() and len(lengths) > 1 and not whole else LOW if level < 0 else None,
        loose=whole,
    )


@check_sink_window.part("example")
def _sink_example(case: Case) -> None:
    _sinks(case, 70, 70, 4, 20)


@check_sink_window.part("edges")
def _sink_edges(case: Case) -> None:
    for num_queries, num_keys, sink, window in ((50, 50, 0, 5), (70, 70, 0, 33), (40, 90, 4, 16), (1, 60, 4, 16),
                                                (1, 1, 0, 1), (33, 33, 40, 1), (64, 64, 20, 100),
                                                (1, 41, 17, 24), (1, 42, 17, 24), (3, 70, 33, 1),
                                                (36, 60, 10, 40)):  # fmt: skip
        _sinks(case, num_queries, num_keys, sink, window)
    _sinks(case, 40, 100, 5, 12, torch.float16, level=-20)
    _sinks(case, 70, 70, 0, 5, level=-200)
    _sinks(case, 40, 64, 3, 20, level=200)
    _sinks(case, 33, 64, 3, 30, torch.float16, values=20_000)


@check_sink_window.part("random")
def _sink_random(case: Case) -> None:
    for dtype in (torch.float32, torch.float16, torch.float32):
        num_queries = case.randint(1, 70)
        _sinks(
            case,
            num_queries,
            num_queries + case.randint(0, 60),
            case.rng.choice((0, 4, case.randint(0, 40))),
            case.randint(1, 50),
            dtype,
            head_dim=case.rng.choice((16, 32, 64)),
        )


def _sinks(
    case: Case,
    num_queries: int,
    num_keys: int,
    sink: int,
    window: int,
    dtype: torch.dtype = torch.float32,
    *,
    level: float = 0.0,
    values: float = 1.0,
    head_dim: int = 16,
) -> None:
    q, k, v = levelled(case.randn, num_keys, head_dim, level, dtype)
    v = v if values == 1.0 else values + 1000 * v
    q, past = q[num_keys - num_queries :].contiguous(), num_keys - num_queries
    told = f"for {num_queries} queries, {num_keys} keys, sink={sink}, window={window}"
    seen = sink_mask(num_queries, num_keys, sink, window)
    got, traffic = attend(case, q, k, v, sink, window)
    needs = []
    for begin in range(0, num_queries, TILE_M):
        rows = range(begin, min(begin + TILE_M, num_queries))
        keys = rows_of(seen[begin : rows[-1] + 1].any(0).nonzero().flatten().tolist(), head_dim)
        needs.append(
            Need(
                f"the queries at positions {span(range(past + rows[0], past + rows[-1] + 1))}",
                {"q": rows_of(rows, head_dim), "k": keys, "v": keys, "out": rows_of(rows, head_dim)},
            )
        )
    judge_reads(
        case,
        traffic,
        needs,
        q,
        k,
        told,
        (
            "None of its queries sees that key. The first query's window begins at its position minus "
            f"{window - 1}; the sink ends before key {sink}; no query sees ahead."
        ),
    )
    position, key = torch.arange(past, num_keys)[:, None], torch.arange(num_keys)[None, :]
    mistakes = {
        "This is the window alone: the first keys are missing.": lambda: attention(
            q, k, v, sink_mask(num_queries, num_keys, 0, window)
        ),
        "A window of w sees w keys, the query's own among them: this is one more.": lambda: attention(
            q, k, v, sink_mask(num_queries, num_keys, sink, window + 1) & _loaded(seen)
        ),
        "A window of w sees w keys, the query's own among them: this is one fewer.": lambda: attention(
            q, k, v, sink_mask(num_queries, num_keys, sink, max(window - 1, 1))
        ),
        "This is plain causal attention over what was loaded: each query has a window of its own.": lambda: attention(
            q, k, v, _loaded(seen) & (key <= position)
        ),
        "A query sees no key ahead of its own position.": lambda: attention(
            q, k, v, _loaded(seen) & ((key < sink) | (key > position - window))
        ),
        "The scores are not scaled by 1 / sqrt(head_dim).": lambda: attention(q, k, v, seen, scale=1.0),
    }
    empty = (
        "NaN, where a query sees nothing of the first tile that its program loads: "
        "its best is still -inf there, and -inf minus -inf is not a number."
    )
    hint = LEAVES if values > 1 else LOW if level < 0 else empty if got.isnan().any() else None
    if hint is None and past == 0 and (got[:TILE_N].double() - attention(q, k, v, seen)[:TILE_N]).abs().max() < 1e-3:
        hint = (
            "The queries that have all their keys in a single tile are right. "
            "What does the next tile do to best, total and acc?"
        )
    judge_values(case, got, attention(q, k, v, seen), dtype, told, mistakes, hint)


def _loaded(seen: Tensor) -> Tensor:
    """For each query, the keys that its program loads."""
    return torch.cat([rows.any(0, keepdim=True).expand(len(rows), -1) for rows in seen.split(TILE_M)])


def judge_reads(
    case: Case,
    traffic: Any,
    needs: list[Need],
    q: Tensor,
    k: Tensor,
    told: str,
    unseen: str,
    also: tuple[str, ...] = (),
) -> None:
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(k.shape), "out": tuple(q.shape)}
    judge_programs(case, traffic, needs, shapes, dict.fromkeys(shapes, q.itemsize), told, unseen, also)


def judge_values(
    case: Case,
    got: Any,
    expected: Tensor,
    dtype: torch.dtype,
    told: str,
    mistakes: dict[str, Callable[[], Tensor]],
    hint: str | None,
    loose: bool = False,
) -> None:
    """The output against float64; a mistake that gives what was got names itself."""
    case.is_a(got, dtype, f"the output {told}")
    # Scores of 131,072 have few digits left behind the point, in powers of two fewer.
    near = 5e-2 if loose else 4e-3 if dtype is torch.float16 else 2e-4
    tolerance = {"atol": near, "rtol": near}
    fits = [
        name
        for name, mistaken in mistakes.items()
        if got.shape == expected.shape and torch.allclose(got.double(), mistaken(), **tolerance)
    ]
    case.close(got, expected, f"the output {told}\n  the output", hint=fits[0] if fits else hint, **tolerance)


def span(r: range) -> str:
    return f"{r[0]}" if len(r) == 1 else f"{r[0]} to {r[-1]}"
