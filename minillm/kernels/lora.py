"""The products of LoRA adapters, for a batch whose tokens have different ones. Built in chapter 23.

output[t] += (x[t] @ A[s].T) @ B[s].T        s = token_slots[t], the batch slot of the token's adapter; -1 is none

On a GPU a program takes a tile of tokens that share an adapter, so that both of its matrices are read once a tile:

    token_slots   2  2 -1  0  0  0        tokens sorted by slot     2 | 3  4  5 | 0  1        starts  1  4  4  6
                                          tiles of two tokens           [3 4] [5] [0 1]

    shrink   x [tile, in] A.T [in, rank]      few numbers from a long sum: few tokens split it among programs
    expand   [tile, rank] B.T [rank, out]     added to the output where the tokens lie

The number of programs follows from the number of tokens, however these share the slots. The tiles of slot s begin at
place start // TILE + s, its start counted from the first token with an adapter. That leaves room for the tiles of each
slot before it; a place that is left over has no tokens. (Chen et al. 2023, Punica, arXiv:2310.18547, gather the tokens
of an adapter for the same reason.) On a CPU the product is C: minillm/kernels/native_lora.h.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kernels.language import capability, next_power_of_2, serves, tl, triton
from minillm.staging import upload

MANY_TOKENS = 256  # from here on tiles of 64 tokens, which tensor cores can fill
SPLIT = 512  # inputs that a program sums up where tokens are few
MAX_SPLITS = 8


class LoRAPlan(NamedTuple):
    """The tokens of a batch by their adapter."""

    order: Tensor  # [num_tokens]: tokens sorted by batch slot, those without an adapter first
    starts: Tensor  # [max_loras + 1] int32: where each slot's tokens begin in `order`, and where the last ones end


class TokenSlots(NamedTuple):
    """Which adapter each token of a step has: made once for all its layers."""

    slots: Tensor  # [num_tokens] int32: the batch slot of the token's adapter, -1 where it has none
    plan: LoRAPlan | None = None  # on a GPU

    @classmethod
    def on(cls, device: torch.device, slots: np.ndarray, max_loras: int) -> TokenSlots:
        """From the host, in one copy that is not waited for."""
        if device.type == "cpu":
            return cls(*upload(slots, device=device))
        order = np.argsort(slots, kind="stable").astype(np.int32)
        starts = np.searchsorted(slots[order], np.arange(max_loras + 1)).astype(np.int32)
        slots_there, *plan = upload(slots, order, starts, device=device)
        return cls(slots_there, LoRAPlan(*plan))


def add_lora_(
    output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, token_slots: Tensor, plan: LoRAPlan | None = None
) -> Tensor:
    """Add to each row of `output` [num_tokens, out_features] what its adapter makes of x [num_tokens, in_features].

    lora_a [max_loras, max_rank, in_features] and lora_b [max_loras, out_features, max_rank], with an adapter's scaling
    in its B, and zeros beyond its rank; B is read fastest as the transposed view of [max_loras, max_rank,
    out_features]. token_slots [num_tokens] int32. `output` is changed in place and returned; it may be some columns of
    a wider matrix. Sums are in float32, and the product is rounded once; the Triton kernels also round what lies
    between the two products to the dtype of B. Nothing is copied to the host. `plan` saves sorting the tokens in
    every layer of a step on a GPU: see `TokenSlots`.
    """
    alike = output.dtype == x.dtype == lora_a.dtype == lora_b.dtype
    if (
        alike
        and token_slots.dtype is torch.int32
        and output.stride(1) == 1
        and lora_a.stride()[1:] == (lora_a.shape[2], 1)
    ):
        if native.serves(output):
            native.add_lora_(output, x, lora_a, lora_b, token_slots)
            return output
        if output.is_cuda and serves(output):
            return triton_add_lora_(output, x, lora_a, lora_b, token_slots, plan)
    return torch_add_lora_(output, x, lora_a, lora_b, token_slots)


def plan_lora(token_slots: Tensor, max_loras: int) -> LoRAPlan:
    """Sort tokens by batch slot; nothing is copied to the host."""
    slots, order = torch.sort(token_slots, stable=True)
    wanted = torch.arange(max_loras + 1, dtype=slots.dtype, device=slots.device)
    return LoRAPlan(order, torch.searchsorted(slots, wanted, out_int32=True))


def triton_add_lora_(
    output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, token_slots: Tensor, plan: LoRAPlan | None = None
) -> Tensor:
    """The same by the Triton kernels, wherever those are: two launches. How many tokens there are chooses the tiles,
    and with them the rounding."""
    (num_tokens, k), n = x.shape, output.shape[1]
    max_loras, max_rank, _ = lora_a.shape
    if num_tokens == 0:
        return output
    order, starts = plan or plan_lora(token_slots, max_loras)
    x = x if x.stride(1) == 1 else x.contiguous()
    has_tensor_cores = capability(x) >= 80 and x.dtype is not torch.float32
    many = num_tokens >= MANY_TOKENS and has_tensor_cores
    tile_m, tile, num_warps = (64, 64, 4) if many else (16, 64, 2) if has_tensor_cores else (16, 32, 4)
    width = max(16, next_power_of_2(max_rank))
    splits = 1 if many else min(triton.cdiv(k, SPLIT), MAX_SPLITS)
    shrunk = torch.empty(splits, num_tokens, width, dtype=torch.float32, device=x.device)
    places = num_tokens // tile_m + max_loras
    shared = dict(TILE_M=tile_m, RANK=width, SLOTS=next_power_of_2(max_loras), num_warps=num_warps)
    shrink_kernel[(places, splits)](
        x, lora_a, order, starts, shrunk, num_tokens, max_loras, k, max_rank, x.stride(0), lora_a.stride(0),
        TILE_K=tile, num_stages=3, **shared,
    )  # fmt: skip
    expand_kernel[(places, triton.cdiv(n, tile))](
        shrunk, lora_b, order, starts, output, num_tokens, splits, max_loras, n, max_rank, output.stride(0),
        *lora_b.stride(), TILE_N=tile, num_stages=1, **shared,
    )  # fmt: skip
    return output


def torch_add_lora_(output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, token_slots: Tensor) -> Tensor:
    """The twin: one pair of products for each adapter that the batch has."""
    for slot in token_slots.unique().tolist():
        if slot < 0:
            continue
        tokens = (token_slots == slot).nonzero()[:, 0]
        reduced = x.index_select(0, tokens).float() @ lora_a[slot].float().t()  # [tokens of the slot, max_rank]
        output.index_add_(0, tokens, (reduced @ lora_b[slot].float().t()).to(output.dtype))
    return output


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def shrink_kernel(
    x, a, order, starts, shrunk, num_tokens, num_slots, k, rank, x_row, a_slot,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One split of the inputs, for one tile of tokens: shrunk [splits, tokens in `order`, RANK]."""
    slot, first, end = find_tile(starts, tl.program_id(0), num_slots, SLOTS, TILE_M)
    if first < end:
        rows, ranks, inner = first + tl.arange(0, TILE_M), tl.arange(0, RANK), tl.arange(0, TILE_K)
        tokens = tl.load(order + rows, rows < end, 0)
        split = tl.program_id(1)
        size = tl.cdiv(tl.cdiv(k, tl.num_programs(1)), TILE_K) * TILE_K  # of a split: whole tiles
        x_tile = x + tokens[:, None].to(tl.int64) * x_row + inner[None, :]  # pointers [TILE_M, TILE_K]
        a_tile = a + slot.to(tl.int64) * a_slot + ranks[None, :] * k + inner[:, None]  # pointers [TILE_K, RANK]
        acc = tl.zeros((TILE_M, RANK), tl.float32)
        for start in range(split * size, tl.minimum(split * size + size, k), TILE_K):
            left = k - start
            x_values = tl.load(x_tile + start, (rows < end)[:, None] & (inner < left)[None, :], 0.0)
            a_values = tl.load(a_tile + start, (inner < left)[:, None] & (ranks < rank)[None, :], 0.0)
            acc = tl.dot(x_values, a_values, acc, input_precision="ieee")
        where = (split * num_tokens + rows).to(tl.int64)[:, None] * RANK + ranks[None, :]
        tl.store(shrunk + where, acc, (rows < end)[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "num_slots"])
def expand_kernel(
    shrunk, b, order, starts, out, num_tokens, num_splits, num_slots, n, rank, out_row, b_slot, b_out, b_rank,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A tile of outputs, for one tile of tokens: the splits are added up in their order."""
    slot, first, end = find_tile(starts, tl.program_id(0), num_slots, SLOTS, TILE_M)
    if first < end:
        rows, ranks = first + tl.arange(0, TILE_M), tl.arange(0, RANK)
        columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        tokens = tl.load(order + rows, rows < end, 0)
        reduced = tl.zeros((TILE_M, RANK), tl.float32)
        for split in range(num_splits):
            where = (split * num_tokens + rows).to(tl.int64)[:, None] * RANK + ranks[None, :]
            reduced += tl.load(shrunk + where, (rows < end)[:, None], 0.0)
        b_tile = b + slot.to(tl.int64) * b_slot + ranks[:, None] * b_rank + columns[None, :] * b_out  # [RANK, TILE_N]
        b_values = tl.load(b_tile, (ranks < rank)[:, None] & (columns < n)[None, :], 0.0)
        made = tl.dot(reduced.to(b.dtype.element_ty), b_values, input_precision="ieee")
        inside = (rows < end)[:, None] & (columns < n)[None, :]
        out_tile = out + tokens[:, None].to(tl.int64) * out_row + columns[None, :]
        before = tl.load(out_tile, inside, 0.0).to(tl.float32)
        tl.store(out_tile, (before + made).to(out.dtype.element_ty), inside)


@triton.jit
def find_tile(starts, place, num_slots, SLOTS: tl.constexpr, TILE_M: tl.constexpr):
    """The slot whose tiles have this place, the tile's first token in `order`, and where the slot's tokens end."""
    slots, without = tl.arange(0, SLOTS), tl.load(starts)
    begins = tl.load(starts + slots, slots < num_slots, 0)
    places = (begins - without) // TILE_M + slots
    slot = tl.sum(((places <= place) & (slots < num_slots)).to(tl.int32), 0) - 1
    begin, end = tl.load(starts + slot), tl.load(starts + slot + 1)
    return slot, begin + (place - (begin - without) // TILE_M - slot) * TILE_M, end
