"""Whether a configuration and the files' tensors fit each other, seen before memory is taken. Built in chapter 02.

A config.json may claim a billion layers. The headers of the weights say the name and the shape of each tensor, so the
claims are held against them on torch's device "meta", where a tensor has a shape and takes no memory; only a model
that fits is then built and filled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from minillm.device import DTYPES
from minillm.model.adapted import adapted
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.errors import CheckpointError, naming
from minillm.model.parts import EMBEDDING, QuantizedPart
from minillm.model.weights import GGUF, HEAD, described, on_meta, some

MATRIX = ("_proj.weight", "_proj_with_mqa.weight", HEAD)


def check_fit(path: Path, config: ModelConfig, in_few_bits: bool) -> None:
    """Raise CheckpointError naming each tensor that the configuration says otherwise than the headers at `path`.

    Matrices `in_few_bits` are named by their format, and held against the configuration when they are read.
    """
    tensors = described(path)
    if config.tie_word_embeddings and EMBEDDING not in tensors and HEAD in tensors:  # see `as_tied`
        tensors[EMBEDDING] = tensors.pop(HEAD)
    layers = [int(layer) for name in tensors for layer in re.findall(r"^(?:model\.)?layers\.(\d{1,9})\.", name)]
    if layers and config.num_layers > max(layers) + 1:
        held = f"num_hidden_layers={config.num_layers}, and the last layer that they hold is {max(layers)}"
        _refuse(path, f"Layers missing: model.layers.{max(layers) + 1} and what follows ({held}); fetch both again")
    with naming(path):
        views = Decoder(config, torch.float32, "meta").checkpoint_views()
    named = list(adapted(config, tensors.items()))
    if path.suffix == GGUF or not in_few_bits:
        return fill(views, named, path)
    lacking = {name for name in views if not name.endswith(MATRIX)}
    if config.tie_word_embeddings and (codes := tensors.get("lm_head.codes")) is not None:  # rows of it are embeddings
        lacking.discard(EMBEDDING)
        named.append((EMBEDDING, codes.new_empty(codes.shape[0], config.hidden_size)))
    lacking -= {name for name, _ in named}
    packed = {
        name for name, tensor in named if name.endswith(MATRIX) and tensor.dtype is torch.uint8
    }  # two codes a byte
    in_full = [(name, tensor) for name, tensor in named if name in views and name not in packed]
    misshapen = [told for name, tensor in in_full if (told := _misshapen(name, tensor, views[name]))]
    _refuse(path, _told(missing=sorted(lacking), misshapen=misshapen))


def fill(views: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Copy each checkpoint tensor into the view of the model it belongs to, and account for every one."""
    _refuse(path, _problems(views, tensors))


def check_parts(views: Mapping[str, Tensor], found: Mapping[str, Tensor | QuantizedPart]) -> None:
    """Raise ValueError unless `found` is each tensor of `views`, in its shape."""
    named = {name: on_meta(part.shape) if isinstance(part, QuantizedPart) else part for name, part in found.items()}
    if told := _problems({name: on_meta(view.shape) for name, view in views.items()}, named.items()):
        raise ValueError(f"the weights do not fit their config.json. {told}")


def _problems(views: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Copy `tensors` into `views`; which of either have no counterpart, or one of another shape or type."""
    missing, surplus, misshapen = set(views), [], []
    for name, tensor in tensors:
        view = views.get(name)
        if view is None:
            if not _harmless(name, tensor, views):
                surplus.append(name)
            continue
        missing.discard(name)
        if told := _misshapen(name, tensor, view):
            misshapen.append(told)
        elif tensor.dtype not in DTYPES.values():
            misshapen.append(f"{name} is {tensor.dtype}, readable are {', '.join(DTYPES)}")
        else:
            view.copy_(tensor)
    return _told(missing=sorted(missing), surplus=surplus, misshapen=misshapen)


def _told(**problems: list[str]) -> str:
    return ". ".join(f"{len(names)} {kind}: {some(names)}" for kind, names in problems.items() if names)


def _refuse(path: Path, told: str) -> None:
    if told:
        raise CheckpointError(f"the weights in {path} do not fit their config.json. {told}")


def _misshapen(name: str, tensor: Tensor, view: Tensor) -> str | None:
    if view.shape == tensor.shape:
        return None
    return f"{name} is {list(tensor.shape)}, the configuration says {list(view.shape)}"


def _harmless(name: str, tensor: Tensor, views: dict[str, Tensor]) -> bool:
    """Old checkpoints store rotary frequencies, which we compute; tied ones may store the embedding twice; and some
    quantizers give every product a bias, of zeros where the model has none."""
    if name.endswith(("_proj.bias", "lm_head.bias")):
        return tensor.is_meta or not tensor.any()  # a header does not say
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in views)
