"""The tensors of a model folder: which files hold them, read one at a time. Built in chapter 02."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.errors import CheckpointError, naming
from minillm.model.files import check_file, read_json
from minillm.model.gguf import GGUFFile
from minillm.model.parts import EMBEDDING, QuantizedPart

GGUF = ".gguf"
HEAD = "lm_head.weight"
BASE = "model."
# Of a model of images and text: where its text model is, and what is not of it.
TEXT, NEWER_TEXT = "language_model.", "model.language_model."
SEEING = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # what it calls the matrices of an expert
ADAPTER = "adapter_config.json"
# The types that safetensors writes, and torch computes with or unpacks.
DTYPE_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WHY_NO_PICKLE = (
    "a pickle file can run any code when it is read, so minillm reads safetensors only; "
    "with a file you trust, convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
)

Cut = Callable[[str, Any], tuple[str, Tensor] | None]


def as_tied(
    path: Path, config: ModelConfig, cut: Cut | None = None
) -> tuple[ModelConfig, Iterator[tuple[str, Tensor | QuantizedPart]]]:
    """`config`, and the tensors of the folder at `path` (see `read_tensors`), once the files decide whether the
    output matrix is the embedding. As in transformers 5: where they hold both and these differ, they are two, whatever
    the configuration says; where they hold the output matrix alone, it is the embedding too."""
    tensors = read_tensors(path, cut)
    if not config.tie_word_embeddings or path.suffix == GGUF:
        return config, tensors
    places = tensor_places(path)
    stored = {decoder_name(name, _is_base(places)): name for name in places}
    heads = [name for name in stored if name and name.startswith("lm_head.") and not name.endswith(".bias")]
    if heads == [HEAD] and EMBEDDING not in stored:
        return config, ((EMBEDDING if name == HEAD else name, tensor) for name, tensor in tensors)
    if heads and (
        heads != [HEAD] or not _equal(places, stored[EMBEDDING], stored[HEAD])
    ):  # tensors other than HEAD are quantized
        config = replace(config, tie_word_embeddings=False)
    return config, tensors


def _is_base(places: Iterable[str]) -> bool:
    return EMBEDDING.removeprefix(BASE) in places and not any(name.startswith((BASE, "lm_head.")) for name in places)


def _equal(places: dict[str, Path], *names: str) -> bool:
    """Whether two tensors of a folder are the same."""
    found = []
    for name in names:
        with _opened(places[name]) as tensors:
            found.append(tensors.get_tensor(name))
    return torch.equal(*found)


def read_tensors(path: Path, cut: Cut | None = None) -> Iterator[tuple[str, Tensor | QuantizedPart]]:
    """Every tensor of a GGUF file, or of the folder's safetensors files, one at a time, with its name. `cut` reads a
    part of each tensor of a safetensors file, under a name of its own, or returns None to leave it out."""
    if path.suffix == GGUF:
        with naming(path):
            yield from GGUFFile(path).tensors()
        return
    files: dict[Path, list[str]] = {}
    places = tensor_places(path)
    for name, file in places.items():
        files.setdefault(file, []).append(name)
    is_base = _is_base(places)
    for file, names in files.items():
        with _opened(file) as tensors:
            for stored in names:
                if (name := decoder_name(stored, is_base)) is None:
                    continue
                if cut is None:
                    yield name, tensors.get_tensor(stored)
                elif (part := cut(name, tensors.get_slice(stored))) is not None:
                    yield part


def decoder_name(name: str, is_base: bool) -> str | None:
    """The name in a decoder with a head of a tensor of a folder; None for what only sees images. `AutoModel`, which
    has no head, writes its tensors without "model." before them (`is_base`)."""
    if name.startswith(SEEING):
        return None
    if is_base:
        name = BASE + name
    elif name.startswith(NEWER_TEXT):
        name = BASE + name.removeprefix(NEWER_TEXT)
    return _expert_name(name.removeprefix(TEXT))


def _expert_name(name: str) -> str:
    """The names of experts differ by family; ours are Qwen's."""
    name = name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")  # of DeepSeek and dots.llm1
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+\.)(w[123])\.", lambda found: f"{found[1]}{MIXTRAL[found[2]]}.", name)


def tensor_places(path: Path) -> dict[str, Path]:
    """Which of the folder's files holds each tensor. Raises CheckpointError for a tensor that two of them hold."""
    places: dict[str, Path] = {}
    for file in weight_files(path):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a file, not a dict)
                if name in places:
                    raise CheckpointError(
                        f"{name} stands in {places[name].name} and in {file.name} of {path}; keep one of them"
                    )
                places[name] = file
    return places


def described(path: Path) -> dict[str, Tensor]:
    """Every tensor by its name, on the device "meta": the shape that the files' headers say, and no memory."""
    if path.suffix == GGUF:
        with naming(path):
            return {name: on_meta(shape) for name, shape in GGUFFile(path).shapes.items()}
    found = {}
    for file in weight_files(path):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a file, not a dict)
                header = tensors.get_slice(name)
                if (dtype := DTYPE_NAMES.get(header.get_dtype())) is None:
                    raise CheckpointError(
                        f"{name} in {file} is of type {header.get_dtype()}; readable are {', '.join(DTYPE_NAMES)}"
                    )
                found[name] = on_meta(header.get_shape(), dtype)
    base = _is_base(found)
    named = {decoder_name(name, base): tensor for name, tensor in found.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def on_meta(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    check_file(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or cut off ({error}); it has {file.stat().st_size:,} bytes: fetch it again"
        ) from error


def weight_files(path: Path) -> list[Path]:
    """model.safetensors, or the shards its index names, or whatever safetensors there are."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if os.path.lexists(whole):
        return [whole]
    if os.path.lexists(index):
        files = [path / name for name in _shard_names(index)]
        absent = [file.name for file in files if not os.path.exists(file)]
        if absent:
            raise CheckpointError(f"{path} lacks {some(absent)} of the {len(files)} files that {index.name} names")
        return files
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
        reason = f"it has {some(pickles)}, but {WHY_NO_PICKLE}" if pickles else "nor any other weights"
        raise CheckpointError(f"{path} has no *.safetensors file; {reason}")
    return files


def _shard_names(index: Path) -> list[str]:
    """The files that an index names: safetensors, all of them beside it."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map, which says the file of each tensor; fetch it again")
    for name in names.values():
        if not isinstance(name, str) or not name.isprintable() or Path(name).name != name:
            raise CheckpointError(
                f"{index} names the file {shown(name)}; allowed are names of files in its own folder; fetch it again"
            )
        if not name.endswith(".safetensors"):
            why = WHY_NO_PICKLE if name.endswith(PICKLE_SUFFIXES) else "allowed are *.safetensors; fetch it again"
            raise CheckpointError(f"{index} names the file {shown(name)}; {why}")
    return sorted(set(names.values()))


def refuse_adapter(path: Path) -> None:
    """Raise CheckpointError for the folder of an adapter, whatever else it has."""
    if os.path.lexists(path / ADAPTER):
        base = read_json(path / ADAPTER).get("base_model_name_or_path")
        raise CheckpointError(
            f"{path} has {ADAPTER}: it is an adapter for {base!r}, not a model; peft makes a model of the two: "
            "PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(new_folder)"
        )


def some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
