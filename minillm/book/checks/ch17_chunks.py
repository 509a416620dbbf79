"""Check of chapter 17: gated linear attention in chunks. Built in chapter 17."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker, Timed


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    chunk: int,
    *,
    before: bool = False,
    forgets_late: bool = False,
    carries: bool = True,
    ratio: bool = False,
    drops_rest: bool = False,
    transposed: bool = False,
    shared: bool = False,
    added: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens and the state after every chunk. The keywords are mistakes."""
    outs, states = [], []
    for start in range(0, len(q) - (chunk - 1 if drops_rest else 0), chunk):
        here = slice(start, start + chunk)
        qs, ks, vs, logs = q[here], k[here], v[here], (decay[here] + added).log().cumsum(0)  # [tokens, ...]
        since = (logs[:, None] - logs[None]).clamp(max=0).exp()  # from token j to token i: [i, j, keys]
        if ratio:
            product = decay[here].cumprod(0)
            since = product[:, None] / product[None]
        if shared:
            since = since.mean(-1, keepdim=True).expand_as(since)
        scores = torch.einsum("ik,jk,ijk->ij", qs, ks, since).tril(-1 if before else 0)
        from_start = torch.ones_like(logs) if forgets_late else logs.exp()
        outs.append(scores @ vs + (qs * from_start) @ state)
        to_end = (logs[-1] - logs).exp()
        state = (logs[-1].exp()[:, None] * state if carries else 0) + (to_end * ks).T @ vs
        states.append(state.T if transposed else state)
    return torch.cat(outs), torch.stack(states)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The recurrence: right, and a loop over all tokens."""
    outs, states = [], []
    for place in range(len(q)):
        state = decay[place, :, None] * state + k[place, :, None] * v[place]
        outs.append(q[place] @ state)
        if (place + 1) % chunk == 0 or place + 1 == len(q):
            states.append(state)
    return torch.stack(outs), torch.stack(states)


def _chunked_case(draw: Draw, tokens: int, keys: int, values: int, chunk: int, low: float = 0.5) -> tuple:
    q, k, v = draw.randn(tokens, keys), draw.randn(tokens, keys), draw.randn(tokens, values)
    decay = low + (1 - low) * torch.sigmoid(draw.randn(tokens, keys))
    return q, k, v, decay, draw.randn(keys, values), chunk


def _chunked_edges(draw: Draw) -> Iterator[tuple]:
    yield _chunked_case(draw, 1, 2, 3, 4)  # one token
    yield _chunked_case(draw, 5, 3, 2, 1)  # chunks of one token: the recurrence itself
    yield _chunked_case(draw, 7, 2, 2, 7)  # one chunk
    yield _chunked_case(draw, 10, 2, 3, 4)  # the last chunk is shorter
    q, k, v, decay, state, _ = _chunked_case(draw, 12, 3, 2, 4)
    yield q, k, v, torch.ones(12, 3), state, 4  # nothing decays: plain linear attention
    yield q, k, v, decay, torch.zeros(3, 2), 5  # nothing before
    fast = torch.full((96, 2), 0.05)  # 0.05^48 underflows
    yield *_chunked_case(draw, 96, 2, 2, 48)[:3], fast, draw.randn(2, 2), 48
    q, k, v, decay, state, _ = _chunked_case(draw, 12, 3, 2, 4)
    yield q, k, v, torch.full_like(decay, 1e-6), 1e6 * state, 4  # little is left of much


def _chunked_random(draw: Draw) -> tuple:
    sizes = draw.randint(2, 40), draw.randint(2, 6), draw.randint(2, 6), draw.randint(2, 12)
    return _chunked_case(draw, *sizes)


_LOOP = Timed(
    "2,000 tokens in chunks of 100",
    lambda draw: _chunked_case(draw, 2000, 3, 2, 100),
    "Loop over the chunks, not over their tokens: matrix products compute a whole chunk at a time.",
    lines=4000,
)
check_gated_chunks = FunctionChecker(
    "gated_chunks",
    chunked,
    hint="Within a chunk a product of q and k decays, in every key dimension, by what lies between the two tokens.",
    examples=[
        (
            torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]),
            torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
            torch.tensor([[1.0], [2.0], [4.0]]),
            torch.tensor([[0.5, 1.0], [0.5, 0.25], [1.0, 0.5]]),
            torch.tensor([[8.0], [0.0]]),
            2,
        )
    ],
    edges=_chunked_edges,
    random=_chunked_random,
    trials=25,
    returns=("outs", "states"),
    atol=1e-4,
    rtol=1e-3,
    timed=(_LOOP,),
    misconceptions={
        "A token's own key and value are in the state that its query reads.": dict(before=True),
        "The state from before the chunk has decayed by the time a later token of the chunk reads it.": dict(
            forgets_late=True
        ),
        "A chunk begins with the state that the one before it left.": dict(carries=False),
        "A product of many decays becomes 0, and 0 / 0 is NaN: subtract logarithms instead.": dict(ratio=True),
        "Every key dimension has a decay of its own.": dict(shared=True),
        "The last chunk may be shorter: it counts too.": dict(drops_rest=True),
        "Nothing may be added to a decay before its logarithm: much of a large number decays.": dict(added=1e-6),
        _LOOP.hint: one_by_one,
        "A state is [key dimensions, value dimensions]: the outer product of k and v, in that order.": dict(
            transposed=True
        ),
    },
)
