"""The smallest logit that min-p, top-k and top-p keep, in two passes over the logits of a row. Built in chapter 14.

    group_max_kernel   rows x pieces        pass 1: the largest logit of each of 2,048 groups (id modulo 2,048)
    aim_kernel         one program a row    the aim: k group maxima reach it, so at least k tokens do
    collect_kernel     rows x pieces        pass 2: the tokens at the aim or above, in a list; count and mass of the row
    threshold_kernel   one program a row    the edge of top-k, then that of top-p, found in the list

             | largest           | aim                     | min-p's edge
    logits   ##..#.#.###..##..#.##.......................................
             <- the list: tens to thousands of tokens ->|<- 150,000 tokens that only add to the mass ->

The k-th largest of the group maxima is close to the k-th largest logit, because the largest tokens are spread over the
groups. It is never above it. Without a top-k the aim is such that a list holds about 4,000 tokens. A list that does not
hold the edge (nearly flat rows, thousands of equal tokens) costs more passes: see `minillm.kernels.sampling_edges`.

Programs append to a list in the order in which they happen to run, and nothing depends on that order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import tl, triton
from minillm.kernels.sampling_edges import ROOM, k_and_p, mass_of, rank, threshold_kernel, unrank

GROUPS: tl.constexpr = tl.constexpr(2048)
SPAN: tl.constexpr = tl.constexpr(256)  # consecutive tokens that one program reads: 1 KB
TILE = 1024
MAX_VOCAB_SIZE = 2**20  # see `sampling_edges`
PROGRAMS = 1024  # what a launch should have at least, for GPUs of more than 100 SMs


def find_thresholds(
    logits: Tensor, temperature: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The smallest logit over temperature that is kept, and the last token id kept of those that equal it:
    [num_rows] each.

    Arguments as `minillm.kernels.sampling.sample`'s. A row without a filter gets -inf: all tokens are kept. Raises
    ValueError for a vocabulary over MAX_VOCAB_SIZE, whose sums of masses would not fit.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocabulary of {vocab_size} tokens: top-k and top-p on a GPU take {MAX_VOCAB_SIZE} at most; use neither"
        )
    num_maxima = 8 * pieces_of(8 * num_rows, vocab_size, 8 * 4096)  # times 256 for each row
    new = {"device": logits.device}
    maxima = torch.empty(num_rows, num_maxima * SPAN.value, dtype=torch.float32, **new)
    marks = torch.empty(num_rows, 3, dtype=torch.float32, **new)  # largest, min-p's edge, aim
    # Tokens at the aim or above, tokens min-p keeps, their mass.
    tally = torch.empty(num_rows, 3, dtype=torch.int64, **new)
    listed = torch.empty(num_rows, ROOM.value, dtype=torch.float32, **new)
    bound = torch.empty(num_rows, dtype=torch.float32, **new)
    last_tie = torch.empty(num_rows, dtype=torch.int64, **new)
    k, p = temperature if top_k is None else top_k, temperature if top_p is None else top_p  # not read where None
    uses = {"TOP_K": top_k is not None, "TOP_P": top_p is not None}
    stride = logits.stride(0)
    group_max_kernel[(num_maxima, num_rows)](logits, maxima, stride, vocab_size, num_warps=8)
    aim_kernel[(num_rows,)](
        maxima, temperature, temperature if min_p is None else min_p, k, marks, tally, num_maxima // 8, vocab_size,
        groups_to_reach(vocab_size), MIN_P=min_p is not None, TOP_K=top_k is not None, num_warps=4,
    )  # fmt: skip
    collect_kernel[(pieces_of(num_rows, vocab_size, TILE), num_rows)](
        logits, temperature, k, p, marks, tally, listed, stride, vocab_size, TILE=TILE, **uses, num_warps=8
    )
    threshold_kernel[(num_rows,)](
        logits,
        temperature,
        k,
        p,
        marks,
        tally,
        listed,
        bound,
        last_tie,
        stride,
        vocab_size,
        TILE=2 * TILE,
        **uses,
        num_warps=16,
    )
    return bound, last_tie


def pieces_of(num_rows: int, vocab_size: int, tokens: int) -> int:
    """Programs for each row: enough for a large GPU, but none with fewer than so many tokens."""
    return min(triton.cdiv(vocab_size, tokens), triton.cdiv(PROGRAMS, num_rows))


def groups_to_reach(vocab_size: int) -> int:
    """How many group maxima the lowest aim reaches: half of `ROOM` tokens do,
    if they are spread over the groups evenly."""
    share = min(ROOM.value / 2 / vocab_size, 1.0)
    return max(int(GROUPS.value * (1 - (1 - share) ** (vocab_size / GROUPS.value))), 1)


@triton.jit
def group_max_kernel(logits, maxima, row_stride, vocab_size):
    """A program reads every `pieces`-th span. There are 8, 16, 24, ...
    programs: a column of theirs stays in one group."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pieces = tl.num_programs(0)
    spans, columns = tl.arange(0, 8)[:, None] * pieces, tl.arange(0, SPAN)
    best = tl.full((8, SPAN), float("-inf"), tl.float32)
    for start in range(piece * SPAN, vocab_size, 8 * pieces * SPAN):
        ids = start + spans * SPAN + columns[None, :]
        best = tl.maximum(best, tl.load(logits + row * row_stride + ids, ids < vocab_size, float("-inf")))
    tl.store(maxima + (row * pieces + piece) * SPAN + columns, tl.max(best, 0))


@triton.jit(do_not_specialize=["num_tiles"])  # it depends on the batch size
def aim_kernel(
    maxima, temperature, min_p, top_k, marks, tally, num_tiles, vocab_size, most_groups,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Division by a temperature keeps the order, so 2,048 maxima are divided and not 150,000 logits."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    best = tl.full((GROUPS,), float("-inf"), tl.float32)
    for tile in range(num_tiles):
        best = tl.maximum(best, tl.load(maxima + (row * num_tiles + tile) * GROUPS + groups))
    best = tl.div_rn(best, tl.load(temperature + row))
    largest, edge = tl.max(best, 0), float("-inf")
    if MIN_P:
        ratio = tl.load(min_p + row)
        if ratio > 0.0:
            edge = largest + tl.log(ratio)
    wanted = most_groups
    if TOP_K:
        wanted = tl.minimum(tl.load(top_k + row).to(tl.int32), most_groups)
    aim = edge
    if vocab_size > ROOM:
        # The largest rank that `wanted` groups reach, its bits from the highest down.
        order = rank(best)
        reached = tl.full((), -2147483648, tl.int32)
        for bit in range(0, 32):
            trial = reached ^ (tl.full((), 1, tl.int32) << (31 - bit))
            reached = tl.where(tl.sum((order >= trial).to(tl.int32), 0) >= wanted, trial, reached)
        aim = tl.maximum(unrank(reached), edge)
    tl.store(marks + row * 3, largest)
    tl.store(marks + row * 3 + 1, edge)
    tl.store(marks + row * 3 + 2, aim)
    zero = tl.full((), 0, tl.int64)
    for i in tl.static_range(3):
        tl.store(tally + row * 3 + i, zero)


@triton.jit
def collect_kernel(
    logits, temperature, top_k, top_p, marks, tally, listed, row_stride, vocab_size,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p = k_and_p(top_k, top_p, row, vocab_size, TOP_K, TOP_P)
    if (k < vocab_size) | (p < 1.0):
        heat, largest = tl.load(temperature + row), tl.load(marks + row * 3)
        edge, aim = tl.load(marks + row * 3 + 1), tl.load(marks + row * 3 + 2)
        count = tl.full((), 0, tl.int32)
        mass = tl.zeros((TILE,), tl.int64)
        for start in range(piece * TILE, vocab_size, tl.num_programs(0) * TILE):
            ids = start + tl.arange(0, TILE)
            logit = tl.load(logits + row * row_stride + ids, ids < vocab_size, float("-inf"))
            x = tl.div_rn(logit, heat)
            left = (x >= edge) & (x > float("-inf"))
            if TOP_P:
                mass += tl.where(left, mass_of(x, largest), 0)
            chosen = left & (x >= aim)
            both = tl.sum(left.to(tl.int32) * 65536 + chosen.to(tl.int32), 0)  # two counts of a tile in one sum
            count += both >> 16
            if both & 65535 > 0:
                append(listed + row * ROOM, tally + row * 3, logit, chosen, both & 65535)
        tl.atomic_add(tally + row * 3 + 1, count.to(tl.int64))
        if TOP_P:
            tl.atomic_add(tally + row * 3 + 2, tl.sum(mass, 0))


@triton.jit
def append(listed, length, logit, chosen, num_chosen):
    """The chosen logits to the end of a list that other programs append to;
    its length counts on where the room ends."""
    first = tl.atomic_add(length, num_chosen.to(tl.int64))
    place = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + place, logit, chosen & (place < ROOM))
