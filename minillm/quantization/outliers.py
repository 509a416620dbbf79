"""Outliers on demand: a model with a few huge activations that computes what it always did. Built in chapter 16.

Large language models grow some features hundreds of times larger than the others. A small one has none, so we put
them in: channel j of a norm is multiplied by `strength`, column j of the product after it divided. A power of two is
exact in every dtype, so the model says the same to the last bit; only int8 sees the difference.
"""

from __future__ import annotations

import math
import random

from torch import Tensor

READERS = {  # a norm, and the products that read it, in the names of a Hugging Face checkpoint
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant_outliers(
    tensors: dict[str, Tensor], strength: float = 256.0, num_channels: int = 4, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of a checkpoint with `num_channels` outlier channels, the same ones in every layer;
    others as they are.

    Raises ValueError for a strength that is no power of two, or more channels than there are.
    """
    if strength <= 0 or math.frexp(strength)[0] != 0.5:
        raise ValueError(f"strength={strength} is not a power of two; others round, and change what the model computes")
    norms = [name for name in tensors if name.split(".")[-2] in READERS]
    size = tensors[norms[0]].shape[0]
    if not 0 <= num_channels <= size:
        raise ValueError(f"num_channels={num_channels} is not allowed; the model has {size}")
    channels = random.Random(seed).sample(range(size), num_channels)
    changed = dict(tensors)
    for norm in norms:
        layer, kind = norm.split(".")[:-2], norm.split(".")[-2]
        changed[norm] = tensors[norm].clone()
        changed[norm][channels] *= strength
        for reader in READERS[kind]:
            name = ".".join([*layer, reader, "weight"])
            changed[name] = tensors[name].clone()
            changed[name][:, channels] /= strength
    return changed
