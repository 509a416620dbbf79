"""Drawing tokens on the GPU: temperature, min-p, top-k, top-p and Gumbel noise, no synchronisation.
Built in chapter 14.

    draw_kernel        rows x pieces        argmax of logit + noise in each piece of the vocabulary
    pick_kernel        one program a row    the best piece's best token

The PyTorch twin, `minillm.sampling.sampler`'s own `draw`, sorts every row, writes the noise of the whole vocabulary and
reads it again. Here the noise is made where it is used, the same numbers as `minillm.sampling.noise`, and nothing is
sorted: `minillm.kernels.sampling_filters` finds the smallest logit that the filters keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import next_power_of_2, tl, triton
from minillm.kernels.sampling_filters import find_thresholds

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
        bound, last_tie = find_thresholds(logits, temperature, min_p, top_k, top_p)
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
