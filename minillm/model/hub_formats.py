"""Quantized checkpoints as the hub has them: GPTQ, AWQ, fp8, compressed-tensors, ModelOpt, MXFP4. Built in chapter 15.

Each packs codes into 32-bit words, and no two the same way. Four bits, the words of one column of inputs or outputs:

    GPTQ                qweight [in / 8, out]   inputs   0 1 2 3 4 5 6 7  from the lowest bits up, for each output
    AWQ                 qweight [in, out / 8]   outputs  0 2 4 6 1 3 5 7  from the lowest bits up, for each input
    compressed-tensors  weight_packed [out, in / 8]  inputs  0 1 2 3 4 5 6 7  from the lowest bits up

All of them mean scale * (code - zero point). Here they become a `QuantizedPart`, whose grid is centred: code and zero
point both less 2^(bits - 1), the weight the same. What checkpoints say about activations is not followed: they stay in
the model's dtype, which rounds less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from minillm.model.adapted import adapted
from minillm.model.compressed_tensors import FP8, CompressedTensors, ModelOpt
from minillm.model.decoder import Decoder
from minillm.model.fitting import check_parts
from minillm.model.hub_format import HubFormat, Pieces, grouped, told, unpack_words
from minillm.model.mxfp4 import MXFP4
from minillm.model.parts import QuantizedPart, install
from minillm.quantization.formats import FORMATS, group_size_of
from minillm.rounding import ceil_div

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # output j of eight is at this place of its word


class GPTQ(HubFormat):
    """AutoGPTQ, GPTQModel and transformers. Version 1 stores each zero point less one (a 0 as the largest code);
    GPTQModel takes the ones from whole words, so that a 0 borrows from the next zero point.

    `g_idx` is the group of every input. With `desc_act` the inputs were quantized in the order of their activations,
    and a group's inputs lie scattered: the columns are gathered by group, and the inputs will be.
    """

    marks, needs, may_have = ("qweight",), ("qweight", "qzeros", "scales"), ("g_idx",)

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings)
        self.bits = self.one_of("bits", settings.get("bits"), (2, 3, 4, 8))
        self.group_size = self.read_group_size(settings.get("group_size", -1))
        self.one_of("is_marlin_format", settings.get("is_marlin_format") or False, (False,))
        forms = {field: settings[field] for field in ("checkpoint_format", "format") if settings.get(field)}
        for field, form in forms.items():
            self.one_of(field, form, ("gptq", "gptq_v2"))
        if len(set(forms.values())) > 1:
            raise ValueError(
                f"quantization_config says {forms}, which disagree; keep the one that the zero points are in"
            )
        self.zero_offset = 0 if "gptq_v2" in forms.values() else 1
        self.by_words = "gptqmodel" in str(settings.get("meta"))
        # Bits and group size differ by module: then the shapes tell.
        self.varies = bool(settings.get("dynamic") or settings.get("extra_config"))

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
                f"{module}.g_idx is {told(groups)}, values {int(groups.min())} to {int(groups.max())}; "
                f"it must name one of {num_groups} groups for each of {in_features} inputs"
            )
        codes = unpack_words(qweight.t(), bits, in_features)
        offset = self.zero_offset
        if offset and self.by_words and 8 % bits == 0:
            qzeros, offset = qzeros + sum(1 << place for place in range(0, 32, bits)), 0
        zeros = unpack_words(qzeros, bits, out_features).t().int()  # [out_features, num_groups]
        zeros = (zeros + offset) % 2**bits
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


def auto_round(settings: dict[str, Any]) -> HubFormat:
    """AutoRound rounds better and packs as GPTQ or AWQ do; `packing_format` says which. Its own is for zero points as
    they are."""
    packings = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_awq": "awq"}
    packings["auto_round"] = "gptq_v2"
    form = settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq"
    reader = HubFormat(settings)
    packing = packings[reader.one_of("packing_format", form, tuple(packings))]
    reader.one_of("data_type", settings.get("data_type", "int"), ("int",))
    if form == "auto_round" and settings.get("model_free"):
        raise ValueError(
            "quantization_config says packing_format='auto_round' and model_free=True, with which AutoRound writes "
            "zero points less one and reads them as they are; quantize again with sym=True, or with iters above 0"
        )
    return AWQ(settings) if packing == "awq" else GPTQ(settings | {"checkpoint_format": packing})


def read_hub(
    format: Callable[[dict[str, Any]], HubFormat],
    decoder: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    settings: dict[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """Give `decoder` the matrices among `tensors`, and hand back the others, for the caller to fill in.

    `settings` is the quantization_config. Raises ValueError naming the field, or the tensor with its shape.
    """
    found = adapted(decoder.config, chain.from_iterable(some.items() for some in format(settings).read(tensors)))
    parts, plain = {}, {}
    for name, tensor in found:
        (parts if isinstance(tensor, QuantizedPart) else plain)[name] = tensor
    check_parts(decoder.checkpoint_views(), plain | parts)  # before room is made for them
    return chain(plain.items(), install(decoder, parts))


def read_mxfp4(
    decoder: Decoder, tensors: Iterable[tuple[str, Tensor]], settings: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """`read_hub` of gpt-oss. Raises ValueError for another family, whose rows may lie in another order."""
    if (model_type := decoder.config.model_type) != "gpt_oss":
        raise ValueError(
            f"quant_method='mxfp4' with model_type={model_type!r} is not read; it is read with 'gpt_oss'; use the "
            "bfloat16, float16 or float32 original, or compressed-tensors with format='mxfp4-pack-quantized'"
        )
    return read_hub(MXFP4, decoder, tensors, settings)


FORMAT_OF = {
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "compressed-tensors": CompressedTensors,
    "auto-round": auto_round,
    "modelopt": ModelOpt,
}
READERS = {method: partial(read_hub, format) for method, format in FORMAT_OF.items()} | {"mxfp4": read_mxfp4}
