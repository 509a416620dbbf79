"""Checks of chapter 10: a gate, a rotation in place, unpacked weights, a repaired log-softmax. Built in chapter 10.

Each launches the student's kernel in the interpreter and judges, in this order: what it touched outside its tensors,
what it left unwritten, the values, and how often each number was loaded and stored. `ch10_oracle` has the references,
`ch10_words` the last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch10_oracle import DTYPES, TWICE, checker, gated, poisoned, rotated
from minillm.book.checks.ch10_words import check_dequantize, check_repair_log_softmax, watch
from minillm.book.checks.launcher import Launch
from minillm.book.checks.touched import Touch

__all__ = ["check_dequantize", "check_gated", "check_repair_log_softmax", "check_rotate_pairs", "watch"]

# 1 · a gate


def _gates(case: Case, x: Tensor, limit: float) -> Launch:
    out = poisoned(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    once = "Load the gate values once and the up values once; the program's variables keep what it has loaded."
    return Launch((x, out, limit), touches=(Touch("out", "store", TWICE), Touch("x", "load", once)))


def _gated_edges(draw: Draw) -> Iterator[tuple]:
    yield torch.tensor([[1.0, 0.5]]), 7.0  # one output, and a block that is nearly empty
    for limit in (0.5, 7.0, 30.0):
        yield torch.tensor([[40.0, 1.0, -40.0, 1.0, 1.0, 40.0, 1.0, -40.0, -2.0, -40.0]]), limit
    for width in (127, 128, 129):
        yield 4 * draw.randn(1, 2 * width), 7.0
    yield 4 * draw.randn(4, 64), 7.0  # 128 outputs: a full block
    yield 4 * draw.randn(1024, 2), 7.0
    yield (4 * draw.randn(7, 100)).half(), 7.0
    yield torch.tensor([[60000.0, 60000.0, -60000.0, -60000.0]]).half(), 7.0


def _gated_random(draw: Draw) -> tuple:
    x = draw.rng.choice((1, 4, 10)) * draw.randn(draw.randint(1, 20), 2 * draw.randint(1, 90))
    return x.to(draw.rng.choice(DTYPES)), draw.rng.choice((1.0, 3.5, 7.0))


check_gated = checker(
    "gated",
    gated,
    _gates,
    names=("x", "out", "limit"),
    fills="out",
    examples=[(torch.tensor([[1.0, 2.0, -1.0, 0.5, 3.0, -4.0], [9.0, 1.0, -9.0, 1.0, 0.0, 9.0]]), 7.0)],
    edges=_gated_edges,
    random=_gated_random,
    hint="Output i of the whole tensor comes from x[2i], the gate, and x[2i + 1], the up.",
    misconceptions={
        "This is the chapter's layout, gates before up values. Here they alternate: gate, up, gate, up.": partial(
            gated, split=lambda x: x.chunk(2, -1)
        ),
        "Gate and up are swapped: the gate values have the even indices.": partial(
            gated, split=lambda x: (x[..., 1::2], x[..., ::2])
        ),
        "The gate is limited from above only.": partial(gated, gate=(-1.0, 1.0)),
        "The gate is limited from above.": partial(gated, gate=(-torch.inf, torch.inf)),
        "The up is limited, from above and from below.": partial(gated, up=(-torch.inf, torch.inf)),
        "The up is limited from below too.": partial(gated, up=(-torch.inf, 1.0)),
        "The gate is multiplied by (up + 1), not by up.": partial(gated, shift=0.0),
        "The sigmoid is that of 1.702 times the gate.": partial(gated, alpha=1.0),
    },
)


# 2 · a rotation in place


def _rotates(case: Case, base: Tensor, x: Tensor, places: list[int], table: Tensor) -> Launch:
    """base: the tensor that x is a view of, of which the rest must stay as it is."""
    dim, before = table.shape[1], base.clone()
    outside = torch.ones_like(base)
    outside.as_strided(x.shape, x.stride(), x.storage_offset())[...] = 0
    inside = torch.zeros(x.shape, dtype=torch.long)
    inside[..., :dim] = 1
    rest = f"Of each head the first {dim} dimensions are loaded and stored, each once; the rest is never touched."
    shared = (
        "The row of the table is loaded once for a token, for all of its heads: "
        "what shares a row belongs to one program."
    )
    positions = torch.tensor(places)
    rows = torch.bincount(positions, minlength=len(table))[:, None].expand(-1, dim)

    def unharmed(case: Case) -> None:
        told = "the tensor that x is a view of"
        case.equal(base * outside, before * outside, told, hint="Only x may change, not what lies around it.")

    def carries_none(got: Tensor, wanted: Tensor) -> str | None:
        if torch.allclose(got[..., :dim].double(), wanted[..., :dim], rtol=1e-4, atol=1e-4):
            return f"Dimensions from {dim} on carry no position: they stay as they are."
        return None

    return Launch(
        (x, positions, table),
        touches=(
            Touch("x", "store", rest, inside),
            Touch("x", "load", rest, inside),
            Touch("table", "load", shared, rows),
            Touch("positions", "load", "A token's position is a single number: its program loads it once."),
        ),
        hint=carries_none,
        after=unharmed,
    )


def _table(num_positions: int, rotary_dim: int) -> Tensor:
    angles = torch.arange(num_positions)[:, None] * 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], 1)


def _rotate_examples(draw: Draw) -> Iterator[tuple]:
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0, 5.0]], [[1.0, 2.0, 3.0, 4.0, 6.0]]])
    yield x, x, [1, 2], _table(3, 4)


def _rotate_edges(draw: Draw) -> Iterator[tuple]:
    def alone(x: Tensor, *rest: object) -> tuple:
        return x, x, *rest

    yield alone(draw.randn(1, 1, 2), [0], _table(1, 2))
    yield alone(draw.randn(3, 2, 8), [3, 4, 5], _table(6, 8))  # the whole head
    yield alone(draw.randn(3, 4, 9), [5, 5, 2], _table(6, 4))  # an odd rest, a position twice
    yield alone(draw.randn(4, 3, 16), [9, 0, 4, 9], _table(10, 10))  # 3 heads, 5 pairs: no powers of two
    yield alone(draw.randn(2, 5, 12), [7, 1], _table(8, 6))
    qkv = draw.randn(5, 8, 10)
    yield qkv, qkv[:, 1:4], [6, 5, 4, 3, 2], _table(7, 6)  # between queries and values
    yield qkv, qkv[1:4, 5:], [0, 1, 6], _table(7, 8)
    by_head = draw.randn(3, 4, 10)
    yield by_head, by_head.transpose(0, 1), [1, 8, 2, 3], _table(9, 6)  # heads lie further apart than tokens
    yield alone(draw.randn(6, 6, 40).half(), [3, 1, 4, 1, 5, 9], _table(10, 24))
    yield alone(draw.randn(1, 40, 6), [2], _table(3, 6))


def _rotate_random(draw: Draw) -> tuple:
    tokens, heads, pairs = draw.randint(1, 7), draw.randint(1, 9), draw.randint(1, 14)
    base = draw.randn(tokens, heads + draw.randint(0, 4), 2 * pairs + draw.randint(0, 9))
    base = base.to(draw.rng.choice(DTYPES))
    places = [draw.randint(0, 50) for _ in range(tokens)]
    return base, base[:, base.shape[1] - heads :], places, _table(50, 2 * pairs)


check_rotate_pairs = checker(
    "rotate_pairs",
    rotated,
    _rotates,
    names=("x", "positions", "table"),
    fills="x",
    changes=True,
    examples=_rotate_examples,
    edges=_rotate_edges,
    random=_rotate_random,
    hint="(a, b) becomes (a cos - b sin, a sin + b cos), for neighbours in the first rotary_dim dimensions.",
    misconceptions={
        "Nothing has changed. The result belongs where x was: in place.": lambda x, positions, table: x.double(),
        "This is chapter 02's half-split layout. Here neighbours turn together: 2i and 2i + 1.": partial(
            rotated, neighbours=False
        ),
        "This turns the other way round: a' = a cos - b sin, b' = a sin + b cos.": partial(rotated, sign=-1),
        "A token stands at positions[token], not at its own number.": partial(rotated, by_number=True),
        "Each pair has an angle of its own.": partial(rotated, one_angle=True),
    },
)
