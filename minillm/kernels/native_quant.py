"""Low-bit weights for the CPU's own kernels: packed into panels of codes, multiplied by native_quant.h.
Built in chapter 15.

    codes [out, in], scales and zeros [out, groups]            w = scale * (table[code] - zero)
        -> panels of 16 outputs, in the order in which the kernel reads them: native_codes.h draws it

Codes of up to 4 bits take 4, whatever they mean: the kernel looks them up in a table of 16 whole numbers. Those of 5
to 8 bits take a byte. With `activations="int8"` tokens are rounded to integers too, and sums are exact. The twin of all
of them is `F.linear(x, weight.dequantize())`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels import huge_pages, native
from minillm.kernels.native import LANES
from minillm.rounding import ceil_div

STEP = 8  # inputs that are decoded together; the kinds of native_codes.h
NIBBLES, BYTES, FLOATS, W8A8 = 1, 2, 3, 4
MOST_INPUTS = 65536  # of W8A8: 255 * 128 times as many still fit into 32 bits


def serves(
    format_name: str, bits: int, activations: str | None, dtype: torch.dtype, group_size: int | None = None
) -> bool:
    """Whether there are kernels for this format (a name of `minillm.quantization.formats.FORMATS`) with x in `dtype`.

    `group_size` is None where a whole row shares a scale."""
    if native.library(dtype) is None or bits > 8 or activations not in (None, "int8"):
        return False
    if group_size is not None and (activations is not None or group_size % STEP):
        return False
    if activations == "int8":
        return format_name.startswith("int")
    return bits <= 4 or format_name.startswith("int") or format_name == "fp8"


@dataclass(frozen=True)
class Matrix:
    """A packed weight. `struct` is what the kernels take; it holds addresses of `tensors`."""

    struct: native.Matrix
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype  # of x
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        """All that is read when the weight is multiplied with."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def unpack_rows(self, row_ids: Tensor) -> Tensor:
        """Rows of the weight as numbers, [len(row_ids), in_features] in `dtype`.
        Raises IndexError for a row it has not."""
        row_ids = row_ids.long().contiguous()
        if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < self.out_features:
            raise IndexError(f"rows {int(row_ids.min())} to {int(row_ids.max())} of a weight of {self.out_features}")
        out = torch.empty(len(row_ids), self.struct.in_features, dtype=self.dtype)
        if native.library(self.dtype).unpack_rows(self.struct, row_ids.data_ptr(), out.data_ptr(), len(row_ids)):
            raise MemoryError(f"no memory for a panel of {self.struct.in_features} inputs")
        return out[:, : self.in_features]


def pack(
    codes: Tensor,
    table: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    dtype: torch.dtype,
    activations: str | None = None,
    activation_scale: Tensor | float | None = None,
) -> Matrix:
    """Pack codes uint8 [out_features, in_features], values of them `table` [2 ** bits], scales and zeros
    [out_features, groups].

    Scales in float16 stay so, others become float32. Groups are even but for the last, and of whole steps of 8 inputs.
    Raises ValueError for what the kernels cannot do: another group size; a table of 4 bits that holds more than whole
    and half numbers, one of 8 bits of neither integers nor signed magnitudes; integer activations with groups or zeros.
    """
    out_features, in_features = codes.shape
    num_groups = scales.shape[1]
    group = ceil_div(in_features, num_groups)
    if num_groups > 1 and group % STEP:
        raise ValueError(
            f"groups of {group} inputs cannot be multiplied here; allowed: multiples of {STEP}, or whole rows"
        )
    if activations == "int8" and (num_groups > 1 or zeros is not None or in_features > MOST_INPUTS):
        raise ValueError(
            f"activations='int8' sums a whole row of at most {MOST_INPUTS} inputs as integers, "
            f"with one scale and no zero point; this weight has {in_features} inputs in {num_groups} "
            f"groups{' with zeros' if zeros is not None else ''}"
        )
    kind = W8A8 if activations == "int8" else NIBBLES if bits <= 4 else BYTES if _is_integer(table) else FLOATS
    if kind == NIBBLES and not _is_integer(table):  # fp4: the kernels look up whole numbers, so twice the values
        if not _is_integer(2 * table):
            raise ValueError(
                f"a table of {len(table)} values is multiplied here if they are whole or half numbers from -64 to "
                f"63.5; this one holds {', '.join(f'{value:g}' for value in table.tolist())}"
            )
        table, zeros = 2 * table, None if zeros is None else 2 * zeros
        scales = scales / 2 if torch.equal(scales / 2 * 2, scales) else scales.float() / 2
    in_pairs = native.library(dtype).code_pair() == 2
    padded = F.pad(codes, (0, -in_features % STEP, 0, -out_features % LANES))
    steps = padded.view(-1, LANES, padded.shape[1] // STEP, STEP)  # [panels, LANES, steps, STEP]
    packed = _PACK[kind](steps, table, in_pairs)
    values = _table(kind, table, in_pairs)
    sums = None
    if kind == W8A8:
        scales = scales.float()
        sums = 128 * packed.sum(dim=(1, 2, 4), dtype=torch.int32)  # [panels, LANES]
    if scales.dtype is not torch.float16:
        scales = scales.float()
    tensors = dict(
        codes=huge_pages.copy(native.in_groups(packed, native.library(dtype).weight_panels())),
        scales=_by_panel(scales),
        zeros=_by_panel(zeros) if zeros is not None and zeros.any() else None,
        table=values,
        sums=sums,
    )
    if kind == FLOATS and in_pairs:
        kind = BYTES  # the same kernel, another table
    struct = native.Matrix(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        kind=kind,
        in_features=padded.shape[1],
        out_features=out_features,
        group=padded.shape[1] if num_groups == 1 else group,
        half_scales=scales.dtype is torch.float16,
        activation_scale=0.0 if activation_scale is None else float(activation_scale) or 1.0,
    )
    return Matrix(struct, tuple(t for t in tensors.values() if t is not None), dtype, in_features, out_features)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x [num_tokens, in_features] times a packed weight: [num_tokens, out_features]."""
    struct = matrix.struct
    if x.shape[1] != struct.in_features:
        x = F.pad(x, (0, struct.in_features - x.shape[1]))
    x = x.contiguous()
    out = torch.empty(x.shape[0], matrix.out_features, dtype=x.dtype)
    bias_place = None if bias is None else bias.data_ptr()
    if native.library(x.dtype).multiply(struct, x.data_ptr(), bias_place, None, out.data_ptr(), x.shape[0]):
        raise MemoryError(
            f"no memory to multiply {x.shape[0]} tokens of {x.shape[1]} features; use smaller prefill chunks"
        )
    return out


def _pack_nibbles(steps: Tensor, table: Tensor, in_pairs: bool) -> Tensor:
    """[panels, steps, LANES] words."""
    words = torch.zeros(steps.shape[:3], dtype=torch.int32)
    for i in range(STEP):
        words |= steps[..., i].int() << (4 * (i // 2) + 16 * (i % 2))
    return words.transpose(1, 2).contiguous()


def _pack_bytes(steps: Tensor, table: Tensor, in_pairs: bool) -> Tensor:
    """[panels, steps, STEP, LANES] signed bytes; for pairs their signs and magnitudes, interleaved."""
    values = table.to(torch.int8)[steps.long()]
    if not in_pairs:
        return values.permute(0, 2, 3, 1).contiguous()
    return _interleave(values.abs().view(torch.uint8) | (values < 0).to(torch.uint8) << 7)  # |-128| is 0x80


def _pack_floats(steps: Tensor, table: Tensor, in_pairs: bool) -> Tensor:
    """The same of e4m3 numbers, which are signs and magnitudes."""
    if not torch.equal(table[128:].nan_to_num(), -table[:128].nan_to_num()):
        raise ValueError(
            "a table of 256 values is multiplied here if it holds integers, or signed magnitudes as fp8 does"
        )
    if (steps & 0x7F == 0x7F).any():
        raise ValueError("the codes 0x7f and 0xff are not numbers; a weight in fp8 must not hold them")
    steps = torch.where(steps == 0x80, 0, steps)  # -0
    return _interleave(steps) if in_pairs else steps.permute(0, 2, 3, 1).contiguous()


def _interleave(steps: Tensor) -> Tensor:
    """[panels, steps, 2, 4, 2, 4, 2]: of four inputs, four times four outputs, in pairs of inputs."""
    panels, _, count, _ = steps.shape
    parts = steps.view(panels, 4, 4, count, 2, 2, 2)  # outputs 4 * 4, inputs 2 * 2 * 2
    return parts.permute(0, 3, 4, 1, 5, 2, 6).contiguous()


def _pack_w8a8(steps: Tensor, table: Tensor, in_pairs: bool) -> Tensor:
    """[panels, steps, 2, LANES, 4] signed bytes."""
    panels, _, count, _ = steps.shape
    return table.to(torch.int8)[steps.long()].view(panels, LANES, count, 2, 4).permute(0, 2, 3, 1, 4).contiguous()


_PACK: dict[int, Callable[[Tensor, Tensor, bool], Tensor]] = {
    NIBBLES: _pack_nibbles, BYTES: _pack_bytes, FLOATS: _pack_floats, W8A8: _pack_w8a8,
}  # fmt: skip


def _table(kind: int, table: Tensor, in_pairs: bool) -> Tensor | None:
    """What `decode_step` looks values up in."""
    if kind == NIBBLES:
        values = F.pad(table, (0, 16 - len(table))).float()
        if in_pairs:
            return values.to(torch.bfloat16).repeat(2)
        return torch.cat([values.view(torch.int8), values.to(torch.int8)])
    if kind == W8A8 or not in_pairs:
        return None
    magnitudes = torch.arange(128.0) if kind == BYTES else table[:128]
    halves = magnitudes.to(torch.bfloat16).view(torch.uint8).view(128, 2)  # lower and upper bytes
    lowest = torch.tensor([0xC3], dtype=torch.uint8)  # the upper byte of -128
    return torch.cat([halves[:, 0], halves[:, 1], lowest])


def _by_panel(side: Tensor) -> Tensor:
    """[out_features, groups] -> [panels, groups, LANES]"""
    padded = F.pad(side, (0, 0, 0, -side.shape[0] % LANES))
    return padded.view(-1, LANES, side.shape[1]).transpose(1, 2).contiguous()


def _is_integer(table: Tensor) -> bool:
    return torch.equal(table, table.round()) and table.min() >= -128 and table.max() <= 127
