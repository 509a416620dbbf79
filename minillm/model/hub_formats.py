"""Quantized checkpoints as the hub has them: GPTQ, AWQ, fp8, compressed-tensors. Built in chapter 15.

Each packs codes into 32-bit words, and no two the same way. Four bits, the words of one column of inputs or outputs:

    GPTQ                qweight [in / 8, out]   inputs   0 1 2 3 4 5 6 7  from the lowest bits up, for each output
    AWQ                 qweight [in, out / 8]   outputs  0 2 4 6 1 3 5 7  from the lowest bits up, for each input
    compressed-tensors  weight_packed [out, in / 8]  inputs  0 1 2 3 4 5 6 7  from the lowest bits up

All of them mean scale * (code - zero point). Here they become a `QuantizedPart`, whose grid is centred: code and zero
point both less 2^(bits - 1), the weight the same. What checkpoints say about activations is not followed: they stay in
the model's dtype, which rounds less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from minillm.model.decoder import Decoder
from minillm.model.parts import QuantizedPart, install
from minillm.quantization.formats import FORMATS, Format, QuantizedWeight, group_size_of, unpack_codes
from minillm.rounding import ceil_div

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # output j of eight is at this place of its word
IGNORED = ("input_scale", "input_zero_point", "k_scale", "v_scale")  # of activations and of the KV cache
Pieces = dict[str, Tensor]


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
                weight = self.part(module, {piece: pieces.pop(piece) for piece in list(pieces) if piece in known})
                (parts if isinstance(weight, QuantizedPart) else plain)[f"{module}.weight"] = weight
            plain |= {f"{module}.{piece}": tensor for piece, tensor in pieces.items() if piece not in IGNORED}
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
                raise ValueError(f"{module}.{piece} is {_told(pieces[piece])}; it must be a matrix of int32 words")

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


class GPTQ(HubFormat):
    """AutoGPTQ, GPTQModel and transformers. Version 1 stores each zero point less one (a 0 as the largest code).

    `g_idx` is the group of every input. With `desc_act` the inputs were quantized in the order of their activations,
    and a group's inputs lie scattered: the columns are gathered by group, and the inputs will be.
    """

    marks, needs, may_have = ("qweight",), ("qweight", "qzeros", "scales"), ("g_idx",)

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings)
        self.bits = self.one_of("bits", settings.get("bits"), (2, 3, 4, 8))
        self.group_size = self.read_group_size(settings.get("group_size", -1))
        form = settings.get("checkpoint_format") or ("marlin" if settings.get("is_marlin_format") else "gptq")
        self.zero_offset = {"gptq": 1, "gptq_v2": 0}[self.one_of("checkpoint_format", form, ("gptq", "gptq_v2"))]
        self.varies = bool(settings.get("dynamic"))  # bits and group size differ by module: then the shapes tell

    def part(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        self.check_words(module, pieces, "qweight", "qzeros")
        qweight, qzeros, scales = pieces["qweight"], pieces["qzeros"], pieces["scales"]
        out_features, bits, group_size = qweight.shape[1], self.bits, self.group_size
        if self.varies:
            bits = self.one_of(f"{module} bits", qzeros.shape[1] * 32 // out_features, (2, 3, 4, 8))
        in_features = qweight.shape[0] * 32 // bits
        if self.varies or group_size == -1:
            group_size = in_features if group_size == -1 else group_size_of(in_features, max(1, scales.shape[0]))
        num_groups = ceil_div(in_features, group_size)  # the last one may be shorter
        side = dict(qzeros=[num_groups, out_features * bits // 32], scales=[num_groups, out_features])
        self.check_shapes(module, pieces, bits, self.group_size, in_features, **side)
        groups = pieces.get("g_idx", torch.arange(in_features) // group_size)
        if list(groups.shape) != [in_features] or int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise ValueError(
                f"{module}.g_idx is {_told(groups)}, values {int(groups.min())} to {int(groups.max())}; "
                f"it must name one of {num_groups} groups for each of {in_features} inputs"
            )
        codes = unpack_words(qweight.t(), bits, in_features)
        zeros = unpack_words(qzeros, bits, out_features).t().int()  # [out_features, num_groups]
        zeros = (zeros + self.zero_offset) % 2**bits
        return grouped(FORMATS[f"int{bits}"], codes, scales.t(), zeros, groups.long())


class AWQ(HubFormat):
    """AutoAWQ's "gemm" layout."""

    marks, needs = ("qweight",), ("qweight", "qzeros", "scales")

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings)
        self.one_of("bits", settings.get("bits", settings.get("w_bit")), (4,))
        self.one_of("version", str(settings.get("version", "gemm")).lower(), ("gemm",))
        self.group_size = self.read_group_size(settings.get("group_size", settings.get("q_group_size", 128)))

    def part(self, module: str, pieces: Pieces) -> QuantizedPart:
        self.check_words(module, pieces, "qweight", "qzeros")
        (in_features, words), scales = pieces["qweight"].shape, pieces["scales"]
        group_size = in_features if self.group_size == -1 else self.group_size
        if in_features % group_size:
            raise ValueError(f"{module}: group_size={group_size} does not divide its {in_features} inputs")
        num_groups = in_features // group_size
        side = dict(qzeros=[num_groups, words], scales=[num_groups, 8 * words])
        self.check_shapes(module, pieces, 4, self.group_size, in_features, **side)
        codes, zeros = (self._unpack(pieces[piece]) for piece in ("qweight", "qzeros"))
        return grouped(FORMATS["int4"], codes.t(), scales.t(), zeros.t().int())

    def _unpack(self, words: Tensor) -> Tensor:
        nibbles = unpack_words(words, 4, 8 * words.shape[1]).view(words.shape[0], -1, 8)
        return nibbles[:, :, AWQ_PLACES].flatten(1)


class FP8(HubFormat):
    """e4m3 weights with a scale for the tensor, for each row, or for each block ("weight_block_size")."""

    marks, needs, may_have = ("weight_scale_inv", "weight_scale"), ("weight",), ()

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings)
        self.one_of("fmt", settings.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
        self.block = settings.get("weight_block_size")

    def part(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        weight, scales = pieces["weight"], pieces.get("weight_scale_inv", pieces.get("weight_scale"))
        if weight.dtype is not torch.float8_e4m3fn or weight.dim() != 2:
            raise ValueError(f"{module}.weight is {_told(weight)}; beside a scale it must be a matrix of float8_e4m3fn")
        return self.scaled(module, FORMATS["fp8"], weight.view(torch.uint8), scales)

    def scaled(
        self, module: str, format: Format, codes: Tensor, scales: Tensor, zeros: Tensor | None = None
    ) -> QuantizedPart | Tensor:
        """Scales of a tensor, of rows [out_features] or [out_features, 1], of groups, or of blocks."""
        out_features, in_features = codes.shape
        scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
        if scales.numel() == 1:
            return grouped(format, codes, scales.expand(out_features, 1), zeros)
        rows, columns = (1, group_size_of(in_features, scales.shape[1])) if not self.block else self.block
        expected = [ceil_div(out_features, rows), ceil_div(in_features, columns)]
        if list(scales.shape) != expected or (self.block is None and in_features % columns):
            blocks = f"blocks of {rows} x {columns}" if self.block else "equal groups"
            raise ValueError(
                f"{module}: scales {list(scales.shape)} do not fit a weight of {out_features} x "
                f"{in_features} in {blocks}"
            )
        of_rows = scales.repeat_interleave(rows, dim=0)[:out_features]
        return grouped(format, codes, of_rows, zeros, torch.arange(in_features) // columns)


class CompressedTensors(FP8):
    """llm-compressor: integers packed into words, or int8 and fp8 as they are."""

    marks, needs = ("weight_packed", "weight_scale"), ("weight_scale",)
    may_have = ("weight", "weight_shape", "weight_zero_point", "weight_g_idx")

    def __init__(self, settings: dict[str, Any]):
        HubFormat.__init__(self, settings)
        formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
        self.one_of("format", settings.get("format"), formats)
        self.one_of(
            "sparsity_config.format", (settings.get("sparsity_config") or {}).get("format", "dense"), ("dense",)
        )
        self.one_of("transform_config", settings.get("transform_config") or None, (None,))
        weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
        self.block = weights[0].get("block_structure") if weights else None

    def part(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        scales, zeros = pieces["weight_scale"], pieces.get("weight_zero_point")
        if "weight_packed" in pieces:
            return self._packed(module, pieces)
        if (weight := pieces.get("weight")) is None:
            raise ValueError(f"{module} has weight_scale, but neither weight nor weight_packed")
        if weight.dtype is not torch.int8 or weight.dim() != 2:
            return super().part(module, pieces)
        zeros = None if zeros is None else zeros.reshape(scales.shape).int() + 128
        return self.scaled(module, FORMATS["int8"], (weight.short() + 128).to(torch.uint8), scales, zeros)

    def _packed(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        words, scales, zeros = pieces["weight_packed"], pieces["weight_scale"], pieces.get("weight_zero_point")
        self.check_words(module, pieces, "weight_packed")
        if "weight_shape" not in pieces:
            raise ValueError(f"{module} has weight_packed, but no weight_shape")
        out_features, in_features = pieces["weight_shape"].tolist()
        bits = self.one_of(f"{module} num_bits", words.shape[1] * 32 // in_features, tuple(range(2, 9)))
        if list(words.shape) != [out_features, ceil_div(in_features * bits, 32)]:
            raise ValueError(
                f"{module}.weight_packed is {_told(words)}; weight_shape says {out_features} x {in_features} codes"
            )
        format, codes = FORMATS[f"int{bits}"], unpack_words(words, bits, in_features)
        if zeros is not None:  # packed along the outputs, or bytes as they are in old files
            packed = zeros.dtype is torch.int32
            zeros = unpack_words(zeros.t(), bits, out_features).t().int() if packed else zeros.int() + 2 ** (bits - 1)
        if (groups := pieces.get("weight_g_idx")) is not None and int(groups.min()) >= 0:  # -1: there is no order
            return grouped(format, codes, scales, zeros, groups.long())
        return self.scaled(module, format, codes, scales, zeros)


def read_hub(
    format: type[HubFormat], decoder: Decoder, tensors: Iterable[tuple[str, Tensor]], settings: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Give `decoder` the matrices among `tensors`, and hand back the others, for the caller to fill in.

    `settings` is the quantization_config. Raises ValueError naming the field, or the tensor with its shape.
    """
    parts, plain = format(settings).read(tensors)
    return chain(plain.items(), install(decoder, parts))


FORMAT_OF = {"gptq": GPTQ, "awq": AWQ, "fp8": FP8, "fbgemm_fp8": FP8, "compressed-tensors": CompressedTensors}
READERS = {method: partial(read_hub, format) for method, format in FORMAT_OF.items()}


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, count]: codes from the lowest bits up, over the borders of words if need be."""
    packed = words.contiguous().view(torch.uint8)  # the machine stores the lowest byte first
    if 8 % bits:
        return unpack_codes(packed, bits, count)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)[:, :count]


def grouped(
    format: Format, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None = None
) -> QuantizedPart | Tensor:
    """The part that these codes [out, in] are, with scales and zero points (of codes) [out, num_groups].

    `groups` names each input's group; None is as many inputs a group as there are, in turn. Inputs of a group that lie
    apart are brought together. Groups of uneven sizes are not a `QuantizedWeight`: then the weight comes dequantized.
    """
    (_, in_features), num_groups = codes.shape, scales.shape[1]
    if zeros is not None:
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


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
