"""Moving a factor from one product's inputs into what makes them: the function stays, the grids change.
Built in chapter 16.

    x / s · (W · s)ᵀ  =  x · Wᵀ

x is not divided at run time. What made x, a norm's weight or the rows of an earlier product, is divided once instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold_into_norm(norm_weight: Tensor, scales: Tensor) -> Tensor:
    """Divide a norm's weight [size] by scales, in place, and return the scales that the columns after it take.

    They are those that the norm, rounded to its dtype, was really divided by; so nothing is lost in bfloat16 either.
    """
    before = norm_weight.float().clone()
    norm_weight.copy_(before / scales)
    after = norm_weight.float()
    return torch.where(after == 0, torch.ones_like(scales), before / torch.where(after == 0, 1.0, after))


def fold_into_rows(weight: Tensor, bias: Tensor | None, first: int, scales: Tensor) -> None:
    """Divide len(scales) rows of weight [out_features, in_features], from row `first` on, and their bias, in place."""
    rows = slice(first, first + len(scales))
    weight[rows] = (weight[rows].float() / scales[:, None]).to(weight.dtype)
    if bias is not None:
        bias[rows] = (bias[rows].float() / scales).to(bias.dtype)


def scale_columns(weight: Tensor, scales: Tensor) -> None:
    """Multiply each column of weight [out_features, in_features] by its scale, in place: the other side of the fold."""
    weight.copy_(weight.float() * scales)
