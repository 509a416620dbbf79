"""Memory: what each model of a repository gets for its weights and its KV cache. Built in chapter 23.

--memory 8GiB, --model-share 0.25     a model gets 2 GiB: its weights, and a KV cache in what they leave
one that needs more                   gets as much as its weights and one request take, while that is free
one that does not fit                 is refused, with the numbers
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minillm.device import available_memory, resolve_device, resolve_dtype
from minillm.engine.config import EngineConfig
from minillm.kv_cache.paged import bytes_per_block
from minillm.kv_cache.quantized import KV_DTYPES
from minillm.model.checkpoint import load_config, resolve_model
from minillm.model.config import ModelConfig
from minillm.speculative.eagle_config import load_head_config, resolve_head

LEAST_TOKENS = 1024  # of one request, where max_model_len is not given and the model was made for more
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class NoRoom(ValueError):
    """A model that does not fit beside those that are loaded; the message has the numbers."""


@dataclass(frozen=True)
class Needs:
    """What a model takes. All but the number of blocks in bytes."""

    weights: int  # also of a draft model, and of as many adapters as may be held
    block: int  # of the KV cache
    least_blocks: int  # for one request
    most_blocks: int  # that all requests of a step could fill
    host: int = 0  # host_kv_bytes

    @property
    def least(self) -> int:
        return self.weights + self.host + self.least_blocks * self.block


class Memory:
    """Counts what the loaded models hold. `total` is in bytes; a model that needs no more gets `share` of it."""

    def __init__(self, total: int, share: float = 0.25):
        if total < 1:
            raise ValueError(f"memory={total} is not allowed; allowed: at least 1 byte")
        if not 0 < share <= 1:
            raise ValueError(f"model_share={share} is not allowed; allowed: over 0, up to 1")
        self.total, self.share = total, share
        self.held: dict[str, int] = {}  # by model

    @property
    def free(self) -> int:
        return self.total - sum(self.held.values())

    def take(self, name: str, needs: Needs) -> int:
        """Hold memory for a model; the number of blocks that its KV cache gets. Raises NoRoom."""
        if needs.least > self.free:
            held = ", ".join(f"{other} {_mb(size)}" for other, size in self.held.items()) or "nothing"
            way_out = "unload another model, or raise --memory" if self.held else "raise --memory"
            weights, cache = _mb(needs.weights + needs.host), _mb(needs.least_blocks * needs.block)
            raise NoRoom(
                f"{name} needs {weights} for its weights and {cache} for the KV cache of one request; {_mb(self.free)} "
                f"of memory={_mb(self.total)} are free (held: {held}); {way_out}"
            )
        size = min(max(needs.least, int(self.total * self.share)), self.free)
        num_blocks = min(needs.most_blocks, (size - needs.weights - needs.host) // needs.block)
        self.held[name] = needs.weights + needs.host + num_blocks * needs.block
        return num_blocks

    def give_back(self, name: str) -> None:
        self.held.pop(name, None)


def needs_of(folder: Path, options: dict[str, Any]) -> Needs:
    """What the model in a folder takes when an `LLM` is made of it with these options. Its weights are counted as they
    are read, also where they are made low-bit afterwards."""
    config = EngineConfig(folder, **options)
    shape = load_config(resolve_model(folder))
    dtype = resolve_dtype(config.dtype, config.device)
    limit = config.max_model_len or shape.max_position_embeddings
    least = config.max_model_len or min(limit, LEAST_TOKENS)
    block, weights = _block_bytes(shape, config, dtype), shape.num_parameters() * dtype.itemsize
    if config.speculative_config is not None and config.speculative_config.method == "draft_model":
        draft = load_config(resolve_model(config.speculative_config.model))
        block += _block_bytes(draft, config, dtype)
        weights += draft.num_parameters() * dtype.itemsize
    elif config.speculative_config is not None and config.speculative_config.method == "eagle":
        head = load_head_config(resolve_head(config.speculative_config.model), shape)
        block += _block_bytes(head.layer, config, dtype) + head.feature_bytes(config.block_size, dtype.itemsize)
        weights += head.fixed_bytes(config.max_num_batched_tokens, dtype.itemsize)
    if config.enable_lora:
        weights += (config.max_loras + config.num_cpu_loras) * _adapter_bytes(shape, config.max_lora_rank, dtype)
    least_blocks, longest = -(-least // config.block_size), -(-limit // config.block_size)
    most = config.num_kv_blocks or config.max_num_seqs * longest
    return Needs(weights, block, min(config.num_kv_blocks or least_blocks, most), most, config.host_kv_bytes)


def default_memory(device: str) -> int:
    """Half of what is free now, in bytes: steps need memory too."""
    resolved = resolve_device(device)
    return (torch.cuda.mem_get_info(resolved)[0] if resolved.type == "cuda" else available_memory()) // 2


def parse_bytes(text: str) -> int:
    """ "2GiB", "500 MB" or "1000000". Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in UNITS:
        raise ValueError(
            f"memory={text!r} is not allowed; allowed: bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def _block_bytes(shape: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    kept = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
    return bytes_per_block(*sizes, config.block_size, kept, shape.kv_vectors)


def _adapter_bytes(shape: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Of an adapter that changes every matrix of the layers."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * (shape.hidden_size + q_size) + 2 * (shape.hidden_size + kv_size)
    mlp = 3 * (shape.hidden_size + shape.intermediate_size)
    return shape.num_layers * rank * (attention + mlp) * dtype.itemsize


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
