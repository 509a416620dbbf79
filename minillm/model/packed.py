"""A linear layer as the CPU's kernels take it, to be part of a larger call. Built in chapter 14."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minillm.kernels import native

if TYPE_CHECKING:
    from minillm.model.layers import Linear


def native_matrix(linear: Linear) -> native.Matrix | None:
    """The packed weight of `linear`, which keeps its memory; None where another kernel computes it, or there is more to
    it than a product."""
    quantized = linear.quantized
    if quantized is None:
        return None if linear.panels is None else native.Matrix.of(linear.panels, linear.out_features)
    if quantized.road != "native" or quantized.outliers is not None or quantized.order is not None:
        return None
    return quantized.matrix.struct
