"""A model that says what a small one says, at the cost of a large one. Built in chapter 18.

How much speculation saves depends on what is said, so random weights cannot tell; and on what a step costs,
so a model that fits into the cache cannot tell either. Here a trained model stands in the corner of larger matrices:
what is added meets zeros, so it is read and multiplied and changes nothing.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..speculative.eagle_config import HeadConfig

GROWN = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
READS_HIDDEN, WRITES_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def write_enlarged(small: Path, folder: Path, num_layers: int, factor: int = 4, seed: int = 0) -> Path:
    """Write the Llama model in folder `small` again, every width times `factor` and with `num_layers` layers.

    `factor` is a power of 4, so that its square root, which the norms need, is exact. Returns `folder`.
    Raises ValueError for another factor, and for fewer layers than there are.
    """
    config = json.loads((small / "config.json").read_text())
    if factor < 1 or factor & (factor - 1) or factor.bit_length() % 2 == 0:
        raise ValueError(
            f"factor={factor} is not allowed; allowed: 1, 4, 16, ..., whose square roots are powers of two"
        )
    if num_layers < config["num_hidden_layers"]:
        raise ValueError(
            f"num_layers={num_layers} is not allowed; the model has {config['num_hidden_layers']}, "
            "and more may follow them"
        )
    weights = load_file(small / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    grown = {name: grow(name, weight, factor, generator) for name, weight in weights.items()}
    layer = {name.split(".", 3)[3]: weight for name, weight in grown.items() if name.startswith("model.layers.0.")}
    for index in range(config["num_hidden_layers"], num_layers):
        for name, weight in layer.items():
            silent = any(part in name for part in WRITES_HIDDEN)  # it computes, and adds nothing
            grown[f"model.layers.{index}.{name}"] = torch.zeros_like(weight) if silent else weight.clone()
    config |= {name: config[name] * factor for name in GROWN}
    # A norm divides by the mean square, and the mean is over `factor` times as many numbers.
    config |= {"num_hidden_layers": num_layers, "rms_norm_eps": config["rms_norm_eps"] / factor}
    shutil.copytree(small, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: weight.contiguous() for name, weight in grown.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def write_enlarged_head(small: Path, folder: Path, factor: int = 4, seed: int = 0) -> Path:
    """Write the draft head in folder `small` again, for a target that `write_enlarged` made with the same `factor`."""
    head, weights = HeadConfig.load(small), load_file(small / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    grown = {}
    for name, weight in weights.items():
        # `fuse` reads several hidden states side by side. What it and the projections write is heard.
        parts = weight.split(head.target_hidden_size, dim=1) if name == "fuse.weight" else [weight]
        kind = "o_proj" if name.startswith(("fuse", "embed_proj", "mix", "out_proj")) else name
        grown[name] = torch.cat([grow(kind, part, factor, generator) for part in parts], dim=-1)
    folder.mkdir(parents=True)
    sizes = {name: getattr(head, name) * factor for name in (*GROWN, "target_hidden_size")}
    replace(head, **sizes, rms_norm_eps=head.rms_norm_eps / factor).write(folder)
    save_file(
        {name: weight.contiguous() for name, weight in grown.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def grow(name: str, weight: Tensor, factor: int, generator: torch.Generator) -> Tensor:
    """The weight in the corner of a larger one; the rest is random where it meets zeros,
    and zero where it would be heard."""
    if weight.dim() == 1:  # a norm
        return torch.cat([weight / factor**0.5, torch.zeros(weight.shape[0] * (factor - 1), dtype=weight.dtype)])
    rows, columns = weight.shape
    if "embed_tokens" in name or "lm_head" in name:
        return torch.cat([weight, torch.zeros(rows, columns * (factor - 1), dtype=weight.dtype)], dim=1)
    grown = (
        torch.randn(rows * factor, columns * factor, generator=generator)
        .mul_(float(weight.float().std()))
        .to(weight.dtype)
    )
    if any(part in name for part in WRITES_HIDDEN):
        grown[rows:] = 0  # nothing is added to the hidden state's new part ...
        grown[:rows, columns:] = 0  # ... and what new heads and neurons say is not heard
    grown[:rows, :columns] = weight
    return grown
