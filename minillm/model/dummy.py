"""A model of random weights, where only its shapes matter: how fast it is, how much memory it takes.
Built in chapter 02."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from minillm.device import resolve_device, resolve_dtype
from minillm.model.checkpoint import load_config
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder

STANDARD_DEVIATION = 0.02  # as checkpoints are initialized before training


def dummy_model(path: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto") -> Decoder:
    """The decoder of a model folder with weights from a fixed seed; none of its files but config.json is read."""
    device = resolve_device(device)
    model = Decoder(load_config(path), resolve_dtype(dtype, device), device)
    views = model.checkpoint_views()
    for name, tensor in dummy_weights(model.config):
        views[name].copy_(tensor)
    return model.prepare()


def dummy_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint of this shape, float32, one at a time: always the same."""
    generator = torch.Generator().manual_seed(0)
    for name, view in Decoder(config, torch.float32, "meta").checkpoint_views().items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(view.shape)
        else:
            yield name, torch.randn(view.shape, generator=generator) * STANDARD_DEVIATION
