"""The counter-based generator: the published bits, the right distribution, no dependence on the batch."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from minillm.sampling import noise
from minillm.sampling.noise import derive_seed, gumbel_noise, random_bits


def test_bits_are_those_of_splitmix64():
    # The first outputs of the reference implementation seeded with 1234567.
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    bits = random_bits(torch.tensor(1234567), torch.arange(5))
    assert [value % 2**64 for value in bits.tolist()] == published


@pytest.mark.parametrize("seed", [0, 1, 2**40, 2**63 - 1])
def test_derived_seeds_are_the_same_bits_without_the_sign(seed):
    derived = [derive_seed(seed, index) for index in range(100)]
    bits = random_bits(torch.tensor(seed), torch.arange(100)).tolist()
    assert derived == [value % 2**64 >> 1 for value in bits]
    assert len(set(derived)) == 100 and all(0 <= value < 2**63 for value in derived)


def grid(num_seeds: int, num_positions: int, num_tokens: int) -> torch.Tensor:
    """Noise of neighbouring seeds, positions and tokens: [num_seeds, num_positions, num_tokens]."""
    seeds = torch.arange(num_seeds).repeat_interleave(num_positions)
    positions = torch.arange(num_positions).repeat(num_seeds)
    return gumbel_noise(seeds, positions, torch.arange(num_tokens)).view(num_seeds, num_positions, num_tokens)


def test_distribution_is_gumbel_along_every_axis():
    values = grid(40, 40, 40).double().numpy()
    assert stats.kstest(values.ravel(), "gumbel_r").pvalue > 1e-3
    for column in (values[:, 0, 0], values[0, :, 0], values[0, 0, :]):
        assert stats.kstest(column, "gumbel_r").pvalue > 1e-3


def test_neighbours_are_uncorrelated():
    # A correlation of 0 measured on n pairs has standard deviation 1/sqrt(n); five of them are allowed.
    values = grid(40, 40, 40)
    for axis in range(3):
        first, second = values.narrow(axis, 0, 39).flatten(), values.narrow(axis, 1, 39).flatten()
        correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
        assert abs(correlation) < 5 / len(first) ** 0.5


def test_a_number_depends_on_its_key_only():
    seeds, positions = torch.tensor([5, 9, 5]), torch.tensor([0, 3, 7])
    whole = gumbel_noise(seeds, positions, torch.arange(1000))  # [3, 1000]
    for row in range(3):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], torch.arange(1000))
        assert torch.equal(alone[0], whole[row])
    chosen = torch.tensor([[7, 999], [0, 3], [500, 7]])
    # Rows with token ids of their own go through torch, the others through C: the same bits, but their logarithms may
    # be rounded differently, twice, at numbers below 16.
    torch.testing.assert_close(
        gumbel_noise(seeds, positions, chosen), whole.gather(1, chosen), rtol=2**-21, atol=2**-21
    )
    assert not torch.equal(whole[0], whole[2])


def test_no_number_repeats_in_a_large_vocabulary():
    # 24 bits of uniform would give some 1,300 equal pairs here and break ties to the smaller id.
    values = gumbel_noise(torch.tensor([3]), torch.tensor([0]), torch.arange(150_000))[0]
    assert values[values > 8].unique().numel() == (values > 8).sum() > 20


@pytest.mark.parametrize("bits", [0, -1, 2**63 - 1, -(2**63), 1])
def test_extreme_bits_give_finite_noise(monkeypatch, bits):
    monkeypatch.setattr(noise, "random_bits", lambda key, counter: torch.full((1, 1), bits))
    value = gumbel_noise(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    assert value.dtype == torch.float32 and value.isfinite().all()
