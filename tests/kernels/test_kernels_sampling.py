"""The fused draw says what the sampler's own operations say, token for token."""

from __future__ import annotations

import random

import pytest
import torch

from minillm.kernels.sampling import PIECE, sample
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.noise import gumbel_noise
from minillm.sampling.params import SamplingParams
from minillm.sampling.sampler import Sampler
from tests.helpers.kernel_cases import device


def metadata_of(params: list[SamplingParams], vocab_size: int, seed: int = 0) -> SamplingMetadata:
    rng = random.Random(seed)
    rows = [SamplingRow(one, rng.randrange(2**63), [1], [2] * rng.randrange(5), frozenset()) for one in params]
    return SamplingMetadata(rows, vocab_size, device())


def both(logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[list[int], list[int]]:
    return tuple(Sampler(fused=fused).choose(logits.to(device()), metadata).tolist() for fused in (True, False))


@pytest.mark.parametrize("seed", range(12))
def test_the_fused_draw_is_the_samplers(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = rng.choice([7, 1024, PIECE + 1])
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.6, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 50]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.05]),
        )
        for _ in range(4)
    ] + [SamplingParams(temperature=1.0)]
    logits = torch.randn(5, vocab_size) * 3
    if seed % 3 == 0:
        logits = logits.round()  # ties, at the filters' edges too
    fused, plain = both(logits, metadata_of(params, vocab_size, seed))
    assert fused == plain


def kept(logits: torch.Tensor, **params) -> set[int]:
    """The tokens that the filters leave; a few draws of the kernel find none but those, and the same as the sampler."""
    rows = [SamplingParams(temperature=1.0, **params)] * 10
    metadata = metadata_of(rows, logits.shape[-1])
    logits = logits.expand(10, -1).contiguous().to(device())
    fused, plain = both(logits, metadata)
    assert fused == plain
    return set(metadata.filter(logits)[0].isfinite().nonzero()[:, 0].tolist())


def test_of_equal_tokens_at_the_edge_top_p_keeps_the_smaller_ids():
    # Probabilities 1/2, 1/8 x 4: 0.6 needs the first and one of the four, 0.7 two of them.
    logits = torch.tensor([-3.0, 0.0, 2.0, 0.0, 0.0, 0.0]).mul(0.6931472)
    logits[0] = float("-inf")
    assert kept(logits, top_p=0.6) == {2, 1}
    assert kept(logits, top_p=0.7) == {2, 1, 3}


def test_top_k_keeps_all_that_equal_the_kth():
    assert kept(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0]), top_k=2) == {1, 2, 3, 5}


def test_top_k_before_top_p_and_negative_logits():
    logits = torch.tensor([-1.0, -1.0, -2.0, -9.0, -30.0])
    assert kept(logits, top_k=3, top_p=0.99) == {0, 1, 2}
    assert kept(logits, top_k=3, top_p=0.5) == {0, 1}
    assert kept(logits, min_p=0.3) == {0, 1, 2} and kept(logits, min_p=0.5) == {0, 1}


def test_greedy_takes_the_first_of_the_largest_even_across_pieces():
    logits = torch.zeros(1, 2 * PIECE + 5)
    logits[0, [PIECE - 1, PIECE, 2 * PIECE + 3]] = 4.0
    column = torch.ones(1, device=device())
    seeds = torch.zeros(1, dtype=torch.int64, device=device())
    greedy = torch.ones(1, dtype=torch.bool, device=device())
    assert sample(logits.to(device()), column, seeds, seeds, greedy).tolist() == [PIECE - 1]


def test_one_temperature_of_noise_is_the_noise_of_the_twin():
    """With flat logits the draw is the argmax of the noise alone."""
    seeds = torch.tensor([0, 1, 2**63 - 1, 77] * 8, device=device())
    positions = torch.arange(32, device=device())
    logits = torch.zeros(32, 3000, device=device())
    drawn = sample(
        logits, torch.ones(32, device=device()), seeds, positions, torch.zeros(32, dtype=torch.bool, device=device())
    )
    assert torch.equal(drawn, gumbel_noise(seeds, positions, torch.arange(3000, device=device())).argmax(-1))
