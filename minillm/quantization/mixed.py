"""LLM.int8(): the few inputs that are huge stay in high precision, all others become int8. Built in chapter 16."""

from __future__ import annotations

from torch import Tensor

from minillm.quantization.formats import Format, QuantizedWeight
from minillm.quantization.rtn import round_to_nearest


def split_outliers(
    weight: Tensor, largest_inputs: Tensor, format: str | Format = "int8", threshold: float = 6.0
) -> tuple[QuantizedWeight, tuple[Tensor, Tensor] | None]:
    """Columns of weight [out_features, in_features] whose input exceeds `threshold` anywhere in the calibration text.

    Returns the weight without them, a scale for each row, and (columns [n], their weights [out_features, n]), or None
    where there are none. Both products are added. Dettmers et al. 2022, arXiv:2208.07339; they look for the columns in
    every batch anew, here calibration finds them once.
    """
    columns = (largest_inputs > threshold).nonzero()[:, 0]
    rest = weight.index_fill(1, columns, 0)  # so that a row's scale is that of the other columns
    quantized = round_to_nearest(rest, format, group_size=None)
    return quantized, (columns, weight[:, columns].clone()) if len(columns) else None
