"""Where the keys and values of all blocks lie, and how blocks are copied and moved. Built in chapter 06.

    keys[layer]         [num_blocks + 1, num_kv_heads, head_dim, block_size]      head_dim / 2 bytes in int4
    values[layer]       [num_blocks + 1, num_kv_heads, block_size, head_dim]      likewise
    key_scales[layer]   [num_blocks + 1, num_kv_heads, block_size] float32, and value_scales likewise: of codes only

A slot is block * block_size + offset. Keys lie transposed within a block, so that the scores of a whole block are a
weighted sum of its rows (see `torch_attention`); vLLM's first paged kernel turned them too, for the same reason.
Block 0 is the null block and stays zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.kernels import huge_pages
from minillm.kv_cache.quantized import (
    INT4,
    KV_DTYPES,
    bytes_per_vector,
    dequantize_vectors,
    quantize_vectors,
)
from minillm.staging import upload

if TYPE_CHECKING:
    from minillm.kv_cache.manager import BlockMoves


class PagedKVCache:
    """The memory behind a `BlockPool` of `num_blocks`, and `num_host_blocks` places to move blocks to.

    `dtype` is the model's; `kv_dtype` "int8", "fp8" or "int4" keeps codes and scales (see `quantized`) in its place.
    All that a block is made of stands in `parts`, each a list of one tensor a layer, and whatever moves a block moves
    all of them.
    """

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
        kv_dtype: str = "auto",
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.model_dtype = dtype
        self.dtype = dtype if kv_dtype == "auto" else KV_DTYPES[kv_dtype]
        self.quantized = kv_dtype != "auto"
        if self.dtype is INT4 and head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd, and a byte of kv_dtype='int4' holds two numbers; use 'int8'")
        width = head_dim // 2 if self.dtype is INT4 else head_dim
        shapes = self.shapes_of_a_block(num_kv_heads, width)

        def layers(name: str, count: int, place: torch.device | str) -> list[Tensor]:
            kind = torch.float32 if name.endswith("_scales") else self.dtype
            return [_zeros((count, *shapes[name]), kind, place) for _ in range(num_layers)]

        self.parts = {name: layers(name, num_blocks + 1, device) for name in shapes}
        self.host_parts = {name: layers(name, num_host_blocks, "cpu") for name in shapes}
        self.keys, self.values = self.parts["keys"], self.parts.get("values")
        self.key_scales, self.value_scales = self.parts.get("key_scales"), self.parts.get("value_scales")
        self.bytes_per_block = sum(part[0][0].nbytes for part in self.parts.values()) * num_layers

    def shapes_of_a_block(self, num_kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """The parts of a block of one layer, by name."""
        size = self.block_size
        shapes = {"keys": (num_kv_heads, head_dim, size), "values": (num_kv_heads, size, head_dim)}
        if self.quantized:
            shapes |= dict.fromkeys(("key_scales", "value_scales"), (num_kv_heads, size))
        return shapes

    @property
    def in_place(self) -> bool:
        """Whether attention in torch reads keys and values where they lie, for one query of a sequence."""
        return not self.quantized

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put each token's key and value, [num_tokens, num_kv_heads, head_dim], into its slot [num_tokens] int64."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        if self.quantized:
            k, self.key_scales[layer][blocks, :, offsets] = quantize_vectors(k, self.dtype)
            v, self.value_scales[layer][blocks, :, offsets] = quantize_vectors(v, self.dtype)
        as_bytes(self.keys[layer])[blocks, :, :, offsets] = as_bytes(k)
        as_bytes(self.values[layer])[blocks, :, offsets] = as_bytes(v)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of some blocks, in the model's dtype: [len(blocks), num_kv_heads, ...]."""
        keys, values = (
            as_bytes(part[layer]).index_select(0, blocks).view(self.dtype) for part in (self.keys, self.values)
        )
        if not self.quantized:
            return keys, values
        key_scales, value_scales = self.key_scales[layer][blocks], self.value_scales[layer][blocks]
        keys = dequantize_vectors(keys, key_scales[:, :, None], self.model_dtype, dim=2)  # keys lie transposed
        return keys, dequantize_vectors(values, value_scales[..., None], self.model_dtype)

    def move(self, moves: BlockMoves) -> None:
        """Make the copies a step asks for, before its forward pass."""
        for pairs, sources, targets in (
            (moves.swap_out, self.parts, self.host_parts),
            (moves.copies, self.parts, self.parts),
            (moves.swap_in, self.host_parts, self.parts),
        ):
            if not pairs:
                continue
            places = {side["keys"][0].device for side in (sources, targets)}
            indices = {place: upload(*zip(*pairs), device=place) for place in places}
            for name in sources:
                for source, target in zip(sources[name], targets[name]):
                    origin, destination = indices[source.device][0], indices[target.device][1]
                    rows = as_bytes(source).index_select(0, origin)  # read first: a target may be a source
                    as_bytes(target).index_copy_(0, destination, rows.to(target.device))

    def read_blocks(self, blocks: list[int]) -> dict[str, Tensor]:
        """Copies in host memory of all parts, by name: each [num_layers, len(blocks), ...]."""
        index = torch.tensor(blocks, dtype=torch.int64)
        return {
            name: torch.stack([as_bytes(layer).index_select(0, index.to(layer.device)).cpu() for layer in layers])
            for name, layers in self.parts.items()
        }

    def write_blocks(self, blocks: list[int], rows: dict[str, Tensor]) -> None:
        """The reverse of `read_blocks`."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for name, layers in self.parts.items():
            for layer, layer_rows in zip(layers, rows[name]):
                as_bytes(layer).index_copy_(0, index.to(layer.device), layer_rows.to(layer.device))


def bytes_per_block(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, kv_vectors: int = 2
) -> int:
    """Keys and values of `block_size` tokens in all layers, with their scales if `dtype` is one of codes; latents
    alone with `kv_vectors` of 1."""
    return kv_vectors * num_layers * block_size * num_kv_heads * bytes_per_vector(head_dim, dtype)


def as_bytes(x: Tensor) -> Tensor:
    """fp8 as the bytes that it is: copying them needs no arithmetic, which torch does not have for it everywhere."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Zeros, and never what the memory held before: a weight of 0 times NaN is NaN. On a CPU memory is taken page by
    page when it is first written, so that a large pool costs nothing until it is used."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_pages.zeros(shape, dtype)
