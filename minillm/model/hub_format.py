"""What the hub's quantized checkpoints have in common: pieces of a module are one weight. Built in chapter 15."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from minillm.model.parts import QuantizedPart
from minillm.quantization.formats import Format, QuantizedWeight, group_size_of, unpack_codes

# Of activations, and of the KV cache and its queries: both stay in the model's dtype, or take `kv_cache_dtype`.
IGNORED = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "k_scale", "v_scale", "q_scale")
ZERO_POINTS = ("k_zero_point", "v_zero_point", "q_zero_point")
Pieces = dict[str, Tensor]
SCALES, ZEROS, ORDER = ("scales", "weight_scale", "weight_scale_inv"), ("weight_zero_point",), ("g_idx", "weight_g_idx")
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


class HubFormat:
    """How one `quant_method` writes a weight. A module that has a tensor of `marks` is quantized, the rest is plain."""

    marks: tuple[str, ...]
    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings

    def read(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, QuantizedPart], dict[str, Tensor]]:
        """What is quantized and what is plain, by the names of a plain checkpoint."""
        modules: dict[str, Pieces] = defaultdict(dict)
        for name, tensor in tensors:
            module, _, piece = name.rpartition(".")
            modules[module][piece] = tensor
        parts, plain = {}, {}
        for module in list(modules):
            pieces = modules.pop(module)  # what is unpacked need not be held twice
            if any(mark in pieces for mark in self.marks):
                if lacking := [piece for piece in self.needs if piece not in pieces]:
                    raise ValueError(f"{module} has {', '.join(sorted(pieces))}, but no {', '.join(lacking)}")
                known = {*self.marks, *self.needs, *self.may_have}
                self._check_pieces(module, pieces)
                weight = self.part(module, {piece: pieces.pop(piece) for piece in list(pieces) if piece in known})
                (parts if isinstance(weight, QuantizedPart) else plain)[f"{module}.weight"] = weight
            plain |= {
                f"{module}.{piece}": tensor for piece, tensor in pieces.items() if not _ignored(module, piece, tensor)
            }
        return parts, plain

    def part(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        raise NotImplementedError

    def one_of(self, field: str, value: Any, allowed: tuple) -> Any:
        if value not in allowed:
            raise ValueError(
                f"quantization_config says {field}={value!r}; readable with quant_method="
                f"{self.settings.get('quant_method')!r} are {', '.join(map(repr, allowed))}"
            )
        return value

    def read_group_size(self, value: Any) -> int:
        if not isinstance(value, int) or (value < 1 and value != -1):
            raise ValueError(
                f"quantization_config says group_size={value!r}; allowed are -1, for whole rows, and numbers from 1"
            )
        return value

    def check_words(self, module: str, pieces: Pieces, *words: str) -> None:
        for piece in words:
            if piece in pieces and (pieces[piece].dtype is not torch.int32 or pieces[piece].dim() != 2):
                raise ValueError(f"{module}.{piece} is {told(pieces[piece])}; it must be a matrix of int32 words")

    def _check_pieces(self, module: str, pieces: Pieces) -> None:
        """What is beside the codes is numbers of the kinds that it can be, in rows."""
        for piece, tensor in pieces.items():
            if piece in SCALES and (tensor.dim() > 2 or (tensor.dtype in INTEGERS and tensor.dtype is not torch.uint8)):
                raise ValueError(
                    f"{module}.{piece} is {told(tensor)}; it must be numbers, for the whole, rows or groups"
                )
            if piece in ZEROS and (tensor.dim() > 2 or tensor.dtype not in INTEGERS):
                raise ValueError(
                    f"{module}.{piece} is {told(tensor)}; it must be whole numbers, for the whole, rows or groups"
                )
            if piece in ORDER and (tensor.dim() != 1 or tensor.dtype not in INTEGERS or not tensor.numel()):
                raise ValueError(f"{module}.{piece} is {told(tensor)}; it must be whole numbers, one for each input")

    def check_shapes(
        self, module: str, pieces: Pieces, bits: int, group_size: int, in_features: int, **shapes: list[int]
    ) -> None:
        """Whether the side tensors have the shapes that bits and group size give them."""
        for piece, shape in shapes.items():
            if list(pieces[piece].shape) != shape:
                raise ValueError(
                    f"{module}.{piece} is {list(pieces[piece].shape)}; bits={bits}, group_size={group_size} "
                    f"and {in_features} inputs make it {shape}"
                )


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, count]: codes from the lowest bits up, over the borders of words if need be."""
    packed = words.contiguous().view(torch.uint8)  # the machine stores the lowest byte first
    if 8 % bits:
        return unpack_codes(packed, bits, count)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)[:, :count]


def nibbles(packed: Tensor) -> Tensor:
    """Two codes of each byte, the low half first: uint8 [rows, n] -> [rows, 2 n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Scales of which a byte holds the exponent alone (e8m0): 2^(byte - 127), of the same shape; float16 where that
    has all of them, which takes half of float32's bytes, else float32."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    in_half = bool(((exponents >= 127 - 24) & (exponents <= 127 + 15)).all())
    return powers.half() if in_half else powers


def grouped(
    format: Format, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None = None
) -> QuantizedPart | Tensor:
    """The part that these codes [out, in] are, with scales and zero points (of codes) [out, num_groups].

    `groups` names each input's group; None is as many inputs a group as there are, in turn. Inputs of a group that lie
    apart are brought together. Groups of uneven sizes are not a `QuantizedWeight`: then the weight comes dequantized.
    """
    (_, in_features), num_groups = codes.shape, scales.shape[1]
    if zeros is not None:
        if zeros.shape != scales.shape:
            raise ValueError(f"zero points {list(zeros.shape)} do not fit scales {list(scales.shape)}")
        zeros = zeros.int() - 2 ** (format.bits - 1)
    even = torch.arange(in_features) // group_size_of(in_features, num_groups)
    order = None
    if groups is not None and not torch.equal(groups, even):
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], even):
            values = format.decode(codes) - (0 if zeros is None else zeros[:, groups])
            return values * scales.float()[:, groups]
        codes = codes[:, order]
    keep = torch.float16 if scales.dtype is torch.float16 and num_groups > 1 else torch.float32
    if zeros is not None:
        zeros = zeros.to(torch.int8).contiguous() if bool(zeros.any()) else None
    return QuantizedPart(QuantizedWeight(format, codes.contiguous(), scales.to(keep).contiguous(), zeros), order)


def told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _ignored(module: str, piece: str, tensor: Tensor) -> bool:
    """Whether the tensor is about activations or the KV cache. Raises ValueError for a zero point that is not 0."""
    if piece in ZERO_POINTS and tensor.float().any():
        raise ValueError(
            f"{module}.{piece} is not 0: a KV cache with a zero point is not supported; supported are those without"
        )
    return piece in IGNORED or piece in ZERO_POINTS
