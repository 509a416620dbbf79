"""Rotation and the way into the cache, in Triton, against float64, on ragged and hostile shapes; and the twin against
the model's own layers. Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from minillm.kernels import rotary
from minillm.kv_cache.paged import PagedKVCache
from minillm.model.config import RopeConfig
from minillm.model.layers import RMSNorm, Rotary, apply_rotary
from tests.helpers.kernel_cases import (
    ROUNDING,
    device,
    error,
    every_dtype,
    exact_norm,
    framed,
    needs_triton,
    projection,
    random,
)

pytestmark = needs_triton
EPS = 1e-6
SHAPES = [(1, 1, 16), (8, 2, 64), (9, 3, 80), (7, 7, 34), (40, 20, 96), (12, 4, 128), (5, 5, 256)]


def exact_rotary(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> Tensor:
    x = x.double() if weight is None else exact_norm(x, weight, EPS)
    low, high = x.chunk(2, -1)
    half = x.shape[-1] // 2
    return torch.cat([low * cos[..., :half].double() + high * sin[..., :half].double(),
                      high * cos[..., half:].double() + low * sin[..., half:].double()], -1)  # fmt: skip


def angles(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    radians = 6 * random((num_tokens, 1, head_dim // 2), torch.float32, seed=5)
    return torch.cat([radians.cos()] * 2, -1).to(dtype), torch.cat([-radians.sin(), radians.sin()], -1).to(dtype)


def caches(num_blocks: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks with a gap of NaN after each, and NaN before the first."""
    keys = framed((num_blocks, kv_heads + 1, head_dim, block_size), dtype)[:, :kv_heads]
    return keys, framed((num_blocks, kv_heads + 1, block_size, head_dim), dtype)[:, :kv_heads]


@every_dtype
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
def test_rotate_and_store_equals_float64_and_its_twin(heads, kv_heads, head_dim, block_size, with_norm, dtype):
    matrix = projection(5, heads + 2 * kv_heads, head_dim, dtype)
    q, k, v, _ = matrix.split([heads, kv_heads, kv_heads, 1], dim=1)
    cos, sin = angles(5, head_dim, dtype)
    weights = (random((head_dim,), dtype, 6), random((head_dim,), dtype, 7), EPS) if with_norm else (None, None, 0.0)
    num_blocks = 64 // block_size
    slots = torch.tensor([3, -1, 63, 16, 17], device=device())  # the last slot of all, neighbours, and a padded row
    real = slots >= 0
    keys, values = caches(num_blocks, kv_heads, head_dim, block_size, dtype)
    before, rotated = matrix.clone(), exact_rotary(q, cos, sin, weights[0])
    expected_keys, expected_values = exact_rotary(k, cos, sin, weights[1]), v.clone()

    rotary.rotate_and_store(q, k, v, cos, sin, keys, values, slots, *weights)

    assert error(q[real], rotated[real]) < ROUNDING[dtype]
    blocks, offsets = slots[real] // block_size, slots[real] % block_size
    assert error(keys[blocks, :, :, offsets], expected_keys[real]) < ROUNDING[dtype]
    assert torch.equal(values[blocks, :, offsets], expected_values[real])
    for cache, written in ((keys, keys[blocks, :, :, offsets]), (values, values[blocks, :, offsets])):
        assert (~whole(cache).isnan()).sum() == written.numel(), "a slot that no token has was written"
    assert torch.equal(matrix[:, heads:], before[:, heads:]), "k or v was changed"
    assert (~whole(matrix).isnan()).sum() == matrix.numel(), "written beyond q's matrix"

    twin_q, twin_k, twin_v = before[:, :-1].split([heads, kv_heads, kv_heads], dim=1)
    twin_keys, twin_values = caches(num_blocks, kv_heads, head_dim, block_size, dtype)
    rotary.torch_rotate_and_store(twin_q, twin_k, twin_v, cos, sin, twin_keys, twin_values, slots, *weights)
    tolerance = dict(rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype], equal_nan=True)
    torch.testing.assert_close(q[real], twin_q[real], **tolerance)
    torch.testing.assert_close(keys, twin_keys, **tolerance)
    torch.testing.assert_close(values, twin_values, **tolerance)


def whole(x: Tensor) -> Tensor:
    """All of the memory that a tensor is a part of."""
    return x.new_empty(0).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes() // x.itemsize,), (1,))


def test_rotate_and_store_twin_equals_the_layers_and_the_cache():
    config = RopeConfig(theta=10000.0)
    tables = Rotary(config, 32, torch.float32, torch.device(device()))
    q, k, v, _ = projection(6, 8, 32, torch.float32).split([4, 2, 2, 1], dim=1)
    positions, slots = (
        torch.tensor([0, 1, 2, 100, 101, 7], device=device()),
        torch.tensor([16, 17, 18, 50, 51, 33], device=device()),
    )
    cos, sin = tables(positions)
    q_norm, k_norm = (RMSNorm(32, EPS, torch.float32, torch.device(device())) for _ in range(2))
    for layer in (q_norm, k_norm):
        layer.weight.normal_()
    for weights in ((None, None, 0.0), (q_norm.weight, k_norm.weight, EPS)):
        ours, theirs = (PagedKVCache(1, 2, 32, 3, 16, torch.float32, device()) for _ in range(2))
        normed = (q, k) if weights[0] is None else (q_norm(q), k_norm(k))
        expected_q, expected_k = (apply_rotary(x.contiguous(), cos, sin) for x in normed)
        theirs.write(0, expected_k, v, slots)
        given = q.clone()
        rotary.torch_rotate_and_store(given, k, v, cos, sin, ours.keys[0], ours.values[0], slots, *weights)
        torch.testing.assert_close(given, expected_q)
        torch.testing.assert_close(ours.keys[0], theirs.keys[0])
        torch.testing.assert_close(ours.values[0], theirs.values[0])


def test_a_slot_far_out_in_a_large_cache():
    """Offsets beyond 2^31 elements. The cache is a mapping of zeros that takes memory only where it is written; below
    it lies as much again, so that an offset that wraps around to a negative number writes into it,
    and not elsewhere."""
    head_dim, block_size, half = 16, 16, 2**31
    stride = 2 * head_dim * block_size  # elements of a block: its keys, then its values
    num_blocks = half // stride + 2  # so the last block begins beyond 2^31
    memory = sparse_zeros(half + num_blocks * stride)
    blocks = memory[half:].view(num_blocks, 1, stride)
    keys = blocks[:, :, : stride // 2].unflatten(2, (head_dim, block_size))
    values = blocks[:, :, stride // 2 :].unflatten(2, (block_size, head_dim))
    q, k, v, _ = projection(2, 3, head_dim, torch.float16).split(1, dim=1)
    cos, sin = angles(2, head_dim, torch.float16)
    slots = torch.tensor([num_blocks * block_size - 1, 5], device=device())

    rotary.rotate_and_store(q, k, v, cos, sin, keys, values, slots)

    assert error(keys[-1, 0, :, -1], exact_rotary(k, cos, sin, None)[0, 0]) < ROUNDING[torch.float16]
    assert torch.equal(values[-1, 0, -1], v[0, 0])
    assert torch.equal(values[0, 0, 5], v[1, 0])


def sparse_zeros(num_elements: int) -> Tensor:
    if device() == "cuda":
        if torch.cuda.mem_get_info()[0] < 3 * num_elements:
            pytest.skip(f"needs {num_elements * 2 / 2**30:.0f} GiB of GPU memory")
        return torch.zeros(num_elements, dtype=torch.float16, device="cuda")
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; Python names it from 3.13 on
    return torch.frombuffer(
        mmap.mmap(-1, 2 * num_elements, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve), dtype=torch.float16
    )


def test_rotate_and_store_refuses_what_it_would_misread():
    q, k, v = projection(2, 4, 16, torch.float32).split([2, 1, 1, 1], dim=1)[:3]
    cos, sin = angles(2, 16, torch.float32)
    keys, values = caches(2, 1, 16, 4, torch.float32)
    slots = torch.tensor([0, 1], device=device())
    cases = [
        ("odd", [x[..., :15] for x in (q, k, v)], keys, values),
        ("side by side", [q.transpose(0, 1), k, v], keys, values),
        ("one piece", [q, k, v], keys.transpose(2, 3), values),
    ]
    for said, given, given_keys, given_values in cases:
        with pytest.raises(ValueError, match=said):
            rotary.rotate_and_store(*given, cos, sin, given_keys, given_values, slots)
