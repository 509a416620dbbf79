"""PyTorch's own packed products on a CPU: weights in the layouts that they take, kept once. Built in chapter 15.

With few tokens the packed kernels are faster, with many a plain product of the unpacked weight is; so a layout has to
be read back too. Of int8 it is the codes as they are. Of int4 it depends on the processor, and we find it by looking:

    rows 0 to 63 of a weight, column by column:     [ in_features, 32 bytes ], with two codes a byte
    of one column, in AVX-512's order:              row 0 | row 32 << 4,  row 1 | row 33 << 4,  ...
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from minillm.quantization.formats import QuantizedWeight, spread

GROUP_SIZES = (32, 64, 128, 256)  # of the int4 product


class Int8Matrix:
    """Whole rows of int8: codes and a scale each."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype):
        self.codes = (weight.codes.int() - 128).to(torch.int8)  # [out_features, in_features]
        self.scales = weight.scales[:, 0].float()  # [out_features]
        self.product_scales = self.scales.to(dtype)

    @staticmethod
    def serves(weight: QuantizedWeight) -> bool:
        return weight.format.name == "int8" and weight.scales.shape[1] == 1 and weight.zeros is None

    @property
    def num_bytes(self) -> int:
        # One in float32.
        kept = {self.scales.data_ptr(): self.scales, self.product_scales.data_ptr(): self.product_scales}
        return self.codes.nbytes + sum(scales.nbytes for scales in kept.values())

    def multiply(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features], contiguous: [num_tokens, out_features]"""
        return torch.ops.aten._weight_int8pack_mm(x, self.codes, self.product_scales)

    def unpack_rows(self, ids: Tensor) -> Tensor:
        """float32 [len(ids), in_features]"""
        return self.codes[ids] * self.scales[ids][:, None]


class Int4Matrix:
    """Groups of up to 4 bits. The product's scales and zero points are bfloat16, and it counts from 8:
    w = (code - 8) * scale + zero. Codes of fewer bits move to the middle of its table: those of int3, 0 to 7,
    become 4 to 11.
    """

    def __init__(self, weight: QuantizedWeight):
        codes = weight.codes.int() + 8 - 2 ** (weight.format.bits - 1)
        zeros = torch.zeros_like(weight.scales) if weight.zeros is None else -weight.zeros * weight.scales
        # uint8 [out_features, in_features / 2]
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
        # [groups, out_features, 2]
        self.sides = torch.stack([weight.scales.t(), zeros.t()], dim=-1).to(torch.bfloat16).contiguous()
        self.scales, self.zeros = weight.scales, weight.zeros  # as they are, for `unpack`
        self.group_size, self.in_features = weight.group_size, weight.in_features

    @staticmethod
    def serves(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
        if (
            not weight.format.is_integer
            or weight.format.bits > 4
            or weight.group_size not in GROUP_SIZES
            or weight.in_features % 32
        ):
            return False
        # With float32 activations the product is many times slower than dequantizing.
        return dtype is torch.bfloat16 and weight.out_features % 64 == 0 and panel_order() is not None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.packed, self.sides, self.scales, self.zeros) if part is not None)

    def multiply(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features], contiguous: [num_tokens, out_features]"""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group_size, self.sides)

    def unpack_rows(self, ids: Tensor) -> Tensor:
        """float32 [len(ids), in_features]"""
        values = read_codes(self.packed, ids, panel_order()).float() - 8
        if self.zeros is not None:
            values -= spread(self.zeros[ids].float(), self.in_features)
        return values.mul_(spread(self.scales[ids].float(), self.in_features))


def read_codes(packed: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    """Codes of some rows of a packed int4 weight, uint8 [len(ids), in_features]. `order` [rows of a panel] says which
    row stands at each place of a panel's column."""
    size, in_features = len(order), 2 * packed.shape[1]
    place = order.argsort()[ids % size]  # of each row, in its panel
    columns = packed.view(-1, in_features, size // 2).transpose(1, 2)  # [panels, size / 2, in_features]
    pairs = columns[ids // size, place // 2]  # [len(ids), in_features], each with a neighbour
    return pairs >> (4 * (place % 2)).to(torch.uint8)[:, None] & 15


@cache
def panel_order() -> Tensor | None:
    """The order of a panel's rows in the layout that this processor's int4 product takes; None for a layout that is
    none of those we know."""
    rows = torch.arange(128).expand(32, -1).t()
    parts = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu((rows >> 4 * i & 15).int().contiguous(), 1) for i in range(2)
    ]
    for size in (64, 32, 16):
        column = [part.view(torch.uint8).flatten()[: size // 2].long() for part in parts]
        order = torch.stack(
            [column[0] & 15 | (column[1] & 15) << 4, column[0] >> 4 | column[1] >> 4 << 4], dim=-1
        ).flatten()
        if order.sort().values.equal(torch.arange(size)) and all(
            read_codes(part.view(torch.uint8), torch.arange(128), order).equal((rows >> 4 * i & 15).to(torch.uint8))
            for i, part in enumerate(parts)
        ):
            return order
    return None
