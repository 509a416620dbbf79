"""Questions of chapter 16, calibrated quantization."""

from __future__ import annotations

import torch

from minillm.course.questions.question import Bank, Draw, Variant
from minillm.quantization.smoothquant import smoothing_scales
from minillm.quantization.statistics import output_error

BANK = Bank()


@BANK.computed(
    16,
    "say what a rounded weight costs at the output",
    title="What rounding costs at the output",
    minutes=6,
    tolerance=0.01,
    within=(20, 200),
    rubric=("the two errors", "the quadratic form with its cross term", "the error"),
)
def rounding_error(draw: Draw) -> Variant:
    def cost(drawn: tuple, crossed: bool = True) -> float:
        weights, rounded, (a, b, c) = drawn
        hessian = torch.tensor([[a, b * crossed], [b * crossed, c]], dtype=torch.float32)
        return float(output_error(torch.tensor([weights]), torch.tensor([rounded]), hessian)[0])

    def make() -> tuple:
        weights = [n / 10 for n in draw.numbers(2, 11, 59)]
        return (
            weights,
            [float(round(w)) for w in weights],
            (draw.number(110, 490), draw.number(60, 105), draw.number(110, 490)),
        )

    drawn = draw.until(make, lambda d: 25 < cost(d) < 180 and all(0.2 < abs(w - r) < 0.45 for w, r in zip(*d[:2]))
                       and abs(cost(d) - cost(d, False)) > 5)  # fmt: skip
    (w1, w2), (r1, r2), (a, b, c) = drawn
    e1, e2 = r1 - w1, r2 - w2
    return Variant(
        f"Two weights of an output, {w1} and {w2}, are rounded to {r1:g} and {r2:g}. Over the calibration text the "
        f"inputs have the sums of squares {a} and {c}, and the sum of products {b}. What is the sum of squared errors "
        "of the output?",
        cost(drawn),
        (
            f"Errors: {e1:+.1f} and {e2:+.1f}.",
            f"$e^T H e$ = {a} · {e1 * e1:.2f} + 2 · {b} · ({e1 * e2:+.2f}) + {c} · {e2 * e2:.2f}.",
            f"Together {cost(drawn):.2f}.",
        ),
        {"the inputs go together: there is a cross term": cost(drawn, False)},
    )


@BANK.computed(
    16,
    "derive GPTQ's update",
    title="GPTQ's next weight",
    minutes=6,
    tolerance=0.01,
    within=(1, 9),
    rubric=("the error of the first weight", "the ratio of the inverse's entries", "the sign, and the weight"),
)
def gptq_update(draw: Draw) -> Variant:
    def make() -> tuple[float, float, int, int]:
        first, second = (n / 10 for n in draw.numbers(2, 21, 69))
        return first, second, draw.number(20, 60), draw.number(12, 19)

    def updated(drawn: tuple, sign: int = -1) -> float:
        first, second, diagonal, cross = drawn
        return second + sign * (first - round(first)) * -cross / diagonal

    drawn = draw.until(make, lambda d: 0.25 < abs(d[0] - round(d[0])) < 0.45 and abs(updated(d) - d[1]) > 0.08)
    first, second, diagonal, cross = drawn
    error = first - round(first)
    return Variant(
        f"GPTQ rounds the first of two weights, {first}, to {round(first)}; the second is {second}. The inverse of "
        f"the Hessian has the entries $(H^{{-1}})_{{11}} = {diagonal / 10}$ and $(H^{{-1}})_{{12}} = {-cross / 10}$. "
        "What is the second weight after the update, before it is rounded?",
        updated(drawn),
        (
            f"Error: {first} − {round(first)} = {error:+.1f}.",
            f"$(H^{{-1}})_{{12}} / (H^{{-1}})_{{11}}$ = {-cross / diagonal:.4f}.",
            f"{second} − ({error:+.1f}) · ({-cross / diagonal:.4f}) = {updated(drawn):.3f}.",
        ),
        {"the correction has the other sign": updated(drawn, 1)},
    )


@BANK.computed(
    16,
    "multiply in 8 bits on both sides",
    title="A smoothing scale",
    minutes=4,
    tolerance=0.01,
    within=(4, 40),
    rubric=("the power of the inputs", "the power of the weights", "the ratio"),
)
def smoothing_scale(draw: Draw) -> Variant:
    def scale(drawn: tuple, share: float) -> float:
        inputs, weight, _ = drawn
        return float(smoothing_scales(torch.tensor([float(inputs)]), torch.tensor([[weight / 100]]), share)[0])

    drawn = draw.until(
        lambda: (draw.number(21, 89), draw.number(12, 89), draw.of(0.25, 0.4, 0.6, 0.75)),
        lambda d: 4.5 < scale(d, d[2]) < 36 and abs(scale(d, d[2]) / scale(d, 1 - d[2]) - 1) > 0.1,
    )
    inputs, weight, alpha = drawn
    answer = scale(drawn, alpha)
    return Variant(
        f"The largest magnitude of an input channel over the calibration text is {inputs}, that of its column of "
        f"weights {weight / 100}. By which scale does SmoothQuant with $α = {alpha}$ divide the channel?",
        answer,
        (
            f"${inputs}^{{{alpha}}} = {inputs**alpha:.3f}$.",
            f"${weight / 100}^{{{1 - alpha:g}}} = {(weight / 100) ** (1 - alpha):.3f}$.",
            f"{inputs**alpha:.3f} / {(weight / 100) ** (1 - alpha):.3f} = {answer:.3f}.",
        ),
        {"α belongs to the inputs": scale(drawn, 1 - alpha)},
    )


BANK.written(
    16,
    "repair a model that outlier channels have ruined",
    "Where the difficulty goes",
    "SmoothQuant divides activation channels by scales and multiplies columns of weights by them. Why does the output "
    "not change before rounding, and why is the rounded result better? What happens at α = 1?",
    "The factor and its inverse cancel in the product. Activations with outlier channels share a scale by token, "
    "which the outliers stretch; weights can take some of the range. With α = 1 all of the difficulty moves into the "
    "weights, which then have outliers.",
    rubric=(
        "scale and inverse cancel",
        "outliers stretch the activations' scale",
        "weights have room for a part of it",
        "α = 1 ruins the weights",
    ),
)
