"""Checks of chapter 12: soft-capped scores with grouped heads. Built in chapter 12."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch12_kernels import DTYPES, LEAVES, attention_plan, checker, need_of
from minillm.book.checks.ch12_oracle import TILE_M, capped_attended, levelled
from minillm.book.checks.launcher import Launch
from minillm.book.checks.touched import Need, rows_of, span


def _caps(
    case: Case,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    cap: float,
    dtype: torch.dtype = torch.float32,
    level: float = 0.0,
    values: float = 1.0,
    head_dim: int = 16,
) -> Launch:
    q, _, _ = levelled(case.randn, num_queries * num_heads, head_dim, level, dtype)
    _, k, v = levelled(case.randn, num_keys * num_kv_heads, head_dim, level, dtype)
    q = (2 * q).view(num_queries, num_heads, head_dim)
    q[:, :, 0] /= 2
    k, v = (one.view(num_keys, num_kv_heads, head_dim) for one in (k, v))
    v = v if values == 1.0 else values + 1000 * v
    told = (
        f"for {num_queries} queries, {num_keys} keys, {num_heads} heads over {num_kv_heads}, "
        f"cap={cap:g}{f', scores around {level:g}' if level else ''}"
    )
    unseen = "A program reads its own KV head, from the first key to that at its last token's position, never ahead."

    def hint(got: Tensor, wanted: Tensor) -> str | None:
        if values > 1:
            return LEAVES
        if level and got.isnan().any():
            return (
                "NaN: is there an exponential that overflows? tanh by (e - 1) / (e + 1) becomes inf / inf. "
                "Subtract the largest score too: exp(200) is no float32, and exp(-500) is 0."
            )
        return None

    needs = _needs(num_queries, num_keys, num_heads, num_kv_heads, head_dim)
    return Launch((q, k, v, cap), told, attention_plan(q, k, needs, told, unseen), hint=hint)


def _needs(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Need]:
    """A program has the tokens of a tile, with the heads of one KV head."""
    group, past, needs = num_heads // num_kv_heads, num_keys - num_queries, []
    for begin in range(0, num_queries, TILE_M // group):
        tokens = range(begin, min(begin + TILE_M // group, num_queries))
        places = span(range(past + tokens[0], past + tokens[-1] + 1), " to ")
        for head in range(num_kv_heads):
            queries = [token * num_heads + head * group + i for token in tokens for i in range(group)]
            keys = [key * num_kv_heads + head for key in range(past + tokens[-1] + 1)]
            who = f"the tokens at positions {places} with the heads of KV head {head}"
            needs.append(need_of(who, rows_of(queries, head_dim), rows_of(keys, head_dim)))
    return needs


def _random_heads(draw: Draw, dtype: torch.dtype) -> tuple:
    num_queries, num_kv_heads = draw.randint(1, 50), draw.randint(1, 3)
    num_heads = num_kv_heads * draw.rng.choice((1, 2, 4, 8))
    num_keys = num_queries + draw.rng.choice((0, draw.randint(1, 40)))
    cap, head_dim = draw.rng.choice((1.0, 4.0, 50.0)), draw.rng.choice((16, 32))
    return num_queries, num_keys, num_heads, num_kv_heads, cap, dtype, 0.0, 1.0, head_dim


check_capped = checker(
    "capped",
    capped_attended,
    _caps,
    examples=[(20, 20, 4, 2, 5.0)],
    edges=[
        (1, 1, 1, 1, 50.0),
        (40, 40, 1, 1, 2.0),
        (33, 33, 8, 1, 3.0),
        (17, 30, 6, 3, 30.0),
        (70, 70, 2, 2, 1.0),
        (1, 50, 8, 1, 4.0),
        (5, 64, 8, 2, 4.0),
        (20, 20, 2, 1, 5.0, torch.float32, 1000),  # tanh of 200
        (20, 33, 2, 1, 5.0, torch.float32, -1000),
        (20, 20, 2, 1, 300.0, torch.float32, -250),
        (20, 20, 2, 1, 300.0, torch.float32, 250),  # capped to some 200, whose exponential is no float32
        (20, 33, 4, 1, 20.0, torch.float16, -20),
        (20, 40, 4, 1, 2.0, torch.float16, 0, 20_000),
    ],
    random=_random_heads,
    trials=tuple(DTYPES),
    hint="Scale, then cap, then mask, then the softmax. "
    "The rows of one token share its position, whatever their heads.",
    misconceptions={
        "The mask does not survive: what was -inf before the cap is -cap after it. Cap first, then mask.": partial(
            capped_attended, masks_last=False
        ),
        "These scores are not capped.": partial(capped_attended, caps=False),
        "tanh(score / cap) is at most 1: the cap multiplies it again.": partial(capped_attended, multiplies=False),
        "The score that is capped is the scaled one: scale first.": partial(capped_attended, scales_first=False),
        "A query sees no key ahead of its own position.": partial(capped_attended, causal=False),
    },
)
