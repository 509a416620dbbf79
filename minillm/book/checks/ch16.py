"""Checks of chapter 16: a static scale, a column of GPTQ, AWQ's search, SmoothQuant's alpha, folding.
Built in chapter 16."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch16_oracle import (
    error_of,
    folded,
    mlp,
    scaled_and_rounded,
    searched,
    settled,
    smoothing,
    static_codes,
    w8a8_errors,
)

__all__ = ["check_fold_mlp", "check_search_grid", "check_settle", "check_shared_alpha", "check_static_int8", "mlp"]

_QUANTIZATION = "minillm.quantization"
check_static_int8 = Checker(
    "static_int8",
    hint="Sort the magnitudes of the calibration text, leave out the largest `spare`, divide by 127.",
    forbid=(f"{_QUANTIZATION}.activations.quantize_activations",),
)
check_settle = Checker(
    "settle",
    hint="Round the column, divide its error by inverse[j, j], subtract row j of the inverse as often from the others.",
    forbid=(f"{_QUANTIZATION}.gptq.gptq", f"{_QUANTIZATION}.gptq.inverse_cholesky"),
)
check_search_grid = Checker(
    "search_grid",
    hint="For every pair: scale, round, scale back, and the sum of (d @ hessian) * d.",
    forbid=(f"{_QUANTIZATION}.awq.search_scales", f"{_QUANTIZATION}.awq.round_clipped"),
)
check_shared_alpha = Checker(
    "shared_alpha",
    hint="One vector of scales for all products; the worst of their errors decides.",
    forbid=(f"{_QUANTIZATION}.smoothquant.smoothing_scales",),
)
check_fold_mlp = Checker(
    "fold_mlp",
    hint="What makes an input is divided, the column that reads it multiplied. Who makes the inputs of `down`?",
    forbid=tuple(f"{_QUANTIZATION}.folding.{name}" for name in ("fold_into_norm", "fold_into_rows", "scale_columns")),
)


@check_static_int8.part("example")
def _static_example(case: Case) -> None:
    calibration = torch.tensor([[1.0, -12.7, 3.0], [100.0, 2.0, -5.0]])
    _rounds(case, calibration, torch.tensor([[1.0, -0.26, 12.6], [13.0, 0.0, 2.0]]), 1)


@check_static_int8.part("edges")
def _static_edges(case: Case) -> None:
    x = torch.tensor([[127.0, -127.0], [127.4, -127.4], [127.6, 0.0], [0.0, -300.0], [0.5, 1.5]])
    _rounds(case, torch.tensor([[-127.0, 1.0]]), x, 0)  # the largest magnitude is negative
    _rounds(case, torch.tensor([[-127.0, 1.0]]), x, 1)
    _rounds(case, torch.tensor([[5.0, -5.0, 1.0]]), case.randn(4, 4), 1)  # equal ones count one by one
    _rounds(case, torch.tensor([[5.0, 5.0, 5.0, 1.0]]), case.randn(4, 4), 2)
    _rounds(case, torch.zeros(3, 2), x, 0)  # a scale of 1
    _rounds(case, case.randn(6, 3), torch.zeros(0, 3), 2)
    _rounds(case, case.randn(4, 3), 1e6 * case.randn(5, 3), 0)  # far outside: no code may wrap


@check_static_int8.part("random")
def _static_random(case: Case) -> None:
    for _ in range(40):
        size = case.randint(1, 20)
        calibration = case.randn(case.randint(1, 30), size) * 10.0 ** case.randint(-2, 3)
        x = case.randn(case.randint(1, 12), size) * calibration.abs().max()
        _rounds(case, calibration, x, case.randint(0, calibration.numel()))


def _rounds(case: Case, calibration: Tensor, x: Tensor, spare: int) -> None:
    got = case.call(calibration, x, spare)
    told = f"for {calibration.numel()} numbers of calibration, spare={spare}"
    case.true(isinstance(got, tuple) and len(got) == 3, f"the result {told} is not a tuple (codes, scale, cut_off)")
    codes, scale, cut = static_codes(calibration, x, spare)
    case.is_a(got[0], torch.int8, "codes")
    signed = calibration.flatten().sort(descending=True).values[spare] / 127
    wrong = [
        (
            "Magnitudes count: -127 is larger than 1.",
            signed != scale and torch.allclose(torch.as_tensor(got[1]).float(), signed),
        )
    ]
    distinct = calibration.abs().unique().flip(0) / 127
    if spare < len(distinct) < calibration.numel():
        wrong.append(
            ("Equal magnitudes count one by one.", torch.allclose(torch.as_tensor(got[1]).float(), distinct[spare]))
        )
    if calibration.numel() > spare + 1:
        further = static_codes(calibration, x, spare + 1)[1]
        wrong.append(
            (
                "One too many was left out: with spare=0 the largest itself counts.",
                torch.allclose(torch.as_tensor(got[1]).float(), further),
            )
        )
    hint = (
        "With all magnitudes 0 the scale is 1."
        if calibration.abs().max() == 0
        else next((text for text, hit in wrong if hit), None)
    )
    case.close(torch.as_tensor(got[1]).float(), scale, f"the scale {told}", rtol=1e-5, atol=0.0, hint=hint)
    below = (got[0].long() == -128).any() and "No code is -128: the grid is symmetric."
    case.equal(
        got[0].long(),
        codes.long(),
        f"codes {told}\n  codes",
        hint=below or "Beyond the grid a number is cut off at 127 or -127; as an int8 it would wrap around.",
    )
    case.equal(
        torch.as_tensor(got[2]),
        cut,
        f"which tokens were cut off, {told}",
        hint="A token is cut off if, rounded, one of its numbers lies beyond ±127; exactly 127 is not.",
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


@check_shared_alpha.part("example")
def _alpha_example(case: Case) -> None:
    x = torch.tensor([[1.0, 60.0, -0.5], [0.3, -90.0, 0.7]], dtype=torch.float64)
    weights = [
        torch.tensor([[0.5, 0.1, -0.4], [0.2, 0.3, 0.9]], dtype=torch.float64),
        torch.tensor([[1.0, -0.2, 0.3]], dtype=torch.float64),
    ]
    _smooths(case, x, weights, [0.0, 0.5, 1.0])


@check_shared_alpha.part("edges")
def _alpha_edges(case: Case) -> None:
    x = case.randn(8, 6).double() * torch.tensor([1.0, 1.0, 200.0, 1.0, 1.0, 1.0]).double()
    weights = [case.randn(5, 6).double(), 30 * case.randn(3, 6).double()]
    _smooths(case, x, weights, [0.5, 0.5])
    _smooths(case, x, weights[:1], [0.75, 0.25])
    _smooths(case, x, weights, [0.501, 0.5, 0.499])  # the same powers of two: the smallest alpha
    dead = x.index_fill(1, torch.tensor([4]), 0)
    _smooths(case, dead, weights, [0.4, 0.8])  # an input that is always 0
    hollow = [weights[0].index_fill(1, torch.tensor([0]), 0), weights[1].index_fill(1, torch.tensor([0]), 0)]
    _smooths(case, x, hollow, [0.3, 0.6])  # a column of zeros


@check_shared_alpha.part("random")
def _alpha_random(case: Case) -> None:
    for _ in range(20):
        size, tokens = case.randint(2, 16), case.randint(2, 20)
        x = case.randn(tokens, size).double() * 10.0 ** case.randn(size).double()
        weights = [
            case.randn(case.randint(1, 6), size).double()
            * 10.0 ** (case.randn(1).double() + 0.5 * case.randn(size).double())
            for _ in range(case.randint(1, 4))
        ]
        _smooths(case, x, weights, [round(case.rng.random(), 2) for _ in range(case.randint(2, 7))])


def _smooths(case: Case, x: Tensor, weights: list[Tensor], alphas: list[float]) -> None:
    got = case.call(x, weights, alphas)
    told = f"for {list(x.shape)} inputs, {len(weights)} products, alphas={alphas}"
    case.true(isinstance(got, tuple) and len(got) == 2, f"the result {told} is not a tuple (alpha, scales)")
    alpha = float(got[0])
    case.true(alpha in alphas, f"alpha={alpha} is not a candidate {told}")
    scales = smoothing(x, weights, alpha)
    mistakes = {
        "Powers of two: 2 ** round(log2(s)).": smoothing(x, weights, alpha, powers=False),
        "All products behind the norm share the scales: the largest weight of a column over all of them.": smoothing(
            x, weights, alpha, all_products=False
        ),
        "Upside down: s divides the inputs, so it grows with them.": 1 / scales,
    }
    given = torch.as_tensor(got[1]).double()
    hint = next(
        (
            text
            for text, value in mistakes.items()
            if given.shape == value.shape and torch.allclose(given, value) and not torch.allclose(value, scales)
        ),
        None,
    )
    case.close(given, scales, f"the scales for alpha={alpha} {told}", rtol=1e-6, atol=0.0, hint=hint)
    worst = {a: max(w8a8_errors(x, weights, smoothing(x, weights, a))) for a in alphas}
    least = min(worst.values())
    sums = {a: sum(w8a8_errors(x, weights, smoothing(x, weights, a))) for a in alphas}
    hint = (
        "That is the least sum of the errors; the worst product decides."
        if alpha == min(alphas, key=sums.get)
        else None
    )
    case.true(
        worst[alpha] <= least * (1 + 1e-9),
        f"with alpha={alpha} the worst error is {worst[alpha]:.5g}, and {least:.5g} is possible, {told}",
        hint=hint,
    )
    first = min(a for a, value in worst.items() if value <= least * (1 + 1e-9))
    case.equal(alpha, first, f"alpha {told}", hint="Equal errors: the smallest alpha.")


@check_fold_mlp.part("example")
def _fold_example(case: Case) -> None:
    _folds(
        case, _layer(case, 3, 4, 2), {"norm": torch.tensor([1.0, 4.0, 2.0]).double(), "down": torch.ones(4).double()}
    )
    _folds(
        case,
        _layer(case, 3, 4, 2),
        {"norm": torch.ones(3).double(), "down": torch.tensor([2.0, 1.0, 0.5, 8.0]).double()},
    )


@check_fold_mlp.part("edges")
def _fold_edges(case: Case) -> None:
    ones = {"norm": torch.ones(3).double(), "down": torch.ones(3).double()}
    _folds(case, _layer(case, 3, 3, 3), ones)
    # Square: nothing but the axis tells them apart.
    _folds(case, _layer(case, 3, 3, 3), {name: s * 2 for name, s in ones.items()})
    _folds(
        case,
        _layer(case, 3, 3, 3),
        {"norm": torch.tensor([1.0, 2.0, 4.0]).double(), "down": torch.tensor([8.0, 1.0, 0.25]).double()},
    )
    layer = _layer(case, 4, 5, 2)
    layer["norm"][1] = 0.0
    _folds(case, layer, {"norm": torch.tensor([3.0, 7.0, 0.1, 1.0]).double(), "down": torch.full((5,), 0.3).double()})
    _folds(case, _layer(case, 1, 1, 1), {"norm": torch.tensor([5.0]).double(), "down": torch.tensor([0.2]).double()})


@check_fold_mlp.part("random")
def _fold_random(case: Case) -> None:
    for _ in range(20):
        hidden, inner = case.randint(1, 9), case.randint(1, 12)
        scales = {"norm": 2.0 ** case.randn(hidden).double(), "down": 2.0 ** case.randn(inner).double()}
        _folds(case, _layer(case, hidden, inner, case.randint(1, 5)), scales)


def _layer(case: Case, hidden: int, inner: int, out: int) -> dict[str, Tensor]:
    shapes = {
        "norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "up_bias": (inner,),
        "down": (out, inner),
    }
    return {name: case.randn(*shape).double() for name, shape in shapes.items()}


def _folds(case: Case, layer: dict[str, Tensor], scales: dict[str, Tensor]) -> None:
    got = case.call(layer, scales)
    case.true(isinstance(got, dict) and set(got) == set(layer), "the result is not a dict with the layer's five names")
    expected = folded(layer, scales)
    x = case.randn(6, len(layer["norm"])).double()
    hints = {
        "norm": (
            "The inputs shall become *smaller* by the scales. The function is the same both ways round; "
            "the inputs are not."
        ),
        "gate": "gate is multiplied where its inputs were divided. Its rows stay: silu(g / t) is not silu(g) / t.",
        "up": (
            "Columns are multiplied by scales['norm'], rows divided by scales['down']: "
            "up is linear, so its rows can carry that."
        ),
        "up_bias": "What makes an input of down is row and bias of up; both are divided.",
        "down": "down's columns are multiplied by scales['down'].",
    }
    for name in layer:
        case.close(got[name], expected[name], name, atol=1e-9, rtol=1e-9, hint=hints[name])
    case.close(mlp(got, x), mlp(layer, x), "what the layer computes", atol=1e-7, rtol=1e-7)
