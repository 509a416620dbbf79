"""Which program attends for which queries: the tiles of a ragged batch, longest first. Built in chapter 12.

Sequences of different lengths have different numbers of tiles. A grid of (longest sequence) x (sequences) launches
mostly programs without work, and starts the long walks last. A plan lists the tiles instead, those that see most keys
first, so that no long walk is left over when all others have finished:

    lengths 4, 4, 9; tiles of 4 queries      tile      2,8   2,4   0,0   1,0   2,0   -1    (sequence, first query)
                                             sees      9     8     4     4     4     free

The host does not know the lengths, only the number of tokens: sum(ceil(length / tile)) is at most (tokens + sequences *
(tile - 1)) / tile. So a plan has that many places, whatever the lengths, and a recorded step can be launched again with
others; fewer places than there are sequences stay free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import tl, triton
from minillm.rounding import ceil_div

BLOCK = 64  # tiles, and sequences, that a program compares at once


def plan_tiles(
    query_start_loc: Tensor, seq_lens: Tensor | None, num_tokens: int, max_query_len: int, tile: int
) -> Tensor:
    """The tiles of `tile` queries as int32 [most_tiles, 2]: sequence and first query, by descending keys seen;
    -1 behind them.

    Sequence i owns the tokens query_start_loc[i]:query_start_loc[i + 1], at most `max_query_len`, of a batch of
    `num_tokens`. They are the last of its seq_lens[i] positions; all of them where seq_lens is None.
    Nothing is copied to the host.
    """
    num_seqs = query_start_loc.shape[0] - 1
    plan = torch.empty(
        most_tiles(num_tokens, num_seqs, max_query_len, tile), 2, dtype=torch.int32, device=query_start_loc.device
    )
    if len(plan):
        plan_tiles_kernel[(num_seqs,)](
            query_start_loc, seq_lens, plan, num_seqs, len(plan), TILE=tile, BLOCK=BLOCK, num_warps=4
        )
    return plan


def most_tiles(num_tokens: int, num_seqs: int, max_query_len: int, tile: int) -> int:
    """The most tiles that sequences with so many tokens together can have: each ends in a tile with one token."""
    return min((num_tokens + num_seqs * (tile - 1)) // tile, num_seqs * ceil_div(max_query_len, tile))


@triton.jit(
    do_not_specialize=["num_seqs", "num_places"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens"]
)
def plan_tiles_kernel(query_start_loc, seq_lens, plan, num_seqs, num_places, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """One sequence: each of its tiles goes to the place that is the number of tiles that come before it."""
    seq = tl.program_id(0)
    length, past = length_and_past(query_start_loc, seq_lens, seq, seq >= 0)
    total = 0
    for start in range(0, num_seqs, BLOCK):
        others = start + tl.arange(0, BLOCK)
        lengths, _ = length_and_past(query_start_loc, seq_lens, others, others < num_seqs)
        total += tl.sum(tl.cdiv(lengths, TILE), 0)
    for place in range(total + seq, num_places, num_seqs):  # the free ones, shared by all programs
        tl.store(plan + 2 * place, -1)

    for begin in range(0, length, TILE * BLOCK):
        first = begin + tl.arange(0, BLOCK) * TILE
        sees = past + tl.minimum(first + TILE, length)
        before = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_seqs, BLOCK):
            others = start + tl.arange(0, BLOCK)
            lengths, pasts = length_and_past(query_start_loc, seq_lens, others, others < num_seqs)
            # Tiles of others that see at most `most` keys: the full ones by division, with the last one all of them.
            most = sees[:, None] - (others < seq)[None, :].to(tl.int32)  # of equals, earlier sequences come first
            full = tl.minimum(tl.maximum(most - pasts[None, :], 0), lengths[None, :]) // TILE
            fewer = tl.where((pasts + lengths)[None, :] <= most, tl.cdiv(lengths, TILE)[None, :], full)
            before += tl.sum(tl.cdiv(lengths, TILE)[None, :] - fewer, 1)
        tl.store(plan + 2 * before, seq, first < length)
        tl.store(plan + 2 * before + 1, first, first < length)


@triton.jit
def length_and_past(query_start_loc, seq_lens, seq, there):
    """How many queries a sequence has, and positions before the first of them; both 0 where there is none."""
    length = tl.load(query_start_loc + seq + 1, there, 0) - tl.load(query_start_loc + seq, there, 0)
    past = length * 0
    if seq_lens is not None:
        past = tl.load(seq_lens + seq, there, 0) - length
    return length.to(tl.int32), past.to(tl.int32)


def torch_plan_tiles(
    query_start_loc: Tensor, seq_lens: Tensor | None, num_tokens: int, max_query_len: int, tile: int
) -> Tensor:
    """The twin: all tiles, sorted."""
    lengths = query_start_loc.diff().tolist()
    tiles = []
    for seq, length in enumerate(lengths):
        past = 0 if seq_lens is None else int(seq_lens[seq]) - length
        tiles += [(-past - min(first + tile, length), seq, first) for first in range(0, length, tile)]
    plan = query_start_loc.new_full(
        (most_tiles(num_tokens, len(lengths), max_query_len, tile), 2), -1, dtype=torch.int32
    )
    for place, (_, seq, first) in enumerate(sorted(tiles)):
        plan[place] = torch.tensor([seq, first])
    return plan
