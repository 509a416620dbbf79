"""Checks of chapter 10: a gate, a rotation in place, unpacked weights, a repaired log-softmax. Built in chapter 10.

Each launches the student's kernel in the interpreter and judges, in this order: what it touched outside its tensors,
what it left unwritten, the values, and how often each number was loaded and stored. `ch10_oracle` has the references.
`ch10_words` has the last two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch10_oracle import Watched, gated_reference, poisoned, rotated
from minillm.book.checks.ch10_words import (
    KERNELS,
    TWICE,
    check_dequantize,
    check_repair_log_softmax,
    close,
    watch,
)

__all__ = ["check_dequantize", "check_gated", "check_repair_log_softmax", "check_rotate_pairs", "watch"]


check_gated = Checker(
    "gated", hint="Output i of the whole tensor comes from x[2i], the gate, and x[2i + 1], the up.", forbid=KERNELS
)
check_rotate_pairs = Checker(
    "rotate_pairs",
    hint="(a, b) becomes (a cos - b sin, a sin + b cos), for neighbours in the first rotary_dim dimensions.",
    forbid=KERNELS,
)


@check_gated.part("example")
def _gated_example(case: Case) -> None:
    _gated(case, torch.tensor([[1.0, 2.0, -1.0, 0.5, 3.0, -4.0], [9.0, 1.0, -9.0, 1.0, 0.0, 9.0]]), 7.0)


@check_gated.part("edges")
def _gated_edges(case: Case) -> None:
    _gated(case, torch.tensor([[1.0, 0.5]]), 7.0)  # one output, and a block that is nearly empty
    for limit in (0.5, 7.0, 30.0):
        _gated(case, torch.tensor([[40.0, 1.0, -40.0, 1.0, 1.0, 40.0, 1.0, -40.0, -2.0, -40.0]]), limit)
    for width in (127, 128, 129):
        _gated(case, 4 * case.randn(1, 2 * width), 7.0)
    _gated(case, 4 * case.randn(4, 64), 7.0)  # 128 outputs: a full block
    _gated(case, 4 * case.randn(1024, 2), 7.0)
    _gated(case, (4 * case.randn(7, 100)).half(), 7.0)
    _gated(case, torch.tensor([[60000.0, 60000.0, -60000.0, -60000.0]]).half(), 7.0)


@check_gated.part("random")
def _gated_random(case: Case) -> None:
    for _ in range(12):
        x = case.rng.choice((1, 4, 10)) * case.randn(case.randint(1, 20), 2 * case.randint(1, 90))
        _gated(case, x.to(case.rng.choice((torch.float32, torch.float16))), case.rng.choice((1.0, 3.5, 7.0)))


def _gated(case: Case, x: Tensor, limit: float) -> None:
    out = poisoned(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    seen = Watched(case, case.student, (x, out, limit), {"x": x, "out": out}, writes=("out",))
    seen.written("out")
    half = x.shape[1] // 2
    close(
        case,
        out,
        gated_reference(x, limit),
        "out",
        {
            "This is the chapter's layout, gates in front of ups. Here they alternate: gate, up, gate, up.": lambda: (
                gated_reference(x, limit, split=lambda x: (x[..., :half], x[..., half:]))
            ),
            "Gate and up have changed places: the gates stand at the even places.": lambda: gated_reference(
                x, limit, split=lambda x: (x[..., 1::2], x[..., ::2])
            ),
            "The gate is limited from above only.": lambda: gated_reference(x, limit, gate=(-limit, limit)),
            "The gate is limited from above.": lambda: gated_reference(x, limit, gate=(-torch.inf, torch.inf)),
            "The up is limited, from above and from below.": lambda: gated_reference(
                x, limit, up=(-torch.inf, torch.inf)
            ),
            "The up is limited from below too.": lambda: gated_reference(x, limit, up=(-torch.inf, limit)),
            "The gate is multiplied by (up + 1), not by up.": lambda: gated_reference(x, limit, shift=0.0),
            "The sigmoid is that of 1.702 times the gate.": lambda: gated_reference(x, limit, alpha=1.0),
        },
    )
    seen.minimum("out", "store", hint=TWICE)
    seen.minimum(
        "x", "load", hint="One load for the gates, one for the ups; what is loaded stays in the program's variables."
    )


@check_rotate_pairs.part("example")
def _rotate_example(case: Case) -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0, 5.0]], [[1.0, 2.0, 3.0, 4.0, 6.0]]])
    _rotates(case, x, [1, 2], _table(3, 4))


@check_rotate_pairs.part("edges")
def _rotate_edges(case: Case) -> None:
    _rotates(case, case.randn(1, 1, 2), [0], _table(1, 2))
    _rotates(case, case.randn(3, 2, 8), [3, 4, 5], _table(6, 8))  # the whole head
    _rotates(case, case.randn(3, 4, 9), [5, 5, 2], _table(6, 4))  # an odd rest, a position twice
    _rotates(case, case.randn(4, 3, 16), [9, 0, 4, 9], _table(10, 10))  # 3 heads, 5 pairs: no powers of two
    _rotates(case, case.randn(2, 5, 12), [7, 1], _table(8, 6))
    qkv = case.randn(5, 8, 10)
    _rotates(case, qkv[:, 1:4], [6, 5, 4, 3, 2], _table(7, 6), base=qkv)  # between queries and values
    _rotates(case, qkv[1:4, 5:], [0, 1, 6], _table(7, 8), base=qkv)
    by_head = case.randn(3, 4, 10)
    # Heads lie further apart than tokens.
    _rotates(case, by_head.transpose(0, 1), [1, 8, 2, 3], _table(9, 6), base=by_head)
    _rotates(case, case.randn(6, 6, 40).half(), [3, 1, 4, 1, 5, 9], _table(10, 24))
    _rotates(case, case.randn(1, 40, 6), [2], _table(3, 6))


@check_rotate_pairs.part("random")
def _rotate_random(case: Case) -> None:
    for _ in range(12):
        tokens, heads, pairs = case.randint(1, 7), case.randint(1, 9), case.randint(1, 14)
        base = case.randn(tokens, heads + case.randint(0, 4), 2 * pairs + case.randint(0, 9)).to(
            case.rng.choice((torch.float32, torch.float16))
        )
        skip = base.shape[1] - heads
        _rotates(case, base[:, skip:], [case.randint(0, 50) for _ in range(tokens)], _table(50, 2 * pairs), base=base)


def _table(num_positions: int, rotary_dim: int) -> Tensor:
    angles = torch.arange(num_positions)[:, None] * 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], 1)


def _rotates(case: Case, x: Tensor, places: list[int], table: Tensor, base: Tensor | None = None) -> None:
    """base: the larger tensor that x is a view of, of which the rest must stay as it is."""
    positions, old, dim = torch.tensor(places), x.clone(), table.shape[1]
    base = x if base is None else base
    outside, before = torch.ones_like(base), base.clone()
    outside.as_strided(x.shape, x.stride(), x.storage_offset())[...] = 0
    seen = Watched(
        case,
        case.student,
        (x, positions, table),
        {"x": x, "positions": positions, "table": table},
        writes=("x",),
        reads=("x",),
    )
    close(
        case,
        x,
        rotated(old, positions, table),
        "x",
        {
            "Nothing has changed. The result belongs where x was: in place.": lambda: old.double(),
            "This is chapter 02's half-split layout. Here neighbours turn together: 2i and 2i + 1.": lambda: rotated(
                old, positions, table, neighbours=False
            ),
            "This turns the other way round: a' = a cos - b sin, b' = a sin + b cos.": lambda: rotated(
                old, positions, table, sign=-1
            ),
            "A token stands at positions[token], not at its own number.": lambda: rotated(
                old, torch.arange(len(places)) % len(table), table
            ),
            f"Dimensions from {dim} on carry no position: they stay as they are.": lambda: torch.cat(
                [rotated(old, positions, table)[..., :dim], x[..., dim:].double()], -1
            ),
            "Each pair has an angle of its own.": lambda: rotated(
                old, positions, table[:, [0] * (dim // 2) + [dim // 2] * (dim // 2)]
            ),
        },
    )
    case.equal(
        base * outside,
        before * outside,
        "the tensor that x is a view of",
        hint="Only x may change, not what lies around it.",
    )
    inside = torch.zeros(x.shape, dtype=torch.long)
    inside[..., :dim] = 1
    rest = f"Of each head the first {dim} dimensions are loaded and stored, each once; the rest is never touched."
    seen.minimum("x", "store", inside, hint=rest)
    seen.minimum("x", "load", inside, hint=rest)
    tokens_at = torch.bincount(positions, minlength=len(table))[:, None].expand(-1, dim)
    seen.minimum(
        "table",
        "load",
        tokens_at,
        hint=(
            "The row of the table is loaded once for a token, for all of its heads: "
            "what shares a row belongs to one program."
        ),
    )
    seen.minimum("positions", "load", hint="A token's position is a single number: its program loads it once.")
