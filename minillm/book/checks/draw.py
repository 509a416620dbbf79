"""Seeded chance for the checks: the same seed draws the same cases. Built in chapter 00."""

from __future__ import annotations

import random


class Draw:
    """What a checker draws its cases from.

    seed: an int; another seed changes sizes as well as values, as long as both are drawn here.
    rng: a `random.Random` of this seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self._generator = None

    def randn(self, *shape: int):
        """Normal random numbers, float32, from this seed."""
        import torch

        return torch.randn(*shape, generator=self._torch(), dtype=torch.float32)  # whatever the notebook's default is

    def randint(self, low: int, high: int, *shape: int):
        """Whole random numbers, int64, low <= x < high; a plain int without a shape."""
        import torch

        return torch.randint(low, high, shape, generator=self._torch()) if shape else self.rng.randrange(low, high)

    def _torch(self):
        import torch

        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.seed)
        return self._generator
