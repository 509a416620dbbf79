"""GPTQ: round column by column, and let the columns still to come make up for the error. Built in chapter 16.

A product's output error is trace((W - Q) H (W - Q)ᵀ) with H = XᵀX (see `minillm.quantization.statistics`).
When column j is rounded, the best that the later columns can do about it is, in closed form,

    W[:, j:]  -=  (W[:, j] - Q[:, j]) / U[j, j] · U[j, j:]          with H⁻¹ = Uᵀ U, U upper triangular

Inputs that vary together stand in for each other. Where none do, H is diagonal, U too, and what is left is rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.quantization.formats import Format, QuantizedWeight
from minillm.quantization.rtn import choose_scales, encode, in_groups, resolve_format

BLOCK_SIZE = 128  # columns; those after a block are updated once, by a matrix product


def gptq(
    weight: Tensor,
    hessian: Tensor,
    format: str | Format = "int4",
    group_size: int | None = 64,
    symmetric: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
) -> QuantizedWeight:
    """Quantize weight [out_features, in_features] for inputs with hessian XᵀX [in_features, in_features].

    A group's scales are found when its first column's turn comes, from weights that have made up for earlier errors
    already. `act_order` takes the columns by falling H[j, j], so that the inputs that matter most are rounded while
    most columns are left to help; its scales come from the weight as it was, so that a group stays a run of columns.
    Frantar et al. 2022, arXiv:2210.17323. Raises ValueError for a format or group size that `round_to_nearest` refuses.
    """
    format = resolve_format(format)
    out_features, in_features = weight.shape
    in_groups(weight, group_size)  # raises where it does not divide
    size = group_size or in_features
    order = (
        hessian.diagonal().argsort(descending=True) if act_order else torch.arange(in_features, device=weight.device)
    )
    work = weight.float()[:, order]  # a copy: what each column is to be rounded from
    upper = inverse_cholesky(hessian[order][:, order], damping)

    scales, zeros = choose_scales(weight, format, group_size, symmetric)
    if act_order:  # from here on column j of `work` has scales[:, j]: indices stay on the device, without a wait
        scales, zeros = scales[:, order // size], None if zeros is None else zeros[:, order // size]
    codes = torch.empty_like(weight, dtype=torch.uint8)  # in the order of `work`
    block_size = size * max(1, BLOCK_SIZE // size) if size < in_features else BLOCK_SIZE  # a block holds whole groups
    for start in range(0, in_features, block_size):
        end = min(start + block_size, in_features)
        errors = torch.zeros(out_features, end - start, device=weight.device)
        for j in range(start, end):
            group = slice(j, j + 1) if act_order else slice(j // size, j // size + 1)
            if not act_order and j % size == 0:
                scales[:, group], now = choose_scales(work[:, j : j + size], format, group_size, symmetric)
                if zeros is not None:
                    zeros[:, group] = now
            column = encode(work[:, j : j + 1], format, scales[:, group], None if zeros is None else zeros[:, group])
            codes[:, j] = column.codes[:, 0]
            error = (work[:, j : j + 1] - column.dequantize()) / upper[j, j]  # [out_features, 1]
            work[:, j:end] -= error * upper[j, j:end]
            errors[:, j - start] = error[:, 0]
        work[:, end:] -= errors @ upper[start:end, end:]
    if act_order:
        places = order.argsort()  # of each input in `work`
        codes = codes[:, places]
        scales, zeros = (None if kept is None else kept[:, places[::size]].contiguous() for kept in (scales, zeros))
    return QuantizedWeight(format, codes, scales, zeros)


def inverse_cholesky(hessian: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with UᵀU the inverse of H; float32 [in_features, in_features].

    `damping` of H's mean diagonal is added to it: inputs that are always zero or exact copies would leave nothing to
    invert. Row j of U is what the columns from j on know of each other once the columns before j are settled.
    """
    hessian = hessian.double()  # in float32, a badly conditioned H ends up with a negative pivot
    mean = hessian.diagonal().mean()
    hessian = hessian + torch.eye(len(hessian), device=hessian.device) * torch.where(mean > 0, damping * mean, 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float()
