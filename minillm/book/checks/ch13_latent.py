"""The check of chapter 13's decoding over pages of latents: values, and no keys per head. Built in chapter 13.

The reference makes keys and values of every head, in float64: it knows nothing of absorption.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Draw, FunctionChecker
from minillm.book.checks.snapshot import detached
from minillm.book.checks.watch import LargestTensor


def latent_decode(
    q_plain: Tensor, q_turned: Tensor, k_up: Tensor, v_up: Tensor, pages: Tensor, block_table: Tensor,
    seq_lens: list[int], scale: float, *,
    rotary_first: bool = True, scaled: bool = True, rotary: bool = True, in_order: bool = False, divided: bool = False,
) -> Tensor:  # fmt: skip
    """[num_seqs, num_heads, v_head_dim] float32. The keywords are mistakes."""
    rank, rope = k_up.shape[2], q_turned.shape[2]
    out = torch.zeros(len(seq_lens), *v_up.shape[:2], dtype=torch.float64)
    for seq, length in enumerate(seq_lens):
        blocks = torch.arange(1, block_table.shape[1] + 1).clamp(max=len(pages) - 1) if in_order else block_table[seq]
        rows = pages[blocks].flatten(0, 1)[:length].double()
        turned, c = rows.split([rope, rank], dim=1) if rotary_first else reversed(rows.split([rank, rope], dim=1))
        keys, values = (torch.einsum("hdr,nr->hnd", up.double(), c) for up in (k_up, v_up))
        scores = torch.einsum("hd,hnd->hn", q_plain[seq].double(), keys)
        scores = scores + rotary * (q_turned[seq].double() @ turned.T)
        scores = scores * (scale if scaled else 1.0) / (k_up.shape[1] + rope if divided else 1) ** 0.5
        if length:
            out[seq] = torch.einsum("hn,hnd->hd", scores.softmax(-1), values)
    return out.float()


def _given(
    draw: Draw, lengths: list[int], heads: int, plain: int, rank: int, rope: int, value: int, block_size: int = 4
) -> tuple:
    """Arguments whose blocks lie in random order; what is no latent of a sequence is NaN."""
    counts = [-(-length // block_size) for length in lengths]
    order = list(range(1, sum(counts) + 3))
    draw.rng.shuffle(order)
    pages = torch.full((len(order) + 1, block_size, rope + rank), torch.nan)
    table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int64)
    for seq, (length, count) in enumerate(zip(lengths, counts)):
        for place in range(count):
            block = table[seq, place] = order.pop()
            used = min(block_size, length - place * block_size)
            pages[block, :used] = draw.randn(used, rope + rank)
    ups = draw.randn(heads, plain, rank) / rank**0.5, draw.randn(heads, value, rank) / rank**0.5
    queries = draw.randn(len(lengths), heads, plain), draw.randn(len(lengths), heads, rope)
    return *queries, *ups, pages, table, lengths, round(draw.rng.uniform(0.2, 0.6), 3)


def _examples(draw: Draw) -> list[tuple]:
    return [_given(draw, [6, 3], 2, 3, 5, 2, 4), _given(draw, [9], 3, 4, 6, 2, 3)]


def _edges(draw: Draw) -> list[tuple]:
    return [
        _given(draw, [1], 1, 1, 1, 1, 1),
        _given(draw, [4, 8], 2, 3, 4, 4, 3),  # whole blocks; a latent as wide as the rotary key
        _given(draw, [0, 5, 0], 2, 3, 5, 2, 4),
        _given(draw, [7, 7], 3, 3, 3, 2, 3, block_size=1),
        _given(draw, [64, 40], 16, 32, 16, 4, 32, block_size=8),  # where keys of all heads would be the largest tensor
    ]


def _random(draw: Draw) -> tuple:
    lengths = [draw.rng.choice((0, 1, draw.randint(1, 30))) for _ in range(draw.randint(1, 5))]
    sizes = (draw.randint(1, 6) for _ in range(5))
    return _given(draw, lengths, *sizes, block_size=draw.rng.choice((1, 2, 4, 16)))


def _nan(got: Tensor, expected: Tensor, *given: object) -> str | None:
    if got.isnan().any():
        return "NaN lies in block 0 and in the free end of a last block: read the first seq_lens[i] rows alone."
    return None


def _no_heads(case: Case, got: Tensor, *given: object) -> None:
    """No tensor as large as the keys of all heads."""
    q_plain, q_turned, k_up, v_up, pages, table, _, _ = given
    rows = table.numel() * pages.shape[1]
    heads = q_plain.shape[1]
    pairs = heads * rows + len(q_plain) * heads * (k_up.shape[2] + q_turned.shape[2])
    limit = max(k_up.numel(), v_up.numel(), pages.numel(), rows * pages.shape[2], pairs)
    with LargestTensor() as watch:
        case.run(case.student, *detached(given))
    made = heads * rows * k_up.shape[1]
    case.true(
        watch.largest <= max(limit, q_plain.numel(), got.numel()),
        f"{watch.operation} made a tensor of {watch.largest:,} elements; all pages have {pages.numel():,}, "
        f"and keys of every head would have {made:,}",
        hint="Absorb: k_up goes to the query, one vector per head, and v_up behind the weighted sum of latents.",
    )


check_latent_decode = FunctionChecker(
    "latent_decode",
    latent_decode,
    returns="the output [sequence, head, dimension]",
    examples=_examples,
    edges=_edges,
    random=_random,
    trials=20,
    atol=2e-4,
    rtol=1e-4,
    also=_no_heads,
    explain=_nan,
    misconceptions={
        "In these pages the rotary key comes first: columns 0 to rope, then the latent.": dict(rotary_first=False),
        "A score is multiplied by `scale`, both of its parts.": dict(scaled=False),
        "A score has two parts: the absorbed query and the latent, the rotated query and the rotary key.": dict(
            rotary=False
        ),
        "The blocks of a sequence stand in block_table, not one behind the other.": dict(in_order=True),
        "`scale` is all there is: nothing else is divided by the root of a head's size.": dict(divided=True),
    },
    forbid=("minillm.kv_cache.latent.latent_attention", "minillm.kv_cache.latent.LatentAttention"),
)
