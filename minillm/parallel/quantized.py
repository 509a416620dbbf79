"""Low-bit weights, cut between ranks. Built in chapter 20.

    column parallel   some rows of the codes, with the scales of those rows
    row parallel      some columns. A scale that a whole row shares is copied; where groups of inputs share one, each
                      rank must hold whole groups

So a rank multiplies with the very weights that one process would. What it cannot have is refused by name.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minillm.parallel.layout import Cut, Layout
from minillm.quantization.formats import QuantizedWeight
from minillm.quantization.linear import QuantizedLinear


def cut_quantized(name: str, whole: QuantizedLinear, cut: Cut, layout: Layout, device: torch.device) -> QuantizedLinear:
    """A rank's part of a quantized weight that is not prepared yet, on `device`. `name` is its place in the model.

    Raises ValueError where the rank would have a part of a group of inputs, inputs in act order, or a part of a token
    whose activations are rounded together.
    """
    weight, outliers = whole.weight, whole.outliers
    if cut.ranges is not None and cut.dim == 0:
        rows = torch.cat([torch.arange(one.start, one.stop) for one in cut.ranges]).to(weight.codes.device)
        weight = weight[rows]
        outliers = None if outliers is None else (outliers[0], outliers[1][rows])
    elif cut.ranges is not None and layout.tensor_parallel_size > 1:
        _check_inputs(name, whole, layout)
        weight = _some_columns(name, weight, cut.ranges[0], layout)
    on_device = [None if part is None else part.to(device) for part in (whole.activation_scale, whole.order)]
    if outliers is not None:
        outliers = (outliers[0].to(device), outliers[1].to(device))
    return QuantizedLinear(weight.to(device), whole.activations, on_device[0], outliers, on_device[1])


def _check_inputs(name: str, whole: QuantizedLinear, layout: Layout) -> None:
    refused = f"tensor_parallel_size={layout.tensor_parallel_size} cannot cut {name}: "
    if whole.order is not None:
        raise ValueError(
            f"{refused}its inputs are in act order, each group from all over the row; quantize with act_order=False, "
            "or use pipeline_parallel_size"
        )
    if whole.activations is not None:
        raise ValueError(
            f"{refused}its activations are rounded to {whole.activations} by the largest of a token, of which each "
            "rank has a part; quantize the weights alone, or use pipeline_parallel_size"
        )


def _some_columns(name: str, weight: QuantizedWeight, columns: range, layout: Layout) -> QuantizedWeight:
    codes = weight.codes[:, columns.start : columns.stop].contiguous()
    if weight.scales.shape[1] == 1:
        return replace(weight, codes=codes)
    size = weight.group_size
    if columns.start % size or len(columns) % size:
        raise ValueError(
            f"tensor_parallel_size={layout.tensor_parallel_size} gives a rank {len(columns)} inputs of {name}, and "
            f"groups of {size} inputs share a scale; quantize with a group_size that divides {len(columns)}, "
            "or use fewer ranks"
        )
    groups = slice(columns.start // size, columns.stop // size)
    zeros = None if weight.zeros is None else weight.zeros[:, groups].contiguous()
    return replace(weight, codes=codes, scales=weight.scales[:, groups].contiguous(), zeros=zeros)
