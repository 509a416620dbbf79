"""Checks of chapter 16: a static scale, a column of GPTQ, AWQ's search. Built in chapter 16.

`ch16_scales` has alpha and folding, `ch16_rotations` rotations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch16_oracle import (
    errors_of,
    half_away,
    half_up,
    mlp,
    one_after_the_other,
    searched,
    settled,
    static_codes,
)
from minillm.book.checks.ch16_rotations import check_rotate_blocks, check_rotate_layer, half_layer
from minillm.book.checks.ch16_scales import PACKAGE, check_fold_mlp, check_shared_alpha, doubles

__all__ = [
    "check_fold_mlp",
    "check_rotate_blocks",
    "check_rotate_layer",
    "check_search_grid",
    "check_settle",
    "check_shared_alpha",
    "check_static_int8",
    "half_layer",
    "mlp",
]

_TIES = "Ties go to the even number, as with torch.round: 0.5 becomes 0, and 1.5 becomes 2."
_TIES_AWAY = "Ties go to the even number, not away from zero: 0.5 becomes 0, and -0.5 too."


# 1 · a static scale


def _static_edges(draw: Draw) -> Iterator[tuple]:
    x = torch.tensor([[127.0, -127.0], [127.4, -127.4], [127.6, 0.0], [0.0, -300.0], [0.5, 1.5], [-0.5, 2.5]])
    yield torch.tensor([[-127.0, 1.0]]), x, 0  # the largest magnitude is negative
    yield torch.tensor([[-127.0, 1.0]]), x, 1
    yield torch.tensor([[5.0, 5.0, 5.0, 1.0]]), draw.randn(4, 4), 2  # equal ones count one by one
    yield torch.tensor([[5.0, -5.0, 1.0]]), draw.randn(4, 4), 1
    yield torch.zeros(3, 2), x, 0  # a scale of 1
    yield draw.randn(6, 3), torch.zeros(0, 3), 2
    yield draw.randn(4, 3), 1e6 * draw.randn(5, 3), 0  # far outside: no code may wrap


def _static_random(draw: Draw) -> tuple:
    size = draw.randint(1, 20)
    calibration = draw.randn(draw.randint(1, 30), size) * 10.0 ** draw.randint(-2, 3)
    x = draw.randn(draw.randint(1, 12), size) * calibration.abs().max()
    return calibration, x, draw.randint(0, calibration.numel())


check_static_int8 = FunctionChecker(
    "static_int8",
    static_codes,
    hint="Sort the magnitudes of the calibration text, leave out the largest `spare`, divide by 127.",
    examples=[
        (torch.tensor([[1.0, -12.7, 3.0], [100.0, 2.0, -5.0]]), torch.tensor([[1.0, -0.26, 12.6], [13.0, 0.0, 2.0]]), 1)
    ],
    edges=_static_edges,
    random=_static_random,
    returns=("codes", "scale", "cut_off"),
    rtol=1e-5,
    misconceptions={
        "Magnitudes count: -127 is larger than 1.": dict(
            order=lambda seen: seen.flatten().sort(descending=True).values
        ),
        "Of equal magnitudes, each counts as one.": dict(order=lambda seen: seen.abs().unique().flip(0)),
        "One too many was left out: with spare=0 the largest itself counts.": lambda seen, x, spare: static_codes(
            seen, x, spare + 1
        ),
        "The scale comes from `calibration`, not from `x`.": lambda seen, x, spare: static_codes(x, x, spare),
        "With all magnitudes 0 the scale is 1.": dict(of_zero=0.0),
        "No code is -128: the grid is symmetric.": dict(code=lambda places: places.clamp(-128, 127).to(torch.int8)),
        "Beyond the grid a number is cut off at 127 or -127; as an int8 it would wrap around.": dict(
            code=lambda places: (places.long() % 256).to(torch.uint8).view(torch.int8)
        ),
        "A token is cut off if, rounded, one of its numbers lies beyond ±127; exactly 127 is not.": dict(
            beyond=lambda exact: exact.round().abs() >= 127
        ),
        "cut_off looks at the rounded numbers: 127.4 becomes 127, which is inside.": dict(
            beyond=lambda exact: exact.abs() > 127
        ),
        "Compute cut_off before you clamp; afterwards no number is outside the grid.": dict(
            beyond=lambda exact: exact.abs() > torch.inf
        ),
        _TIES: dict(rounded=half_up),
        _TIES_AWAY: dict(rounded=half_away),
        "Round first: .to(torch.int8) truncates.": dict(rounded=torch.trunc),
    },
    forbid=(f"{PACKAGE}.activations.quantize_activations",),
)


# 2 · one column of GPTQ


def _hessian(draw: Draw, size: int) -> Tensor:
    x = draw.randn(40, size).double() + draw.randn(40, 1).double()
    return x.T @ x


def _settle_edges(draw: Draw) -> Iterator[tuple]:
    one, invert = torch.ones(3, dtype=torch.float64), torch.linalg.inv
    yield draw.randn(3, 1).double(), doubles([0.5]), 0, one, 3  # the last column of all
    yield draw.randn(3, 4).double(), torch.diag(1 / torch.arange(1.0, 5.0)).double(), 2, one, 1  # nothing moves
    yield doubles([0.5, 9.0], [1.5, 0.0], [-2.5, 1.0]), invert(_hessian(draw, 2)), 0, one, 7  # ties to even
    yield 50 * draw.randn(3, 5).double(), invert(_hessian(draw, 5)), 4, one, 3  # cut off, and the error is large
    yield draw.randn(3, 5).double(), invert(_hessian(draw, 5)), 1, doubles(0.1, 1.0, 3.0), 7


def _settle_random(draw: Draw) -> tuple:
    """Some columns are settled already, in a random order, each from what the one before it left."""
    out, size, largest = draw.randint(1, 7), draw.randint(2, 13), draw.rng.choice((1, 3, 7))
    weight, inverse = draw.randn(out, size).double(), torch.linalg.inv(_hessian(draw, size))
    scales = 0.2 + draw.randn(out).double().abs()
    for _ in range(draw.rng.choice((0, 0, draw.randint(0, size)))):
        _, weight, inverse = settled(weight, inverse, draw.randint(0, weight.shape[1]), scales, largest)
    return weight, inverse, draw.randint(0, weight.shape[1]), scales, largest


_HALF = doubles([0.4, 0.4]), torch.linalg.inv(doubles([1.0, 0.9], [0.9, 1.0]))

check_settle = FunctionChecker(
    "settle",
    settled,
    hint="Round the column, divide its error by inverse[j, j], subtract so many rows j of the inverse from the others.",
    examples=[(*_HALF, column, torch.ones(1, dtype=torch.float64), 3) for column in (0, 1)],
    edges=_settle_edges,
    random=_settle_random,
    trials=30,
    returns=("codes", "weight", "inverse"),
    atol=1e-8,
    rtol=1e-7,
    misconceptions={
        "The others do not move at all.": dict(moves=lambda error, inverse, j: torch.zeros_like(inverse[0])),
        "They move in the wrong direction: the column moved by -error, so subtract.": dict(
            moves=lambda error, inverse, j: -torch.outer(error / inverse[j, j], inverse[j])
        ),
        "Divide the error by inverse[column, column].": dict(
            moves=lambda error, inverse, j: torch.outer(error, inverse[j])
        ),
        "That is the square root's row, as with Cholesky; with the inverse itself divide by inverse[column, column], "
        "once.": dict(moves=lambda error, inverse, j: torch.outer(error / inverse[j, j].sqrt(), inverse[j])),
        "Row 0 of the inverse belongs to column 0; take the row of the column that you rounded.": dict(
            moves=lambda error, inverse, j: torch.outer(error / inverse[0, 0], inverse[0])
        ),
        "A row and a column of the inverse are not the inverse of what is left: subtract the outer product first.": (
            dict(without=False)
        ),
        "Codes are cut off at ±largest.": dict(cut=False),
        "Codes go from -largest to largest; the chapter's go one lower.": dict(lowest=lambda largest: -largest - 1),
        "If a weight is cut off at the end of the grid, that is part of the error too.": dict(cut_is_error=False),
        "The columns that remain keep their order.": dict(
            order=lambda rest, column: (rest[:column] + rest[-1:] + rest[column:-1])[: len(rest)]
        ),
        _TIES: dict(rounded=half_up),
        _TIES_AWAY: dict(rounded=half_away),
    },
    forbid=(f"{PACKAGE}.gptq.gptq", f"{PACKAGE}.gptq.inverse_cholesky"),
)


# 3 · AWQ's search


def _search_edges(draw: Draw) -> Iterator[tuple]:
    weight, hessian = draw.randn(4, 6).double(), _hessian(draw, 6)
    even = torch.full((6,), 3.0, dtype=torch.float64)
    yield weight, hessian, even, 4, [0.9, 0.0, 0.5], [1.0]  # alpha changes nothing: the smallest
    yield torch.zeros(2, 6).double(), hessian, even, 4, [0.5, 0.25], [0.7, 0.9]  # no error anywhere: 0.25 and 0.9
    yield weight, hessian, torch.zeros(6).double(), 3, [0.5, 0.0], [0.9, 1.0]  # no input was ever seen
    magnitude = doubles(0.0, 1.0, 5.0, 0.0, 2.0, 30.0)
    yield weight, hessian, magnitude, 3, [1.0], [0.75]  # inputs that are always 0
    yield weight, torch.diag(magnitude), magnitude, 2, [0.0, 0.5, 1.0], [1.0, 0.5]
    with_zeros = torch.cat([weight, torch.zeros(1, 6).double()])
    yield with_zeros, hessian, draw.randn(6).abs().double(), 3, [0.0, 0.3], [1.0]
    v = doubles(1.0, 1.0, 2.0, 4.0)  # numbers halfway between two codes
    yield doubles([3.0, 0.5, 1.5, -0.5]), torch.outer(v, v) + torch.eye(4), even[:4], 3, [0.0], [1.0]


def _search_random(draw: Draw) -> tuple:
    if draw.rng.random() < 0.45:  # two bits and few outputs: the best alpha depends on the range
        x = draw.randn(32, 8).double() * 4.0 ** draw.randn(8).double()
        return draw.randn(2, 8).double(), x.T @ x, x.abs().mean(0), 2, [0.0, 0.25, 0.5, 0.75], [1.0, 0.8, 0.6]
    out, size = draw.randint(1, 8), draw.randint(2, 24)
    x = draw.randn(64, size).double() * 10.0 ** draw.randn(size).double()
    alphas = [round(draw.rng.random(), 2) for _ in range(draw.randint(1, 6))]
    shrinks = [round(0.4 + 0.6 * draw.rng.random(), 2) for _ in range(draw.randint(1, 5))]
    return draw.randn(out, size).double(), x.T @ x, x.abs().mean(0), draw.randint(2, 6), alphas, shrinks


def _explain_search(got, expected, weight, hessian, magnitude, bits, alphas, shrinks) -> str | None:
    errors = errors_of(weight, hessian, magnitude, bits, alphas, shrinks)
    pair = got[0], got[1]
    if pair not in errors:
        return f"alpha and shrink are elements of alphas={alphas} and shrinks={shrinks}."
    if pair == expected[:2]:
        return f"The pair is right; its error is {errors[pair]:.6g}. d = weight - step * code / s, in weight's units."
    return f"alpha={pair[0]}, shrink={pair[1]} has the error {errors[pair]:.6g}; a better pair has {expected[2]:.6g}."


check_search_grid = FunctionChecker(
    "search_grid",
    searched,
    hint="For every pair: scale, round, scale back, and the sum of (d @ hessian) * d.",
    examples=[
        (
            doubles([0.9, 0.1, -0.3, 1.0], [0.2, -0.7, 0.5, -1.2]),
            torch.diag(doubles(100.0, 1.0, 1.0, 0.5)),
            doubles(10.0, 1.0, 1.0, 0.7),
            3,
            [0.0, 0.25, 0.5],
            [1.0, 0.8],
        )
    ],
    edges=_search_edges,
    random=_search_random,
    trials=45,
    returns=("alpha", "shrink", "error"),
    atol=1e-9,
    rtol=1e-6,
    misconceptions={
        "Inputs vary together: it is d H dᵀ, not only its diagonal.": dict(diagonal=True),
        "Equal errors: the smaller alpha.": dict(first=lambda pair: (-pair[0], -pair[1])),
        "Equal errors: the smaller alpha, then the larger shrink.": dict(first=lambda pair: pair),
        "d = weight - rounded / scales: back in the units of the weight.": dict(back=False),
        "0 to the power alpha is 0: an input of magnitude 0 has the scale 1.": dict(unseen=False),
        "The best alpha depends on the range: search both together.": one_after_the_other,
        "L is 2 ** (bits - 1) - 1.": dict(largest=lambda bits: 2 ** (bits - 1)),
        _TIES: dict(rounded=half_up),
        _TIES_AWAY: dict(rounded=half_away),
    },
    explain=_explain_search,
    forbid=(f"{PACKAGE}.awq.search_scales", f"{PACKAGE}.awq.round_clipped"),
)
