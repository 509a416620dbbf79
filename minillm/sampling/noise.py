"""Seeded Gumbel noise that depends on nothing but its key. Built in chapter 01.

An ordinary generator hands out its numbers in the order they are asked for, so a request
that shares a batch would get other numbers than alone. Here a number is computed from where
it stands: (seed, output position, token id). Any of them can be asked for at any time.

The computation is SplitMix64 (Steele, Lea and Flood 2014): a counter that grows by a fixed odd
step, scrambled until no test finds a pattern. int64 arithmetic wraps modulo 2**64 on CPU and
GPU alike, so both draw the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels import native

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd
MULTIPLY_1, MULTIPLY_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [num_rows, num_tokens], always finite.

    seeds and positions int64 [num_rows]; token_ids int64 [num_tokens], or [num_rows, num_tokens].
    argmax(logits + noise) is a draw from softmax(logits) (the Gumbel-max trick, chapter 01).
    """
    if token_ids.dim() == 1 and token_ids.is_cpu and native.library():  # the same numbers in one pass: chapter 14
        return native.gumbel_noise(seeds.contiguous(), positions.contiguous(), token_ids.contiguous())
    keys = random_bits(seeds, positions)  # [num_rows], each the key of a stream over the vocabulary
    # 63 bits make a float with full relative precision near 0: the rare, large noises are not rounded together.
    uniform = (random_bits(keys[:, None], token_ids) & (2**63 - 1) | 1).float() * 2.0**-63
    uniform.clamp_(max=1 - 2.0**-24)  # float32 would round the last ones up to 1, whose noise is -inf
    exponential = torch.log1p(-uniform).neg_()
    return exponential.log_().neg_()


def random_bits(key: Tensor, counter: Tensor | int) -> Tensor:
    """The `counter`-th number of the stream `key`: 64 random bits as int64, over the broadcast shape."""
    step = _signed((counter + 1) * STEP & MASK) if isinstance(counter, int) else (counter + 1) * _signed(STEP)
    bits = key + step
    bits = (bits ^ _shift_right(bits, 30)) * _signed(MULTIPLY_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(MULTIPLY_2)
    return bits ^ _shift_right(bits, 31)


def derive_seed(seed: int, index: int) -> int:
    """A seed of its own for part `index` of what `seed` seeds: a sample of n, a request of an LLM.

    The same function as `random_bits`, on Python's whole numbers, with the sign bit dropped.
    """
    bits = (seed + (index + 1) * STEP) & MASK
    bits = (bits ^ bits >> 30) * MULTIPLY_1 & MASK
    bits = (bits ^ bits >> 27) * MULTIPLY_2 & MASK
    return (bits ^ bits >> 31) >> 1


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit in from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
