"""gpt-oss as the hub has it: experts in MXFP4, the rest of the model plain. Built in chapter 15.

    experts.gate_up_proj_blocks  uint8 [experts, 2 * size, hidden / 32, 16]   two e2m1 codes a byte, the first one low
    experts.gate_up_proj_scales  uint8 [experts, 2 * size, hidden / 32]       e8m0: a block's scale is 2^(byte - 127)
    experts.down_proj_blocks     uint8 [experts, hidden, size / 32, 16]
    experts.down_proj_scales     uint8 [experts, hidden, size / 32]

The rows are outputs; of gate_up_proj the even ones are the gate's and the odd ones are up's. Each expert becomes three
`QuantizedPart`s with the codes of the file. Sources: the model card (arXiv:2508.10925), OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minillm.model.hub_format import HubFormat, nibbles, powers_of_two, told
from minillm.model.parts import QuantizedPart
from minillm.quantization.formats import FORMATS, QuantizedWeight

BLOCK = 32  # inputs that share a scale
STORED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")


class MXFP4(HubFormat):
    """The hub's checkpoints of gpt-oss. The tensors say which modules are plain, so `modules_to_not_convert` is not
    read."""

    def read(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, QuantizedPart], dict[str, Tensor]]:
        """What is quantized, by the names of `minillm.model.gpt_oss`, and what is plain, by those of the file.

        Raises ValueError naming blocks without scales or scales without blocks, and either in another shape or type.
        """
        parts, plain = {}, {}
        waiting: dict[tuple[str, str], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            if (match := STORED.fullmatch(name)) is None:
                plain[name] = tensor
                continue
            module, matrix, piece = match.groups()
            pieces = waiting.setdefault((module, matrix), {})
            pieces[piece] = tensor
            if len(pieces) == 2:  # what is unpacked need not be held twice
                del waiting[module, matrix]
                parts |= self._parts(module, matrix, **pieces)
        for (module, matrix), pieces in waiting.items():
            [there] = pieces
            lacking = "scales" if there == "blocks" else "blocks"
            raise ValueError(
                f"{module}.{matrix}_{there} has no {matrix}_{lacking} beside it; both are needed: fetch it again"
            )
        return parts, plain

    def _parts(self, module: str, matrix: str, blocks: Tensor, scales: Tensor) -> Iterator[tuple[str, QuantizedPart]]:
        """The matrices of each expert, by our names."""
        name = f"{module}.{matrix}"
        if blocks.dtype is not torch.uint8 or blocks.dim() != 4 or blocks.shape[3] != BLOCK // 2:
            raise ValueError(
                f"{name}_blocks is {told(blocks)}; it must be uint8 [experts, outputs, inputs / {BLOCK}, {BLOCK // 2}]"
            )
        if scales.dtype is not torch.uint8 or scales.shape != blocks.shape[:3]:
            raise ValueError(
                f"{name}_scales is {told(scales)}; beside blocks {list(blocks.shape)} it must be uint8 "
                f"{list(blocks.shape[:3])}"
            )
        if bool((scales == 255).any()):
            raise ValueError(f"{name}_scales has the byte 255, which is no number in e8m0; fetch it again")
        is_zero = (blocks & 0x77 == 0).all(-1)  # whatever its scale, which may be too small for float16
        powers = powers_of_two(scales.masked_fill(is_zero, 127))
        rows = {"down_proj": slice(None)}
        if matrix == "gate_up_proj":
            rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for expert in range(len(blocks)):
            for part, of in rows.items():
                codes = nibbles(blocks[expert, of].flatten(1))  # [outputs, inputs]
                weight = QuantizedWeight(FORMATS["fp4"], codes, powers[expert, of].contiguous(), scale_bits=8)
                yield f"{module}.{expert}.{part}.weight", QuantizedPart(weight)
