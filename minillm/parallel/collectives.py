"""Collectives over sends and receives: all-reduce by ring, tree and direct exchange, gather, scatter. Built in
chapter 20.

Every rank calls the same collective with a tensor of the same shape. What each algorithm sends is a formula
(`ring_sent`, `tree_sent`, `direct_sent`), which tests compare with what the links have counted.

    ring, 4 ranks      rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0     2 * 3 steps, a quarter of the tensor in each
    tree, 4 ranks      3 -> 2, 1 -> 0    2 -> 0    0 -> 2    0 -> 1, 2 -> 3     2 * 2 steps, all of it in each
    direct, 4 ranks    each to each                                       1 step, three times all of it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minillm.parallel.links import Link, Sent


def ring_all_reduce(link: Link, tensor: Tensor) -> Tensor:
    """The sum over all ranks, on each of them, in `tensor`'s shape; the same to the last bit everywhere.

    A reduce-scatter and an all-gather: 2 (n - 1) steps, in each of which a rank sends one of n chunks to its neighbour
    (Patarasuk & Yuan, 2009).
    """
    chunks = list(_chunks(tensor, link.world_size))
    _reduce_around(link, chunks)
    _gather_around(link, chunks)
    return torch.cat(chunks).view(tensor.shape)


def reduce_scatter(link: Link, tensor: Tensor) -> Tensor:
    """This rank's chunk of the sum over all ranks: flat, elements `chunk_bounds(...)[rank]` to the next."""
    chunks = list(_chunks(tensor, link.world_size))
    _reduce_around(link, chunks)
    return chunks[link.rank]


def all_gather(link: Link, tensor: Tensor) -> Tensor:
    """The tensors of all ranks, one after the other, on each of them: [world_size, *tensor.shape]."""
    chunks = [torch.empty_like(tensor) for _ in range(link.world_size)]
    chunks[link.rank] = tensor.detach().clone()
    _gather_around(link, chunks)
    return torch.stack(chunks)


def tree_all_reduce(link: Link, tensor: Tensor) -> Tensor:
    """The sum over all ranks, on each of them: up a binomial tree to rank 0, and down again."""
    total, distance = tensor.detach().clone(), 1
    while distance < link.world_size and link.rank % (2 * distance) == 0:
        if link.rank + distance < link.world_size:
            total += link.recv(total, link.rank + distance)
        distance *= 2
    if link.rank:  # `distance` is now the lowest bit of the rank: its parent is that far away
        link.send(total, link.rank - distance)
        total = link.recv(total, link.rank - distance)
    while distance > 1:
        distance //= 2
        if link.rank + distance < link.world_size:
            link.send(total, link.rank + distance)
    return total


def direct_all_reduce(link: Link, tensor: Tensor) -> Tensor:
    """The sum over all ranks, on each of them: every rank sends all of its tensor to every other, at once."""
    n, rank = link.world_size, link.rank
    waits = {
        (rank - hop) % n: link.start_exchange(tensor, (rank + hop) % n, tensor, (rank - hop) % n) for hop in range(1, n)
    }
    parts = {source: wait() for source, wait in waits.items()} | {rank: tensor.detach()}
    total = parts[0].clone()
    for source in range(1, n):  # in the same order everywhere: rounding must not differ between ranks
        total += parts[source]
    return total


def chunk_bounds(size: int, parts: int) -> list[int]:
    """Where `parts` chunks of `size` elements begin, and the end: they differ by one element at most."""
    return [size * part // parts for part in range(parts + 1)]


def ring_sent(size: int, itemsize: int, world_size: int, rank: int, *, steps: str = "all-reduce") -> Sent:
    """What `ring_all_reduce` sends from one rank for `size` elements; steps="reduce-scatter" or "all-gather" for half
    of it. Where `size` divides by n, bytes are 2 (n - 1) / n times the tensor's."""
    bounds = chunk_bounds(size, world_size)
    lengths = [end - start for start, end in pairwise(bounds)]
    halves = {
        "reduce-scatter": [lengths[(rank - 1 - step) % world_size] for step in range(world_size - 1)],
        "all-gather": [lengths[(rank - step) % world_size] for step in range(world_size - 1)],
    }
    if steps not in ("all-reduce", *halves):
        raise ValueError(f"steps={steps!r}: use all-reduce, {' or '.join(halves)}")
    sent = halves.get(steps) or halves["reduce-scatter"] + halves["all-gather"]
    return Sent(len(sent), sum(sent) * itemsize)


def tree_sent(size: int, itemsize: int, world_size: int, rank: int) -> Sent:
    """What `tree_all_reduce` sends from one rank: all of the tensor to its parent, and to each of its children."""
    lowest = rank & -rank if rank else 1 << (world_size - 1).bit_length()
    children = sum(rank + (1 << bit) < world_size for bit in range(lowest.bit_length() - 1))
    messages = children + (rank > 0)
    return Sent(messages, messages * size * itemsize)


def direct_sent(size: int, itemsize: int, world_size: int) -> Sent:
    """What `direct_all_reduce` sends from one rank: all of the tensor to all others."""
    return Sent(world_size - 1, (world_size - 1) * size * itemsize)


def _reduce_around(link: Link, chunks: list[Tensor]) -> None:
    """n - 1 steps to the right: a chunk collects each rank's part on its way. Rank r ends with chunk r complete."""
    n, rank = link.world_size, link.rank
    for step in range(n - 1):
        outgoing, incoming = (rank - 1 - step) % n, (rank - 2 - step) % n
        part = link.exchange(chunks[outgoing], (rank + 1) % n, chunks[incoming], (rank - 1) % n)
        chunks[incoming] = part + chunks[incoming]


def _gather_around(link: Link, chunks: Sequence[Tensor]) -> None:
    """n - 1 steps to the right: rank r begins with chunk r, and passes on what it received in the step before."""
    n, rank = link.world_size, link.rank
    for step in range(n - 1):
        outgoing, incoming = (rank - step) % n, (rank - 1 - step) % n
        chunks[incoming] = link.exchange(chunks[outgoing], (rank + 1) % n, chunks[incoming], (rank - 1) % n)


def _chunks(tensor: Tensor, parts: int) -> list[Tensor]:
    flat = tensor.detach().reshape(-1)
    return [flat[start:end].clone() for start, end in pairwise(chunk_bounds(len(flat), parts))]
