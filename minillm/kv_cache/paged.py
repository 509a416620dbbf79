"""Where the keys and values of all blocks lie, and how blocks are copied and moved. Built in chapter 06.

    keys[layer]    [num_blocks + 1, num_kv_heads, head_dim, block_size]
    values[layer]  [num_blocks + 1, num_kv_heads, block_size, head_dim]

A slot is block * block_size + offset. Keys lie transposed within a block, so that the scores of a whole block are a
weighted sum of its rows (see `torch_attention`); vLLM's first paged kernel turned them too, for the same reason.
Block 0 is the null block and stays zero.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.kv_cache.manager import BlockMoves


class PagedKVCache:
    """The memory behind a `BlockPool` of `num_blocks`, and `num_host_blocks` places to move blocks to."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        key_shape, value_shape = (num_kv_heads, head_dim, block_size), (num_kv_heads, block_size, head_dim)
        self.keys = [_zeros((num_blocks + 1, *key_shape), dtype, device) for _ in range(num_layers)]
        self.values = [_zeros((num_blocks + 1, *value_shape), dtype, device) for _ in range(num_layers)]
        self.host_keys = [_zeros((num_host_blocks, *key_shape), dtype) for _ in range(num_layers)]
        self.host_values = [_zeros((num_host_blocks, *value_shape), dtype) for _ in range(num_layers)]
        self.bytes_per_block = bytes_per_block(num_layers, num_kv_heads, head_dim, block_size, dtype)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put each token's key and value, [num_tokens, num_kv_heads, head_dim], into its slot [num_tokens] int64."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.keys[layer][blocks, :, :, offsets] = k
        self.values[layer][blocks, :, offsets] = v

    def move(self, moves: BlockMoves) -> None:
        """Make the copies a step asks for, before its forward pass."""
        for pairs, sources, targets in (
            (moves.swap_out, (self.keys, self.values), (self.host_keys, self.host_values)),
            (moves.copies, (self.keys, self.values), (self.keys, self.values)),
            (moves.swap_in, (self.host_keys, self.host_values), (self.keys, self.values)),
        ):
            if not pairs:
                continue
            origin, destination = torch.tensor(pairs).unbind(1)
            for source_layers, target_layers in zip(sources, targets):
                for source, target in zip(source_layers, target_layers):
                    rows = source.index_select(0, origin.to(source.device))  # read first: a target may be a source
                    target.index_copy_(0, destination.to(target.device), rows.to(target.device))

    def read_blocks(self, blocks: list[int]) -> tuple[Tensor, Tensor]:
        """Copies in host memory: keys [num_layers, len(blocks), ...] and values likewise."""
        index = torch.tensor(blocks, dtype=torch.int64)
        keys, values = (
            torch.stack([layer.index_select(0, index.to(layer.device)).cpu() for layer in layers])
            for layers in (self.keys, self.values)
        )
        return keys, values

    def write_blocks(self, blocks: list[int], keys: Tensor, values: Tensor) -> None:
        """The reverse of `read_blocks`."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for layers, rows in ((self.keys, keys), (self.values, values)):
            for layer, layer_rows in zip(layers, rows):
                layer.index_copy_(0, index.to(layer.device), layer_rows.to(layer))


def bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `block_size` tokens in all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Zeros, and never what the memory held before: a weight of 0 times NaN is NaN. On a CPU memory is taken page by
    page when it is first written, so that a large pool costs nothing until it is used."""
    if torch.device(device).type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)  # zeros, by the system's promise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
