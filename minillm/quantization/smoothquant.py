"""SmoothQuant: move what is hard about activations into the weights, where it is easy. Built in chapter 16."""

from __future__ import annotations

from torch import Tensor


def smoothing_scales(largest_inputs: Tensor, weight: Tensor, alpha: float = 0.5) -> Tensor:
    """What to divide each input by, and to multiply its column of weight [out_features, in_features] with:
    [in_features].

        s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

    `largest_inputs` is max |x| of each input over the calibration text. With alpha=0.5 input j and column j end up with
    the same largest magnitude, so that int8 serves both sides alike; alpha=0 evens out the columns alone, alpha=1 the
    inputs alone. Xiao et al. 2022, arXiv:2211.10438. Raises ValueError for alpha outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"alpha={alpha} is not allowed; allowed: 0 (all stays in the activations) to 1 (all into the weights)"
        )
    inputs = largest_inputs.float().clamp(min=1e-5)
    columns = weight.float().abs().amax(0).clamp(min=1e-5)
    return inputs**alpha / columns ** (1 - alpha)
