"""What the checks of chapter 16 compare with. Built in chapter 16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def static_codes(calibration: Tensor, x: Tensor, spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the scale and which tokens were cut off."""
    scale = calibration.abs().flatten().sort(descending=True).values[spare] / 127
    scale = torch.ones_like(scale) if scale == 0 else scale
    places = (x / scale).round()
    return places.clamp(-127, 127).to(torch.int8), scale, (places.abs() > 127).any(1)


def settled(
    weight: Tensor, inverse: Tensor, column: int, scales: Tensor, largest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the column, the other columns afterwards, and the inverse that they are left with."""
    codes = (weight[:, column] / scales).round().clamp(-largest, largest)
    error = weight[:, column] - codes * scales
    moved = weight - torch.outer(error / inverse[column, column], inverse[column])
    smaller = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    rest = [j for j in range(weight.shape[1]) if j != column]
    return codes.to(torch.int8), moved[:, rest], smaller[rest][:, rest]


def scaled_and_rounded(weight: Tensor, magnitude: Tensor, bits: int, alpha: float, shrink: float) -> Tensor:
    """What the product multiplies with, in the units of `weight`."""
    ratio = magnitude / magnitude.max() if magnitude.max() > 0 else torch.ones_like(magnitude)
    scales = torch.where(magnitude > 0, ratio, torch.ones_like(ratio)) ** alpha
    return _on_grid(weight * scales, 2 ** (bits - 1) - 1, shrink) / scales


def _on_grid(weight: Tensor, largest: int, shrink: float = 1.0) -> Tensor:
    steps = shrink * weight.abs().amax(1, keepdim=True) / largest
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    return steps * (weight / steps).round().clamp(-largest, largest)


def error_of(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    d = weight - approximation
    return float(((d @ hessian) * d).sum())


def searched(
    weight: Tensor, hessian: Tensor, magnitude: Tensor, bits: int, alphas: list[float], shrinks: list[float]
) -> dict[tuple[float, float], float]:
    """The error of each candidate."""
    return {
        (a, s): error_of(weight, scaled_and_rounded(weight, magnitude, bits, a, s), hessian)
        for a in alphas
        for s in shrinks
    }


def smoothing(x: Tensor, weights: list[Tensor], alpha: float, all_products: bool = True, powers: bool = True) -> Tensor:
    """SmoothQuant's scales, rounded to powers of two."""
    readers = weights if all_products else weights[:1]
    columns = torch.cat(readers).abs().amax(0).clamp(min=1e-5)
    scales = x.abs().amax(0).clamp(min=1e-5) ** alpha / columns ** (1 - alpha)
    return torch.exp2(scales.log2().round()) if powers else scales


def w8a8_errors(x: Tensor, weights: list[Tensor], scales: Tensor) -> list[float]:
    """Relative error of each product, both sides in 8 bits."""
    rounded = _on_grid(x / scales, 127)
    return [float((rounded @ _on_grid(w * scales, 127).T - x @ w.T).norm() / (x @ w.T).norm()) for w in weights]


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
