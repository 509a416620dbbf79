"""From a name to a model: resolve, read the configuration, read safetensors. Built in chapter 02."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm import zoo
from minillm.device import resolve_device, resolve_dtype
from minillm.model.adapted import adapted
from minillm.model.calibration import calibration_sequences
from minillm.model.config import ModelConfig, as_token_ids
from minillm.model.decoder import Decoder
from minillm.model.errors import CheckpointError, naming
from minillm.model.families import text_of
from minillm.model.fields import check_config
from minillm.model.files import read_json
from minillm.model.fitting import check_fit, fill
from minillm.model.gguf import GGUFFile, read_gguf
from minillm.model.hub import download
from minillm.model.hub_formats import READERS
from minillm.model.quantize import quantize_decoder
from minillm.model.quantized_folder import QUANT_METHOD, differences, read_quantized, stored_config
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import (
    GGUF,
    PICKLE_SUFFIXES,
    WHY_NO_PICKLE,
    as_tied,
    read_tensors,
    refuse_adapter,
    some,
)
from minillm.quantization.config import QuantizationConfig, resolve as resolve_quantization

GENERATION = "generation_config.json"  # how the model's authors would have it sampled, and what ends its texts
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
# Where tools wrote what their newer versions write into config.json, and as which quant_method.
SETTINGS_FILES = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}

# Folders whose weights are low-bit already: who takes those tensors, by the quant_method in config.json. Each is
# called with the decoder, whose matrices wait on "meta", the tensors and the quantization_config; it gives the decoder
# its matrices, hands back the other tensors, and raises ValueError for what it cannot read.
QuantizedReader = Callable[[Decoder, Iterator[tuple[str, Tensor]], dict[str, Any]], Iterable[tuple[str, Tensor]]]
QUANTIZED_READERS: dict[str, QuantizedReader] = {"minillm": read_quantized, **READERS, "gguf": read_gguf}


def resolve_model(name: str | Path) -> Path:
    """The folder of a model: a bundled name ("tinyworld"), a folder, or a hub id ("Qwen/Qwen3-0.6B"); or a GGUF file,
    by its path, by its folder if it is the only one there, or by hub id and name ("org/model/file.gguf").

    What the hub has is downloaded once, with a progress bar, into the Hugging Face cache; no code is fetched.
    Raises CheckpointError for a name that is none of these, a pickle file, or a hub out of reach.
    """
    bundled = zoo.bundled()
    if str(name) in bundled:
        return Path(bundled[str(name)])
    path = Path(name).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else _only_gguf(path) or path
    if path.is_file() and path.suffix == GGUF:
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"model={str(name)!r} is refused: {WHY_NO_PICKLE}")
    if path.is_file():
        raise CheckpointError(
            f"model={str(name)!r} is a file; pass the folder that holds it and its config.json, or a .gguf file"
        )
    if hub := re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w./-]+\.gguf))?", str(name)):
        return download(*hub.groups())
    raise CheckpointError(
        f"model={str(name)!r} is neither a folder that exists, nor a hub id like 'Qwen/Qwen3-0.6B', "
        f"nor bundled ({', '.join(bundled) or 'none here'})"
    )


def load_config(path: str | Path) -> ModelConfig:
    """Read config.json; end-of-sequence ids come from generation_config.json too, and may be several."""
    path = Path(path)
    if path.suffix == GGUF:
        with naming(path):
            return GGUFFile(path).config
    refuse_adapter(path)
    raw = text_of(read_json(path / "config.json"))
    if stored_quantization(path) is not None:
        raw.pop("quantization_config", None)  # the decoder's shape is the same
    ids: tuple[int, ...] = ()
    for file, fields in ((path / "config.json", raw), (path / GENERATION, _read_generation(path))):
        with naming(file):
            ids += as_token_ids(fields.get("eos_token_id"))
    with naming(path / "config.json"):
        return ModelConfig.from_hf(raw | {"eos_token_id": list(dict.fromkeys(ids))})


def load_sampling_defaults(path: str | Path) -> dict[str, Any]:
    """What generation_config.json says of the `SAMPLING_DEFAULTS`, as it stands there; nothing for a GGUF file."""
    raw = _read_generation(Path(path))
    return {name: raw[name] for name in SAMPLING_DEFAULTS if raw.get(name) is not None}


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantization: str | dict[str, Any] | QuantizationConfig | None = None,
    cpu_offload_bytes: int = 0,
    max_model_len: int | None = None,
) -> Decoder:
    """Build the decoder of a model folder and fill it from its safetensors files, converted to `dtype`.

    With `quantization` (see `minillm.quantization.config`) its matrices are then written in low-bit form, one after the
    other; in full they only ever stand in host memory. Raises CheckpointError naming every tensor that is missing,
    surplus or misshapen, a damaged file, or pickle weights; ValueError for a configuration the decoder does not
    support. `max_model_len` is the longest text to come, if not the longest that the model was made for.
    """
    asked = dict(on_host=cpu_offload_bytes > 0, max_model_len=max_model_len)
    return read_model(path, dtype, device, quantization, **asked).prepare(cpu_offload_bytes)


def read_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantization: str | dict[str, Any] | QuantizationConfig | None = None,
    on_layer: Callable[[str], None] = lambda name: None,
    on_host: bool = False,
    max_model_len: int | None = None,
) -> Decoder:
    """`load_model`, not prepared yet; `on_layer` hears of each layer that is quantized.
    `on_host` leaves the matrices there."""
    path, device, quantization = Path(path), resolve_device(device), resolve_quantization(quantization)
    dtype = resolve_dtype(dtype, device)
    stored = stored_quantization(path, quantization)
    waits = "meta" if stored else "cpu" if quantization or on_host else None
    config, tensors = load_config(path).for_texts_of(max_model_len), read_tensors(path)
    if stored is None or stored["quant_method"] != QUANT_METHOD:
        config, tensors = as_tied(path, config)
    if stored is None and path.suffix != GGUF:
        tensors = adapted(config, tensors)
    check_fit(path, config, in_few_bits=stored is not None)
    model = Decoder(config, dtype, device, linear_device=waits)
    if stored is not None:
        with naming(path):
            tensors = QUANTIZED_READERS[stored["quant_method"]](model, tensors, stored)
    fill(model.checkpoint_views(), tensors, path)
    if quantization is not None and stored is None:
        texts = None
        if quantization.is_calibrated:
            asked = (quantization.num_documents, quantization.seed, quantization.calibration)
            texts = calibration_sequences(load_tokenizer(path), *asked)
        quantize_decoder(model, quantization, texts, on_layer)
    return model


def stored_quantization(path: Path, asked: QuantizationConfig | None = None) -> dict[str, Any] | None:
    """The quantization_config of a folder whose weights are low-bit already; None of any other.

    Raises CheckpointError for a method that is not read, or where `asked` is something else than what is there.
    """
    if path.suffix == GGUF:
        with naming(path):
            kept = GGUFFile(path).kept_types
        settings = kept and {"quant_method": "gguf", "weights": " and ".join(kept)}
    else:
        refuse_adapter(path)
        raw = read_json(path / "config.json")
        with naming(path / "config.json"):
            check_config(raw)
        settings = raw.get("quantization_config")
        for file, method in SETTINGS_FILES.items():
            if not settings and (path / file).exists():
                settings = {"quant_method": method} | read_json(path / file)
    if not settings:
        return None
    method = str(settings.get("quant_method", "unknown"))
    if method not in QUANTIZED_READERS:
        raise CheckpointError(
            f"the checkpoint in {path} is quantized ({method}), which is not read; read are "
            f"{', '.join(QUANTIZED_READERS)}: use its bfloat16, float16 or float32 original"
        )
    if asked is not None and (method != "minillm" or stored_config(settings) != asked):
        said = settings.get("method", method), settings.get("weights", settings.get("bits"))
        there = ", ".join(str(part) for part in said if part is not None)
        differ = f"; it differs in {differences(asked, stored_config(settings))}" if method == "minillm" else ""
        raise CheckpointError(
            f"quantization asks for {asked.method}, {asked.weights}; {path} is quantized already ({there}): "
            f"leave quantization out{differ}"
        )
    return settings


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob(f"*{GGUF}"))
    if len(files) > 1:
        names = some([file.name for file in files])
        raise CheckpointError(f"{folder} has {len(files)} GGUF files and no config.json: name one of {names}")
    return files[0] if files else None


def _read_generation(path: Path) -> dict[str, Any]:
    return read_json(path / GENERATION) if os.path.lexists(path / GENERATION) else {}
