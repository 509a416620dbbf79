"""Fingerprint: the name of a model by what its keys and values depend on. Built in chapter 07."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from minillm.quantization.linear import QuantizedLinear

if TYPE_CHECKING:
    from minillm.model.decoder import Decoder

SAMPLED, LARGE_PRIME = 1024, 2654435761  # of every tensor, for the fingerprint


def fingerprint(model: Decoder) -> str:
    """Names a model by its configuration, dtype and a sample of every weight. Keys and values that another
    model computed, or the same one before it was trained further, must never be taken for its own."""
    digest = hashlib.sha256(f"{model.config}{model.dtype}".encode())
    tensors = model.checkpoint_views()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            digest.update(f"{name} {module.weight.format} {module.activations}".encode())
            tensors |= {f"{name}.{part}": tensor for part, tensor in module.tensors().items()}
    for name, tensor in tensors.items():
        # From all over the tensor: an even stride would meet the same few columns in every row.
        places = torch.arange(SAMPLED, device=tensor.device) * LARGE_PRIME % max(1, tensor.numel())
        sample = tensor.flatten()[places if tensor.numel() else []].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()
