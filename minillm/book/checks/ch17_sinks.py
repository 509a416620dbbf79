"""Checks of chapter 17: 4-bit keys in groups, parts of a softmax merged with a sink. Built in chapter 17."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker

PACKAGE = "minillm.kv_cache.quantized."


# 4-bit keys in groups


def packed(
    x: Tensor,
    group: int,
    *,
    largest: float = 7.0,
    nearest: Callable[[Tensor], Tensor] = torch.round,
    whole: bool = False,
    offset: int = 8,
    halves: bool = True,
    swapped: bool = False,
    one: float = 1.0,
    divide: Callable[[Tensor, Tensor], Tensor] = torch.div,
) -> tuple[Tensor, Tensor]:
    """Bytes and scales. The keywords are mistakes."""
    grouped = x.float().unflatten(-1, (-1, group))  # [tokens, groups, group]
    scales = grouped.abs().amax(-1) / largest
    if whole:
        scales = scales.amax(-1, keepdim=True).expand_as(scales)
    scales = torch.where(scales == 0, torch.full_like(scales, one), scales)
    codes = nearest(divide(grouped, scales[..., None])).nan_to_num(0).clamp(-largest, largest).flatten(-2) + offset
    codes = codes.to(torch.int64) & 15
    first, second = codes.chunk(2, -1) if halves else (codes[..., ::2], codes[..., 1::2])
    low, high = (second, first) if swapped else (first, second)
    return (low | high << 4).to(torch.uint8), scales.contiguous()


def _packed_edges(draw: Draw) -> Iterator[tuple]:
    yield torch.zeros(2, 4), 2
    yield torch.tensor([[7.0, 0.5, 1.5, -2.5, 3.5, -7.0, 0.0, 6.5]]), 8  # ties
    yield torch.tensor([[0.0, 0.0, 1.0, -2.0]]), 2  # a group of zeros beside another
    yield torch.tensor([[100.0, 1.0, 0.5, -0.25]]), 2  # one group is loud
    yield torch.tensor([[1e-30, -3e-30]]), 2
    yield torch.tensor([[1e-45, -1e-45, 1.0, 2.0]]), 2  # a scale too small for float32
    yield torch.tensor([[287.0, 20.5, 61.5, -143.5]]), 4  # ties, and 1 / 41 is rounded
    yield torch.tensor([[3.0, -1.0, 0.5, 7.0, 2.0, -6.5]]), 3  # a group of an odd size ends where the half does
    yield torch.tensor([[3.0, -1.0]]), 1
    yield draw.randn(3, 8).bfloat16(), 4
    yield draw.randn(3, 8).double(), 4
    yield torch.tensor([[-14.0, 3.0, 2.0, 1.0]], dtype=torch.float16), 4
    yield draw.randn(0, 8), 4
    yield torch.cat([draw.randn(1, 8), 50 * draw.randn(1, 8)]), 4


def _packed_random(draw: Draw) -> tuple:
    group = 2 * draw.randint(1, 9)
    groups = draw.randint(1, 5)
    shape = draw.randint(1, 8), group * groups
    return draw.randn(*shape) * 10.0 ** draw.randint(-2, 3), group


def _no_scale(got: object, expected: tuple, x: Tensor, group: int) -> str | None:
    largest = x.float().unflatten(-1, (-1, group)).abs().amax(-1)
    small = largest[(largest > 0) & (largest / 7 == 0)].tolist()
    return f"A seventh of {small[0]:.3g} is 0 in float32, so the scale of that group is 1." if small else None


check_pack_keys = FunctionChecker(
    "pack_keys",
    packed,
    hint="A scale for each group, codes from -7 to 7, stored plus 8; byte i holds dimensions i and i + head_dim / 2.",
    examples=[(torch.tensor([[7.0, -3.5, 1.2, 0.0], [0.7, 0.2, -14.0, 5.0]]), 2)],
    edges=_packed_edges,
    random=_packed_random,
    returns=("packed", "scales"),
    explain=_no_scale,
    rtol=1e-6,
    misconceptions={
        "The largest code is 7: with -8 a code would have no opposite.": dict(largest=8.0),
        "Where a group's scale would be 0 it is 1, so that no number is divided by 0.": dict(one=0.0),
        "Divide by the scale: 1 / scale is rounded, and a tie is lost.": dict(
            divide=lambda numbers, scales: numbers * (1 / scales)
        ),
        "To the nearest code: a conversion to an integer truncates.": dict(nearest=torch.trunc),
        "Ties go to the even code, as torch.round does.": dict(nearest=lambda x: torch.floor(x + 0.5)),
        "Every group has a scale of its own.": dict(whole=True),
        "A code is stored plus 8, so that it is 1 to 15 and 8 means 0.": dict(offset=0),
        "Byte i holds dimension i and dimension i + head_dim / 2, not two neighbours.": dict(halves=False),
        "The first half of the dimensions is in the low four bits.": dict(swapped=True),
    },
    forbid=(PACKAGE + "quantize_vectors", PACKAGE + "pack_nibbles"),
)


# A softmax with a sink, merged from parts


def merged(
    parts: list[tuple[Tensor, Tensor]],
    sink: Tensor,
    *,
    times: int = 1,
    stable: bool = True,
    ignores_empty: bool = True,
    weighs: bool = True,
    renormalise: bool = False,
    counts: bool = True,
    whole_parts: bool = False,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of all parts and the sink. The keywords are mistakes."""
    lses = torch.stack([lse for _, lse in parts])  # [parts, heads]
    keys = lses.logsumexp(0)
    added = torch.stack([*lses, *[sink] * times])
    total = added.logsumexp(0) if stable else added.exp().sum(0).log()
    shares = (lses - (keys if renormalise else total)).exp()
    if not weighs:
        shares = torch.full_like(shares, 1 / (len(parts) + 1))
    outs = torch.stack([out for out, _ in parts])
    if ignores_empty:
        empty = lses == -torch.inf
        empty = empty.all(-1, keepdim=True) if whole_parts else empty
        outs = torch.where(empty[..., None], torch.zeros_like(outs), outs)
    return (shares[..., None] * outs).sum(0), total if counts else keys


def _part(draw: Draw, heads: int, dim: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    return draw.randn(heads, dim), size * draw.randn(heads)


def _merged_edges(draw: Draw) -> Iterator[tuple]:
    out, lse = _part(draw, 2, 3)
    yield [(out, lse)], torch.zeros(2)  # one part
    yield [(out, lse), (torch.full((2, 3), torch.nan), torch.full((2,), -torch.inf))], torch.zeros(2)  # an empty part
    yield [(out, lse + 300), (out + 1, lse + 301)], torch.full((2,), 299.0)  # exp would overflow
    yield [(out, lse - 300), (out + 1, lse - 301)], torch.full((2,), -299.0)  # and here underflow
    yield [(out, lse)], torch.full((2,), 500.0)  # the sink takes all
    yield [(out, lse)], torch.full((2,), -500.0)  # the sink takes nothing
    some = lse.clone()
    some[1], nothing = -torch.inf, out.clone()
    nothing[1] = torch.nan
    yield [(nothing, some), (out + 1, lse)], torch.zeros(2)  # no keys for one of its heads
    empty = torch.full((1, 2), torch.nan), torch.full((1,), -torch.inf)
    yield [empty, empty], torch.tensor([1.5])  # no keys at all


def _merged_random(draw: Draw) -> tuple:
    heads, dim, size = draw.randint(1, 6), draw.randint(1, 9), float(draw.randint(1, 30))
    parts = [_part(draw, heads, dim, size) for _ in range(draw.randint(2, 6))]
    return parts, size * draw.randn(heads)


check_merge_with_sink = FunctionChecker(
    "merge_with_sink",
    merged,
    hint="The sink is one more part: its log-sum-exp is the logit itself, its output is zero, and it counts once.",
    examples=[
        (
            [
                (torch.tensor([[1.0, 0.0], [2.0, 2.0]]), torch.tensor([0.0, 1.0])),
                (torch.tensor([[0.0, 1.0], [4.0, 0.0]]), torch.tensor([0.0, 1.0])),
            ],
            torch.tensor([0.0, 1.0]),
        )
    ],
    edges=_merged_edges,
    random=_merged_random,
    returns=("out", "lse"),
    atol=1e-5,
    rtol=1e-4,
    misconceptions={
        "The sink counts once, not once in every part.": lambda parts, sink: merged(parts, sink, times=len(parts)),
        "The sink is part of the denominator: the shares of the parts sum to less than 1.": dict(renormalise=True),
        "The log-sum-exp that is returned counts the sink too.": dict(counts=False),
        "exp of a large log-sum-exp overflows: subtract the largest first.": dict(stable=False),
        "A part may have keys for one head and none for another: leave it out for these heads only.": dict(
            whole_parts=True
        ),
        "A part without keys has no output, NaN perhaps, and 0 times NaN is NaN: leave it out.": dict(
            ignores_empty=False
        ),
        "The share of a part is exp(its lse) over the sum of all; the shares are not equal.": dict(weighs=False),
    },
    forbid=tuple(f"minillm.kernels.paged_decode.{name}" for name in ("merge_splits", "torch_merge_splits")),
)
