"""Drawing tokens on the GPU: temperature, min-p, top-k, top-p and Gumbel noise, no synchronisation. Built in chapter 14.

    threshold_kernel   one program a row    the smallest logit that the filters keep       (only where a row filters)
    draw_kernel        rows x pieces        argmax of logit + noise in each piece of the vocabulary
    pick_kernel        one program a row    the best piece's best token

The torch road sorts every row, writes the noise of the whole vocabulary and reads it again. Here nothing is sorted:
the k-th largest logit is found bit by bit, from how many logits lie above a guess, and so is the one at which the
probabilities above reach p. The noise is made where it is used, the same numbers as `minillm.sampling.noise`. The
PyTorch twin is `minillm.sampling.sampler`'s own `draw`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import next_power_of_2, tl, triton

PIECE = 4096  # tokens of the vocabulary a program draws from: enough programs for a GPU at one row of 150,000
STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64, as in minillm.sampling.noise
MULTIPLY_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLY_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """One token a row: int64 [num_rows].

    logits [num_rows, vocab_size] float32, contiguous rows; everything else [num_rows]: temperature float32 over 0,
    seeds and positions int64, greedy bool (such a row takes its largest logit, of equal ones the smallest id),
    min_p and top_p float32, top_k int64 from 1 to vocab_size; None where no row uses the filter.
    """
    num_rows, vocab_size = logits.shape
    num_pieces = triton.cdiv(vocab_size, PIECE)
    device = logits.device
    bound, last_tie = logits, seeds  # not read where nothing is filtered
    filtered = not (min_p is None and top_k is None and top_p is None)
    if filtered:
        bound = torch.empty(num_rows, dtype=torch.float32, device=device)
        last_tie = torch.empty(num_rows, dtype=torch.int64, device=device)
        threshold_kernel[(num_rows,)](
            logits, temperature, temperature if min_p is None else min_p, seeds if top_k is None else top_k,
            temperature if top_p is None else top_p, bound, last_tie, logits.stride(0), vocab_size,
            MIN_P=min_p is not None, TOP_K=top_k is not None, TOP_P=top_p is not None,
            TILE=min(4096, next_power_of_2(vocab_size)), num_warps=16,
        )  # fmt: skip
    values = torch.empty(num_rows, num_pieces, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, num_pieces, dtype=torch.int64, device=device)
    draw_kernel[(num_pieces, num_rows)](
        logits, temperature, seeds, positions, greedy, bound, last_tie, values, tokens, logits.stride(0), vocab_size,
        FILTERED=filtered, TILE=PIECE, num_warps=8,
    )  # fmt: skip
    picked = torch.empty(num_rows, dtype=torch.int64, device=device)
    pick_kernel[(num_rows,)](values, tokens, picked, num_pieces, TILE=next_power_of_2(num_pieces), num_warps=1)
    return picked


@triton.jit
def draw_kernel(
    logits, temperature, seeds, positions, greedy, bound, last_tie, values, tokens, row_stride, vocab_size,
    FILTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = piece * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * row_stride + ids, ids < vocab_size, float("-inf"))
    if not tl.load(greedy + row):
        x = tl.div_rn(x, tl.load(temperature + row))
        if FILTERED:
            least = tl.load(bound + row)
            kept = (x > least) | ((x == least) & (ids <= tl.load(last_tie + row)))
            x = tl.where(kept, x, float("-inf"))
        x += gumbel(tl.load(seeds + row), tl.load(positions + row), ids)
    best, place = tl.max(x, 0, return_indices=True)  # of equal ones the first
    where = row * tl.num_programs(0) + piece
    tl.store(values + where, best)
    tl.store(tokens + where, (piece * TILE + place).to(tl.int64))


@triton.jit
def pick_kernel(values, tokens, picked, num_pieces, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, TILE)
    best = tl.load(values + row * num_pieces + pieces, pieces < num_pieces, float("-inf"))
    tl.store(picked + row, tl.load(tokens + row * num_pieces + tl.argmax(best, 0)))


@triton.jit
def gumbel(seed, position, ids):
    """Standard Gumbel noise for each token id, keyed by seed and position; see `minillm.sampling.noise`."""
    key = random_bits(seed.to(tl.uint64), position.to(tl.uint64))
    bits = random_bits(key, ids.to(tl.uint64)).to(tl.int64) & 0x7FFFFFFFFFFFFFFF | 1
    uniform = tl.minimum(bits.to(tl.float32) * 1.0842021724855044e-19, 1 - 5.9604644775390625e-08)  # 2^-63, 2^-24
    rest = 1.0 - uniform
    lost = 1.0 - rest  # what of `uniform` survived the rounding of `rest`; the factor puts back what did not
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit
def random_bits(key, counter):
    """SplitMix64: the `counter`-th number of the stream `key`, uint64."""
    bits = key + (counter + 1) * STEP
    bits = (bits ^ (bits >> 30)) * MULTIPLY_1
    bits = (bits ^ (bits >> 27)) * MULTIPLY_2
    return bits ^ (bits >> 31)


@triton.jit
def threshold_kernel(
    logits, temperature, min_p, top_k, top_p, bound, last_tie, row_stride, vocab_size,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The smallest value that is kept, and of the tokens that have exactly this value the last one that is."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    heat = tl.load(temperature + row)
    largest = float("-inf")
    for start in range(0, vocab_size, TILE):
        largest = tl.maximum(largest, tl.max(load_tile(logits, heat, start, vocab_size, TILE), 0))
    one = tl.full((), 1, tl.int32)
    least = tl.full((), -2139095041, tl.int32)  # the rank of -inf: everything is kept
    if MIN_P:
        ratio = tl.load(min_p + row)
        if ratio > 0.0:
            least = rank(largest + tl.log(ratio))
    last = vocab_size
    if TOP_K:
        k = tl.load(top_k + row).to(tl.int32)
        if k < vocab_size:
            # The largest rank that k tokens reach, its bits from the highest down: that of the k-th largest logit.
            kth = tl.full((), -2147483648, tl.int32)
            for bit in range(0, 32):
                guess = kth ^ (one << (31 - bit))
                count = 0
                for start in range(0, vocab_size, TILE):
                    count += tl.sum((rank(load_tile(logits, heat, start, vocab_size, TILE)) >= guess).to(tl.int32), 0)
                kth = tl.where(count >= k, guess, kth)
            least = tl.maximum(least, kth)
    if TOP_P:
        p = tl.load(top_p + row)
        if p < 1.0:
            # The largest rank such that the tokens from it on hold p of what is left.
            enough = p * mass(logits, heat, largest, least, vocab_size, TILE)
            edge = tl.full((), -2147483648, tl.int32)
            for bit in range(0, 32):
                guess = edge ^ (one << (31 - bit))
                held = mass(logits, heat, largest, tl.maximum(guess, least), vocab_size, TILE)
                edge = tl.where(held >= enough, guess, edge)
            least = tl.maximum(least, edge)
            # Of the tokens at the edge as many as it takes, the smaller ids first.
            missing = enough - mass(logits, heat, largest, least + 1, vocab_size, TILE)
            needed = tl.maximum(tl.ceil(missing / tl.exp(unrank(least) - largest)), 1.0).to(tl.int32)
            last = nth_equal(logits, heat, least, needed, vocab_size, TILE)
    tl.store(bound + row, unrank(least))
    tl.store(last_tie + row, last.to(tl.int64))


@triton.jit
def load_tile(logits, heat, start, vocab_size, TILE: tl.constexpr):
    ids = start + tl.arange(0, TILE)
    return tl.div_rn(tl.load(logits + ids, ids < vocab_size, float("-inf")), heat)


@triton.jit
def mass(logits, heat, largest, least, vocab_size, TILE: tl.constexpr):
    """The sum of exponentials of all tokens that rank `least` or higher."""
    total = 0.0
    for start in range(0, vocab_size, TILE):
        x = load_tile(logits, heat, start, vocab_size, TILE)
        total += tl.sum(tl.where(rank(x) >= least, tl.exp(x - largest), 0.0), 0)
    return total


@triton.jit
def nth_equal(logits, heat, wanted, n, vocab_size, TILE: tl.constexpr):
    """The id of the n-th token of this rank."""
    found, last = 0, vocab_size
    for start in range(0, vocab_size, TILE):
        equal = (rank(load_tile(logits, heat, start, vocab_size, TILE)) == wanted).to(tl.int32)
        place = tl.cumsum(equal, 0) + found
        last = tl.minimum(last, tl.min(tl.where((place == n) & (equal == 1), start + tl.arange(0, TILE), vocab_size), 0))
        found += tl.sum(equal, 0)
    return last


@triton.jit
def rank(x):
    """An int32 that orders as the float does: the bits of a negative one are turned around."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unrank(order):
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
