"""The C kernel chooses the tokens that an argmax over all logits and all noise chooses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kernels.native_sampling import draw, draws
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.noise import gumbel_noise
from minillm.sampling.params import SamplingParams
from minillm.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
ODD = {
    "alike": lambda logits: torch.zeros_like(logits),
    "rounded": lambda logits: logits.round(),
    "huge": lambda logits: logits * 1e6,
    "infinite": lambda logits: logits.masked_fill(torch.rand_like(logits) < 0.05, float("inf")),
    "banned": lambda logits: logits.masked_fill(torch.rand_like(logits) < 0.9, float("-inf")),
    "all banned": lambda logits: torch.full_like(logits, float("-inf")),
    "no numbers": lambda logits: logits.masked_fill(torch.rand_like(logits) < 0.02, float("nan")),
    "one is likely": lambda logits: logits + 30 * (torch.arange(logits.shape[1]) == logits.shape[1] - 1),
}


def drawn(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    noise = gumbel_noise(seeds, positions, torch.arange(logits.shape[1]))
    return (logits / temperature[:, None] + noise).argmax(dim=-1)


def columns(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds, positions."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**31, (rows,), generator=generator)
    return 0.1 + 2 * torch.rand(rows, generator=generator), seeds, positions


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 65, 1000, 20_011])
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_the_argmax_with_noise(rows, vocab_size):
    """Rows of a wider tensor, also fewer than there are threads: then threads share a row."""
    generator = torch.Generator().manual_seed(rows * vocab_size)
    wider = 3 * torch.randn(rows, vocab_size + 7, generator=generator)
    for name, change in {"plain": lambda logits: logits, **ODD}.items():
        logits = wider.copy_(change(wider.clone()))[:, 3 : vocab_size + 3]
        where = columns(rows, generator)
        assert torch.equal(draw(logits, *where), drawn(logits, *where)), name
        assert torch.equal(draw(logits), logits.argmax(dim=-1)), name
        is_greedy = torch.rand(rows, generator=generator) < 0.5
        mixed = torch.where(is_greedy, logits.argmax(dim=-1), drawn(logits, *where))
        assert torch.equal(draw(logits, *where, is_greedy), mixed), name
        wider = 3 * torch.randn(rows, vocab_size + 7, generator=generator)


def test_no_rows_have_no_tokens():
    assert Sampler().choose(torch.empty(0, 30), SamplingMetadata([], 30)).shape == (0,)
    assert draw(torch.empty(0, 30), *columns(0, torch.Generator())).shape == (0,)


def test_rare_tokens_are_drawn_as_often_as_the_formula_draws_them():
    """The bound passes over whole blocks; 20,000 draws of one distribution, most of them of the commonest tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.linspace(0, -8, 256).expand(20_000, -1)
    _, seeds, positions = columns(20_000, generator)
    got = draw(logits, None, seeds, positions)
    assert torch.equal(got, drawn(logits, torch.ones(20_000), seeds, positions))
    assert got.max() > 200 and got.bincount().argmax() < 10


def test_a_number_of_the_noise_has_the_same_bits_wherever_it_stands():
    seeds, positions = torch.tensor([11, -5]), torch.tensor([3, 2**40])
    whole = gumbel_noise(seeds, positions, torch.arange(1000))
    for start, end in ((0, 1), (1, 5), (63, 65), (900, 1000), (7, 999)):
        assert torch.equal(gumbel_noise(seeds, positions, torch.arange(start, end)), whole[:, start:end])


@pytest.mark.parametrize("seed", range(10))
def test_the_sampler_draws_the_same_with_the_kernel_and_without(seed):
    """Any mix of temperatures, greedy rows and filters."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    vocab_size, count = rng.choice([50, 1024]), rng.choice([1, 2, 9])
    filters = [{}, {}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"repetition_penalty": 1.3}]
    params = [SamplingParams(temperature=rng.choice([0.0, 0.7, 1.5]), **rng.choice(filters)) for _ in range(count)]
    rows = [SamplingRow(one, rng.randrange(2**63), [1, 2], [3] * rng.randrange(4), frozenset()) for one in params]
    metadata = SamplingMetadata(rows, vocab_size, torch.device("cpu"))
    for _ in range(5):
        logits = torch.randn(count, vocab_size, generator=generator)
        logits = logits.round() if seed % 2 else logits
        tokens = Sampler().choose(logits, metadata)
        assert torch.equal(tokens, Sampler(fused=False).choose(logits, metadata))
        metadata.advance(tokens)


def test_other_logits_are_left_to_torch():
    logits = torch.randn(4, 30)
    assert draws(logits) and draws(logits[:, 3:9]) and draws(logits[::2])
    assert not draws(logits.double()) and not draws(logits.t()) and not draws(logits.to("meta"))
