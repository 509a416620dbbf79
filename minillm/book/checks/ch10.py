"""Checks of chapter 10: a gate, a rotation in place, unpacked weights, a repaired log-softmax. Built in chapter 10.

Each launches the student's kernel in the interpreter and judges, in this order: what it touched outside its tensors,
what it left unwritten, the values, and how often each number was loaded and stored. `ch10_oracle` has the references.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch10_oracle import Watched, dequantized, first, gated_reference, poisoned, rotated, unpacked
from minillm.book.traffic import OutOfBounds, record_traffic

__all__ = ["check_dequantize", "check_gated", "check_repair_log_softmax", "check_rotate_pairs", "watch"]

_KERNELS = tuple(
    f"minillm.kernels.{name}" for name in ("activation.silu_mul", "rotary.rotate_and_store", "softmax.softmax")
)
_TWICE = (
    "Two programs, or two lanes of one, store the same number: on a GPU either may come last. "
    "Whose is it? Mask the other."
)
_FLOAT16 = "more than one rounding"

check_gated = Checker(
    "gated", hint="Output i of the whole tensor comes from x[2i], the gate, and x[2i + 1], the up.", forbid=_KERNELS
)
check_rotate_pairs = Checker(
    "rotate_pairs",
    hint="(a, b) becomes (a cos - b sin, a sin + b cos), for neighbours in the first rotary_dim dimensions.",
    forbid=_KERNELS,
)
check_dequantize = Checker(
    "dequantize", hint="(q - zero) * scale, with the zero point and the scale of the weight's group.", forbid=_KERNELS
)
check_repair_log_softmax = Checker(
    "repair_log_softmax",
    hint="x - max - log(sum(exp(x - max))), over the logits of the row and nothing else.",
    forbid=_KERNELS,
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
    _close(
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
    seen.minimum("out", "store", hint=_TWICE)
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
    _close(
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


@check_dequantize.part("example")
def _dequantize_example(case: Case) -> None:
    weights = torch.tensor([[0, 1, 2, 3, 100, 101, 102, 103], [255, 254, 253, 252, 128, 127, 7, 5]])
    _dequantizes(case, weights, torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[1, 100], [250, 128]]), 4)


@check_dequantize.part("edges")
def _dequantize_edges(case: Case) -> None:
    def judge(rows: int, width: int, group: int, **options) -> None:
        _dequantizes(case, *_random_weights(case, rows, width, group), group, **options)

    judge(1, 4, 4)
    judge(1, 4, 32)  # a row shorter than a group
    judge(3, 32, 16)
    judge(3, 40, 16)  # the last group has 8
    judge(2, 36, 12)  # three words a group: a lane is left over
    judge(2, 44, 20)  # five, and a short last group
    judge(4, 24, 8, gap=3)  # rows further apart than they are long
    judge(5, 100, 64, gap=7)
    judge(3, 40, 16, dtype=torch.float16)
    extremes = torch.tensor([[0, 255, 0, 255, 128, 127, 255, 255]])
    _dequantizes(case, extremes, torch.tensor([[1.0, 3.0]]), torch.tensor([[255, 0]]), 4)
    _dequantizes(case, extremes, torch.tensor([[0.25]]), torch.tensor([[128]]), 8, dtype=torch.float16)


@check_dequantize.part("random")
def _dequantize_random(case: Case) -> None:
    for _ in range(12):
        group, dtype = 4 * case.randint(1, 12), case.rng.choice((torch.float32, torch.float16))
        weights = _random_weights(case, case.randint(1, 6), 4 * case.randint(1, 30), group)
        _dequantizes(case, *weights, group, dtype=dtype, gap=case.rng.choice((0, 0, 3)))


def _random_weights(case: Case, rows: int, width: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = -(-width // group)
    return case.randint(0, 256, rows, width), case.randn(rows, groups).abs() + 0.05, case.randint(0, 256, rows, groups)


def _dequantizes(
    case: Case,
    weights: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int,
    *,
    dtype: torch.dtype = torch.float32,
    gap: int = 0,
) -> None:
    """gap: words between the end of one row of `packed` and the next one."""
    rows, width = weights.shape
    words = torch.full((rows, width // 4 + gap), -1, dtype=torch.int32)
    packed = words[:, : width // 4]
    packed.copy_(weights.to(torch.uint8).contiguous().view(torch.int32))
    scales, zeros, out = scales.to(dtype), zeros.to(torch.uint8), poisoned(rows, width, dtype=dtype)
    seen = Watched(case, case.student, (packed, scales, zeros, out, group),
                   {"packed": packed, "scales": scales, "zeros": zeros, "out": out}, writes=("out",))  # fmt: skip
    sizes = {access.itemsize for access in seen.accesses("packed", "load")}
    case.true(
        sizes <= {4},
        f"the kernel loads packed in pieces of {', '.join(map(str, sorted(sizes)))} bytes; expected words of 4",
        hint=(
            "To take a word apart is the exercise: packed stays int32, without .view(torch.uint8), "
            "and the kernel shifts."
        ),
    )
    seen.written("out")
    _close(
        case,
        out,
        dequantized(unpacked(packed), scales, zeros, group),
        "out",
        {
            "The first weight is in the lowest 8 bits of its word, not in the highest.": lambda: dequantized(
                unpacked(packed, reverse=True), scales, zeros, group
            ),
            "A weight is a number from 0 to 255: its highest bit is no sign.": lambda: dequantized(
                unpacked(packed, signed=True), scales, zeros, group
            ),
            "The zero point is subtracted before the scale multiplies: (q - zero) * scale.": lambda: (
                dequantized(unpacked(packed), scales, zeros * 0, group) - _spread(zeros, group, width)
            ),
            "The zero point is missing.": lambda: dequantized(unpacked(packed), scales, zeros * 0, group),
            "q - zero is negative where q is the smaller one, and no uint8 is: subtract as int32.": lambda: (
                (unpacked(packed) - _spread(zeros, group, width)) % 256 * _spread(scales, group, width)
            ),
            (
                "What is shifted still has the later weights in its higher bits, and ones if it is negative: "
                "keep 8 bits, & 0xFF."
            ): lambda: dequantized(unpacked(packed, all_bits=True), scales, zeros, group),
        },
    )
    seen.minimum(
        "out",
        "store",
        hint=(
            f"Perhaps the weights of the next group: a group has {group // 4} words, "
            f"a block a power of two of lanes. {_TWICE}"
        ),
    )
    seen.minimum(
        "packed",
        "load",
        hint="Load words, [WORDS], and spread them over [WORDS, 4] afterwards: words[:, None] moves no bytes.",
    )
    once = "A group's program loads this number once, as a single number, and has it for all of the group's weights."
    seen.minimum("scales", "load", hint=once)
    seen.minimum("zeros", "load", hint=once)


def _spread(per_group: Tensor, group: int, width: int) -> Tensor:
    return per_group.double().repeat_interleave(group, 1)[:, :width]


@check_repair_log_softmax.part("example")
def _repair_example(case: Case) -> None:
    _repairs(
        case, torch.tensor([[1.0, 2.0, 0.5, -1.0, 0.0], [-2.0, -3.0, -2.5, -4.0, -2.0], [3.0, 0.0, 1.0, 2.0, -1.0]])
    )


@check_repair_log_softmax.part("edges")
def _repair_edges(case: Case) -> None:
    for num_tokens in (1, 2, 3, 64, 65, 127):
        _repairs(case, case.randn(3, num_tokens))
    _repairs(case, case.randn(2, 1000))
    _repairs(case, case.randn(4, 6) - 200, "a row far below zero")
    _repairs(case, case.randn(3, 6) * 1e30 - 9e30, "a row far below zero")
    _repairs(case, case.randn(3, 7) * 20 + 3000, "a row far above zero")
    _repairs(case, (case.randn(5, 21) * 8).half(), "float16")
    _repairs(case, (case.randn(5, 21) - 60000).half(), "a row far below zero, in float16")
    forbidden = case.randn(4, 11)
    forbidden[:, ::2] = -torch.inf
    forbidden[3, 1:] = -torch.inf
    forbidden[3, 0] = -5.0
    _repairs(case, forbidden, "logits of -inf")


@check_repair_log_softmax.part("random")
def _repair_random(case: Case) -> None:
    for _ in range(12):
        logits = case.rng.choice((1, 5, 30)) * case.randn(case.randint(1, 9), case.randint(1, 140)) + case.rng.choice(
            (0, -50, 50)
        )
        _repairs(case, logits.to(case.rng.choice((torch.float32, torch.float16))))


def _repairs(case: Case, logits: Tensor, told: str = "") -> None:
    out = poisoned(*logits.shape, dtype=logits.dtype)
    seen = Watched(case, case.student, (logits, out), {"logits": logits, "out": out}, writes=("out",))
    seen.written("out")
    lanes = 1 << (logits.shape[1] - 1).bit_length()
    empty = (
        f"{lanes} lanes for {logits.shape[1]} logits: what do the other {lanes - logits.shape[1]} bring into the "
        "maximum, and into the sum?"
    )
    wanted = logits.double().log_softmax(-1)
    if (place := first((out.isinf() & wanted.isfinite()).numpy())) is not None:
        case.fail(
            f"out{list(place)} is {out[place].item()}, expected {wanted[place].item():g}{told and f': {told}'}",
            hint=(
                "e^89 is more than float32 holds, e^-104 is 0, and log 0 is -inf: "
                "the row's maximum must be subtracted before exp."
            ),
        )
    _close(
        case,
        out,
        wanted,
        "out",
        {},
        hint=f"{told}{': ' if told else ''}{empty if lanes > logits.shape[1] else case.hint}",
    )
    seen.minimum("out", "store", hint=_TWICE)
    seen.minimum(
        "logits",
        "load",
        hint=(
            f"Columns 0 to {logits.shape[1] - 1} belong to a row, and one load has them all: "
            "they stay in the program's variables."
        ),
    )


def watch(launcher, logits: Tensor) -> None:
    """Launch on `logits` and print, access by access, which numbers each program touched,
    up to the first one outside."""
    out = poisoned(*logits.shape, dtype=logits.dtype)
    rows, columns = logits.shape
    print(f"{rows} rows of {columns}: row r has the numbers {columns}r to {columns}r + {columns - 1}")
    stopped = None
    with record_traffic() as traffic:
        try:
            launcher(logits, out)
        except OutOfBounds as error:
            stopped = error
    for access in traffic.accesses:
        numbers = " ".join(f"{number:>2}" for number in access.elements.ravel().tolist())
        print(f"program {access.program[0]}  {access.kind + 's':<6}  {access.tensor:<6}  {numbers}")
    print(f"stopped: {stopped}" if stopped else "every access was inside")
    for row, total in enumerate(out.double().exp().sum(-1).tolist()):
        print(
            f"row {row}: its probabilities add up to {total:.4f}" if total == total else f"row {row}: not all written"
        )


def _close(case: Case, got: Tensor, wanted: Tensor, what: str, mistakes: dict, hint: str | None = None) -> None:
    """Compare with float64, as near as one rounding to the dtype allows; name the mistake that gives what was got."""
    half = got.dtype is torch.float16
    near = {"rtol": 5e-4, "atol": 1e-6} if half else {"rtol": 2e-5, "atol": 4e-6}
    fits = [
        told
        for told, mistaken in mistakes.items()
        if torch.allclose(got.double(), mistaken(), rtol=2e-3 if half else 1e-4, atol=1e-4)
    ]
    if half and torch.allclose(got.double(), wanted, rtol=2e-2, atol=2e-2):
        fits = [f"Nearly: this is {_FLOAT16}. Convert what is loaded to float32 before the arithmetic."]
    case.close(got, wanted, what, hint=fits[0] if fits else hint, **near)
