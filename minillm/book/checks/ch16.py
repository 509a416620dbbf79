"""Checks of chapter 16: a static scale, a column of GPTQ, AWQ's search, SmoothQuant's alpha, folding.
Built in chapter 16.

`ch16_scales` has the first and the last two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch16_oracle import (
    error_of,
    mlp,
    scaled_and_rounded,
    searched,
    settled,
)
from minillm.book.checks.ch16_scales import QUANTIZATION, check_fold_mlp, check_shared_alpha, check_static_int8

__all__ = ["check_fold_mlp", "check_search_grid", "check_settle", "check_shared_alpha", "check_static_int8", "mlp"]

check_settle = Checker(
    "settle",
    hint="Round the column, divide its error by inverse[j, j], subtract row j of the inverse as often from the others.",
    forbid=(f"{QUANTIZATION}.gptq.gptq", f"{QUANTIZATION}.gptq.inverse_cholesky"),
)
check_search_grid = Checker(
    "search_grid",
    hint="For every pair: scale, round, scale back, and the sum of (d @ hessian) * d.",
    forbid=(f"{QUANTIZATION}.awq.search_scales", f"{QUANTIZATION}.awq.round_clipped"),
)


@check_settle.part("example")
def _settle_example(case: Case) -> None:
    hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    _settles(case, torch.tensor([[0.4, 0.4]], dtype=torch.float64), hessian, 0, torch.ones(1, dtype=torch.float64), 3)
    _settles(case, torch.tensor([[0.4, 0.4]], dtype=torch.float64), hessian, 1, torch.ones(1, dtype=torch.float64), 3)


@check_settle.part("edges")
def _settle_edges(case: Case) -> None:
    one = torch.ones(3, dtype=torch.float64)
    # The last column of all.
    _settles(case, case.randn(3, 1).double(), torch.tensor([[2.0]], dtype=torch.float64), 0, one, 3)
    _settles(case, case.randn(3, 4).double(), torch.diag(torch.arange(1.0, 5.0)).double(), 2, one, 1)  # nothing moves
    _settles(
        case, torch.tensor([[0.5, 9.0], [1.5, 0.0], [-2.5, 1.0]], dtype=torch.float64), _hessian(case, 2), 0, one, 7
    )  # ties to even
    _settles(case, 50 * case.randn(3, 5).double(), _hessian(case, 5), 4, one, 3)  # cut off, and the error is large
    _settles(
        case, case.randn(3, 5).double(), _hessian(case, 5), 1, torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64), 7
    )


@check_settle.part("random")
def _settle_random(case: Case) -> None:
    for _ in range(20):
        out, size = case.randint(1, 6), case.randint(2, 12)
        scales = 0.2 + case.randn(out).double().abs()
        _settles(
            case,
            case.randn(out, size).double(),
            _hessian(case, size),
            case.randint(0, size),
            scales,
            case.rng.choice((1, 3, 7)),
        )
    size = 9  # all columns, in a random order, each from what the one before left
    weight, hessian, scales = (
        case.randn(4, size).double(),
        _hessian(case, size),
        torch.full((4,), 0.5, dtype=torch.float64),
    )
    inverse, expected = torch.linalg.inv(hessian), (weight, torch.linalg.inv(hessian))
    while weight.shape[1]:
        column = case.randint(0, weight.shape[1])
        _, *expected = settled(*expected, column, scales, 3)
        _, weight, inverse = case.call(weight, inverse, column, scales, 3)
        case.close(weight, expected[0], f"the weights with {weight.shape[1]} columns left", atol=1e-6, rtol=1e-6)


def _hessian(case: Case, size: int) -> Tensor:
    x = case.randn(40, size).double() + case.randn(40, 1).double()
    return x.T @ x


def _settles(case: Case, weight: Tensor, hessian: Tensor, column: int, scales: Tensor, largest: int) -> None:
    inverse = torch.linalg.inv(hessian)
    got = case.call(weight, inverse, column, scales, largest)
    told = f"for {weight.shape[1]} columns, column={column}, largest={largest}"
    case.true(isinstance(got, tuple) and len(got) == 3, f"the result {told} is not a tuple (codes, weight, inverse)")
    codes, rest, smaller = settled(weight, inverse, column, scales, largest)
    case.is_a(got[0], torch.int8, "codes")
    case.equal(
        got[0].long(),
        codes.long(),
        f"codes {told}\n  codes",
        hint="w / scale to the nearest whole number, ties to even, cut off at ±largest.",
    )
    case.equal(
        list(got[1].shape),
        list(rest.shape),
        f"the shape of the weights {told}",
        hint="The settled column is gone; the others keep their order.",
    )
    case.close(
        got[1],
        rest,
        f"the weights that are left, {told}",
        atol=1e-8,
        rtol=1e-8,
        hint=_settle_hint(got[1], weight, inverse, column, codes * scales),
    )
    keep = [j for j in range(weight.shape[1]) if j != column]
    plain = (
        len(keep)
        and torch.allclose(got[2], inverse[keep][:, keep])
        and not torch.allclose(smaller, inverse[keep][:, keep])
    )
    hint = (
        "A row and a column of the inverse are not the inverse of what is left: subtract the outer product first."
        if plain
        else None
    )
    case.close(got[2], smaller, f"the inverse that is left, {told}", atol=1e-8, rtol=1e-6, hint=hint)


def _settle_hint(got: Tensor, weight: Tensor, inverse: Tensor, column: int, rounded: Tensor) -> str | None:
    error, row = (weight[:, column] - rounded)[:, None], inverse[column]
    keep = [j for j in range(weight.shape[1]) if j != column]
    mistakes = {
        "The others do not move at all.": weight,
        "They move in the wrong direction: the column moved by -error, so subtract.": weight
        + error / row[column] * row,
        "Divide the error by inverse[column, column].": weight - error * row,
        (
            "That is the square root's row, as with Cholesky; with the inverse itself divide by inverse[column, "
            "column], once."
        ): weight - error / row[column].sqrt() * row,
        "Row 0 of the inverse belongs to column 0; take that of the column you settled.": weight
        - error / inverse[0, 0] * inverse[0],
    }
    return next((hint for hint, value in mistakes.items() if torch.allclose(got, value[:, keep])), None)


@check_search_grid.part("example")
def _search_example(case: Case) -> None:
    weight = torch.tensor([[0.9, 0.1, -0.3, 1.0], [0.2, -0.7, 0.5, -1.2]], dtype=torch.float64)
    _searches(
        case,
        weight,
        torch.diag(torch.tensor([100.0, 1.0, 1.0, 0.5])).double(),
        torch.tensor([10.0, 1.0, 1.0, 0.7]).double(),
        3,
        [0.0, 0.25, 0.5],
        [1.0, 0.8],
    )


@check_search_grid.part("edges")
def _search_edges(case: Case) -> None:
    weight, hessian = case.randn(4, 6).double(), _hessian(case, 6)
    even = torch.full((6,), 3.0, dtype=torch.float64)
    _searches(case, weight, hessian, even, 4, [0.9, 0.0, 0.5], [1.0])  # alpha changes nothing: the smallest
    # No error anywhere: 0.25 and 0.9.
    _searches(case, torch.zeros(2, 6).double(), hessian, even, 4, [0.5, 0.25], [0.7, 0.9])
    _searches(case, weight, hessian, torch.zeros(6).double(), 3, [0.5, 0.0], [0.9, 1.0])  # no input was ever seen
    magnitude = torch.tensor([0.0, 1.0, 5.0, 0.0, 2.0, 30.0], dtype=torch.float64)
    _searches(case, weight, hessian, magnitude, 3, [1.0], [0.75])  # inputs that are always 0
    _searches(case, weight, torch.diag(magnitude), magnitude, 2, [0.0, 0.5, 1.0], [1.0, 0.5])
    _searches(
        case,
        torch.cat([weight, torch.zeros(1, 6).double()]),
        hessian,
        case.randn(6).abs().double(),
        3,
        [0.0, 0.3],
        [1.0],
    )


@check_search_grid.part("random")
def _search_random(case: Case) -> None:
    for _ in range(20):  # two bits and few outputs: the best alpha depends on the range
        x = case.randn(32, 8).double() * 4.0 ** case.randn(8).double()
        _searches(case, case.randn(2, 8).double(), x.T @ x, x.abs().mean(0), 2, [0.0, 0.25, 0.5, 0.75], [1.0, 0.8, 0.6])
    for _ in range(25):
        out, size = case.randint(1, 8), case.randint(2, 24)
        spread = 10.0 ** case.randn(size).double()
        x = case.randn(64, size).double() * spread
        alphas = [round(case.rng.random(), 2) for _ in range(case.randint(1, 6))]
        shrinks = [round(0.4 + 0.6 * case.rng.random(), 2) for _ in range(case.randint(1, 5))]
        _searches(case, case.randn(out, size).double(), x.T @ x, x.abs().mean(0), case.randint(2, 6), alphas, shrinks)


def _searches(
    case: Case, weight: Tensor, hessian: Tensor, magnitude: Tensor, bits: int, alphas: list[float], shrinks: list[float]
) -> None:
    got = case.call(weight, hessian, magnitude, bits, alphas, shrinks)
    told = f"for {list(weight.shape)}, bits={bits}, alphas={alphas}, shrinks={shrinks}"
    case.true(isinstance(got, tuple) and len(got) == 3, f"the result {told} is not a tuple (alpha, shrink, error)")
    errors = searched(weight, hessian, magnitude, bits, alphas, shrinks)
    alpha, shrink, error = float(got[0]), float(got[1]), float(got[2])
    case.true((alpha, shrink) in errors, f"alpha={alpha}, shrink={shrink} is not a candidate {told}")
    least = min(errors.values())
    true_error = errors[alpha, shrink]
    tolerance = 1e-9 * max(1.0, least)
    if not math.isclose(error, true_error, rel_tol=1e-6, abs_tol=1e-9):
        unscaled = error_of(
            weight, scaled_and_rounded(weight, magnitude, bits, alpha, shrink), torch.diag(hessian.diagonal())
        )
        hint = (
            "Inputs vary together: it is d H dᵀ, not only its diagonal."
            if math.isclose(error, unscaled, rel_tol=1e-6)
            else None
        )
        case.fail(
            f"the error of alpha={alpha}, shrink={shrink} is {true_error:.6g}, not {error:.6g}, {told}",
            hint=hint or "d = weight - rounded / scales: back in the units of the weight.",
        )
    case.true(
        true_error <= least + tolerance,
        (
            f"alpha={alpha}, shrink={shrink} has the error {true_error:.6g}, "
            f"and a better pair exists ({least:.6g}), {told}"
        ),
    )
    tied = [pair for pair, value in errors.items() if value <= least + tolerance]
    first = min(tied, key=lambda pair: (pair[0], -pair[1]))
    case.equal(
        (alpha, shrink), first, f"the pair {told}", hint="Equal errors: the smaller alpha, then the larger shrink."
    )
