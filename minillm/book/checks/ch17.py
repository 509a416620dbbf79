"""Checks of chapter 17: a grid for each token, pinned spans, a plan for tiers, heavy hitters. Built in chapter 17.

`ch17_memory` has the last two.
"""

from __future__ import annotations

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch17_memory import check_heavy_hitters, check_place

__all__ = ["check_heavy_hitters", "check_place", "check_span_policy", "check_token_grid"]

check_token_grid = Checker(
    "token_grid",
    hint=(
        "A vector is the last axis: low = its smallest number, step = (largest - smallest) / 255, "
        "code = round((x - low) / step)."
    ),
    forbid=("minillm.kv_cache.quantized.quantize_vectors",),
)
check_span_policy = Checker(
    "span_policy",
    hint="The query at t sees p if p <= t and (p is pinned or p > t - window).",
    forbid=("minillm.kv_cache.manager.KVCacheManager", "minillm.kv_cache.retention.RetentionPolicy"),
)


# --- 1: a grid with two ends


def _grid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.float()
    lows, highs = x.amin(-1), x.amax(-1)
    steps = torch.where(highs == lows, torch.ones_like(lows), (highs - lows) / 255)
    return ((x - lows[..., None]) / steps[..., None]).round(), steps, lows


def _judge_grid(case: Case, x: torch.Tensor, what: str) -> None:
    got = case.call(x)
    case.true(
        isinstance(got, tuple) and len(got) == 3 and all(isinstance(part, torch.Tensor) for part in got),
        f"token_grid must return three tensors (codes, steps, lows), not {type(got).__name__}",
    )
    (codes, steps, lows), (true_codes, true_steps, true_lows) = got, _grid(x)
    case.true(codes.dtype is torch.uint8, f"the codes must be torch.uint8; they are {codes.dtype}")
    case.true(
        codes.shape == x.shape, f"the codes of x {list(x.shape)} must have its shape; they have {list(codes.shape)}"
    )
    for name, part in (("steps", steps), ("lows", lows)):
        case.true(part.dtype is torch.float32, f"the {name} must be torch.float32; they are {part.dtype}")
        case.true(
            part.shape == x.shape[:-1],
            f"the {name} must be [tokens, heads], one for each vector: {list(x.shape[:-1])}, not {list(part.shape)}",
        )
    case.close(lows, true_lows, f"the lows of {what}", atol=0, rtol=1e-6)
    hint = None
    if torch.allclose(steps * 255 / 256, true_steps * 255 / 256 * 255 / 256, rtol=1e-4):
        hint = "255 steps between 256 codes: a ruler with 256 marks has 255 gaps."
    if bool((x.float().amax(-1) == x.float().amin(-1)).any()):
        hint = "Where all numbers of a vector are equal its step is 1: no division by 0."
    elif hint is None and x.dtype is not torch.float32:
        hint = f"Compute in float32: x.float() comes before anything else; x is {x.dtype}."
    case.close(steps, true_steps, f"the steps of {what}", atol=0, rtol=1e-5, hint=hint)
    off = (codes.float() - true_codes).abs()
    hint = None
    if bool((codes.float() == (x.float() - true_lows[..., None]).div(true_steps[..., None]).floor()).all()):
        hint = "To the nearest whole number: .to(torch.uint8) alone cuts off what is behind the point."
    near_tie = ((x.float() - true_lows[..., None]) / true_steps[..., None] - true_codes).abs() > 0.499
    allowed = torch.where((off == 1) & near_tie, codes.float(), true_codes)  # at a tie, float32 may fall to either side
    case.equal(codes.int(), allowed.int(), f"the codes of {what}", hint=hint)


@check_token_grid.part("example")
def _grid_example(case: Case) -> None:
    x = torch.tensor([[[0.0, 1.0, 2.0, 255.0]], [[-1.0, 0.35, 1.0, 50.0]]])  # 0.35 lies between two codes
    _judge_grid(case, x, "two tokens with one head each")


@check_token_grid.part("edges")
def _grid_edges(case: Case) -> None:
    _judge_grid(case, torch.zeros(2, 1, 4), "vectors of zeros")
    _judge_grid(
        case, torch.tensor([[[3.5, 3.5, 3.5]], [[1.0, 2.0, 4.0]]]), "a vector of equal numbers beside another one"
    )
    _judge_grid(case, torch.tensor([[[-7.0]], [[2.0]]]), "vectors of one number")
    _judge_grid(case, torch.tensor([[[100.0, 101.0, 103.0]]]), "a vector far from 0")
    _judge_grid(case, torch.tensor([[[-9.0, -8.0, -1.0]]]), "a vector without a positive number")
    half = torch.tensor([[[1.0, 1.25, 3.0], [1000.0, 1001.0, 1004.0]]], dtype=torch.float16)
    _judge_grid(case, half, "float16 vectors, which are computed in float32")
    ties = torch.arange(0, 255.5, 0.5)[None, None]  # step 1: every second number lies between two codes
    codes = case.call(ties)[0]
    case.equal(
        codes[0, 0, :8].tolist(),
        [0, 0, 1, 2, 2, 2, 3, 4],
        "the codes of 0, 0.5, 1, 1.5, … with step 1",
        hint="Ties go to the even code, as torch.round does.",
    )
    one, two = case.randn(1, 2, 8), case.randn(1, 2, 8) * 100
    alone, together = case.call(one)[0], case.call(torch.cat([one, two]))[0][:1]
    case.equal(
        alone.tolist(),
        together.tolist(),
        "the codes of a token after a larger one came",
        hint="A later token changed the grid of an earlier one.",
    )


@check_token_grid.part("random")
def _grid_random(case: Case) -> None:
    for _ in range(20):
        x = case.randn(case.randint(1, 6), case.randint(1, 4), case.randint(2, 40)) * case.randint(
            1, 20
        ) + case.randint(-5, 6)
        _judge_grid(case, x, f"random vectors {list(x.shape)}")


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
            hint = "These are positions in the text. In the cache the seen keys stand side by side: 0, 1, 2, …"
        elif isinstance(got, dict) and set(got) == set(seen):
            hint = (
                "The seen keys count 0, 1, 2, … in the order of the text, and each key counts once: "
                "also one that is pinned and in the window."
            )
        elif isinstance(got, dict) and query not in got:
            hint = "A query sees its own key: p <= t."
        elif isinstance(got, dict) and any(p > query for p in got):
            hint = "A pinned position in the future is not there yet."
        elif isinstance(got, dict) and len(got) != len(seen):
            hint = f"The query at {query} sees the keys {seen}."
        case.equal(got, expected, f"cache_positions({query}) with {setting}", hint=hint)


def _page_hint(
    got: object, expected: list, table: list, num_computed: int, seen_by: list, block_size: int, pinned: list
) -> str | None:
    if not isinstance(got, list) or not all(type(i) is int and 0 <= i < len(table) for i in got):
        return "Return a list of places in the table, not of blocks or positions."
    for i in got:
        positions = f"place {i} holds the positions {i * block_size} to {(i + 1) * block_size - 1}"
        if table[i] == 0:
            return f"Place {i} was given back before: its entry is 0."
        if i not in expected and (i + 1) * block_size > num_computed:
            return f"{positions}, and some of them are still to be written."
        if i not in expected and any(start < (i + 1) * block_size and end > i * block_size for start, end in pinned):
            return f"{positions}, and one of them is pinned: the page stays whole."
        if i not in expected:
            return f"{positions}; the query at {seen_by[i][0]} looks at one of them."
    missing = [i for i in expected if i not in got]
    return (
        f"Nobody from position {num_computed} on looks at place {missing[0]}."
        if missing
        else "Ascending order, please."
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
