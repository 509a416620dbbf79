"""Checks of chapter 10: words taken apart into weights, and a repaired log-softmax. Built in chapter 10."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch10_oracle import Watched, dequantized, first, poisoned, unpacked
from minillm.book.traffic import OutOfBounds, record_traffic

KERNELS = tuple(
    f"minillm.kernels.{name}" for name in ("activation.silu_mul", "rotary.rotate_and_store", "softmax.softmax")
)
TWICE = (
    "Two programs, or two lanes of one, store the same number: on a GPU either may come last. "
    "Whose is it? Mask the other."
)
FLOAT16 = "more than one rounding"
check_dequantize = Checker(
    "dequantize", hint="(q - zero) * scale, with the zero point and the scale of the weight's group.", forbid=KERNELS
)
check_repair_log_softmax = Checker(
    "repair_log_softmax",
    hint="x - max - log(sum(exp(x - max))), over the logits of the row and nothing else.",
    forbid=KERNELS,
)


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
    close(
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
            f"a block a power of two of lanes. {TWICE}"
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
    close(
        case,
        out,
        wanted,
        "out",
        {},
        hint=f"{told}{': ' if told else ''}{empty if lanes > logits.shape[1] else case.hint}",
    )
    seen.minimum("out", "store", hint=TWICE)
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


def close(case: Case, got: Tensor, wanted: Tensor, what: str, mistakes: dict, hint: str | None = None) -> None:
    """Compare with float64, as near as one rounding to the dtype allows; name the mistake that gives what was got."""
    half = got.dtype is torch.float16
    near = {"rtol": 5e-4, "atol": 1e-6} if half else {"rtol": 2e-5, "atol": 4e-6}
    fits = [
        told
        for told, mistaken in mistakes.items()
        if torch.allclose(got.double(), mistaken(), rtol=2e-3 if half else 1e-4, atol=1e-4)
    ]
    if half and torch.allclose(got.double(), wanted, rtol=2e-2, atol=2e-2):
        fits = [f"Nearly: this is {FLOAT16}. Convert what is loaded to float32 before the arithmetic."]
    case.close(got, wanted, what, hint=fits[0] if fits else hint, **near)
