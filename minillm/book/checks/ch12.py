"""Checks of chapter 12: states merged, tiles planned, a repaired kernel, a sink and a window, soft-capping,
rescaling only when it must be.
Built in chapter 12.

`ch12_merges` and `ch12_plans` judge the first two, `ch12_launches` what each program of a kernel touched;
references: `ch12_oracle`. `ch12_kernels` has the next two, `ch12_capped` the fifth, `ch12_lazy` the last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch12_capped import check_capped
from minillm.book.checks.ch12_kernels import (
    check_document_kernel,
    check_sink_window,
)
from minillm.book.checks.ch12_lazy import check_attend_lazily
from minillm.book.checks.ch12_merges import merges
from minillm.book.checks.ch12_oracle import attention, documents_of, levelled
from minillm.book.checks.ch12_plans import Plan, plans, plans_far

__all__ = [
    "check_attend_lazily",
    "check_capped",
    "check_document_kernel",
    "check_merge_states",
    "check_plan_tiles",
    "check_sink_window",
    "documents_of",
    "levelled",
    "reference",
]

_MERGE = tuple(f"minillm.kernels.paged_decode.{name}" for name in ("merge_splits", "torch_merge_splits"))

check_merge_states = Checker(
    "merge_states",
    hint="Everything relative to the largest best of all parts: total and acc of a part times exp(its best - that).",
    forbid=_MERGE,
)
check_plan_tiles = Checker(
    "plan_tiles",
    hint="A tile is skipped if no query sees any of it, whole if all see all of it. Try the first and the last query.",
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
    merges(case, case.randn(4, 6), values, [[], [], []])  # no query saw a key
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


def reference(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Attention inside of documents, in float64."""
    return attention(q, k, v, documents[:, None] == documents[None, :])
