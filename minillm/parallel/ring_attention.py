"""Ring attention: one long prompt over many ranks; keys and values travel, queries stay. Built in chapter 20.

Each rank holds a part of the sequence. In n steps every rank meets the keys and values of every other: it computes
with what it has while it passes them on (Liu, Zaharia & Abbeel, 2023). Scores are never kept: as FlashAttention does
over tiles (chapter 12), a rank keeps for each query the largest score, the sum of exponentials and the weighted sum
of values.

    causal, 4 ranks, 8 chunks of the sequence            (query, key) pairs of each rank
        contiguous   0 1 | 2 3 | 4 5 | 6 7               the last rank has seven times the work of the first
        zigzag       0 7 | 1 6 | 2 5 | 3 4               the same for all: an early chunk goes with a late one
        striped      every fourth token                  nearly the same for all
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.collectives import chunk_bounds
from minillm.parallel.links import Link, Sent
from minillm.parallel.processes import run_processes

PLACEMENTS = ("contiguous", "zigzag", "striped")
TILE = 512  # keys that are scored at once


def positions_of(rank: int, world_size: int, num_tokens: int, placement: str = "zigzag") -> Tensor:
    """The positions of the sequence that a rank holds, ascending: int64."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must be 0 to {world_size - 1}")
    if placement == "contiguous":
        bounds = chunk_bounds(num_tokens, world_size)
        return torch.arange(bounds[rank], bounds[rank + 1])
    if placement == "zigzag":  # 2 n chunks: one from the front and its mirror image from the back
        bounds, mirror = chunk_bounds(num_tokens, 2 * world_size), 2 * world_size - 1 - rank
        front, back = (torch.arange(bounds[chunk], bounds[chunk + 1]) for chunk in (rank, mirror))
        return torch.cat([front, back])
    if placement == "striped":
        return torch.arange(num_tokens)[rank::world_size].contiguous()
    raise ValueError(f"placement={placement!r}: one of {', '.join(PLACEMENTS)}")


def ring_attention(
    link: Link,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_tokens: int,
    placement: str = "zigzag",
    scale: float | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks: [own tokens, num_heads, head_dim].

    q [own tokens, num_heads, head_dim]; k and v [own tokens, num_kv_heads, head_dim], the tokens at `positions_of` this
    rank. `num_tokens` is the length of the whole sequence. scale: 1 / sqrt(head_dim) where it is None.
    Raises ValueError where q, k and v do not have this rank's tokens.
    """
    n, rank = link.world_size, link.rank
    places = [positions_of(other, n, num_tokens, placement).to(q.device) for other in range(n)]
    if not len(q) == len(k) == len(v) == len(places[rank]):
        raise ValueError(
            f"rank {rank} holds {len(places[rank])} of {num_tokens} tokens ({placement}); "
            f"q, k and v have {len(q)}, {len(k)} and {len(v)}"
        )
    sums, held = RunningSoftmax(q, places[rank], scale), torch.stack([k, v])
    for step in range(n):
        owner = (rank - step) % n
        wait = None
        if step < n - 1:  # pass on what we hold, and meanwhile compute with it
            following = held.new_empty(2, len(places[(owner - 1) % n]), *held.shape[2:])
            wait = link.start_exchange(held, (rank + 1) % n, following, (rank - 1) % n)
        sums.take_in(*held, places[owner])
        if wait is not None:
            held = wait()
    return sums.result().to(q.dtype)


class RunningSoftmax:
    """Attention of some queries over keys that come in pieces, in any order: the online softmax of chapter 12."""

    def __init__(self, q: Tensor, positions: Tensor, scale: float | None = None):
        """q [num_queries, num_heads, head_dim] at `positions` [num_queries] of the sequence."""
        accurate = torch.promote_types(q.dtype, torch.float32)
        self.q = (q.to(accurate) * (q.shape[2] ** -0.5 if scale is None else scale)).transpose(0, 1)
        self.positions, self.num_pairs = positions, 0
        self.best = self.q.new_full(self.q.shape[:2], float("-inf"))  # [num_heads, num_queries]: the largest score
        self.total = torch.zeros_like(self.best)  # the sum of exponentials below it
        self.acc = torch.zeros_like(self.q)  # the weighted sum of values

    def take_in(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Keys, values [num_keys, num_kv_heads, head_dim] at ascending `positions`; what no query sees is skipped."""
        group = self.q.shape[0] // k.shape[1]
        for start in range(0, len(positions), TILE):
            columns = positions[start : start + TILE]
            # The first query that sees the first of these keys: positions ascend, so do all queries after it.
            first = int(torch.searchsorted(self.positions, columns[0]))
            if first == len(self.positions):
                break
            seen = columns <= self.positions[first:, None]
            self.num_pairs += int(seen.sum())
            keys, values = (x[start : start + TILE].to(self.q.dtype).transpose(0, 1) for x in (k, v))
            keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
            scores = (self.q[:, first:] @ keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
            best = torch.maximum(self.best[:, first:], scores.amax(-1))
            rescale, weights = torch.exp(self.best[:, first:] - best), torch.exp(scores - best[..., None])
            self.total[:, first:] = self.total[:, first:] * rescale + weights.sum(-1)
            self.acc[:, first:] = self.acc[:, first:] * rescale[..., None] + weights @ values
            self.best[:, first:] = best

    def result(self) -> Tensor:
        """[num_queries, num_heads, head_dim]."""
        return (self.acc / self.total[..., None]).transpose(0, 1)


def pairs_per_step(world_size: int, num_tokens: int, placement: str) -> list[list[int]]:
    """(query, key) pairs that each rank computes in each step: [rank][step]. A step of the ring is as long as that of
    its busiest rank."""
    places = [positions_of(rank, world_size, num_tokens, placement) for rank in range(world_size)]
    return [
        [_pairs(places[rank], places[(rank - step) % world_size]) for step in range(world_size)]
        for rank in range(world_size)
    ]


def ring_attention_sent(
    rank: int, world_size: int, num_tokens: int, kv_width: int, itemsize: int, placement: str = "zigzag"
) -> Sent:
    """What one rank sends: n - 1 messages with a key and a value for each token of a part.
    kv_width: num_kv_heads * head_dim."""
    owners = [(rank - step) % world_size for step in range(world_size - 1)]
    tokens = sum(len(positions_of(owner, world_size, num_tokens, placement)) for owner in owners)
    return Sent(len(owners), 2 * tokens * kv_width * itemsize)


def ring_attention_in_processes(
    q: Tensor, k: Tensor, v: Tensor, world_size: int, placement: str = "zigzag", *, timeout: float = 120.0
) -> tuple[Tensor, list[Sent]]:
    """Causal attention of a whole sequence, computed by `world_size` processes: the result, and what each rank sent.

    q [num_tokens, num_heads, head_dim]; k and v [num_tokens, num_kv_heads, head_dim]; the result is as q.
    """
    places = [positions_of(rank, world_size, len(q), placement) for rank in range(world_size)]
    parts = [(q[place].cpu(), k[place].cpu(), v[place].cpu(), len(q), placement) for place in places]
    out = torch.empty_like(q)
    answers = run_processes(_attend, parts, timeout=timeout)
    for place, (part, _) in zip(places, answers):
        out[place] = part.to(q.device)
    return out, [sent for _, sent in answers]


def _attend(link: Link, q: Tensor, k: Tensor, v: Tensor, num_tokens: int, placement: str) -> tuple[Tensor, Sent]:
    """What each process computes."""
    q, k, v = (x.to(link.device) for x in (q, k, v))
    return ring_attention(link, q, k, v, num_tokens, placement).cpu(), link.sent


def _pairs(queries: Tensor, keys: Tensor) -> int:
    return int(torch.searchsorted(keys, queries, right=True).sum())  # for each query, the keys at or before it
