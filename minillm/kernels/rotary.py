"""Everything between the projection and attention: per-head norm, rotation, and the way into the cache.
Built in chapter 13.

One launch serves q, k and v, which lie side by side in the output of one matrix product. A program takes a tile of
heads of one token; what it does depends on which third of the row they are from.

    a token's row:   [ q heads ......................... | k heads ... | v heads ... ]
    programs:          tile 0     tile 1     tile 2        tile 0        tile 0
                       norm, rotate, store in place        norm, rotate,  store
                                                           store by slot  by slot

    keys   [num_blocks + 1, num_kv_heads, head_dim, block_size]     slot = block * block_size + offset
    values [num_blocks + 1, num_kv_heads, block_size, head_dim]
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.kv_codes import INT4, LARGEST, as_codes, check_codes, encode, pair_of, to_pairs, torch_encode
from minillm.kernels.language import next_power_of_2, tl, triton

ELEMENTS = 1024  # a program's tile, heads * head_dim: eight elements a thread in four warps


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Rotate q in place; rotate k and write it, and v, into the cache. k and v themselves stay as they are.

    q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], heads side by side, any stride
    from token to token. cos and sin [num_tokens, 1, head_dim] as `Rotary` makes them, the sign in sin. keys and values
    as in `PagedKVCache`, slot_mapping [num_tokens] int64. A token of slot -1 is padding: it writes nothing into the
    cache, and its q holds nothing of use afterwards. With q_weight and k_weight [head_dim] each head of q and k is
    RMS-normed first (Qwen3). The rotation is computed in float32 and rounded once. Any even head_dim; of int4 a
    multiple of 4.

    A cache in 8 or 4 bits (chapter 17) gets the codes of what another cache would get, and their scales: key_scales and
    value_scales [num_blocks + 1, num_kv_heads, block_size] float32.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k.shape[1], values.shape[2]
    check(q, k, v, cos, sin, keys, values)
    check_codes(keys, values, key_scales, value_scales)
    width = next_power_of_2(head_dim // 2)
    tile = max(1, min(ELEMENTS // (2 * width), next_power_of_2(num_heads)))
    tiles = triton.cdiv(num_heads, tile) + 2 * triton.cdiv(num_kv_heads, tile)
    with_norm = q_weight is not None
    rotate_and_store_kernel[(num_tokens, tiles)](
        q, k, v, cos, sin, as_codes(keys), as_codes(values), slot_mapping,
        q_weight if with_norm else q, k_weight if with_norm else k, key_scales, value_scales,
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), sin.stride(0), keys.stride(0), values.stride(0), eps,
        Q_HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, BLOCK_SIZE=block_size, NORM=with_norm,
        HEADS=tile, WIDTH=width, PAIR=pair_of(keys), LARGEST_CODE=LARGEST.get(keys.dtype, 0.0),
        num_warps=max(1, tile * width // 128),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])  # it may begin anywhere in a step's inputs
def rotate_and_store_kernel(
    q, k, v, cos, sin, keys, values, slot_mapping, q_weight, k_weight, key_scales, value_scales,
    q_token, k_token, v_token, cos_token, sin_token, key_block, value_block, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIR: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    HALF: tl.constexpr = DIM // 2
    WIDE: tl.constexpr = DIM // PAIR  # elements of a vector in the cache: of int4 each has two dimensions
    HALF_WIDE: tl.constexpr = HALF // PAIR
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)  # a large cache has more than 2^31 elements
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE  # needed last: nothing waits for the slot until the store
    dims = tl.arange(0, WIDTH)  # of the first half; each turns with its partner, HALF further on

    if tile < Q_TILES:
        heads = tile * HEADS + tl.arange(0, HEADS)
        inside = (heads < Q_HEADS)[:, None] & (dims < HALF)[None, :]
        place = q + token * q_token + heads[:, None] * DIM + dims[None, :]
        first, second = rotate(
            place, inside, q_weight, cos + token * cos_token, sin + token * sin_token, eps, dims, DIM, NORM
        )
        tl.store(place, first, inside)
        tl.store(place + HALF, second, inside)
    elif tile < Q_TILES + KV_TILES:
        heads = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)
        inside = (heads < KV_HEADS)[:, None] & (dims < HALF)[None, :]
        place = k + token * k_token + heads[:, None] * DIM + dims[None, :]
        first, second = rotate(
            place, inside, k_weight, cos + token * cos_token, sin + token * sin_token, eps, dims, DIM, NORM
        )
        if key_scales is not None:
            scales = key_scales + (block * KV_HEADS + heads) * BLOCK_SIZE + offset
            first, second = to_codes(
                first, second, scales, heads < KV_HEADS, slot, k, keys, HEADS, WIDTH, PAIR, LARGEST_CODE
            )
        places = tl.arange(0, WIDTH // PAIR)
        held = (heads < KV_HEADS)[:, None] & (places < HALF_WIDE)[None, :]
        target = keys + block * key_block + (heads[:, None] * WIDE + places[None, :]) * BLOCK_SIZE + offset
        if slot >= 0:
            tl.store(target, first, held)
            tl.store(target + HALF_WIDE * BLOCK_SIZE, second, held)
    else:
        heads = (tile - Q_TILES - KV_TILES) * HEADS + tl.arange(0, HEADS)
        inside = (heads < KV_HEADS)[:, None] & (dims < HALF)[None, :]
        place = v + token * v_token + heads[:, None] * DIM + dims[None, :]
        low, high = tl.load(place, inside, 0.0), tl.load(place + HALF, inside, 0.0)
        if value_scales is not None:
            scales = value_scales + (block * KV_HEADS + heads) * BLOCK_SIZE + offset
            low, high = to_codes(low, high, scales, heads < KV_HEADS, slot, v, values, HEADS, WIDTH, PAIR, LARGEST_CODE)
        places = tl.arange(0, WIDTH // PAIR)
        held = (heads < KV_HEADS)[:, None] & (places < HALF_WIDE)[None, :]
        target = values + block * value_block + (heads[:, None] * BLOCK_SIZE + offset) * WIDE + places[None, :]
        if slot >= 0:
            tl.store(target, low, held)
            tl.store(target + HALF_WIDE, high, held)


@triton.jit
def rotate(place, inside, weight, cos, sin, eps, dims, DIM: tl.constexpr, NORM: tl.constexpr):
    """Both halves of the heads at `place`, [HEADS, WIDTH] each, normed and rotated, in float32."""
    HALF: tl.constexpr = DIM // 2
    there = dims < HALF
    first = tl.load(place, inside, 0.0).to(tl.float32)
    second = tl.load(place + HALF, inside, 0.0).to(tl.float32)
    first_cos = tl.load(cos + dims, there, 0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + HALF + dims, there, 0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + dims, there, 0.0).to(tl.float32)[None, :]  # negative: the minus of the rotation
    second_sin = tl.load(sin + HALF + dims, there, 0.0).to(tl.float32)[None, :]
    if NORM:
        dtype = place.dtype.element_ty
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        first_weight = tl.load(weight + dims, there, 0.0)[None, :]
        second_weight = tl.load(weight + HALF + dims, there, 0.0)[None, :]
        first = ((first * scale).to(dtype) * first_weight).to(tl.float32)
        second = ((second * scale).to(dtype) * second_weight).to(tl.float32)
    return first * first_cos + second * first_sin, second * second_cos + first * second_sin


@triton.jit
def to_codes(
    first, second, scales, inside, slot, x, cache,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIR: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    """The elements that `cache` holds for both halves of the heads, WIDTH // PAIR of each; their scales are stored.
    What is encoded was rounded to the dtype of x first, as in a cache that holds it."""
    dtype = x.dtype.element_ty
    codes: tl.constexpr = tl.int8 if PAIR == 2 else cache.dtype.element_ty
    low, high, scale = encode(first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32), codes, LARGEST_CODE)
    if slot >= 0:
        tl.store(scales, scale, inside)
    if PAIR == 2:
        low, high = to_pairs(low, HEADS, WIDTH // 2), to_pairs(high, HEADS, WIDTH // 2)
    return low, high


def check(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raise ValueError unless everything lies as the kernel reads and writes it."""
    head_dim = q.shape[2]
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: the rotation turns pairs of dimensions")
    if keys.dtype is INT4 and head_dim % 4:
        raise ValueError(
            f"head_dim={head_dim}: each half of a head goes into whole bytes of int4, so it has to be a multiple of 4"
        )
    if any((x.stride(1) != head_dim and x.shape[1] > 1) or x.stride(2) != 1 for x in (q, k, v)):
        raise ValueError("the heads of a token must lie side by side in q, k and v; call .contiguous()")
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise ValueError("cos and sin of a token must lie in one piece; call .contiguous()")
    if not keys[0].is_contiguous() or not values[0].is_contiguous():
        raise ValueError("each block of the cache must lie in one piece")


def torch_rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """The twin."""
    real = slot_mapping >= 0
    blocks, offsets = slot_mapping[real] // values.shape[2], slot_mapping[real] % values.shape[2]
    q.copy_(torch_rotate(q, cos, sin, q_weight, eps))
    k, v = torch_rotate(k, cos, sin, k_weight, eps)[real], v[real]
    if key_scales is not None:
        k, key_scales[blocks, :, offsets] = torch_encode(k, keys.dtype)
        v, value_scales[blocks, :, offsets] = torch_encode(v, values.dtype)
    as_codes(keys)[blocks, :, :, offsets] = as_codes(k)
    as_codes(values)[blocks, :, offsets] = as_codes(v)


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Heads [num_tokens, heads, head_dim], normed where there is a weight, and rotated."""
    accurate = torch.promote_types(x.dtype, torch.float32)
    if weight is not None:
        wide = x.to(accurate)
        x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    partner = x.roll(x.shape[-1] // 2, dims=-1)
    return (x.to(accurate) * cos + partner.to(accurate) * sin).to(x.dtype)
