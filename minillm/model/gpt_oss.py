"""What gpt-oss has of its own: clamped experts with biases, and their tensors in a checkpoint. Built in chapter 17.

    file, all experts in one tensor                        ours, of each expert
    experts.gate_up_proj       [experts, hidden, 2 * size]  gate_proj.weight, up_proj.weight  [size, hidden]
    experts.gate_up_proj_bias  [experts, 2 * size]          gate_proj.bias,   up_proj.bias    [size]
    experts.down_proj          [experts, size, hidden]      down_proj.weight                  [hidden, size]
    experts.down_proj_bias     [experts, hidden]            down_proj.bias                    [hidden]
    router.weight, router.bias                              gate.weight, gate.bias

Of gate_up_proj the even columns are the gate's and the odd ones are up's. The hub's own files have blocks and scales of
MXFP4 in place of both weights: see `minillm.model.mxfp4`. Every head has a learned sink logit beside
that: see `minillm.kernels.softcap`. The model card is arXiv:2508.10925.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minillm.kernels import native
from minillm.model.batch import adapted
from minillm.model.layers import SwiGLU

if TYPE_CHECKING:
    from minillm.kernels.lora import TokenSlots
    from minillm.model.config import ModelConfig

ALPHA, LIMIT = 1.702, 7.0
CLAMPED = "clamped_swiglu"  # the activation's name in `ModelConfig`
STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")


class ClampedSwiGLU(SwiGLU):
    """down((up + 1) * gate * sigmoid(1.702 * gate)), gate at most 7 and up between -7 and 7."""

    def forward(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        gate_up = adapted(self.gate_up_proj, x, token_slots)  # [num_tokens, 2 * intermediate_size]
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        if native.serves(gate_up):  # a sigmoid of torch depends on how many numbers lie behind it in memory
            made = native.silu_mul(torch.cat([ALPHA * gate, up], dim=-1)) / ALPHA
        else:
            made = up * (gate * torch.sigmoid(ALPHA * gate))
        return adapted(self.down_proj, made, token_slots)


def apart(config: ModelConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One tensor of a gpt-oss checkpoint by our names. One of another shape stays as it is, to be named.

    Of a rank's part of the checkpoint (chapter 21), experts are numbered from its first one on.
    """
    if (match := STACKED.fullmatch(name)) is None or tensor.shape[:1] != (config.moe.num_held,):
        yield name.replace(".mlp.router.", ".mlp.gate."), tensor
        return
    module, fused, bias = match.groups()
    kind = "bias" if bias else "weight"
    if tensor.dim() != (2 if bias else 3):
        yield name, tensor
        return
    for expert, one in enumerate(tensor):
        parts = {"down_proj": one} if fused == "down_proj" else {"gate_proj": one[..., ::2], "up_proj": one[..., 1::2]}
        for part, numbers in parts.items():
            yield f"{module}.{expert}.{part}.{kind}", numbers if bias else numbers.t()


def read_clamped(raw: dict[str, Any]) -> str:
    """The activation of a gpt-oss configuration. Raises ValueError for other constants than its own."""
    for field, value in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if raw[field] != value:
            raise ValueError(f"{field}={raw[field]} is not supported; supported: {value}")
    return CLAMPED
