"""Checks of chapter 02: a rotation of neighbouring pairs, and attention with shared heads that copies no key.
Built in chapter 02.

Copies of K are not inferred from the source: a dispatch mode watches every tensor that the student's code makes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw, FunctionChecker
from minillm.book.checks.snapshot import detached
from minillm.book.checks.watch import LargestTensor

# 1 · the rotation


def rotated(
    x: Tensor, positions: Tensor, theta: float, *, halves: bool = False, apart: bool = False, sign: int = 1,
    counted: bool = False, slow: float = 1.0,
) -> Tensor:  # fmt: skip
    """A pair as a complex number, its rotation as a product, in float64. The keywords are mistakes."""
    x = _side_by_side(x) if halves else x
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    frequencies = theta ** (-slow * torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    places = torch.arange(len(x)) if counted else positions
    angles = sign * places[:, None, None] * frequencies
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).float()
    return _apart(turned) if apart or halves else turned


def _side_by_side(x: Tensor) -> Tensor:
    """Number i beside number i + head_dim / 2."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _apart(x: Tensor) -> Tensor:
    """All first members of the pairs, then all second ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _rotary_edges(draw: Draw) -> dict[str, tuple]:
    x, steps = draw.randn(3, 2, 8), torch.arange(4)
    return {
        "every position is 0, so every angle is 0: nothing turns": (x, torch.zeros(3, dtype=torch.int64), 10000.0),
        "two tokens have the same position, and the last one a smaller one": (x, torch.tensor([7, 7, 3]), 100.0),
        "a head has one pair": (draw.randn(4, 1, 2), steps, 10000.0),
        "there are as many tokens as heads: positions go along the tokens": (draw.randn(4, 4, 4), steps, 10.0),
        "x is a view, its heads come first in memory": (
            draw.randn(2, 5, 6).transpose(0, 1),
            torch.arange(5),
            50.0,
        ),
        "x is a view whose last dimension has a stride: take the pairs by indexing, or make x contiguous first": (
            draw.randn(8, 2, 4).permute(2, 1, 0),
            steps,
            100.0,
        ),
    }


def _random_vectors(draw: Draw) -> tuple:
    tokens, theta = draw.randint(1, 7), draw.rng.choice((100.0, 10000.0, 500000.0))
    x = draw.randn(tokens, draw.randint(1, 5), 2 * draw.randint(1, 17))
    return x, draw.randint(0, 2000, tokens), theta


check_interleaved_rotary = FunctionChecker(
    "interleaved_rotary",
    rotated,
    returns="the rotated vectors [token, head, dimension]",
    # Two pairs, both pointing along their first axis; theta=4 gives the frequencies 1 and 1/2.
    examples=[(torch.tensor([[[1.0, 0.0, 1.0, 0.0]]]), torch.tensor([2]), 4.0)],
    edges=_rotary_edges,
    random=_random_vectors,
    trials=30,
    atol=2e-3,
    rtol=1e-5,
    hint="Dimensions 2i and 2i+1 turn together, by position · theta^(-2i / head_dim), counter-clockwise.",
    misconceptions={
        "This is the half-split layout of Hugging Face checkpoints; here neighbours 2i and 2i+1 form a pair.":
            dict(halves=True),
        "The pairs are turned correctly, but then all first members stand before all second ones: they must alternate.":
            dict(apart=True),
        "The pairs turn clockwise: check the signs, (a cos - b sin, b cos + a sin).": dict(sign=-1),
        "A token's angle comes from its entry in `positions`, not from its place in x.": dict(counted=True),
        "The frequencies fall half as fast as they should: pair i has the exponent -2i / head_dim.": dict(slow=0.5),
    },
    forbid=("minillm.model.layers.apply_rotary",),
)  # fmt: skip

# 2 · attention with shared heads

_LONG = 48  # keys from which on K repeated for each query head is the largest tensor by far


def attended(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, *,
    kv_of: Callable[[int, int, int], int] = lambda h, n, kv: h % kv,
    scale: Callable[[int], float] = math.sqrt, seen: Callable[[Tensor], Tensor] = lambda allowed: allowed,
) -> Tensor:  # fmt: skip
    """One head at a time, in float64. The keywords are mistakes."""
    heads = []
    for head in range(q.shape[1]):
        kv = kv_of(head, q.shape[1], k.shape[1])
        scores = q[:, head].double() @ k[:, kv].double().T / scale(q.shape[2])
        heads.append(scores.masked_fill(~seen(allowed), -torch.inf).softmax(-1) @ v[:, kv].double())
    return torch.stack(heads, dim=1).float()


def _small(case: Case, got: Tensor, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> None:
    """The largest tensor that the answer makes; where K is long, one repeated for each query head is larger."""
    if len(k) < _LONG:
        return
    watch = LargestTensor()

    @functools.wraps(case.student)
    def watched(*tensors: Tensor) -> Tensor:
        with watch:
            return case.student(*tensors)

    case.run(watched, *detached((q, k, v, allowed)))
    case.true(
        not any("scaled_dot_product" in name for name in watch.operations),
        "torch's own attention was called; write the two products and the softmax yourself",
    )
    scores, copied = q.shape[1] * allowed.numel(), q.shape[1] * len(k) * q.shape[2]
    case.true(
        watch.largest <= max(k.numel(), q.numel(), scores),
        f"{watch.operation} made a tensor of {watch.largest:,} elements; q has {q.numel():,}, k has {k.numel():,}, the "
        f"scores have {scores:,}, and K repeated for every query head would have {copied:,}",
        hint="Broadcasting in `@` copies too: "
        "put the query heads of a group side by side, as more rows of one product.",
    )


def _heads(
    draw: Draw, queries: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, level: float = 0.0
) -> tuple[Tensor, ...]:
    """q, k, v and a mask with a key for each query; `level` is added to q and k."""
    allowed = draw.randn(queries, seq_len) > 0
    allowed[torch.arange(queries), draw.randint(0, seq_len, queries)] = True
    q, k = draw.randn(queries, heads, head_dim) + level, draw.randn(seq_len, kv_heads, head_dim) + level
    return q, k, draw.randn(seq_len, kv_heads, head_dim), allowed


def _gqa_examples(draw: Draw) -> Iterator[tuple]:
    ones, every = torch.ones(1, 4, 2), torch.ones(1, 1, dtype=torch.bool)
    # One key, two KV heads: each query head returns what it reads.
    yield ones, torch.ones(1, 2, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), every
    # The scores are 0 and 2 ln 3 / sqrt(4) = ln 3, so the weights are 1/4 and 3/4, and the output is 3.
    k, v = (torch.tensor(two).view(2, 1, 1).expand(2, 1, 4) for two in ([0.0, math.log(3) / 2], [0.0, 4.0]))
    yield torch.ones(1, 1, 4), k, v, torch.ones(1, 2, dtype=torch.bool)
    yield _heads(draw, 1, _LONG, 8, 2, 32)


def _gqa_edges(draw: Draw) -> dict[str, tuple]:
    views = "view() cannot join two dimensions of a view, reshape() and flatten() can"
    one_key = torch.zeros(1, 6, dtype=torch.bool)
    one_key[0, 2] = True
    q, k, v, allowed = _heads(draw, 3, 7, 4, 2, 6)

    def laid(*dims: int) -> tuple[Tensor, ...]:
        """q, k and v with their dimensions in this order in memory."""
        return tuple(x.permute(dims).contiguous().permute(dims) for x in (q, k, v))

    return {
        "one key is allowed. Its weight is 1, so the output is its v": (*_heads(draw, 1, 6, 4, 2, 8)[:3], one_key),
        "there are as many KV heads as query heads": _heads(draw, 2, 5, 3, 3, 4),
        "there is one KV head": _heads(draw, 2, 5, 6, 1, 4),
        "three query heads share a KV head": _heads(draw, 2, 5, 6, 2, 4),
        "scores are large, and exp() overflows: use softmax on the masked scores": _heads(draw, 1, 6, 4, 2, 8, 8.0),
        f"q, k and v are parts of one tensor: {views}": (
            *draw.randn(5, 8, 4).split([4, 2, 2], dim=1),
            torch.ones(5, 5, dtype=torch.bool).tril(),
        ),
        f"heads come first in memory, and `allowed` is transposed: {views}": (*laid(1, 0, 2), allowed.T.contiguous().T),
        f"q, k and v lie in memory the other way round: {views}": (*laid(2, 1, 0), allowed),
        "the keys are long": _heads(draw, 1, 96, 8, 2, 32),
        "the keys are long, and all query heads share them": _heads(draw, 3, 64, 6, 1, 64),
    }


def _random_heads(draw: Draw, is_long: bool) -> tuple:
    queries, kv_heads = draw.randint(1, 4 if is_long else 7), draw.randint(1, 4)
    if is_long:
        return _heads(draw, queries, draw.randint(_LONG, 80), kv_heads * draw.randint(3, 5), kv_heads, 64)
    seq_len, heads = queries + draw.randint(0, 6), kv_heads * draw.randint(1, 5)
    return _heads(draw, queries, seq_len, heads, kv_heads, draw.randint(2, 20))


def _is_nan(got: Tensor, expected: Tensor, *given: Tensor) -> str | None:
    if got.isnan().any():
        return (
            "NaN comes from a softmax in which every score is -inf or one is inf: "
            "mask the scores before the softmax, where allowed is False."
        )
    return None


check_gqa_attention = FunctionChecker(
    "gqa_attention",
    attended,
    returns="the output [query, head, dimension]",
    examples=_gqa_examples,
    edges=_gqa_edges,
    random=_random_heads,
    trials=(False,) * 15 + (True,) * 3,
    atol=1e-4,
    rtol=1e-4,
    explain=_is_nan,
    also=_small,
    hint="Query head h reads KV head h % num_kv_heads; give q a group dimension instead of repeating K.",
    misconceptions={
        "Here consecutive query heads share a KV head; query head h has to read KV head h % num_kv_heads.":
            dict(kv_of=lambda h, n, kv: h // (n // kv)),
        "The scores were not scaled: divide them by sqrt(head_dim).": dict(scale=lambda size: 1.0),
        "The scores were divided by head_dim: divide them by its square root.": dict(scale=float),
        "The mask is the wrong way round: True means that the query may look, so -inf goes where allowed is False.":
            dict(seen=torch.logical_not),
        "These are the values for attention over all keys: the mask was not applied.": dict(seen=torch.ones_like),
    },
    forbid=("minillm.model.attention.causal_attention",),
)  # fmt: skip
