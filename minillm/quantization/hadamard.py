"""Hadamard matrices: rotations that spread one large number over all, in n log n additions. Built in chapter 16.

    H_1 = [1]     H_2n = [ H_n   H_n ]         every entry is 1 or -1, and H Hᵀ = n · identity, so H / sqrt(n)
                         [ H_n  -H_n ]         preserves lengths; one outlier of size a becomes n numbers of a / sqrt(n)

A model's sizes are often not powers of two (576, 3072, 5120). Paley (1933) has a matrix of many other orders; the
Kronecker product of one with a power of two serves the rest: 576 = 16 · 36.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """x [..., size] times a Hadamard matrix over sqrt(size), in x's dtype. For a power of two the matrix is its own
    inverse; for other sizes the inverse is its transpose. Raises ValueError for a size without a known matrix."""
    size = x.shape[-1]
    order = paley_order(size)  # 1 for a power of two
    y = x.reshape(-1, size // order, order)
    if order > 1:
        y = y @ paley_matrix(order).to(y)
    half = 1
    while half < size // order:  # butterflies: of pairs, of pairs of pairs, ...
        pairs = y.view(-1, size // order // (2 * half), 2, half * order)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        half *= 2
    return (y.reshape(x.shape)) / size**0.5


class Rotation:
    """x -> x diag(signs) H / sqrt(size): a randomized Hadamard matrix, whose random signs keep an unlucky vector from
    lining up with a row of H (Tseng et al. 2024, QuIP#, arXiv:2402.04396). Lengths and angles stay as they are."""

    def __init__(self, size: int, seed: int = 0):
        paley_order(size)  # raises where there is no matrix
        generator = torch.Generator().manual_seed(seed)
        self.size, self.signs = size, torch.randint(0, 2, (size,), generator=generator) * 2 - 1

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size], rotated; in x's dtype."""
        return hadamard_transform(x * self.signs.to(x))


@cache
def paley_order(size: int) -> int:
    """The order of the matrix that, with a power of two, makes `size`; 1 for a power of two itself.

    Raises ValueError for a size that has none: odd ones, twice odd ones, and a few beyond those that Paley's two
    constructions over prime fields reach.
    """
    odd = size & -size and size // (size & -size)
    if odd == 1:
        return 1
    order = 4 * odd
    while odd and size % order == 0:
        if _paley_prime(order) is not None:
            return order
        order *= 2
    raise ValueError(
        f"size={size} has no Hadamard matrix here; allowed: powers of two, and powers of two times the order of one of "
        "Paley's (12, 20, 28, 36, 44, 60, ...), which are multiples of 4"
    )


def _paley_prime(order: int) -> tuple[int, bool] | None:
    """The prime whose squares make a matrix of this order, and whether by Paley's second construction."""
    for prime, is_second in ((order - 1, False), (order // 2 - 1, True)):
        if prime % 4 == (1 if is_second else 3) and prime > 2 and all(prime % i for i in range(2, int(prime**0.5) + 1)):
            return prime, is_second
    return None


@cache
def paley_matrix(order: int) -> Tensor:
    """A Hadamard matrix [order, order] of 1 and -1, float64. Its pattern says which differences are squares modulo a
    prime q: order q + 1 for q = 3 mod 4, and 2 (q + 1) for q = 1 mod 4 (Paley 1933)."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    prime, is_second = _paley_prime(order)
    squares = {i * i % prime for i in range(1, prime)}
    residues = torch.tensor([0] + [1 if i in squares else -1 for i in range(1, prime)], dtype=torch.float64)
    numbers = torch.arange(prime)
    core = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    core[0, 0] = 0
    core[1:, 1:] = residues[(numbers[:, None] - numbers[None, :]) % prime]
    identity = torch.eye(prime + 1, dtype=torch.float64)
    if is_second:  # symmetric core C with C C = q: each entry becomes a block of two by two
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        alone = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(core, plus) + torch.kron(identity, alone)
    core[1:, 0] = -1.0  # skew core S with S Sᵀ = q
    return core + identity
