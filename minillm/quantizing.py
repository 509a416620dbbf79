"""Quantize a model once and keep the folder: what `minillm quantize` does. Built in chapter 16."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from minillm.model.calibration import corpus_sequences, perplexity
from minillm.model.checkpoint import (
    load_config,
    load_model,
    load_tokenizer,
    read_model,
    resolve_model,
)
from minillm.model.decoder import Decoder
from minillm.model.quantized_folder import check_new, save_quantized
from minillm.model.weights import read_tensors, weight_files
from minillm.quantization.config import QuantizationConfig, resolve
from minillm.quantization.outliers import plant_outliers
from minillm.zoo import corpus

QUALITY_DOCUMENTS = 32  # of held-out text, for the line about quality


@dataclass(frozen=True)
class Quantized:
    """What came of it. Perplexities are those of held-out documents of the corpus."""

    folder: Path
    bits_per_weight: float  # of the matrices, scales and zero points included
    bytes_before: int  # of the weight files
    bytes_after: int
    perplexity_before: float
    perplexity_after: float


def quantize_model(
    model: str | Path,
    config: QuantizationConfig,
    folder: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    on_step: Callable[[str], None] = lambda what: None,
) -> Quantized:
    """Quantize `model` as `config` says, write `folder`, and compare the two; `on_step` hears of each layer and of the
    two comparisons. Raises ValueError for a folder that is not empty, and whatever loading and calibration raise."""
    check_new(folder)
    source = resolve_model(model)
    if not (source / "config.json").exists():
        raise ValueError(
            f"{source} has no config.json beside its weights; quantize a model folder in Hugging Face layout"
        )
    sequences = corpus_sequences(load_tokenizer(source), QUALITY_DOCUMENTS, corpus.HELD_OUT_SEED)
    before = perplexity(load_model(source, dtype, device), sequences)
    on_step("measured the original")
    decoder = read_model(source, dtype, device, config, on_step)
    bits = bits_per_weight(decoder)
    written = save_quantized(decoder, config, source, folder)
    after = perplexity(decoder.prepare(), sequences)
    on_step("measured the result")
    sizes = [sum(file.stat().st_size for file in weight_files(path)) for path in (source, written)]
    return Quantized(written, bits, *sizes, before, after)


def num_steps(model: str | Path) -> int:
    """How often `on_step` is called."""
    return load_config(resolve_model(model)).num_layers + 2


def config_of(
    method: str,
    bits: int | None = None,
    group_size: int | None = 64,
    format: str | None = None,
    symmetric: bool | None = None,
    act_order: bool = False,
    num_documents: int = 64,
    seed: int = 0,
    calibration: str | Path | None = None,
    rotate: bool = False,
) -> QuantizationConfig:
    """What the command line's options mean. Raises ValueError for options that contradict each other."""
    if bits is not None and format is not None:
        raise ValueError(f"--bits {bits} and --format {format} both say what a weight is; give one of them")
    changes = dict(num_documents=num_documents, seed=seed, calibration=calibration and str(calibration))
    changes["rotate"] = rotate
    if method in ("smoothquant", "llm_int8"):
        if bits not in (None, 8) or format not in (None, "fp8") or symmetric is False:
            raise ValueError(
                f"--method {method} multiplies int8 by int8 (or fp8 by fp8), symmetric; --bits 8 or --format fp8"
            )
        return resolve({"name": method, "weights": format or "int8", "activations": format or "int8", **changes})
    weights = format or f"int{bits or 4}"
    if symmetric is None:
        symmetric = method == "rtn" or format is not None
    changes |= dict(method=method, weights=weights, group_size=group_size, symmetric=symmetric, act_order=act_order)
    return resolve(changes)


def report(result: Quantized) -> str:
    """Two lines: what it takes, and what it costs."""
    change = result.perplexity_after / result.perplexity_before - 1
    return (
        f"{result.folder}: {result.bits_per_weight:.2f} bits per weight, "
        f"{result.bytes_before:,} -> {result.bytes_after:,} bytes\nperplexity on {QUALITY_DOCUMENTS} held-out "
        f"documents of the corpus: {result.perplexity_before:.3f} -> {result.perplexity_after:.3f} ({change:+.2%})"
    )


def bits_per_weight(decoder: Decoder) -> float:
    """Of all matrices that are in low-bit form; before `prepare` or after."""
    quantized = [linear.quantized for linear in decoder.linears().values() if linear.quantized is not None]
    return 8 * sum(q.num_bytes for q in quantized) / sum(q.out_features * q.in_features for q in quantized)


def write_outlier_model(
    model: str | Path, folder: str | Path, strength: float = 256.0, num_channels: int = 4, seed: int = 0
) -> Path:
    """A copy of `model` that says the same, with outliers in its activations; see `minillm.quantization.outliers`."""
    source, folder = resolve_model(model), check_new(folder)
    tensors = plant_outliers(dict(read_tensors(source)), strength, num_channels, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy2(file, folder / file.name)
    save_file(tensors, folder / "model.safetensors")
    return folder
