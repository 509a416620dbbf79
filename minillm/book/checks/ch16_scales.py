"""Checks of chapter 16: SmoothQuant's alpha, folding. Built in chapter 16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch16_oracle import folded, shared, smoothing, w8a8_errors
from minillm.book.checks.compare import same

PACKAGE = "minillm.quantization"


def doubles(*numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# 4 · one alpha for several products


def _alpha_edges(draw: Draw) -> Iterator[tuple]:
    x = draw.randn(8, 6).double() * doubles(1.0, 1.0, 200.0, 1.0, 1.0, 1.0)
    weights = [draw.randn(5, 6).double(), 30 * draw.randn(3, 6).double()]
    yield x, weights, [0.5, 0.5]
    yield x, weights[:1], [0.75, 0.25]
    yield torch.full((2, 4), 4.0).double(), [torch.eye(4).double()], [0.51, 0.5, 0.49]  # 2 each time: the smallest
    yield x.index_fill(1, torch.tensor([4]), 0), weights, [0.4, 0.8]  # an input that is always 0
    yield x, [weight.index_fill(1, torch.tensor([0]), 0) for weight in weights], [0.3, 0.6]  # a column of zeros


def _alpha_random(draw: Draw) -> tuple:
    size, tokens = draw.randint(2, 16), draw.randint(2, 20)
    x = draw.randn(tokens, size).double() * 10.0 ** draw.randn(size).double()
    weights = [
        draw.randn(draw.randint(1, 6), size).double()
        * 10.0 ** (draw.randn(1).double() + 0.5 * draw.randn(size).double())
        for _ in range(draw.randint(1, 4))
    ]
    return x, weights, [round(draw.rng.random(), 2) for _ in range(draw.randint(2, 7))]


def _explain_alpha(got, expected, x, weights, alphas) -> str | None:
    if got[0] not in alphas:
        return f"alpha is an element of alphas={alphas}."
    worst = [max(w8a8_errors(x, weights, smoothing(x, weights, alpha))) for alpha in (got[0], expected[0])]
    if got[0] == expected[0] or worst[0] <= worst[1] * (1 + 1e-9):
        return None
    return f"With alpha={got[0]} the worst error is {worst[0]:.5g}, and {worst[1]:.5g} is possible."


check_shared_alpha = FunctionChecker(
    "shared_alpha",
    shared,
    hint="One vector of scales for all products; the worst of their errors decides.",
    examples=[
        (
            doubles([1.0, 60.0, -0.5], [0.3, -90.0, 0.7]),
            [doubles([0.5, 0.1, -0.4], [0.2, 0.3, 0.9]), doubles([1.0, -0.2, 0.3])],
            [0.0, 0.5, 1.0],
        )
    ],
    edges=_alpha_edges,
    random=_alpha_random,
    trials=20,
    returns=("alpha", "scales"),
    rtol=1e-9,
    misconceptions={
        "Powers of two: 2 ** round(log2(s)).": dict(power=None),
        "Round log2(s) to the nearest: 2 ** 1.6 becomes 2 ** 2.": dict(power=torch.floor),
        "All products behind the norm share the scales: the largest weight of a column over all of them.": dict(
            readers=slice(1)
        ),
        "The fraction is upside down: s divides the inputs, so it grows with them.": dict(upside_down=True),
        "This alpha has the smallest sum of the errors; the worst product decides.": dict(worst=sum),
        "Smooth with the powers of two, not with the scales before rounding.": dict(judged={"power": None}),
        "Both maxima are at least 1e-5.": dict(least=0.0),
        "Equal errors: the smallest alpha.": dict(tie=max),
    },
    explain=_explain_alpha,
    forbid=(f"{PACKAGE}.smoothquant.smoothing_scales",),
)


# 5 · folding


def _layer(draw: Draw, hidden: int, inner: int, out: int) -> dict[str, Tensor]:
    shapes = {
        "norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "up_bias": (inner,),
        "down": (out, inner),
    }
    return {name: draw.randn(*shape).double() for name, shape in shapes.items()}


def _scales(norm: list[float], down: list[float]) -> dict[str, Tensor]:
    return {"norm": doubles(*norm), "down": doubles(*down)}


def _fold_example(draw: Draw) -> Iterator[tuple]:
    yield _layer(draw, 3, 4, 2), _scales([1.0, 4.0, 2.0], [1.0] * 4)
    yield _layer(draw, 3, 4, 2), _scales([1.0] * 3, [2.0, 1.0, 0.5, 8.0])


def _fold_edges(draw: Draw) -> Iterator[tuple]:
    for norm, down in (([1.0] * 3, [1.0] * 3), ([2.0] * 3, [2.0] * 3), ([1.0, 2.0, 4.0], [8.0, 1.0, 0.25])):
        yield _layer(draw, 3, 3, 3), _scales(norm, down)  # square: nothing but the axis tells them apart
    layer = _layer(draw, 4, 5, 2)
    layer["norm"][1] = 0.0
    yield layer, _scales([3.0, 7.0, 0.1, 1.0], [0.3] * 5)
    yield _layer(draw, 1, 1, 1), _scales([5.0], [0.2])


def _fold_random(draw: Draw) -> tuple:
    hidden, inner = draw.randint(1, 9), draw.randint(1, 12)
    scales = {"norm": 2.0 ** draw.randn(hidden).double(), "down": 2.0 ** draw.randn(inner).double()}
    return _layer(draw, hidden, inner, draw.randint(1, 5)), scales


_FOLD = {
    "norm": "The scales must make the inputs *smaller*. The function is the same both ways round; the inputs are not.",
    "gate": "The columns of gate are multiplied by scales['norm']. Its rows stay: silu(g / t) is not silu(g) / t.",
    "up": "Columns are multiplied by scales['norm'], rows divided by scales['down']: up is linear, so its rows can "
    "take them.",
    "up_bias": "An input of down comes from a row and the bias of up: divide both.",
    "down": "down's columns are multiplied by scales['down'].",
}


def _folded_as(**wrong) -> partial:
    """`folded` with some of its five results computed as `wrong` says, from the layer and both scales."""

    def fold(layer, scales):
        s, t = scales["norm"], scales["down"]
        return folded(layer, scales) | {name: made(layer[name], s, t) for name, made in wrong.items()}

    return partial(fold)


check_fold_mlp = FunctionChecker(
    "fold_mlp",
    folded,
    hint="Divide what computes an input, multiply the column that reads it. What computes the inputs of `down`?",
    examples=_fold_example,
    edges=_fold_edges,
    random=_fold_random,
    trials=20,
    returns="the layer",
    atol=1e-9,
    rtol=1e-9,
    misconceptions={
        _FOLD["norm"]: _folded_as(
            norm=lambda norm, s, t: norm * s, gate=lambda gate, s, t: gate / s, up=lambda up, s, t: up / s / t[:, None]
        ),
        _FOLD["gate"]: _folded_as(gate=lambda gate, s, t: gate * s / t[:, None]),
        "The rows of up make the inputs of down, not those of gate: silu(g / t) is not silu(g) / t.": _folded_as(
            gate=lambda gate, s, t: gate * s / t[:, None], up=lambda up, s, t: up * s, up_bias=lambda bias, s, t: bias
        ),
        _FOLD["up"]: _folded_as(up=lambda up, s, t: up * s),
        _FOLD["up_bias"]: _folded_as(up_bias=lambda bias, s, t: bias),
        _FOLD["down"]: _folded_as(down=lambda down, s, t: down / t),
    },
    explain=lambda got, expected, layer, scales: next(
        hint for name, hint in _FOLD.items() if not same(got[name], expected[name], 1e-9, 1e-9)
    ),
    forbid=tuple(f"{PACKAGE}.folding.{name}" for name in ("fold_into_norm", "fold_into_rows", "scale_columns")),
)
