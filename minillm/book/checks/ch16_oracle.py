"""What the checks of chapter 16 compare with: references, with switches for known mistakes. Built in chapter 16."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Errors = dict[tuple[float, float], float]


def half_up(x: Tensor) -> Tensor:
    """Rounding as it is taught in school: ties upwards."""
    return (x + 0.5).floor()


def half_away(x: Tensor) -> Tensor:
    """Ties away from zero."""
    return x.sign() * (x.abs() + 0.5).floor()


def to_int8(places: Tensor) -> Tensor:
    """To the nearest code of a symmetric grid."""
    return places.clamp(-127, 127).to(torch.int8)


def static_codes(
    calibration: Tensor,
    x: Tensor,
    spare: int,
    *,
    order: Callable[[Tensor], Tensor] = lambda seen: seen.abs().flatten().sort(descending=True).values,
    of_zero: float = 1.0,
    rounded: Callable[[Tensor], Tensor] = torch.round,
    code: Callable[[Tensor], Tensor] = to_int8,
    beyond: Callable[[Tensor], Tensor] = lambda exact: exact.round().abs() > 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the scale and which tokens were cut off."""
    magnitudes = order(calibration)
    scale = magnitudes[min(spare, len(magnitudes) - 1)] / 127
    scale = torch.full_like(scale, of_zero) if scale == 0 else scale
    exact = x / scale
    return code(rounded(exact)), scale, beyond(exact).any(1)


Moves = Callable[[Tensor, Tensor, int], Tensor]  # error of the column, inverse, column -> what the weights lose


def _made_up_for(error: Tensor, inverse: Tensor, column: int) -> Tensor:
    return torch.outer(error / inverse[column, column], inverse[column])


def settled(
    weight: Tensor,
    inverse: Tensor,
    column: int,
    scales: Tensor,
    largest: int,
    *,
    moves: Moves = _made_up_for,
    rounded: Callable[[Tensor], Tensor] = torch.round,
    lowest: Callable[[int], int] = lambda largest: -largest,
    cut: bool = True,
    cut_is_error: bool = True,
    without: bool = True,
    order: Callable[[list[int], int], list[int]] = lambda rest, column: rest,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the column, the other columns afterwards, and the inverse that they are left with."""
    places = rounded(weight[:, column] / scales)
    codes = places.clamp(lowest(largest), largest) if cut else places
    error = weight[:, column] - (codes if cut_is_error else places) * scales
    moved = weight - moves(error, inverse, column)
    gone = torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    rest = order([j for j in range(weight.shape[1]) if j != column], column)
    return codes.to(torch.int8), moved[:, rest], (inverse - gone if without else inverse)[rest][:, rest]


def _on_grid(
    weight: Tensor, largest: int, shrink: float = 1.0, rounded: Callable[[Tensor], Tensor] = torch.round
) -> Tensor:
    steps = shrink * weight.abs().amax(1, keepdim=True) / largest
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    return steps * rounded(weight / steps).clamp(-largest, largest)


def scaled_and_rounded(
    weight: Tensor,
    magnitude: Tensor,
    bits: int,
    alpha: float,
    shrink: float,
    *,
    back: bool = True,
    rounded: Callable[[Tensor], Tensor] = torch.round,
    largest: Callable[[int], int] = lambda bits: 2 ** (bits - 1) - 1,
    unseen: bool = True,
) -> Tensor:
    """What the product multiplies with, in the units of `weight`."""
    ratio = magnitude / magnitude.max() if magnitude.max() > 0 or not unseen else torch.ones_like(magnitude)
    scales = (torch.where(magnitude > 0, ratio, torch.ones_like(ratio)) if unseen else ratio) ** alpha
    made = _on_grid(weight * scales, largest(bits), shrink, rounded)
    return made / scales if back else made


def whole_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    d = weight - approximation
    return float(((d @ hessian) * d).sum())


def errors_of(
    weight: Tensor, hessian: Tensor, magnitude: Tensor, bits: int, alphas: list[float], shrinks: list[float], **how
) -> Errors:
    """The error of each candidate; `how` as in `scaled_and_rounded`."""
    return {
        (a, s): whole_error(weight, scaled_and_rounded(weight, magnitude, bits, a, s, **how), hessian)
        for a in alphas
        for s in shrinks
    }


def searched(
    weight: Tensor,
    hessian: Tensor,
    magnitude: Tensor,
    bits: int,
    alphas: list[float],
    shrinks: list[float],
    *,
    diagonal: bool = False,
    first: Callable[[tuple[float, float]], tuple] = lambda pair: (pair[0], -pair[1]),
    **how,
) -> tuple[float, float, float]:
    """(alpha, shrink, error) of the best; first: what decides between equal errors."""
    hessian = torch.diag(hessian.diagonal()) if diagonal else hessian
    errors = errors_of(weight, hessian, magnitude, bits, alphas, shrinks, **how)
    least = min(errors.values())
    tied = [pair for pair, error in errors.items() if error <= least + 1e-9 * max(1.0, least)]
    best = min(tied or errors, key=first)
    return *best, errors[best]


def one_after_the_other(weight, hessian, magnitude, bits, alphas, shrinks) -> tuple[float, float, float]:
    """The best alpha for the largest range, then the best range for it."""
    alpha = searched(weight, hessian, magnitude, bits, alphas, [max(shrinks)])[0]
    return searched(weight, hessian, magnitude, bits, [alpha], shrinks)


def smoothing(
    x: Tensor,
    weights: list[Tensor],
    alpha: float,
    *,
    readers: slice = slice(None),
    power: Callable[[Tensor], Tensor] | None = torch.round,
    least: float = 1e-5,
) -> Tensor:
    """SmoothQuant's scales; power: how their logarithm becomes a whole number, if it does."""
    columns = torch.cat(weights[readers]).abs().amax(0).clamp(min=least)
    scales = x.abs().amax(0).clamp(min=least) ** alpha / columns ** (1 - alpha)
    return scales if power is None else torch.exp2(power(scales.log2()))


def w8a8_errors(x: Tensor, weights: list[Tensor], scales: Tensor) -> list[float]:
    """Relative error of each product, both sides in 8 bits."""
    rounded = _on_grid(x / scales, 127)
    return [float((rounded @ _on_grid(w * scales, 127).T - x @ w.T).norm() / (x @ w.T).norm()) for w in weights]


def shared(
    x: Tensor,
    weights: list[Tensor],
    alphas: list[float],
    *,
    worst: Callable[[list[float]], float] = max,
    tie: Callable[[list[float]], float] = min,
    upside_down: bool = False,
    judged: dict | None = None,
    **how,
) -> tuple[float, Tensor]:
    """(alpha, scales) of the best; judged: switches of `smoothing` for the error alone, how: for both."""

    def scales(alpha: float, **more) -> Tensor:
        found = smoothing(x, weights, alpha, **(how | more))
        return 1 / found if upside_down else found

    errors = {alpha: worst(w8a8_errors(x, weights, scales(alpha, **(judged or {})))) for alpha in alphas}
    least = min(errors.values())
    tied = [alpha for alpha, error in errors.items() if error <= least * (1 + 1e-9)]
    alpha = tie(tied or alphas)
    return alpha, scales(alpha)


def mlp(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """The half of a decoder layer that the last exercise folds scales into."""
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer["norm"]
    up = normed @ layer["up"].T + layer["up_bias"]
    return (F.silu(normed @ layer["gate"].T) * up) @ layer["down"].T


def folded(layer: dict[str, Tensor], scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of gate and up divided by scales["norm"], those of down by scales["down"]."""
    s, t = scales["norm"], scales["down"]
    return {
        "norm": layer["norm"] / s,
        "gate": layer["gate"] * s,
        "up": layer["up"] * s / t[:, None],
        "up_bias": layer["up_bias"] / t,
        "down": layer["down"] * t,
    }
