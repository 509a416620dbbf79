"""An adapter in host memory, read from a folder as PEFT writes it. Built in chapter 23.

    adapter_config.json          rank, scaling, targets       minillm.model.lora_config
    adapter_model.safetensors    ...layers.0.self_attn.q_proj.lora_A.weight  [r, in_features]
                                 ...layers.0.self_attn.q_proj.lora_B.weight  [out_features, r]

    y = x Wᵀ + scaling * (x Aᵀ) Bᵀ                            Hu et al. 2021; the scaling is multiplied into B here

Two adapters are the same if their `key` is: a hash of what they compute, whatever they are called. So prefix blocks
and batch slots that are named by it stay right when a folder is written anew.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from minillm import zoo
from minillm.model.adapted import adapted
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.errors import AdapterError, CheckpointError, naming
from minillm.model.files import check_file
from minillm.model.lora_config import LoraConfig, read_lora_config
from minillm.model.weights import ADAPTER, PICKLE_SUFFIXES, some

TENSORS = "adapter_model.safetensors"
# What PEFT, and models that are wrapped in others, write before the name of a layer.
PREFIX = r"(?:(?:base_model|model|language_model|module|_orig_mod)\.)*"
NAME = re.compile(PREFIX + r"layers\.(\d{1,6})\.([\w.]+)\.lora_([AB])(?:\.(\w+))?\.weight")
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
# Tensors that are refused by name: a part of the name, and what it stands for.
REFUSED = {
    "lora_magnitude_vector": "DoRA is not served; merge the adapter into its model",
    "lora_embedding_": "an adapter of the embedding is not served; train one of q, k, v, o, gate, up and down",
    "embed_tokens": "an adapter of the embedding is not served; train one of q, k, v, o, gate, up and down",
    "lm_head": "an adapter of the output matrix is not served; train one of q, k, v, o, gate, up and down",
    "kv_b_proj": "an adapter of kv_b_proj is not served, since decoding absorbs it; train q, kv_a, o, gate, up or down",
    "modules_to_save": "whole matrices are not served; merge the adapter into its model",
    "lora_B.bias": "biases are not served; train the adapter with lora_bias=False",
}
HEADER_BYTES = 2**24
Shapes = Mapping[str, tuple[int, int]]  # layers.0.self_attn.q_proj -> (out_features, in_features)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The matrices of an adapter on the host: by place, as in layers.0.self_attn.q_proj, A [r, in_features] and
    B [out_features, r], in the model's dtype, with the scaling in B."""

    key: str
    matrices: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())

    @property
    def rank(self) -> int:
        """The largest."""
        return max(len(a) for a, _ in self.matrices.values())


def shapes_of(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """What adapters can change: each matrix of a layer as a checkpoint has it, with its output and input features."""
    shapes = {}
    for place, linear in decoder.linears().items():
        if takes_adapters(place):
            for name, rows in linear.checkpoint_rows(place).items():
                shapes[name] = (rows.stop - rows.start, linear.in_features)
    return shapes


def takes_adapters(place: str) -> bool:
    """Whether the matrix at this place of a decoder may have adapters."""
    return place != "lm_head" and ".experts." not in place


def read_adapter(folder: str | Path, config: ModelConfig, shapes: Shapes, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read the adapter in `folder`, or the bundled one of that name, for a model whose matrices have `shapes`.

    Raises AdapterError for a folder that is none, is damaged, does not fit the model, or asks for what is not served.
    """
    try:
        folder = zoo.bundled_adapters().get(str(folder)) or Path(folder).expanduser()
        return _read(folder, config, shapes, max_rank, dtype)
    except AdapterError:
        raise
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # of expanduser
        raise AdapterError(f"lora_path={str(folder)!r} begins with a user that is not known here") from error


def _read(folder: Path, config: ModelConfig, shapes: Shapes, max_rank: int, dtype: torch.dtype) -> Adapter:
    if not folder.is_dir():
        raise AdapterError(
            f"lora_path={str(folder)!r} is not a folder; give one with {ADAPTER} and {TENSORS}, "
            f"or a bundled adapter: {', '.join(zoo.bundled_adapters())}"
        )
    if not os.path.lexists(folder / TENSORS):
        pickles = [name for name in sorted(os.listdir(folder)) if name.endswith(PICKLE_SUFFIXES)]
        why = f"it has {pickles[0]}, and a pickle file can run any code when it is read" if pickles else "it is missing"
        raise AdapterError(f"{folder} has no {TENSORS}: {why}; write it with save_pretrained of PEFT")
    lora = read_lora_config(folder, max_rank)
    found = _pairs(folder, lora, _loaded(folder / TENSORS, shapes))
    digest, matrices = hashlib.sha256(f"{dtype}".encode()), {}
    for place, pair in sorted(_fitting(folder, config, lora, shapes, found).items()):
        a, b = (tensor.to(dtype).contiguous() for tensor in pair)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(f"{folder / TENSORS}: {place} is not finite in {dtype}; train or convert it again")
        digest.update(f"{place} {tuple(a.shape)} {tuple(b.shape)}".encode())
        for tensor in (a, b):
            digest.update(tensor.view(torch.uint8).numpy())
        matrices[place] = (a, b)
    _check_complete(folder, lora, shapes, matrices)
    return Adapter(digest.hexdigest(), matrices)


def _loaded(file: Path, shapes: Shapes) -> dict[str, Tensor]:
    """All tensors of the file, read at once: it may be written anew meanwhile."""
    check_file(file)
    most = HEADER_BYTES + 8 * 64 * sum(map(sum, shapes.values()))
    if (size := file.stat().st_size) > most:
        raise AdapterError(f"{file} has {size:,} bytes; an adapter of rank 64 for this model has at most {most:,}")
    try:
        return load(file.read_bytes())
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise AdapterError(f"{file} is damaged ({error}); fetch or write it again") from error


def _pairs(folder: Path, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each matrix by its place, the scaling in B; both in float32 at least."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        for part, why in REFUSED.items():
            if part in name:
                raise AdapterError(f"{folder / TENSORS} has {shown(name)}: {why}")
        if (match := NAME.fullmatch(name)) is None:
            raise AdapterError(f"{folder / TENSORS} has {shown(name)}, which is not A or B of a layer's matrix")
        if not tensor.is_floating_point() or tensor.dim() != 2 or not tensor.numel():
            raise AdapterError(
                f"{folder / TENSORS}: {name} is {tensor.dtype} {list(tensor.shape)}, not a matrix of floating-point "
                "numbers"
            )
        of_place = found.setdefault(f"layers.{int(match[1])}.{match[2]}", {})
        if match[3] in of_place:
            raise AdapterError(f"{folder / TENSORS} has lora_{match[3]} of layer {match[1]}'s {match[2]} twice")
        of_place[match[3]] = tensor.float()
    if not found:
        raise AdapterError(f"{folder / TENSORS} holds no tensors")
    pairs = {}
    for place, parts in found.items():
        if missing := {"A", "B"} - parts.keys():
            raise AdapterError(f"{folder / TENSORS} has no lora_{missing.pop()} of {place}, only its other matrix")
        a, b, rank = parts["A"], parts["B"], lora.rank(f"model.{place}")
        if len(a) != rank or b.shape[1] != rank:
            raise AdapterError(
                f"{folder}: {place} has A {list(a.shape)} and B {list(b.shape)}, and the configuration says rank {rank}"
            )
        pairs[place] = (a, b * lora.scaling(f"model.{place}"))
    return pairs


def _fitting(
    folder: Path, config: ModelConfig, lora: LoraConfig, shapes: Shapes, pairs: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs by the places that the decoder has, the rows of B in its order. A pair of a fused matrix becomes one
    for each of its parts, with the same A."""
    fitting: dict[str, tuple[Tensor, Tensor]] = {}
    for place, (a, b) in pairs.items():
        with naming(folder):
            named = [
                (name.removeprefix("model.").removesuffix(".weight"), part)
                for name, part in adapted(config, [(f"model.{place}.weight", b)])
            ]
        for name, part in named:
            if ".experts" in place or ".gate." in f"{place}.":
                raise AdapterError(
                    f"the adapter in {folder} changes {place}: adapters of experts and of their router are not served; "
                    "train one of q, k, v and o"
                )
            if name not in shapes:
                raise AdapterError(f"the adapter in {folder} changes {place}, which this model does not have")
            if shapes[name] != (len(part), a.shape[1]):
                raise AdapterError(
                    f"the adapter in {folder} was made for another model: its {name} has {a.shape[1]} inputs and "
                    f"{len(part)} outputs, this model's has {shapes[name][1]} and {shapes[name][0]}"
                )
            if name in fitting:
                raise AdapterError(f"the adapter in {folder} changes {name} twice, alone and in a fused matrix")
            fitting[name] = (a, part)
    return fitting


def _check_complete(folder: Path, lora: LoraConfig, shapes: Shapes, matrices: Mapping[str, object]) -> None:
    """Where target_modules lists names, the file has each of them in each layer, and nothing else."""
    if lora.target_modules is None:
        return
    surplus = [place for place in matrices if not any(lora.targets(f"model.{name}") for name in _names(place))]
    if surplus:
        raise AdapterError(f"{folder}: target_modules does not name {some(sorted(surplus))}, which {TENSORS} has")
    missing = sorted(place for place in shapes if lora.targets(f"model.{place}") and place not in matrices)
    if missing and not lora.is_partial:
        raise AdapterError(f"{folder / TENSORS} lacks {len(missing)} targets: {some(missing)}; fetch or write it again")


def _names(place: str) -> Iterator[str]:
    """The names by which a configuration may mean it: its own, and that of the fused matrix it is a part of."""
    yield place
    for fused, parts in FUSED.items():
        module, _, part = place.rpartition(".")
        if part in parts and fused.startswith(module.split(".")[-1]):
            yield f"{module}.{fused.split('.')[1]}"
