"""Checks of chapter 12: soft-capped scores with grouped heads. Built in chapter 12."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch12_kernels import (
    FLASH,
    LEAVES,
    TILE_M,
    TILE_N,
    judge_reads,
    judge_values,
    span,
)
from minillm.book.checks.ch12_launches import Need, rows_of
from minillm.book.checks.ch12_oracle import capped_attention, levelled
from minillm.book.checks.kernels import attend

check_capped = Checker(
    "capped",
    hint=(
        "Scale, then cap, then mask, then the softmax. The rows of one token share its position, whatever their heads."
    ),
    forbid=FLASH,
)


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
                        f"the tokens at positions {span(range(past + tokens[0], past + tokens[-1] + 1))} with the "
                        f"heads of KV head {head}"
                    ),
                    {"q": queries, "k": keys, "v": keys, "out": queries},
                )
            )
    judge_reads(
        case,
        traffic,
        needs,
        q,
        k,
        told,
        "A program reads its own KV head, from the first key to that at its last token's position, never ahead.",
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
    judge_values(
        case,
        got,
        capped_attention(q, k, v, cap),
        dtype,
        told,
        mistakes,
        LEAVES if values > 1 else overflow if got.isnan().any() else None,
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
