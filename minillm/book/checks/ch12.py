"""Checks of chapter 12: states merged, tiles planned, a repaired kernel, a sink and a window, soft-capping.
Built in chapter 12.

`ch12_merges` and `ch12_plans` judge the first two, `ch12_launches` what each program of a kernel touched;
references: `ch12_oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch12_launches import Need, attend, judge_programs, rows_of
from minillm.book.checks.ch12_merges import merges
from minillm.book.checks.ch12_oracle import attention, capped_attention, documents_of, levelled, sink_mask
from minillm.book.checks.ch12_plans import Plan, plans, plans_far

__all__ = [
    "check_capped",
    "check_document_kernel",
    "check_merge_states",
    "check_plan_tiles",
    "check_sink_window",
    "documents_of",
    "levelled",
    "reference",
]

TILE_M, TILE_N = 32, 16  # of the kernels: queries of a program, keys of a step
_FLASH = tuple(
    f"minillm.kernels.flash_attention.{name}" for name in ("flash_attention", "torch_flash_attention", "torch_attend")
)
_MERGE = tuple(f"minillm.kernels.paged_decode.{name}" for name in ("merge_splits", "torch_merge_splits"))
_LOW = (
    "Scores that all grow by the same amount have the same softmax. Here low ones lose: "
    "something in the kernel is compared with them that is no score."
)
_LEAVES = (
    "acc is a sum of values, and leaves float16 (65,504) where they are large: "
    "the state is float32, also between two tiles."
)
_DTYPES = {torch.float32: "float32", torch.float16: "float16"}

check_merge_states = Checker(
    "merge_states",
    hint="Everything relative to the largest best of all parts: total and acc of a part times exp(its best - that).",
    forbid=_MERGE,
)
check_plan_tiles = Checker(
    "plan_tiles",
    hint="A tile is skipped if nobody sees any of it, whole if all see all of it. Ask the first and the last query.",
)
check_document_kernel = Checker(
    "document_kernel",
    hint="What is the best score of a query that has seen no key yet? And what is exp(best - best) then?",
    forbid=_FLASH,
)
check_sink_window = Checker(
    "sink_window",
    hint="Keys below both the sink and the window's first key, then the window's: no key twice.",
    forbid=_FLASH,
)
check_capped = Checker(
    "capped",
    hint=(
        "Scale, then cap, then mask, then the softmax. The rows of one token share its position, whatever their heads."
    ),
    forbid=_FLASH,
)


@check_merge_states.part("example")
def _merge_example(case: Case) -> None:
    merges(case, torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), [[0, 1], [2, 3]])
    merges(
        case,
        torch.tensor([[2.0, 5.0, 1.0], [0.0, -1.0, 4.0]]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        [[2], [], [0, 1]],
    )


@check_merge_states.part("edges")
def _merge_edges(case: Case) -> None:
    values = case.randn(6, 3)
    merges(case, case.randn(2, 6), values, [list(range(6))])  # a single part
    merges(case, case.randn(4, 6), values, [[], [], []])  # nobody saw anything
    for level in (200.0, -200.0, 3000.0, -3000.0):
        merges(case, case.randint(-3, 4, 3, 6) + level, values, [[0], [1, 2, 3], [], [4, 5]])
    merges(case, torch.tensor([[0.0, 300.0, -300.0, 1.0, 2.0, 299.0]]), values, [[0], [2], [3, 4], [1, 5]])
    merges(case, torch.full((2, 6), 7.0), values, [[0, 1], [2, 3], [4, 5]])  # equal bests
    partly = case.randn(3, 6)
    # Masked: one query sees one part, one the other, one neither.
    partly[0, :3], partly[1, 3:], partly[2] = -torch.inf, -torch.inf, -torch.inf
    merges(case, partly, values, [[0, 1, 2], [3, 4, 5]])
    merges(case, case.randn(5, 6).double(), values.double(), [[0, 3], [1], [2, 4, 5]])


@check_merge_states.part("random")
def _merge_random(case: Case) -> None:
    for _ in range(40):
        num_queries, num_keys, spread = case.randint(1, 6), case.randint(1, 30), case.rng.choice((1, 10, 100))
        scores, values = spread * case.randn(num_queries, num_keys), case.randn(num_keys, case.randint(1, 5))
        scores = scores.masked_fill(case.randn(num_queries, num_keys) > 0.8, -torch.inf)
        parts: list[list[int]] = [[] for _ in range(case.randint(1, 7))]
        for key in range(num_keys):
            case.rng.choice(parts).append(key)
        merges(case, scores, values, parts, groups=True)


@check_plan_tiles.part("example")
def _plan_example(case: Case) -> None:
    plans(case, Plan(8, 20, 4, 4, 3, 6))
    plans(case, Plan(12, 12, 4, 4, 0, None))


@check_plan_tiles.part("edges")
def _plan_edges(case: Case) -> None:
    for numbers in ((1, 1, 16, 16, 0, None), (1, 17, 16, 16, 0, None), (1, 32, 16, 16, 0, 16), (1, 32, 16, 16, 0, 17),
                    (16, 16, 16, 16, 16, 1), (10, 10, 4, 3, 7, None), (10, 10, 3, 4, 10, 2), (9, 30, 4, 8, 0, 1),
                    (9, 30, 4, 8, 30, None), (20, 20, 8, 4, 6, 3), (20, 40, 4, 8, 21, 9), (20, 40, 16, 4, 8, 5),
                    (33, 33, 32, 16, 0, 40), (5, 64, 8, 64, 0, None), (24, 24, 8, 1, 5, 4),
                    (24, 24, 1, 8, 5, 4), (12, 30, 6, 6, 18, 6), (12, 30, 6, 6, 19, 1)):  # fmt: skip
        plans(case, Plan(*numbers))
    plans_far(case, Plan(100, 10**15, 16, 64, 1000, 4096))
    plans_far(case, Plan(40, 10**15 + 7, 16, 128, 10**14 + 5, None))


@check_plan_tiles.part("random")
def _plan_random(case: Case) -> None:
    for _ in range(60):
        num_queries = case.randint(1, 25)
        num_keys = num_queries + case.rng.choice((0, case.randint(0, 40)))
        prefix, window = (
            case.rng.choice((0, case.randint(0, num_keys + 1))),
            case.rng.choice((None, case.randint(1, num_keys + 4))),
        )
        plans(case, Plan(num_queries, num_keys, case.randint(1, 9), case.randint(1, 9), prefix, window))


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
    for dtype in _DTYPES:
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
    told = f"for documents of {lengths} tokens, scores around {level:g}, {_DTYPES[dtype]}"
    every = rows_of(range(num_tokens), head_dim)
    tiles = [range(begin, min(begin + TILE_M, num_tokens)) for begin in range(0, num_tokens, TILE_M)]
    needs = [
        Need(
            f"queries {_span(rows)}",
            {"q": rows_of(rows, head_dim), "k": every, "v": every, "out": rows_of(rows, head_dim)},
        )
        for rows in tiles
    ]
    _judge(case, traffic, needs, q, k, told, "Every program reads all keys and values here, once.", also=("documents",))
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
    _values(
        case,
        got,
        attention(q, k, v, documents[:, None] == documents[None, :]),
        dtype,
        told,
        mistakes if len(lengths) > 1 else {},
        first if got.isnan().any() and len(lengths) > 1 and not whole else _LOW if level < 0 else None,
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
                f"the queries at positions {_span(range(past + rows[0], past + rows[-1] + 1))}",
                {"q": rows_of(rows, head_dim), "k": keys, "v": keys, "out": rows_of(rows, head_dim)},
            )
        )
    _judge(
        case,
        traffic,
        needs,
        q,
        k,
        told,
        (
            "None of its queries sees that key. The first query's window begins at its position minus "
            f"{window - 1}; the sink ends before key {sink}; no one sees ahead."
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
    hint = _LEAVES if values > 1 else _LOW if level < 0 else empty if got.isnan().any() else None
    if hint is None and past == 0 and (got[:TILE_N].double() - attention(q, k, v, seen)[:TILE_N]).abs().max() < 1e-3:
        hint = (
            "The queries that have all their keys in a single tile are right. "
            "What does the next tile do to best, total and acc?"
        )
    _values(case, got, attention(q, k, v, seen), dtype, told, mistakes, hint)


def _loaded(seen: Tensor) -> Tensor:
    """For each query, the keys that its program loads."""
    return torch.cat([rows.any(0, keepdim=True).expand(len(rows), -1) for rows in seen.split(TILE_M)])


@check_capped.part("example")
def _capped_example(case: Case) -> None:
    _caps(case, 20, 20, 4, 2, 5.0)


@check_capped.part("edges")
def _capped_edges(case: Case) -> None:
    for numbers in (
        (1, 1, 1, 1, 50.0),
        (40, 40, 1, 1, 2.0),
        (33, 33, 8, 1, 3.0),
        (17, 30, 6, 3, 30.0),
        (70, 70, 2, 2, 1.0),
        (1, 50, 8, 1, 4.0),
        (5, 64, 8, 2, 4.0),
    ):
        _caps(case, *numbers)
    _caps(case, 20, 20, 2, 1, 5.0, level=1000)  # tanh of 200
    _caps(case, 20, 33, 2, 1, 5.0, level=-1000)
    _caps(case, 20, 20, 2, 1, 300.0, level=-250)
    _caps(case, 20, 20, 2, 1, 300.0, level=250)  # capped to some 200, whose exponential is no float32
    _caps(case, 20, 33, 4, 1, 20.0, torch.float16, level=-20)
    _caps(case, 20, 40, 4, 1, 2.0, torch.float16, values=20_000)


@check_capped.part("random")
def _capped_random(case: Case) -> None:
    for dtype in (torch.float32, torch.float16):
        num_queries, num_kv_heads = case.randint(1, 50), case.randint(1, 3)
        num_heads, num_keys = (
            num_kv_heads * case.rng.choice((1, 2, 4, 8)),
            num_queries + case.rng.choice((0, case.randint(1, 40))),
        )
        _caps(
            case,
            num_queries,
            num_keys,
            num_heads,
            num_kv_heads,
            case.rng.choice((1.0, 4.0, 50.0)),
            dtype,
            head_dim=case.rng.choice((16, 32)),
        )


def _caps(
    case: Case,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    cap: float,
    dtype: torch.dtype = torch.float32,
    *,
    level: float = 0.0,
    values: float = 1.0,
    head_dim: int = 16,
) -> None:
    (q, _, _), (_, k, v) = (
        levelled(case.randn, rows, head_dim, level, dtype)
        for rows in (num_queries * num_heads, num_keys * num_kv_heads)
    )
    q, k, v = (
        (2 * q).view(num_queries, num_heads, head_dim),
        k.view(num_keys, num_kv_heads, head_dim),
        v.view(num_keys, num_kv_heads, head_dim),
    )
    q[:, :, 0] /= 2
    v = v if values == 1.0 else values + 1000 * v
    told = (
        f"for {num_queries} queries, {num_keys} keys, {num_heads} heads over {num_kv_heads}, "
        f"cap={cap:g}{f', scores around {level:g}' if level else ''}"
    )
    got, traffic = attend(case, q, k, v, cap)
    group, past, needs = num_heads // num_kv_heads, num_keys - num_queries, []
    for begin in range(0, num_queries, TILE_M // group):
        tokens = range(begin, min(begin + TILE_M // group, num_queries))
        for head in range(num_kv_heads):
            queries = rows_of(
                [token * num_heads + head * group + i for token in tokens for i in range(group)], head_dim
            )
            keys = rows_of([key * num_kv_heads + head for key in range(past + tokens[-1] + 1)], head_dim)
            needs.append(
                Need(
                    (
                        f"the tokens at positions {_span(range(past + tokens[0], past + tokens[-1] + 1))} with the "
                        f"heads of KV head {head}"
                    ),
                    {"q": queries, "k": keys, "v": keys, "out": queries},
                )
            )
    _judge(
        case,
        traffic,
        needs,
        q,
        k,
        told,
        "A program reads its own KV head, from the first key to that at its last token's position; no one sees ahead.",
    )
    mistakes = {
        "The mask does not survive: what was -inf before the cap is -cap after it. Cap first, then mask.": lambda: (
            _masked_first(q, k, v, cap)
        ),
        "These scores are not capped.": lambda: capped_attention(q, k, v, None),
        "tanh(score / cap) is at most 1: the cap multiplies it again.": lambda: capped_attention(q / cap, k, v, 1.0),
        "The score that is capped is the scaled one: scale first.": lambda: capped_attention(
            q, k, v, cap * head_dim**-0.5
        ),
        "A query sees no key ahead of its own position.": lambda: capped_attention(q, k, v, cap, tile=TILE_M // group),
    }
    overflow = (
        (
            "NaN: is there an exponential that overflows? tanh by (e - 1) / (e + 1) becomes inf / inf. "
            "The largest score has to be taken away too: exp(200) is no float32, and exp(-500) is 0."
        )
        if level
        else None
    )
    _values(
        case,
        got,
        capped_attention(q, k, v, cap),
        dtype,
        told,
        mistakes,
        _LEAVES if values > 1 else overflow if got.isnan().any() else None,
    )


def _masked_first(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
    """What comes of -inf that is capped to -cap: keys ahead keep a weight, as far as the program's tiles go."""
    out, group, past = torch.empty(q.shape, dtype=torch.float64), q.shape[1] // k.shape[1], len(k) - len(q)
    for token in range(len(q)):
        last = past + min((token // (TILE_M // group) + 1) * (TILE_M // group), len(q))
        for head in range(q.shape[1]):
            scores = torch.full((-(-last // TILE_N) * TILE_N,), -cap, dtype=torch.float64)
            scores[: past + token + 1] = cap * torch.tanh(
                q[token, head].double() @ k[: past + token + 1, head // group].double().T * q.shape[2] ** -0.5 / cap
            )
            out[token, head] = scores.softmax(0)[:last] @ v[:last, head // group].double()
    return out


def _judge(
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


def _values(
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


def _span(r: range) -> str:
    return f"{r[0]}" if len(r) == 1 else f"{r[0]} to {r[-1]}"


def reference(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Attention inside of documents, in float64."""
    return attention(q, k, v, documents[:, None] == documents[None, :])
