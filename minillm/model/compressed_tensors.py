"""fp8 checkpoints, and what llm-compressor and ModelOpt write. Built in chapter 15."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from minillm.model.hub_format import HubFormat, Pieces, grouped, nibbles, powers_of_two, told, unpack_words
from minillm.model.parts import QuantizedPart
from minillm.quantization.formats import FORMATS, Format, group_size_of
from minillm.rounding import ceil_div

FOUR_BITS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


class FP8(HubFormat):
    """e4m3 weights with a scale for the tensor, for each row, or for each block ("weight_block_size")."""

    marks, needs, may_have = ("weight_scale_inv", "weight_scale"), ("weight",), ()

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings)
        self.one_of("fmt", settings.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
        self.block = settings.get("weight_block_size")

    def part(self, module: str, pieces: Pieces, block: list[int] | None = None) -> QuantizedPart | Tensor:
        weight, scales = pieces["weight"], pieces.get("weight_scale_inv", pieces.get("weight_scale"))
        if weight.dtype is not torch.float8_e4m3fn or weight.dim() != 2:
            raise ValueError(f"{module}.weight is {told(weight)}; beside a scale it must be a matrix of float8_e4m3fn")
        return self.scaled(module, FORMATS["fp8"], weight.view(torch.uint8), scales, block=block or self.block)

    def scaled(
        self,
        module: str,
        format: Format,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        block: list[int] | None = None,
    ) -> QuantizedPart | Tensor:
        """Scales of a tensor, of rows [out_features] or [out_features, 1], of groups, or of blocks."""
        out_features, in_features = codes.shape
        scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
        if scales.numel() == 1:
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(out_features, 1)
            return grouped(format, codes, scales.expand(out_features, 1), zeros)
        rows, columns = block or (1, group_size_of(in_features, scales.shape[1]))
        expected = [ceil_div(out_features, rows), ceil_div(in_features, columns)]
        if list(scales.shape) != expected or (block is None and in_features % columns):
            blocks = f"blocks of {rows} x {columns}" if block else "equal groups"
            raise ValueError(
                f"{module}: scales {list(scales.shape)} do not fit a weight of {out_features} x "
                f"{in_features} in {blocks}"
            )
        of_rows = scales.repeat_interleave(rows, dim=0)[:out_features]
        return grouped(format, codes, of_rows, zeros, torch.arange(in_features) // columns)


class CompressedTensors(FP8):
    """llm-compressor: integers packed into words, or int8 and fp8 as they are."""

    marks, needs = ("weight_packed", "weight_scale"), ("weight_scale",)
    may_have = ("weight", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")

    def __init__(self, settings: dict[str, Any]):
        HubFormat.__init__(self, settings)
        integers, floats = ("pack-quantized", "int-quantized"), ("float-quantized", *FOUR_BITS)
        formats = (*integers, *floats, "mxfp8-quantized", "naive-quantized", "mixed-precision", "dense")
        self.one_of("format", settings.get("format"), formats)
        self.one_of(
            "sparsity_config.format", (settings.get("sparsity_config") or {}).get("format", "dense"), ("dense",)
        )
        self.one_of("transform_config", settings.get("transform_config") or None, (None,))
        self.groups = list((settings.get("config_groups") or {}).values())
        self.block = None

    def part(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        scales, zeros, scheme = pieces["weight_scale"], pieces.get("weight_zero_point"), self._scheme(module)
        if "weight_packed" in pieces and pieces["weight_packed"].dtype is torch.uint8:
            return self._four_bits(module, pieces, scheme)
        if "weight_packed" in pieces:
            return self._packed(module, pieces, scheme)
        if (weight := pieces.get("weight")) is None:
            raise ValueError(f"{module} has weight_scale, but neither weight nor weight_packed")
        if weight.dtype is not torch.int8 or weight.dim() != 2:
            self._check(module, weight, scheme, "float", (8,))
            if scales.dtype is torch.uint8:  # MXFP8
                pieces = pieces | {"weight_scale": powers_of_two(scales)}
            return super().part(module, pieces, _block(scheme))
        self._check(module, weight, scheme, "int", tuple(range(2, 9)))
        zeros = None if zeros is None else zeros.reshape(scales.shape).int() + 128
        codes = (weight.short() + 128).to(torch.uint8)
        return self.scaled(module, FORMATS["int8"], codes, scales, zeros, _block(scheme))

    def _scheme(self, module: str) -> dict[str, Any]:
        """The weights of the group whose targets name this module best: by its name, a pattern, or its class."""
        ranks, kind = {}, "Embedding" if module.endswith("embed_tokens") else "Linear"
        for group in self.groups:
            for target in group.get("targets") or ():
                pattern = target.removeprefix("re:")
                if target in (module, kind) or (pattern != target and re.match(pattern, module)):
                    rank = 0 if target == module else 1 if pattern != target else 2
                    ranks.setdefault(rank, group.get("weights") or {})
        return ranks[min(ranks)] if ranks else {}

    def _check(self, module: str, weight: Tensor, scheme: dict[str, Any], kind: str, bits: tuple[int, ...]) -> None:
        """Whether the group's settings are about such a tensor."""
        says = scheme.get("type", kind), scheme.get("num_bits", bits[0])
        if says[0] != kind or says[1] not in bits:
            raise ValueError(
                f"quantization_config says type={says[0]!r}, num_bits={says[1]} of {module}, whose tensor is "
                f"{told(weight)}"
            )

    def _four_bits(self, module: str, pieces: Pieces, scheme: dict[str, Any]) -> QuantizedPart | Tensor:
        """e2m1, two codes a byte, the first one low. The scale of a group is e4m3 over one float for the whole tensor
        (NVFP4), or a power of two alone (MXFP4)."""
        packed, scales, whole = pieces["weight_packed"], pieces["weight_scale"], pieces.get("weight_global_scale")
        self._check(module, packed, scheme, "float", (4,))
        if scales.dtype is torch.float8_e4m3fn and whole is not None and whole.numel() == 1:
            scales = scales.float() / whole.float()
        elif scales.dtype is torch.uint8 and whole is None:
            scales = powers_of_two(scales)
        else:
            beside = "no weight_global_scale" if whole is None else f"weight_global_scale {told(whole)}"
            raise ValueError(
                f"{module}.weight_scale is {told(scales)} beside {beside}; with four-bit floats it must be "
                "float8_e4m3fn beside one number, or uint8 alone"
            )
        return self.scaled(module, FORMATS["fp4"], nibbles(packed), scales, block=_block(scheme))

    def _packed(self, module: str, pieces: Pieces, scheme: dict[str, Any]) -> QuantizedPart | Tensor:
        words, scales, zeros = pieces["weight_packed"], pieces["weight_scale"], pieces.get("weight_zero_point")
        self.check_words(module, pieces, "weight_packed")
        if "weight_shape" not in pieces:
            raise ValueError(f"{module} has weight_packed, but no weight_shape")
        out_features, in_features = pieces["weight_shape"].tolist()
        bits = scheme.get("num_bits") or words.shape[1] * 32 // in_features
        self._check(module, words, scheme | {"num_bits": bits}, "int", tuple(range(2, 9)))
        widths = {ceil_div(in_features * bits, 32), ceil_div(in_features, 32 // bits)}
        if words.shape[0] != out_features or words.shape[1] not in widths:
            raise ValueError(
                f"{module}.weight_packed is {told(words)}; weight_shape says {out_features} x {in_features} codes, "
                f"quantization_config {bits} bits each"
            )
        format, codes = FORMATS[f"int{bits}"], _unpack(words, bits, in_features)
        if zeros is not None:  # packed along the outputs, or bytes as they are in old files
            packed = zeros.dtype is torch.int32
            zeros = _unpack(zeros.t(), bits, out_features).t().int() if packed else zeros.int() + 2 ** (bits - 1)
        if (groups := pieces.get("weight_g_idx")) is not None and int(groups.min()) >= 0:  # -1: there is no order
            return grouped(format, codes, scales, zeros, groups.long())
        return self.scaled(module, format, codes, scales, zeros, _block(scheme))


class ModelOpt(FP8):
    """NVIDIA's Model Optimizer: fp8 with a scale for the tensor or for each row, or NVFP4, whose group scales are
    multiplied by a number for the whole tensor (llm-compressor divides by it)."""

    marks, needs, may_have = ("weight_scale",), ("weight",), ("weight_scale_2",)

    def __init__(self, settings: dict[str, Any]):
        settings = settings | settings.get("quantization", {})  # hf_quant_config.json has them one level down
        super().__init__(settings)
        self.algorithm = str(settings.get("quant_algo")).upper()
        self.one_of("quant_algo", self.algorithm, ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"))
        self.group_size = self.read_group_size(settings.get("group_size") or 16)

    def part(self, module: str, pieces: Pieces) -> QuantizedPart | Tensor:
        if self.algorithm != "NVFP4":
            return super().part(module, pieces)
        packed, scales, whole = pieces["weight"], pieces["weight_scale"], pieces.get("weight_scale_2")
        fits = packed.dtype is torch.uint8 and packed.dim() == 2 and scales.dtype is torch.float8_e4m3fn
        if not fits or whole is None or whole.numel() != 1:
            beside = "no weight_scale_2" if whole is None else f"weight_scale_2 {told(whole)}"
            raise ValueError(
                f"{module} has weight {told(packed)}, weight_scale {told(scales)} and {beside}; NVFP4 has uint8, "
                "float8_e4m3fn and one number"
            )
        block = [1, self.group_size]
        return self.scaled(module, FORMATS["fp4"], nibbles(packed), scales.float() * whole.float(), block=block)


def _block(scheme: dict[str, Any]) -> list[int] | None:
    """Outputs and inputs that share a scale, where the group says so."""
    if scheme.get("strategy") in ("group", "tensor_group") and scheme.get("group_size"):
        return [1, scheme["group_size"]]
    return scheme.get("block_structure")


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes end to end; or, in older files, as many in a word as it holds whole."""
    if words.shape[1] == ceil_div(count * bits, 32):
        return unpack_words(words, bits, count)
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((words[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)[:, :count]
