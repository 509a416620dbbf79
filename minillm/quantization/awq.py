"""AWQ: the weights of large inputs matter most, so enlarge them before rounding. Built in chapter 16.

A weight that is multiplied by s and rounded, its input divided by s, has an error smaller by about s, as long as its
group's scale does not grow. Inputs that are large on average get a large s. How large, a search decides, by the
product's own output error; so does how far each group's range may be clipped. Lin et al. 2023, arXiv:2306.00978.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minillm.quantization.formats import Format, QuantizedWeight, spread
from minillm.quantization.rtn import in_groups, round_to_nearest
from minillm.quantization.statistics import InputStatistics, output_error

STEPS = 20  # of the search for alpha, 0 to 1
SHRINK = tuple(1 - step / 20 for step in range(11))  # of a group's range: whole, then down to a half


def search_scales(
    weight: Tensor,
    inputs: InputStatistics,
    format: str | Format = "int4",
    group_size: int | None = 64,
    symmetric: bool = True,
    source: Tensor | None = None,
) -> Tensor:
    """What to divide each input of weight [out_features, in_features] by: mean|x|^alpha, the alpha of the least error.

    Inputs of one `source` [in_features], numbered from 0, share what makes them and so share a scale (value heads that
    several query heads read). Returns one scale a source; alpha=0, all ones, is among the candidates.
    """
    source = torch.arange(weight.shape[1], device=weight.device) if source is None else source
    count = torch.bincount(source)
    magnitude = torch.zeros(len(count), device=weight.device).index_add(0, source, inputs.mean) / count
    best, least = torch.ones_like(magnitude), torch.full((), torch.inf, device=weight.device)
    for step in range(STEPS):
        scales = magnitude.clamp(min=1e-4) ** (step / STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()  # centred on 1: only ratios matter
        columns = scales[source]
        rounded = round_to_nearest(weight.float() * columns, format, group_size, symmetric).dequantize() / columns
        error = output_error(weight, rounded, inputs.hessian).sum()
        best = torch.where(error < least, scales, best)  # decided on the device: the host waits for no candidate
        least = torch.minimum(least, error)
    return best


def round_clipped(
    weight: Tensor, hessian: Tensor, format: str | Format = "int4", group_size: int | None = 64, symmetric: bool = True
) -> QuantizedWeight:
    """Round to nearest, each group's range shrunk as far as that lowers the error of what the group adds to the output.

    A few large weights are cut off, and all others have a finer grid. Memory: a few times that of the weight.
    """
    weight = weight.float()
    groups = in_groups(weight, group_size)  # [out_features, num_groups, size]
    size = groups.shape[2]
    blocks = torch.stack(
        [hessian[start : start + size, start : start + size] for start in range(0, weight.shape[1], size)]
    )
    best, least = None, None
    for shrink in SHRINK:
        low, high = groups.amin(-1, keepdim=True) * shrink, groups.amax(-1, keepdim=True) * shrink
        clipped = groups.clamp(low, high).view_as(weight)
        candidate = round_to_nearest(clipped, format, group_size, symmetric)
        # [num_groups, out_features, size]
        difference = in_groups(weight - candidate.dequantize(), group_size).transpose(0, 1)
        error = ((difference @ blocks) * difference).sum(-1).t().contiguous()  # [out_features, num_groups]
        if best is None:
            best, least = candidate, error
            continue
        better = error < least
        best, least = _choose(better, candidate, best), torch.where(better, error, least)
    return best


def _choose(better: Tensor, candidate: QuantizedWeight, best: QuantizedWeight) -> QuantizedWeight:
    """The groups of `candidate` where `better` [out_features, num_groups] says so."""
    zeros = None if best.zeros is None else torch.where(better, candidate.zeros, best.zeros)
    return replace(
        best,
        codes=torch.where(spread(better, best.in_features), candidate.codes, best.codes),
        scales=torch.where(better, candidate.scales, best.scales),
        zeros=zeros,
    )
