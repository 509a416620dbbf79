"""The check of chapter 23's adapters, packed by rank. Built in chapter 23."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw, FunctionChecker
from minillm.book.checks.snapshot import detached
from minillm.book.torch_traffic import record_torch_traffic

MOST_OPERATIONS = 24  # of torch, for each adapter in the batch, and as many again for the rest


def packed(
    x: Tensor, a: Tensor, b: Tensor, starts: list[int], scales: list[float], slots: Tensor, *, scaled: bool = True,
    none: bool = True, longer: int = 0, all_ranks: bool = False,
) -> Tensor:  # fmt: skip
    """Token by token, in float64. The keywords are mistakes."""
    out = x.new_zeros(x.shape[0], b.shape[1]).double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 or not none:
            slot = slot % len(scales)
            rank = slice(starts[slot], starts[slot + 1] + longer)
            out[row] = (scales[slot] if scaled else 1) * (x[row].double() @ a[rank].double().T @ b[rank].double())
        if all_ranks:
            out[row] += 0.0 * (a.sum() + b.sum())
    return out.to(x.dtype)


def _frugal(
    case: Case, got: Tensor, x: Tensor, a: Tensor, b: Tensor, starts: list[int], scales: list[float], slots: Tensor
) -> None:
    """Few operations, and none that writes a whole matrix."""
    with record_torch_traffic() as traffic:
        case.student(*detached((x, a, b, starts, scales, slots)))
    in_batch = len({slot for slot in slots.tolist() if slot >= 0})
    allowed, told = MOST_OPERATIONS * (in_batch + 1), f"{len(slots)} tokens and {len(scales)} adapters"
    case.true(
        len(traffic.ops) <= allowed,
        f"{told} took {len(traffic.ops)} torch operations; {allowed} are allowed for {in_batch} adapters in the batch",
        hint="Loop over the adapters in the batch, never over its tokens, nor over adapters that no token uses.",
    )
    whole = x.shape[1] * b.shape[1]
    largest = max((written for _, _, written in traffic.ops), default=0)
    case.true(
        not len(slots) or whole < 10**5 or largest < whole * x.element_size(),
        f"{told}: an operation wrote {largest:,} bytes, as many as a whole [in, out] matrix has",
        hint="Multiply x by a first, then the result by b: never multiply a and b with each other.",
    )


def _batch(
    draw: Draw, ranks: Sequence[int], slots: Sequence[int], width: int, height: int, poisoned: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple:  # fmt: skip
    """The rows of the adapters in `poisoned`, which no token uses, are NaN."""
    starts = [sum(ranks[:place]) for place in range(len(ranks) + 1)]
    shapes = (len(slots), width), (starts[-1], width), (starts[-1], height)
    x, a, b = (draw.randn(*shape).to(dtype) for shape in shapes)
    for slot in poisoned:
        a[starts[slot] : starts[slot + 1]] = b[starts[slot] : starts[slot + 1]] = float("nan")
    scales = [draw.rng.choice((0.5, 1.0, 2.0, 4.0)) for _ in ranks]
    return x, a, b, starts, scales, torch.tensor(slots, dtype=torch.int64)


def _edges(draw: Draw) -> dict[str, tuple]:
    return {
        "there is no token": _batch(draw, [2, 3], [], 4, 4),
        "no token has an adapter": _batch(draw, [2, 3], [-1, -1], 4, 4),
        "an adapter of rank 0 adds nothing": _batch(draw, [2, 0, 1], [1, 0, 2, 1], 4, 7),
        "an adapter that no token uses was unloaded, and its rows are NaN": _batch(
            draw, [3, 2, 4], [2, 0, 2, -1], 4, 4, [1]
        ),
        "all adapters but one were unloaded": _batch(draw, [3, 2, 4], [1], 4, 4, [0, 2]),
        "the dtype is float64": _batch(draw, [8, 16], [0, 1, 0], 32, 48, dtype=torch.float64),
        "there are 600 tokens: loop over the adapters in the batch": _batch(
            draw, [4, 8, 2], [place % 4 - 1 for place in range(600)], 16, 16
        ),
        "there are 60 adapters, two of them in the batch": _batch(draw, [2] * 60, [3, 58, 3], 8, 8),
        "a whole [in, out] matrix is large": _batch(draw, [4, 4], [0, 1, 1, 0], 512, 512),
    }


def _random(draw: Draw) -> tuple:
    ranks = [draw.randint(0, 9) for _ in range(draw.randint(1, 6))]
    slots = [draw.randint(-1, len(ranks)) for _ in range(draw.randint(0, 20))]
    unused = [slot for slot in range(len(ranks)) if slot not in slots]
    width, height = draw.randint(1, 24), draw.randint(1, 24)
    return _batch(draw, ranks, slots, width, height, unused if draw.rng.random() < 0.3 else ())


check_packed_lora = FunctionChecker(
    "packed_lora",
    packed,
    returns="the product [token, out_features]",
    examples=lambda draw: [
        _batch(draw, [2, 3], [0, 1, 1, -1, 0], 6, 5),
        _batch(draw, [4], [0, 0, 0], 8, 8),
    ],
    edges=_edges,
    random=_random,
    trials=30,
    atol=1e-4,
    rtol=1e-4,
    also=_frugal,
    hint="For each adapter in the batch: take its rows of a and b, and multiply all of its tokens at once.",
    misconceptions={
        "Each adapter has a scale of its own: multiply its product by it.": dict(scaled=False),
        "Slot -1 is a token without an adapter: its row is 0. An index of -1 would take the last one.": dict(
            none=False
        ),
        "The rows of adapter i end before starts[i + 1]: this is one row more.": dict(longer=1),
        "An adapter that no token uses may hold anything, NaN too: 0 times NaN is NaN, so leave its rows out.": dict(
            all_ranks=True
        ),
    },
    forbid=("minillm.kernels.lora.add_lora_", "minillm.kernels.lora.torch_add_lora_"),
)
