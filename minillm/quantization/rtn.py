"""Round to nearest: scales from the largest weight of a group, then every weight to the nearest value.
Built in chapter 15."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.quantization.formats import E4M3_MAX, FORMATS, Format, QuantizedWeight, spread

SCALE_FORMATS = (None, "power_of_two", "e4m3")  # None: float16 for a group, float32 for a whole row


def round_to_nearest(
    weight: Tensor,
    format: str | Format = "int4",
    group_size: int | None = 64,
    symmetric: bool = True,
    per_tensor: bool = False,
    scale_format: str | None = None,
) -> QuantizedWeight:
    """Quantize weight [out_features, in_features] without looking at any data.

    `group_size` inputs of an output share a scale; None is the whole row (per channel), and `per_tensor` gives every
    row the same scale. A grid that is not `symmetric` spans what the group really holds, with a zero point; integers
    only. `scale_format` is one of `SCALE_FORMATS`: scales of 8 bits, as MXFP4 and NVFP4 have them. Raises ValueError
    for a format that is unknown or a group size that does not divide the inputs.
    """
    format = resolve_format(format)
    if not symmetric and not format.is_integer:
        raise ValueError(f"symmetric=False is not allowed for {format.name}: a zero point belongs to an integer grid")
    if scale_format not in SCALE_FORMATS:
        allowed = ", ".join(map(repr, SCALE_FORMATS))
        raise ValueError(f"scale_format={scale_format!r} is unknown; allowed: {allowed}")
    scales, zeros = choose_scales(weight, format, group_size, symmetric, per_tensor, scale_format)
    return encode(weight, format, scales, zeros, scale_bits=8 if scale_format else 0)


def choose_scales(
    weight: Tensor,
    format: Format,
    group_size: int | None,
    symmetric: bool,
    per_tensor: bool = False,
    scale_format: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales [out_features, num_groups], rounded to the dtype they are kept in,
    and zero points where the grid has them."""
    grouped = in_groups(weight.float(), group_size)  # [out_features, num_groups, group_size]
    high, low = grouped.amax(-1), grouped.amin(-1)
    if per_tensor:
        high, low = high.amax().expand_as(high), low.amin().expand_as(low)
    if symmetric:
        scales = torch.maximum(high, -low) / format.largest
    else:
        high, low = high.clamp(min=0), low.clamp(max=0)  # 0 must stay 0
        scales = (high - low) / (2**format.bits - 1)
    if scale_format == "power_of_two":
        scales = torch.exp2(scales.clamp(min=2.0**-100).log2().ceil())
    elif scale_format == "e4m3":
        scales = two_level_scales(scales)
    kept = torch.float32 if group_size is None or scale_format else torch.float16
    scales = scales.to(kept)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # a group of zeros
    if symmetric:
        return scales, None
    half = 2 ** (format.bits - 1)
    return scales, (-low / scales.float() - half).round().clamp(-half, half - 1).to(torch.int8)


def two_level_scales(scales: Tensor) -> Tensor:
    """Scales as a number of e4m3 times one float32 of the whole weight, as NVFP4 keeps them: the largest scale becomes
    448, the largest number of e4m3. Scales more than 2^17 times smaller round to 0."""
    whole = scales.amax().clamp(min=2.0**-100) / E4M3_MAX
    return (scales / whole).to(torch.float8_e4m3fn).float() * whole


def encode(
    weight: Tensor, format: Format, scales: Tensor, zeros: Tensor | None, scale_bits: int = 0
) -> QuantizedWeight:
    """Every weight to the nearest value of its group's grid."""
    in_features = weight.shape[1]
    values = weight.float() / spread(scales.float(), in_features)
    if zeros is not None:
        values = values + spread(zeros.float(), in_features)
    return QuantizedWeight(format, format.encode(values), scales.contiguous(), zeros, scale_bits)


def in_groups(weight: Tensor, group_size: int | None) -> Tensor:
    """[out_features, in_features] -> [out_features, num_groups, group_size].
    Raises ValueError where it does not divide."""
    in_features = weight.shape[1]
    size = in_features if group_size is None else group_size
    if size < 1 or in_features % size:
        raise ValueError(
            f"group_size={group_size} does not divide in_features={in_features}; "
            "possible are "
            f"{', '.join(str(s) for s in (32, 64, 128, 256) if in_features % s == 0) or in_features}, "
            "or None for whole rows"
        )
    return weight.reshape(weight.shape[0], in_features // size, size)


def resolve_format(format: str | Format) -> Format:
    if isinstance(format, Format):
        return format
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; allowed: {', '.join(FORMATS)}")
    return FORMATS[format]
