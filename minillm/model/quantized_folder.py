"""A quantized model as a folder: written once, loaded in seconds. Built in chapter 16.

config.json            the model's own, and "quantization_config": {"quant_method": "minillm", "method": "gptq", ...}
model.safetensors      of each matrix, for example layers.0.self_attn.qkv_proj
                         .codes   uint8 [out, in * bits / 8], packed (see `minillm.quantization.formats`)
                         .scales  [out, groups]     .zeros  uint8, packed, where the grid has them
                         .activation_scale, .outlier_columns and .outlier_weights, where the method has them
                       the rest under the names of a Hugging Face checkpoint
tokenizer.json, generation_config.json, ...     copied
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.device import DTYPES
from minillm.model.decoder import Decoder
from minillm.model.families import text_of
from minillm.model.hub_format import told
from minillm.model.layers import Linear
from minillm.quantization.config import QuantizationConfig, resolve
from minillm.quantization.formats import FORMATS, QuantizedWeight, pack_codes, unpack_codes
from minillm.quantization.linear import QuantizedLinear
from minillm.rounding import ceil_div

QUANT_METHOD = "minillm"  # in config.json: who can read the tensors
PARTS = ("codes", "scales", "zeros", "activation_scale", "outlier_columns", "outlier_weights")
NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".md")


def save_quantized(decoder: Decoder, config: QuantizationConfig, source: str | Path, folder: str | Path) -> Path:
    """Write `decoder`, quantized by `config` and not prepared yet, with what else `source` has; returns the folder.

    Raises ValueError for a folder that has anything in it.
    """
    source, folder = Path(source), check_new(folder)
    tensors = {name: as_stored(view) for name, view in decoder.checkpoint_views().items()}
    for name, linear in decoder.linears().items():
        if linear.quantized is not None:
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts_of(linear.quantized).items()}
    folder.mkdir(parents=True, exist_ok=True)  # only now: half a folder would be in the way of the next attempt
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
            shutil.copy2(file, folder / file.name)
    raw = text_of(json.loads((source / "config.json").read_text(encoding="utf-8")))
    # Which the source's files decide, not its config.json.
    raw["tie_word_embeddings"] = decoder.config.tie_word_embeddings
    raw["quantization_config"] = {"quant_method": QUANT_METHOD, **config.as_dict()}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def check_new(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; name a new folder, or remove it first")
    return folder


def as_stored(tensor: Tensor) -> Tensor:
    """In bfloat16 where that loses nothing: most weights came in it, however they were computed with since."""
    narrow = tensor.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor.clone()


def parts_of(quantized: QuantizedLinear) -> dict[str, Tensor]:
    """The tensors of one matrix, packed. Prepared ones no longer have them."""
    weight = quantized.weight
    if weight is None:
        raise ValueError("the matrix is prepared for its kernel; save a quantized decoder before `prepare`")
    bits = weight.format.bits
    parts = {"codes": pack_codes(weight.codes, bits), "scales": weight.scales}
    if weight.zeros is not None:
        parts["zeros"] = pack_codes((weight.zeros.int() + 2 ** (bits - 1)).to(torch.uint8), bits)
    if quantized.activation_scale is not None:
        parts["activation_scale"] = quantized.activation_scale
    if quantized.outliers is not None:
        parts["outlier_columns"], parts["outlier_weights"] = quantized.outliers[0], as_stored(quantized.outliers[1])
    return parts


def read_quantized(
    decoder: Decoder, tensors: Iterator[tuple[str, Tensor]], settings: dict[str, Any]
) -> list[tuple[str, Tensor]]:
    """Give `decoder` the matrices among `tensors`, and hand back the others, for the caller to fill in.

    `settings` is the quantization_config that `save_quantized` wrote. Raises ValueError naming a field that is not
    known, or a matrix that is missing or misshapen.
    """
    config = stored_config(settings)
    decoder.rotated = config.rotate  # the tensors are those of the rotated model
    linears = decoder.linears()
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    rest = []
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if module in linears and part in PARTS:
            parts[module][part] = tensor.to(decoder.device)
        else:
            rest.append((name, tensor))
    for name, linear in linears.items():
        format = config.lm_head if name == "lm_head" else config.weights
        if format is None:
            linear.move_to(decoder.device)
            continue
        linear.quantize(assemble(name, linear, parts[name], config, format))
    if config.lm_head is not None and decoder.config.tie_word_embeddings:
        decoder.embed_tokens = None  # rows of the output matrix
    return rest


def stored_config(settings: dict[str, Any]) -> QuantizationConfig:
    return resolve({key: value for key, value in settings.items() if key != "quant_method"})


def differences(asked: QuantizationConfig, stored: QuantizationConfig) -> str:
    """The fields in which they are not the same, with both values."""
    pairs = ((name, value, getattr(stored, name)) for name, value in asked.as_dict().items())
    return ", ".join(f"{name} ({wanted!r} asked, {there!r} there)" for name, wanted, there in pairs if wanted != there)


def assemble(
    name: str, linear: Linear, parts: dict[str, Tensor], config: QuantizationConfig, format: str
) -> QuantizedLinear:
    """One matrix from its stored parts."""
    bits, (out, width) = FORMATS[format].bits, (linear.out_features, linear.in_features)
    _check_parts(name, parts, format, out, width)
    zeros = None
    if "zeros" in parts:
        codes = unpack_codes(parts["zeros"], bits, parts["scales"].shape[1])
        zeros = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    scale_bits = 8 if config.scale_format and name != "lm_head" else 0
    codes = unpack_codes(parts["codes"], bits, width)
    weight = QuantizedWeight(FORMATS[format], codes, parts["scales"], zeros, scale_bits)
    if name == "lm_head":
        return QuantizedLinear(weight)
    outliers = None
    if "outlier_columns" in parts:
        outliers = (parts["outlier_columns"], parts["outlier_weights"].to(linear.dtype))
    return QuantizedLinear(weight, config.activations, parts.get("activation_scale"), outliers)


def _check_parts(name: str, parts: dict[str, Tensor], format: str, out: int, width: int) -> None:
    """Raise ValueError naming the part that is missing, or of another shape or type than `save_quantized` writes."""
    if not {"codes", "scales"} <= parts.keys():
        raise ValueError(f"{name}.codes or {name}.scales is missing, which {format} weights need")
    bits, scales, columns = FORMATS[format].bits, parts["scales"], parts.get("outlier_columns")
    num_groups = scales.shape[1] if scales.dim() == 2 and 0 < scales.shape[1] <= width else 1
    of_bytes, of_numbers = (torch.uint8,), tuple(DTYPES.values())
    needed = {
        "codes": (of_bytes, [out, ceil_div(width * bits, 8)]),
        "scales": (of_numbers, [out, num_groups]),
        "zeros": (of_bytes, [out, ceil_div(num_groups * bits, 8)]),
        "activation_scale": (of_numbers, []),
        "outlier_columns": ((torch.int64,), [0 if columns is None else columns.numel()]),
        "outlier_weights": (of_numbers, [out, 0 if columns is None else columns.numel()]),
    }
    for part, tensor in parts.items():
        dtypes, shape = needed[part]
        if tensor.dtype not in dtypes or list(tensor.shape) != shape:
            raise ValueError(
                f"{name}.{part} is {told(tensor)}; {format} of {out} x {width} is {shape}, "
                f"{' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
            )
    if columns is not None and ("outlier_weights" not in parts or not ((columns >= 0) & (columns < width)).all()):
        raise ValueError(f"{name}.outlier_columns must name columns below {width}, with their outlier_weights")
