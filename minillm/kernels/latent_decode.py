"""Latent attention (MLA) of one token a sequence over pages: all heads read one vector a position. Built in chapter 13.

`minillm.kernels.paged_decode` with one KV head and with values inside the keys. What attention weighs are the first
columns of the latent that it scores, so a tile is loaded once and multiplied twice, the second time as it lies:

                    value_dim        rest
    q    [rows]   | plain (absorbed) | rotary |       rows are query heads: all of a token, or ROWS of them
    tile [keys]   | latent           | key    |       -> scores = q tileᵀ, out = softmax(scores) latent

The heads of a token share each byte, which makes this decode step the one with most arithmetic for a byte: 2 * heads
products for a number that is read, 32 for DeepSeek-V2-Lite's 16 heads in place of 2 for a head of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.decode_plan import DecodePlan, even_bounds, merge_parts, read_item
from minillm.kernels.flash_attention import base_2_scale, dot_precision, take_in
from minillm.kernels.kv_codes import LARGEST, UNIT, as_codes, decode, take_in_codes
from minillm.kernels.language import capability, next_power_of_2, tl, triton
from minillm.rounding import ceil_div

ROWS = 16  # query heads of a program: the mean of each is value_dim numbers in registers
MOST_VALUES, MOST_REST = 512, 128  # columns, of the values and behind them
PAGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def latent_decode(
    q: Tensor,
    latents: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    value_dim: int,
    scale: float | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """One query a sequence, its last position: [num_seqs, num_heads, value_dim].

    q [num_seqs, num_heads, latent_dim], absorbed, any stride from sequence to sequence and head to head; latents
    [num_blocks, block_size, latent_dim], as `LatentKVCache` keeps them, whose first `value_dim` columns are the values;
    seq_lens [num_seqs], 0 for a row that only fills up a batch: its result is 0. block_table [num_seqs, blocks]. Scores
    are multiplied by `scale`, 1 / sqrt(latent_dim) where it is None. Latents in int8 or fp8 come with their `scales`
    [num_blocks, block_size] float32. A `plan` for `head_tiles(num_heads)` KV heads, used once, splits long sequences.
    """
    num_seqs, num_heads, latent_dim = q.shape
    block_size = latents.shape[1]
    check_latents(q, latents, value_dim, scales)
    if out is None:
        out = torch.empty(num_seqs, num_heads, value_dim, dtype=q.dtype, device=q.device)
    tile_n, num_warps, num_stages = choose_tile(q.element_size(), latents.element_size(), capability(q))
    tiles, grid, planned = head_tiles(num_heads), (head_tiles(num_heads), num_seqs), {}
    if plan is not None:
        num_slots, grid = plan.counters.shape[0], (tiles, plan.items.shape[1])
        parts = torch.empty(num_slots, tiles, ROWS, value_dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(num_slots, tiles, ROWS, dtype=torch.float32, device=q.device)
        planned = {"plan": plan.items, "counters": plan.counters, "parts": parts, "logs": logs}
    latent_decode_kernel[grid](
        q, as_codes(latents, capability(q)), out, seq_lens, block_table, scales, base_2_scale(scale, latent_dim),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), latents.stride(0), block_table.stride(0),
        NUM_HEADS=num_heads, LATENT_DIM=latent_dim, VALUE_DIM=value_dim, VALUES=max(16, next_power_of_2(value_dim)),
        REST=max(16, next_power_of_2(latent_dim - value_dim)), BLOCK_SIZE=block_size, ROWS=ROWS, TILE_N=tile_n,
        PRECISION=dot_precision(q.dtype), num_warps=num_warps, num_stages=num_stages, **planned,
    )  # fmt: skip
    return out


def head_tiles(num_heads: int) -> int:
    """Programs that share the heads of a token: what `plan_decode` takes for the number of KV heads."""
    return ceil_div(num_heads, ROWS)


def choose_tile(query_bytes: int, latent_bytes: int, capability: int) -> tuple[int, int, int]:
    """Positions at a time, warps and stages: from builds, which keep their registers with these; not from timings."""
    if latent_bytes == 1:  # codes take registers on their way to the tensor cores
        return 32, 8, 2
    if query_bytes == 4:
        return 16, 4, 2
    return 32 if capability in (90, 100) else 16, 4, 3  # 91 KB, two programs in an SM of 227; else 54


# The index tensors may be slices, and the table as wide as the step's longest sequence: neither compiles a variant.
@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["seq_lens", "block_table"])
def latent_decode_kernel(
    q, latents, out, seq_lens, block_table, scales, scale, q_seq, q_head, out_seq, out_head, latent_block, table_row,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
    plan=None, counters=None, parts=None, logs=None,
):  # fmt: skip
    tile_of_heads, seq, split, num_splits = tl.program_id(0), tl.program_id(1).to(tl.int64), 0, 1
    if plan is not None:
        seq, _, first, last, split, num_splits, slot = read_item(plan, tl.program_id(1), tl.num_programs(1))
        if seq < 0:
            return
        begin, end = even_bounds(first, last, split, num_splits, TILE_N)
    else:
        begin, end = 0, tl.load(seq_lens + seq).to(tl.int32)

    rows = tl.arange(0, ROWS)
    heads = tile_of_heads * ROWS + rows
    real = heads < NUM_HEADS
    values, rest = tl.arange(0, VALUES), tl.arange(0, REST)  # columns: of the values, and behind them
    inside = real[:, None] & (values < VALUE_DIM)[None, :]
    behind = (rest < LATENT_DIM - VALUE_DIM)[None, :]
    query = q + seq * q_seq + heads[:, None] * q_head
    plain = tl.load(query + values[None, :], inside, 0.0)
    turned = tl.load(query + VALUE_DIM + rest[None, :], real[:, None] & behind, 0.0)
    block_table += seq * table_row

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    columns = begin + tl.arange(0, TILE_N)
    # Block ids are loaded a tile ahead: the latents whose addresses they are can then be on their way themselves.
    following = tl.load(block_table + columns // BLOCK_SIZE, columns < end, 0)
    for tile in range(begin, end, TILE_N):
        columns = tile + tl.arange(0, TILE_N)
        blocks = following.to(tl.int64)
        ahead = columns + TILE_N
        following = tl.load(block_table + ahead // BLOCK_SIZE, ahead < end, 0)
        there, offsets = columns < end, columns % BLOCK_SIZE
        place = latents + (blocks * latent_block + offsets * LATENT_DIM)[:, None]
        latent = tl.load(place + values[None, :], there[:, None] & (values < VALUE_DIM)[None, :], 0.0)
        key = tl.load(place + VALUE_DIM + rest[None, :], there[:, None] & behind, 0.0)
        latent, key = decode(latent, plain), decode(key, plain)
        scores = tl.dot(plain, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(key), scores, input_precision=PRECISION) * scale  # [ROWS, TILE_N]
        if scales is None:
            scores = tl.where(there[None, :], scores, float("-inf"))
            best, total, acc = take_in(best, total, acc, scores, latent, True, PRECISION)
        else:
            sizes = tl.load(scales + blocks * BLOCK_SIZE + offsets, there, 0.0)
            scores = tl.where(there[None, :], scores * sizes[None, :], float("-inf"))
            best, total, acc, _same = take_in_codes(
                best, total, acc, acc, scores, latent, sizes, plain, 1, True, PRECISION
            )
    if scales is not None:
        acc *= 1 / UNIT

    some = tl.where(total == 0.0, 1.0, total)  # an empty split, or a row that only fills up the batch: zeros
    mean = acc / some[:, None]
    result = out + seq * out_seq + heads[:, None] * out_head + values[None, :]
    if plan is None or num_splits == 1:
        tl.store(result, mean, inside)
    else:
        where, step = (slot * tl.num_programs(0) + tile_of_heads) * ROWS + rows, tl.num_programs(0) * ROWS
        tl.store(parts + (where + split * step)[:, None] * VALUE_DIM + values[None, :], mean, inside)
        tl.store(logs + where + split * step, best + tl.log2(some), real)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        counter = counters + slot * tl.num_programs(0) + tile_of_heads
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            mean = merge_parts(parts, logs, where, step, num_splits, real, inside, values, VALUE_DIM, ROWS, VALUES)
            tl.store(result, mean, inside)
            tl.store(counter, 0)  # for the next layer


def check_latents(q: Tensor, latents: Tensor, value_dim: int, scales: Tensor | None) -> None:
    """Raise ValueError unless the kernel can attend with these."""
    latent_dim = latents.shape[-1]
    if latents.dim() != 3 or q.shape[-1] != latent_dim:
        raise ValueError(
            f"q {list(q.shape)} and latents {list(latents.shape)} do not fit: they are [num_seqs, num_heads, "
            "latent_dim] and [num_blocks, block_size, latent_dim]"
        )
    if not 0 < value_dim < latent_dim:
        raise ValueError(f"value_dim={value_dim} is not allowed: the values are 1 to {latent_dim - 1} first columns")
    if value_dim > MOST_VALUES or latent_dim - value_dim > MOST_REST:
        raise ValueError(
            f"latent_dim={latent_dim} with value_dim={value_dim}: the kernel takes values of up to {MOST_VALUES} "
            f"columns and up to {MOST_REST} behind them; use attention_backend='torch'"
        )
    if q.stride(-1) != 1 or not latents[0].is_contiguous():
        raise ValueError("the dimensions of a query must lie side by side, and each block in one piece")
    if latents.dtype not in PAGE_DTYPES:
        raise ValueError(f"latents of {latents.dtype} cannot be read; pages are {', '.join(map(str, PAGE_DTYPES))}")
    if latents.dtype not in LARGEST:
        if scales is not None:
            raise ValueError(f"scales were given for latents of {latents.dtype}, which have none; leave them out")
    elif scales is None or scales.dtype is not torch.float32 or scales.shape != latents.shape[:2]:
        given = "none were given" if scales is None else f"they are {scales.dtype} {list(scales.shape)}"
        raise ValueError(f"latents of {latents.dtype} need scales, float32 {list(latents.shape[:2])}; {given}")


def torch_latent_decode(
    q: Tensor,
    latents: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    value_dim: int,
    scale: float | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """The twin: gather each sequence's latents, then the formula; `plan` changes nothing."""
    out = q.new_zeros(*q.shape[:2], value_dim) if out is None else out
    accurate = torch.promote_types(q.dtype, torch.float32)  # at least: a float64 stays what it is
    for row, (length, table) in enumerate(zip(seq_lens.tolist(), block_table)):
        keys = as_codes(latents)[table].view(latents.dtype).flatten(0, 1)[:length].to(accurate)
        if scales is not None:
            keys = keys * scales[table].flatten()[:length, None]
        scores = q[row].to(accurate) @ keys.T * (q.shape[2] ** -0.5 if scale is None else scale)
        out[row] = scores.softmax(-1) @ keys[:, :value_dim]  # no positions: zeros
    return out
