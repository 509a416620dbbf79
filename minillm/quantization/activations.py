"""Low-bit activations: one scale for each token, or one for all. Built in chapter 16."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.quantization.formats import E4M3_MAX

LARGEST = {"int8": 127.0, "fp8": E4M3_MAX}


def quantize_activations(x: Tensor, format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values of the grid, float32 [num_tokens, in_features], and the scales [num_tokens, 1] that they are multiplied
    with.

    `scale`, from calibration, is a number for all tokens (static); None takes each token's largest magnitude. What
    exceeds the grid is cut off. A token of zeros has scale 1.
    """
    x = x.float()
    largest = LARGEST[format]
    scales = x.abs().amax(-1, keepdim=True) / largest if scale is None else scale.float().expand(x.shape[0], 1)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (x / scales).clamp(-largest, largest)
    if format == "int8":
        return values.round(), scales
    return values.to(torch.float8_e4m3fn).float(), scales
