"""Checks of chapter 17: a grid for each token, pinned spans, a plan for tiers, heavy hitters. Built in chapter 17.

`ch17_memory` has the last two, `ch17_sinks` 4-bit keys and softmaxes with a sink, `ch17_chunks` gated linear attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch17_chunks import check_gated_chunks
from minillm.book.checks.ch17_memory import check_heavy_hitters, check_place
from minillm.book.checks.ch17_sinks import check_merge_with_sink, check_pack_keys

__all__ = [
    "check_gated_chunks",
    "check_heavy_hitters",
    "check_merge_with_sink",
    "check_pack_keys",
    "check_place",
    "check_span_policy",
    "check_token_grid",
]

check_span_policy = Checker(
    "span_policy",
    hint="The query at t sees p if p <= t and (p is pinned or p > t - window).",
    forbid=("minillm.kv_cache.manager.KVCacheManager", "minillm.kv_cache.retention.RetentionPolicy"),
)


# --- 1: a grid with two ends


def grid(
    x: Tensor,
    *,
    gaps: int = 255,
    nearest: Callable[[Tensor], Tensor] = torch.round,
    axes: tuple[int, ...] = (-1,),
    low: Callable[[Tensor, tuple[int, ...]], Tensor] = lambda x, axes: x.amin(axes, keepdim=True),
    dtype: torch.dtype | None = torch.float32,
    one: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and lows. The keywords are mistakes."""
    x = x.to(dtype or x.dtype)
    lows = low(x, axes)
    steps = (x.amax(axes, keepdim=True) - lows) / gaps
    steps = torch.where(steps == 0, torch.full_like(steps, one), steps)
    codes = nearest((x - lows) / steps).nan_to_num(0).to(torch.uint8)
    return codes, *(part.float().expand(*x.shape[:2], 1)[..., 0] for part in (steps, lows))


def _mistaken(**mistake: object) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    wrong = partial(grid, **mistake)
    wrong.__qualname__ = "token_grid"
    return wrong


check_token_grid = Checker(
    "token_grid",
    hint="A vector lies along the last axis: low = its smallest number, step = (largest - smallest) / 255.",
    misconceptions={
        "255 steps between 256 codes: a ruler with 256 marks has 255 gaps.": _mistaken(gaps=256),
        "Where the step would be 0 it is 1, so that no number is divided by 0.": _mistaken(one=0.0),
        "Round to the nearest integer: .to(torch.uint8) alone truncates.": _mistaken(nearest=torch.floor),
        "Ties go to the even code, as torch.round does.": _mistaken(nearest=lambda x: torch.floor(x + 0.5)),
        "Every token and head has a grid of its own.": _mistaken(axes=(-2, -1)),
        "A later token must not change the grid of an earlier one.": _mistaken(axes=(0, -1)),
        "The grid begins at the smallest number, not at minus the largest magnitude.": _mistaken(
            low=lambda x, axes: -x.abs().amax(axes, keepdim=True)
        ),
        "Compute in float32: x.float() comes before anything else.": _mistaken(dtype=None),
    },
    forbid=("minillm.kv_cache.quantized.quantize_vectors",),
)


def _judge_grid(case: Case, x: Tensor, what: str) -> None:
    got, right = case.call(x), grid(x)
    case.is_a(got, tuple, "the result")
    case.true(len(got) == 3, f"the result has {len(got)} elements, not codes, steps and lows")
    for name, one, other in zip(("codes", "steps", "lows"), got, right):
        case.is_a(one, other.dtype, name, hint="Compute in float32, whatever the dtype of x; only the codes are uint8.")
        case.equal(list(one.shape), list(other.shape), f"the shape of the {name} of {what}")
    case.close(got[2], right[2], f"the lows of {what}", atol=0, rtol=1e-6)
    case.close(got[1], right[1], f"the steps of {what}", atol=0, rtol=1e-5)
    places = (x.float() - right[2][..., None]) / right[1][..., None]
    near_tie = (places - right[0]).abs() > 0.499
    exact = places == places.floor() + 0.5  # a tie in whole steps is decided by the statement
    off = (got[0].float() - right[0].float()).abs()
    allowed = torch.where((off == 1) & near_tie & ~exact, got[0], right[0])  # float32 may fall to either side
    case.equal(got[0].int(), allowed.int(), f"the codes of {what}")


@check_token_grid.part("example")
def _grid_example(case: Case) -> None:
    x = torch.tensor([[[0.0, 1.0, 2.0, 255.0]], [[-1.0, 0.35, 1.0, 50.0]]])  # 0.35 lies between two codes
    _judge_grid(case, x, "two tokens with one head each")


@check_token_grid.part("edges")
def _grid_edges(case: Case) -> None:
    _judge_grid(case, torch.zeros(2, 1, 4), "vectors of zeros")
    _judge_grid(case, torch.tensor([[[3.5] * 3], [[1.0, 2.0, 4.0]]]), "equal numbers beside another vector")
    _judge_grid(case, torch.tensor([[[-7.0]], [[2.0]]]), "vectors of one number")
    _judge_grid(case, torch.tensor([[[100.0, 101.0, 103.0]]]), "a vector far from 0")
    _judge_grid(case, torch.tensor([[[-9.0, -8.0, -1.0]]]), "a vector without a positive number")
    _judge_grid(case, torch.tensor([[[1e-20, 2e-20, 4e-20], [0.0, 1.0, 3.0]]]), "a vector of very small numbers")
    _judge_grid(case, torch.tensor([[[0.0, 1e-44, 2e-44]]]), "a vector whose step is too small for float32")
    half = torch.tensor([[[1.0, 1.25, 3.0], [1000.0, 1001.0, 1004.0]]], dtype=torch.float16)
    _judge_grid(case, half, "float16 vectors")
    _judge_grid(case, case.randn(2, 2, 9).bfloat16(), "bfloat16 vectors")
    wide = torch.tensor([[[0.0, 1.0, 2.0, 5.0]]], dtype=torch.float64) + 2.0**24  # float32 has no 2^24 + 1
    _judge_grid(case, wide, "a float64 vector")
    _judge_grid(case, torch.arange(0, 255.5, 0.5)[None, None], "0, 0.5, 1, 1.5, … with step 1")
    _judge_grid(case, torch.cat([case.randn(1, 2, 8), case.randn(1, 2, 8) * 100]), "a small token before a large one")


@check_token_grid.part("random")
def _grid_random(case: Case) -> None:
    for _ in range(20):
        shape = case.randint(1, 6), case.randint(1, 4), case.randint(2, 40)
        _judge_grid(case, case.randn(*shape) * case.randint(1, 20) + case.randint(-5, 6), f"vectors {list(shape)}")


# --- 2: pinned spans


def _sees(window: int, pinned: list, query: int, key: int) -> bool:
    return key <= query and (key > query - window or any(start <= key < end for start, end in pinned))


def _judge_policy(case: Case, block_size: int, window: int, pinned: list, tables: list, queries: list[int]) -> None:
    policy = case.run(case.student, block_size, window, pinned)
    setting = f"block_size={block_size}, window={window}, pinned={pinned}"
    for table, num_computed in tables:
        latest = max(len(table) * block_size, num_computed) + window + 1
        seen_by = [
            [
                t
                for t in range(num_computed, latest)
                if any(_sees(window, pinned, t, p) for p in range(i * block_size, (i + 1) * block_size))
            ]
            for i in range(len(table))
        ]
        expected = [i for i, block in enumerate(table) if block and not seen_by[i]]
        got = case.run(policy.free_pages, table, num_computed)
        case.equal(
            got,
            expected,
            f"free_pages({table}, {num_computed}) with {setting}",
            hint=_page_hint(got, expected, table, num_computed, seen_by, block_size, pinned),
        )
    for query in queries:
        seen = [p for p in range(query + 1) if _sees(window, pinned, query, p)]
        expected = {p: place for place, p in enumerate(seen)}
        got = case.run(policy.cache_positions, query)
        hint = None
        if isinstance(got, dict) and list(got) != seen and sorted(got) == seen:
            got = {p: got[p] for p in seen}
        if isinstance(got, dict) and set(got) == set(seen) and all(p == place for p, place in got.items()):
            hint = "These are positions in the text. In the cache the seen keys have the positions 0, 1, 2, …"
        elif isinstance(got, dict) and set(got) == set(seen):
            hint = (
                "The seen keys count 0, 1, 2, … in the order of the text, and each key counts once: "
                "also one that is pinned and in the window."
            )
        elif isinstance(got, dict) and query not in got:
            hint = "A query sees its own key: p <= t."
        elif isinstance(got, dict) and any(p > query for p in got):
            hint = "A pinned position after the query is not seen: p <= t."
        elif isinstance(got, dict) and len(got) != len(seen):
            hint = f"The query at {query} sees the keys {seen}."
        case.equal(got, expected, f"cache_positions({query}) with {setting}", hint=hint)


def _page_hint(
    got: object, expected: list, table: list, num_computed: int, seen_by: list, block_size: int, pinned: list
) -> str | None:
    if not isinstance(got, list) or not all(type(i) is int and 0 <= i < len(table) for i in got):
        return "Return a list of indices into the table, not of blocks or positions."
    for i in got:
        positions = f"table[{i}] holds the positions {i * block_size} to {(i + 1) * block_size - 1}"
        if table[i] == 0:
            return f"table[{i}] is 0: that page was freed before."
        if i not in expected and (i + 1) * block_size > num_computed:
            return f"{positions}, and some of them are still to be written."
        if i not in expected and any(start < (i + 1) * block_size and end > i * block_size for start, end in pinned):
            return f"{positions}, and one of them is pinned: the page stays whole."
        if i not in expected:
            return f"{positions}; the query at {seen_by[i][0]} sees one of them."
    missing = [i for i in expected if i not in got]
    return (
        f"No query from position {num_computed} on sees a position of table[{missing[0]}]."
        if missing
        else "The indices must be in ascending order."
    )


@check_span_policy.part("example")
def _span_example(case: Case) -> None:
    _judge_policy(case, 4, 6, [(0, 2)], [([5, 6, 7, 8, 9], 18)], [3, 18])


@check_span_policy.part("edges")
def _span_edges(case: Case) -> None:
    _judge_policy(
        case, 4, 5, [], [([5, 6, 7], 9), ([5, 6, 7], 8), ([5, 6, 7], 0), ([], 0), ([0, 6, 7, 8], 13)], [0, 4, 5, 9]
    )
    # A window of 1: itself only.
    _judge_policy(case, 4, 1, [], [([5, 6, 7], 4), ([5, 6, 7], 3), ([5, 6, 7, 9, 11], 12)], [0, 7])
    _judge_policy(case, 4, 4, [(7, 8)], [([5, 6, 7, 8, 9], 20)], [20, 6, 7])  # one pinned position keeps its page
    _judge_policy(case, 4, 4, [(8, 8)], [([5, 6, 7, 8, 9], 20)], [20])  # an empty span pins nothing
    _judge_policy(case, 4, 4, [(8, 12)], [([5, 6, 7, 8, 9], 20)], [20])  # ends where a page ends
    # Unordered, overlapping.
    _judge_policy(case, 2, 3, [(9, 11), (0, 3), (2, 4)], [([3, 4, 5, 6, 7, 8, 9, 2], 15)], [15, 9, 2])
    _judge_policy(case, 3, 2, [(30, 40)], [([3, 4, 5, 6], 11)], [11])  # pinned in the future
    _judge_policy(case, 4, 100, [(0, 4)], [([5, 6, 7], 10)], [11])  # a window longer than the text
    _judge_policy(case, 4, 4, [(0, 1)], [([5, 6, 7, 8, 9, 10], 17)], [17])  # pages for positions to come
    _judge_policy(case, 16, 5, [(0, 3), (40, 42)], [([1] * 40, 600)], [600])  # a long text
    pinned = [(0, 1)]
    policy = case.run(case.student, 4, 4, pinned, lend=True)
    case.run(case.student, 2, 9, [])
    pinned.append((4, 5))  # it is the caller's list
    case.equal(
        case.run(policy.free_pages, [5, 6, 7], 12),
        [1],
        "free_pages([5, 6, 7], 12) of a policy that was made before another one",
        hint="Two objects share nothing, and `pinned` is the caller's list, which may change later: copy it.",
    )


@check_span_policy.part("random")
def _span_random(case: Case) -> None:
    for _ in range(40):
        block_size, window = case.randint(1, 6), case.randint(1, 12)
        spans = [
            (start, start + case.randint(0, 6)) for start in (case.randint(0, 40) for _ in range(case.randint(0, 4)))
        ]
        length = case.randint(1, 45)
        pages = -(-length // block_size) + case.randint(0, 2)
        table = [case.randint(1, 99) if case.rng.random() < 0.8 else 0 for _ in range(pages)]
        _judge_policy(
            case,
            block_size,
            window,
            spans,
            [(table, length), (table, case.randint(0, length + 1))],
            [case.randint(0, length), length],
        )
