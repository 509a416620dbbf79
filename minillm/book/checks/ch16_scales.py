"""Checks of chapter 16: a static scale, SmoothQuant's alpha, folding. Built in chapter 16."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch16_oracle import (
    folded,
    mlp,
    smoothing,
    static_codes,
    w8a8_errors,
)

QUANTIZATION = "minillm.quantization"
check_static_int8 = Checker(
    "static_int8",
    hint="Sort the magnitudes of the calibration text, leave out the largest `spare`, divide by 127.",
    forbid=(f"{QUANTIZATION}.activations.quantize_activations",),
)
check_shared_alpha = Checker(
    "shared_alpha",
    hint="One vector of scales for all products; the worst of their errors decides.",
    forbid=(f"{QUANTIZATION}.smoothquant.smoothing_scales",),
)
check_fold_mlp = Checker(
    "fold_mlp",
    hint="What makes an input is divided, the column that reads it multiplied. Who makes the inputs of `down`?",
    forbid=tuple(f"{QUANTIZATION}.folding.{name}" for name in ("fold_into_norm", "fold_into_rows", "scale_columns")),
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
