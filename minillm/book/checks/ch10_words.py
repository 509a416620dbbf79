"""Checks of chapter 10: words taken apart into weights, and a repaired log-softmax. Built in chapter 10."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch10_oracle import DTYPES, TWICE, checker, dequantized, log_softmax, poisoned
from minillm.book.checks.launcher import Launch
from minillm.book.checks.touched import Seen, Touch, first
from minillm.book.traffic import OutOfBounds, Traffic, record_traffic


def _dequantizes(
    case: Case,
    weights: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int,
    dtype: torch.dtype = torch.float32,
    gap: int = 0,
) -> Launch:
    """gap: words between the end of one row of `packed` and the next one."""
    rows, width = weights.shape
    packed = torch.full((rows, width // 4 + gap), -1, dtype=torch.int32)[:, : width // 4]
    packed.copy_(weights.to(torch.uint8).contiguous().view(torch.int32))
    words = "Load words, [WORDS], and spread them over [WORDS, 4] afterwards: words[:, None] moves no bytes."
    once = "A group's program loads this number once, as a single number, and has it for all of the group's weights."
    next_group = (
        f"Perhaps the weights of the next group: a group has {group // 4} words, "
        f"a block a power of two of lanes. {TWICE}"
    )
    return Launch(
        (packed, scales.to(dtype), zeros.to(torch.uint8), poisoned(rows, width, dtype=dtype), group),
        before=_loads_words,
        touches=(
            Touch("out", "store", next_group),
            Touch("packed", "load", words),
            Touch("scales", "load", once),
            Touch("zeros", "load", once),
        ),
    )


def _loads_words(case: Case, traffic: Traffic, seen: Seen) -> None:
    sizes = {access.itemsize for access in seen.accesses("packed", "load")}
    case.true(
        sizes <= {4},
        f"the kernel loads packed in pieces of {', '.join(map(str, sorted(sizes)))} bytes; expected words of 4",
        hint="To take a word apart is the exercise: packed stays int32, without .view(torch.uint8), "
        "and the kernel shifts.",
    )


def _random_weights(draw: Draw, rows: int, width: int, group: int) -> tuple:
    groups = -(-width // group)
    scales = draw.randn(rows, groups).abs() + 0.05
    return draw.randint(0, 256, rows, width), scales, draw.randint(0, 256, rows, groups), group


def _dequantize_edges(draw: Draw) -> Iterator[tuple]:
    for rows, width, group, *options in (
        (1, 4, 4),
        (1, 4, 32),  # a row shorter than a group
        (3, 32, 16),
        (3, 40, 16),  # the last group has 8
        (2, 36, 12),  # three words a group: a lane is left over
        (2, 44, 20),  # five, and a short last group
        (4, 24, 8, torch.float32, 3),  # rows further apart than they are long
        (5, 100, 64, torch.float32, 7),
        (3, 40, 16, torch.float16),
    ):
        yield *_random_weights(draw, rows, width, group), *options
    extremes = torch.tensor([[0, 255, 0, 255, 128, 127, 255, 255]])
    yield extremes, torch.tensor([[1.0, 3.0]]), torch.tensor([[255, 0]]), 4
    yield extremes, torch.tensor([[0.25]]), torch.tensor([[128]]), 8, torch.float16


def _dequantize_random(draw: Draw) -> tuple:
    group, dtype = 4 * draw.randint(1, 12), draw.rng.choice(DTYPES)
    weights = _random_weights(draw, draw.randint(1, 6), 4 * draw.randint(1, 30), group)
    return *weights, dtype, draw.rng.choice((0, 0, 3))


_WEIGHTS = torch.tensor([[0, 1, 2, 3, 100, 101, 102, 103], [255, 254, 253, 252, 128, 127, 7, 5]])
check_dequantize = checker(
    "dequantize",
    dequantized,
    _dequantizes,
    names=("packed", "scales", "zeros", "out", "group"),
    fills="out",
    examples=[(_WEIGHTS, torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[1, 100], [250, 128]]), 4)],
    edges=_dequantize_edges,
    random=_dequantize_random,
    hint="(q - zero) * scale, with the zero point and the scale of the weight's group.",
    misconceptions={
        "The first weight is in the lowest 8 bits of its word, not in the highest.": partial(dequantized, reverse=True),
        "A weight is a number from 0 to 255: its highest bit is no sign.": partial(dequantized, signed=True),
        "The zero point is subtracted before the scale multiplies: (q - zero) * scale.": partial(
            dequantized, zero_last=True
        ),
        "The zero point is missing.": partial(dequantized, no_zero=True),
        "q - zero is negative where q is the smaller one, and no uint8 is: subtract as int32.": partial(
            dequantized, wraps=True
        ),
        "What is shifted still has the later weights in its higher bits, and ones if it is negative: "
        "keep 8 bits, & 0xFF.": partial(dequantized, all_bits=True),
    },
)


def _repairs(case: Case, logits: Tensor, told: str = "") -> Launch:
    columns = logits.shape[1]
    lanes = 1 << (columns - 1).bit_length()
    empty = (
        f"{lanes} lanes for {columns} logits: what do the other {lanes - columns} bring into the maximum, "
        "and into the sum?"
    )
    why = empty if lanes > columns else case.hint
    out = poisoned(*logits.shape, dtype=logits.dtype)

    def infinite(got: Tensor, wanted: Tensor) -> str:
        place = first((got.isinf() & wanted.isfinite()).numpy())
        if place is None:
            return f"{told}: {why}" if told else why
        return case.fail(
            f"out{list(place)} is {got[place].item()}, expected {wanted[place].item():g}{told and f': {told}'}",
            hint="e^89 is more than float32 holds, e^-104 is 0, and log 0 is -inf: "
            "the row's maximum must be subtracted before exp.",
        )

    once = (
        f"Columns 0 to {columns - 1} belong to a row, and one load has them all: they stay in the program's variables."
    )
    return Launch((logits, out), hint=infinite, touches=(Touch("out", "store", TWICE), Touch("logits", "load", once)))


def _repair_edges(draw: Draw) -> Iterator[tuple]:
    for num_tokens in (1, 2, 3, 64, 65, 127):
        yield (draw.randn(3, num_tokens),)
    yield (draw.randn(2, 1000),)
    yield draw.randn(4, 6) - 200, "a row far below zero"
    yield draw.randn(3, 6) * 1e30 - 9e30, "a row far below zero"
    yield draw.randn(3, 7) * 20 + 3000, "a row far above zero"
    yield (draw.randn(5, 21) * 8).half(), "float16"
    yield (draw.randn(5, 21) - 60000).half(), "a row far below zero, in float16"
    forbidden = draw.randn(4, 11)
    forbidden[:, ::2] = -torch.inf
    forbidden[3, 1:] = -torch.inf
    forbidden[3, 0] = -5.0
    yield forbidden, "logits of -inf"


def _repair_random(draw: Draw) -> tuple:
    logits = draw.rng.choice((1, 5, 30)) * draw.randn(draw.randint(1, 9), draw.randint(1, 140))
    logits = logits + draw.rng.choice((0, -50, 50))
    return (logits.to(draw.rng.choice(DTYPES)),)


check_repair_log_softmax = checker(
    "repair_log_softmax",
    log_softmax,
    _repairs,
    names=("logits", "out"),
    fills="out",
    examples=[
        (torch.tensor([[1.0, 2.0, 0.5, -1.0, 0.0], [-2.0, -3.0, -2.5, -4.0, -2.0], [3.0, 0.0, 1.0, 2.0, -1.0]]),)
    ],
    edges=_repair_edges,
    random=_repair_random,
    hint="x - max - log(sum(exp(x - max))), over the logits of the row and nothing else.",
)


def watch(launcher: Callable[[Tensor, Tensor], None], logits: Tensor) -> None:
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
