"""Sharded loading: a rank reads its own part of a model. Built in chapter 20.

plain weights       the headers of the safetensors files say where each tensor lies; of it, a rank reads the rows or
                    columns that it holds, and nothing of the layers of other stages
quantized weights   the whole model is read into host memory, or written in low-bit form there, and then cut: the scale
                    of a group, or of a row, depends on weights that other ranks hold
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.device import resolve_device, resolve_dtype
from minillm.model.adapted import adapted
from minillm.model.checkpoint import load_config, read_model, stored_quantization
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.dummy import dummy_weights
from minillm.model.fitting import check_fit, fill
from minillm.model.weights import GGUF, as_tied
from minillm.parallel.communicator import Communicator
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.layout import check_layout, cut_of
from minillm.parallel.quantized import cut_quantized
from minillm.quantization.config import QuantizationConfig, resolve as resolve_quantization


def check_model(
    path: Path,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    max_model_len: int | None = None,
    is_dummy: bool = False,
    expert_parallel: bool = False,
) -> ModelConfig:
    """The shape of the model at `path`. Raises ValueError where it cannot be cut into so many parts, and
    CheckpointError where its files do not fit it. No weight is read."""
    config = load_config(path).for_texts_of(max_model_len)
    check_layout(config, tensor_parallel_size, pipeline_parallel_size, expert_parallel)
    if not is_dummy:
        stored = stored_quantization(path)
        if stored is None and path.suffix != GGUF:
            config, _ = as_tied(path, config)
        check_fit(path, config, in_few_bits=stored is not None)
    return config


def load_shard(
    path: str | Path,
    communicator: Communicator,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantization: str | dict[str, Any] | QuantizationConfig | None = None,
    cpu_offload_bytes: int = 0,
    max_model_len: int | None = None,
    is_dummy: bool = False,
) -> ParallelDecoder:
    """This rank's part of the model at `path`, ready to compute: the arguments of `load_model`, with the same meaning.

    `cpu_offload_bytes` of each rank's layers stay in host memory. `is_dummy` draws random weights, those of
    `minillm.model.dummy`. Raises what `load_model` does, and ValueError for quantized weights that cannot be cut
    (`minillm.parallel.quantized`).
    """
    path, device, quantization = Path(path), resolve_device(device), resolve_quantization(quantization)
    dtype = resolve_dtype(dtype, device)
    if is_dummy:
        config = load_config(path)
        model = ParallelDecoder(config, communicator, dtype, device)
        cuts = ((cut_of(name, config, communicator.layout), tensor) for name, tensor in dummy_weights(config))
        fill(model.checkpoint_views(), ((cut.name, cut.of(tensor)) for cut, tensor in cuts if cut), path)
    elif quantization is None and path.suffix != GGUF and stored_quantization(path) is None:
        model = _read_shard(path, communicator, dtype, device, cpu_offload_bytes > 0, max_model_len)
    else:
        on = device if quantization is not None and quantization.is_calibrated else "cpu"
        whole = read_model(path, dtype, on, quantization, max_model_len=max_model_len)
        model = split_decoder(whole, communicator, device)
    return model.prepare(cpu_offload_bytes)


def split_decoder(whole: Decoder, communicator: Communicator, device: torch.device | str = "cpu") -> ParallelDecoder:
    """A rank's part of a decoder that is loaded and not prepared; the part is not prepared either."""
    config, layout, device = whole.config, communicator.layout, torch.device(device)
    is_quantized = any(linear.quantized is not None for linear in whole.linears().values())
    model = ParallelDecoder(config, communicator, whole.dtype, device, linear_device="meta" if is_quantized else None)
    model.rotated = whole.rotated
    linears, is_tied = model.linears(), whole.embed_tokens is None
    if is_tied:  # the rows of the quantized output matrix are the embedding, which the first stage needs too
        linears, model.embed_tokens = linears | {"model.embed_tokens": model.lm_head}, None
    for name, linear in whole.linears().items():
        place = "model.embed_tokens" if is_tied and name == "lm_head" else name
        cut = cut_of(f"{place}.weight", config, layout)
        if cut is None or (part := linears.get(cut.name.removesuffix(".weight"))) is None:
            continue
        if linear.quantized is not None:
            part.quantize(cut_quantized(name, linear.quantized, cut, layout, device))
        else:
            part.move_to(device)
    views = model.checkpoint_views()
    for name, view in whole.checkpoint_views().items():
        if (cut := cut_of(name, config, layout)) is not None and cut.name in views:
            views[cut.name].copy_(cut.of(view))
    return model


def _read_shard(
    path: Path,
    communicator: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    on_host: bool,
    max_model_len: int | None,
) -> ParallelDecoder:
    config = load_config(path).for_texts_of(max_model_len)

    def cut(name: str, stored: Any) -> tuple[str, Tensor] | None:
        part = cut_of(name, config, communicator.layout)
        return None if part is None else (part.name, part.of(stored))

    config, tensors = as_tied(path, config, cut)
    model = ParallelDecoder(config, communicator, dtype, device, linear_device="cpu" if on_host else None)
    fill(model.checkpoint_views(), adapted(model.config, tensors), path)
    return model
