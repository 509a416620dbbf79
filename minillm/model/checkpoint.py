"""From a name to a model: resolve, read the configuration, read safetensors. Built in chapter 02."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm import zoo
from minillm.device import DTYPES, resolve_device, resolve_dtype
from minillm.model.config import ModelConfig, as_token_ids
from minillm.model.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HUB_EXTRAS = ["original/*", "consolidated*"]  # the same weights once more, in another layout
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WHY_NO_PICKLE = (
    "a pickle file can run any code when it is read, so minillm reads safetensors only; "
    "with a file you trust, convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file or the tensor, and the way out."""


def resolve_model(name: str | Path) -> Path:
    """The folder of a model: a bundled name ("tinyworld"), a folder, or a hub id ("Qwen/Qwen3-0.6B").

    A hub id is downloaded once, with a progress bar, into the Hugging Face cache; no code is fetched.
    Raises CheckpointError for a name that is none of the three, a pickle file, or a hub out of reach.
    """
    bundled = zoo.bundled()
    if str(name) in bundled:
        return Path(bundled[str(name)])
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"model={str(name)!r} is refused: {WHY_NO_PICKLE}")
    if path.is_file():
        raise CheckpointError(f"model={str(name)!r} is a file; pass the folder that holds it and its config.json")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(name)):
        return _download(str(name))
    raise CheckpointError(
        f"model={str(name)!r} is neither a folder that exists, nor a hub id like 'Qwen/Qwen3-0.6B', "
        f"nor bundled ({', '.join(bundled) or 'none here'})"
    )


def load_config(path: str | Path) -> ModelConfig:
    """Read config.json; end-of-sequence ids come from generation_config.json too, and may be several."""
    path = Path(path)
    raw = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    extra = _read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = as_token_ids(raw.get("eos_token_id")) + as_token_ids(extra)
    return ModelConfig.from_hf(raw | {"eos_token_id": list(dict.fromkeys(ids))})


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; never runs code from it. Raises CheckpointError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(Path(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        present = "has" if (Path(path) / "tokenizer.json").exists() else "has no"
        raise CheckpointError(
            f"{path} {present} tokenizer.json, and no tokenizer could be loaded from it "
            f"({str(error).splitlines()[0]}); a model folder is what `save_pretrained` of model and tokenizer write"
        ) from error


def load_model(
    path: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> Decoder:
    """Build the decoder of a model folder and fill it from its safetensors files, converted to `dtype`.

    Raises CheckpointError naming every tensor that is missing, surplus or misshapen, a damaged file, or
    pickle weights; ValueError for a configuration the decoder does not support.
    """
    path, device = Path(path), resolve_device(device)
    model = Decoder(load_config(path), resolve_dtype(dtype, device), device)
    fill(model.checkpoint_views(), read_tensors(path), path)
    return model.prepare()


def fill(views: dict[str, Tensor], tensors: Iterator[tuple[str, Tensor]], path: Path) -> None:
    """Copy each checkpoint tensor into the view of the model it belongs to, and account for every one."""
    missing, surplus, misshapen = set(views), [], []
    for name, tensor in tensors:
        view = views.get(name)
        if view is None:
            surplus.append(name)
            continue
        missing.discard(name)
        if view.shape != tensor.shape:
            misshapen.append(f"{name} is {list(tensor.shape)}, the configuration says {list(view.shape)}")
        elif tensor.dtype not in DTYPES.values():
            misshapen.append(f"{name} is {tensor.dtype}, readable are {', '.join(DTYPES)}")
        else:
            view.copy_(tensor)
    surplus = [name for name in surplus if not _harmless(name, views)]
    problems = {"missing": sorted(missing), "surplus": sorted(surplus), "misshapen": misshapen}
    if any(problems.values()):
        told = [f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names]
        raise CheckpointError(f"the weights in {path} do not fit their config.json. {'. '.join(told)}")


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors files, one at a time, with its name."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is damaged or cut off ({error}); it has {file.stat().st_size:,} bytes: fetch it again"
            ) from error


def weight_files(path: Path) -> list[Path]:
    """model.safetensors, or the shards its index names, or whatever safetensors there are."""
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if index.exists():
        files = [path / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise CheckpointError(f"{path} lacks {_some(absent)} of the {len(files)} files that {index.name} names")
        return files
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
        reason = f"it has {_some(pickles)}, but {WHY_NO_PICKLE}" if pickles else "nor any other weights"
        raise CheckpointError(f"{path} has no *.safetensors file; {reason}")
    return files


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXTRAS))
    except GatedRepoError as error:
        raise CheckpointError(
            f"model={hub_id!r} asks for its licence to be accepted: do so on its page, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"model={hub_id!r} is not on the hub, or is private: check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model={hub_id!r} is not in the local cache and the hub is out of reach ({type(error).__name__}). Where "
            f"there is a network run `hf download {hub_id} --local-dir FOLDER` and pass that folder, "
            f"or use a bundled model: {', '.join(zoo.bundled()) or 'none here'}"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise CheckpointError(f"{file.parent} has no {file.name}; a model folder is what `save_pretrained` writes")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); fetch it again") from error


def _harmless(name: str, views: dict[str, Tensor]) -> bool:
    """Old checkpoints store rotary frequencies, which we compute; tied ones may store the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in views)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
