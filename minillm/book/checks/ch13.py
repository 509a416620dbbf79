"""Checks of chapter 13: a prefix merged in, the number of splits, a gather over pages, addresses. Built in chapter 13.

The references are in `ch13_oracle`; `ch13_launches` looks at what the programs of a gather touched.
`ch13_places` has a gather and addresses, `ch13_latent` decoding over latents.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.checks.ch13_latent import check_latent_decode
from minillm.book.checks.ch13_oracle import Costs, best_splits, last_end, merge_time, programs_of, state_of
from minillm.book.checks.ch13_places import check_gather_window, check_slot_places

__all__ = [
    "Costs",
    "check_best_splits",
    "check_gather_window",
    "check_latent_decode",
    "check_merge_prefix",
    "check_slot_places",
]

_PAGED = tuple(
    f"minillm.kernels.paged_decode.{name}"
    for name in ("merge_splits", "torch_merge_splits", "paged_decode", "torch_paged_decode", "choose_num_splits")
)

check_merge_prefix = Checker(
    "merge_prefix",
    hint="A part weighs exp(its log - the log of both); the log of both is log(exp(a) + exp(b)).",
    forbid=_PAGED,
)


@check_merge_prefix.part("example")
def _prefix_example(case: Case) -> None:
    _merges(case, 3, 2, [4, 2, 3], [2, 0], 5)
    _merges(case, 2, 1, [1, 2], [0, 1], 3)


@check_merge_prefix.part("edges")
def _prefix_edges(case: Case) -> None:
    _merges(case, 3, 2, [2, 3, 1], [], 4)  # no two sequences share anything
    _merges(case, 3, 2, [0, 3, 0], [2, 1], 4)  # nothing of one's own, and nothing at all
    _merges(case, 2, 3, [2, 0], [1, 0], 0)  # an empty prefix
    _merges(case, 1, 1, [1], [0], 1)
    for own, prefix in ((300.0, -300.0), (-300.0, 300.0), (2000.0, 2000.0), (-2000.0, -2000.0), (88.0, 89.0)):
        _merges(case, 3, 2, [2, 1, 3], [1, 2], 4, own_level=own, prefix_level=prefix)
    _merges(case, 4, 2, [3, 3, 3, 3], [3, 1, 0, 2], 3, dtype=torch.float64)


@check_merge_prefix.part("random")
def _prefix_random(case: Case) -> None:
    for _ in range(30):
        num_seqs = case.randint(1, 7)
        rows = case.rng.sample(range(num_seqs), case.randint(0, num_seqs + 1))
        lengths = [case.rng.choice((0, 1, case.randint(1, 12))) for _ in range(num_seqs)]
        levels = {"own_level": case.rng.choice((0.0, 50.0, -50.0)), "prefix_level": case.rng.choice((0.0, 50.0, -50.0))}
        _merges(case, num_seqs, case.randint(1, 5), lengths, rows, case.randint(0, 9), **levels)


def _merges(
    case: Case,
    num_seqs: int,
    num_heads: int,
    lengths: list[int],
    rows: list[int],
    shared: int,
    *,
    own_level: float = 0.0,
    prefix_level: float = 0.0,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 4,
) -> None:
    """Sequences with keys of their own, those in `rows` behind `shared` keys of a prefix,
    against one softmax over all."""
    prefix_values = case.randn(shared, head_dim).double()
    own, prefix, whole = [], [], []
    for seq, length in enumerate(lengths):
        scores, values = case.randn(num_heads, length).double() + own_level, case.randn(length, head_dim).double()
        before = case.randn(num_heads, shared).double() + prefix_level
        own.append(state_of(scores, values))
        prefix.append(state_of(before, prefix_values))
        if seq in rows:
            scores, values = torch.cat([before, scores], dim=1), torch.cat([prefix_values, values])
        whole.append(state_of(scores, values))
    stack = lambda states, index: torch.stack([state[index] for state in states]).to(dtype)
    own_mean, own_log = stack(own, 0), stack(own, 1)
    grouped = [prefix[row] for row in rows]
    prefix_mean = (
        stack(grouped, 0).transpose(0, 1).contiguous() if rows else torch.zeros(num_heads, 0, head_dim, dtype=dtype)
    )
    prefix_log = stack(grouped, 1).T.contiguous() if rows else torch.zeros(num_heads, 0, dtype=dtype)
    got = case.call(own_mean, own_log, prefix_mean, prefix_log, torch.tensor(rows, dtype=torch.int64))
    told = f"for {num_seqs} sequences with {lengths} keys of their own, rows={rows}, {shared} keys in the prefix"
    case.true(isinstance(got, tuple) and len(got) == 2, f"the result {told} is not a tuple (mean, log)")
    for name, tensor, like in zip(("mean", "log"), got, (own_mean, own_log)):
        case.is_a(tensor, dtype, name)
        case.equal(
            tuple(tensor.shape),
            tuple(like.shape),
            f"the shape of {name}",
            hint="The result has the layout of the sequences' own states, not that of the prefix.",
        )
    log, mean = stack(whole, 1), stack(whole, 0).nan_to_num()
    hint = _blame(got[0], got[1], log, own_mean, own_log, prefix_mean, prefix_log, rows)
    tolerance = (
        {"atol": 1e-10, "rtol": 1e-10}
        if dtype is torch.float64
        else {"atol": 2e-5 * max(1.0, abs(own_level) / 40, abs(prefix_level) / 40), "rtol": 1e-5}
    )
    case.close(got[1], log, f"log {told}\n  log", hint=hint, **tolerance)
    case.close(got[0], mean, f"mean {told}\n  mean", hint=hint, **tolerance)


def _blame(
    mean: Tensor,
    log: Tensor,
    right: Tensor,
    own_mean: Tensor,
    own_log: Tensor,
    prefix_mean: Tensor,
    prefix_log: Tensor,
    rows: list[int],
) -> str | None:
    """Which mistake this looks like."""
    alone = [seq for seq in range(len(own_log)) if seq not in rows]
    if log.isnan().any() or mean.isnan().any():
        empty = right[log.isnan() | mean.isnan().any(2)] == -torch.inf
        return (
            "-inf minus -inf is not a number: where both parts are empty, the mean is 0 and the log -inf."
            if empty.all()
            else (
                "The mean of an empty part was never stored, and 0 times NaN is NaN: "
                "leave it out by torch.where, not by a product."
            )
        )
    if log.isinf().logical_and(right.isfinite()).any():
        return (
            "exp(log) overflows at 89 in float32, and is 0 at -104: raise e to differences only. torch.logaddexp does."
        )
    misplaced = torch.full_like(own_log, -torch.inf)
    misplaced[: len(rows)] = prefix_log.T
    if rows and rows != list(range(len(rows))) and torch.allclose(log, torch.logaddexp(own_log, misplaced)):
        return "Column i of the prefix belongs to sequence rows[i], not to sequence i."
    if alone and not torch.allclose(log[alone], own_log[alone]):
        return f"Sequence {alone[0]} is not in `rows`: it has no prefix, and its state stays as it is."
    other_log = torch.full_like(own_log, -torch.inf)
    other_log[rows] = prefix_log.T
    if torch.allclose(log, torch.maximum(own_log, other_log)):
        return "The larger of two logs is not the log of the sum."
    if torch.allclose(log, torch.logaddexp2(own_log, other_log)):
        return "The logarithms are natural here: powers of e, not of 2."
    return None


def _random_splits(draw: Draw) -> tuple:
    lengths = [draw.rng.choice((0, draw.randint(1, 200), draw.randint(1, 3000))) for _ in range(draw.randint(1, 6))]
    costs = Costs(draw.randint(0, 20), draw.randint(1, 20), draw.randint(0, 60), draw.randint(0, 6))
    tile_n, most = draw.rng.choice((16, 64, 128)), draw.randint(1, 14)
    return lengths, draw.randint(1, 5), draw.randint(1, 24), tile_n, most, costs


def _times(got: tuple, expected: tuple, *given: object) -> str:
    *before, most, costs = given
    tried = sorted({1, expected[0], most, *(n for n in got[:1] if type(n) is int and 1 <= n <= most)})
    alone = {n: last_end(programs_of(before[0], before[1], before[3], n, costs), before[2]) for n in tried}
    told = " ".join(f"{n}: {time + merge_time(n, costs)}" for n, time in alone.items())
    return f"Every number up to max_splits={most} must be tried. Splits and their times: {told}."


_ONE = Costs(2, 3, 5, 1)
check_best_splits = FunctionChecker(
    "best_splits",
    best_splits,
    returns=("num_splits", "time"),
    examples=[([640], 2, 8, 64, 6, _ONE), ([700, 64, 300], 1, 4, 64, 8, _ONE)],
    edges=[
        ([640], 2, 8, 64, 1, _ONE),  # splitting is not allowed
        ([0, 0], 2, 4, 64, 4, _ONE),  # padding only
        ([0, 650, 1], 2, 4, 64, 8, Costs(2, 3, 0, 0)),
        ([640], 1, 10, 64, 20, Costs(0, 1, 0, 0)),  # 10 splits are as good as 20
        ([1024], 1, 16, 64, 16, Costs(1, 4, 0, 0)),
        ([1024], 1, 16, 64, 16, Costs(1, 4, 40, 0)),  # merging costs more than it saves
        ([1024], 1, 16, 64, 16, Costs(0, 4, 0, 5)),
        ([640], 1, 16, 64, 12, Costs(9, 1, 0, 0)),
        ([704], 3, 7, 64, 12, Costs(3, 10, 4, 1)),  # 11 tiles: not every number of splits gives shorter ones
        ([6400, 64, 64, 64, 64, 64], 1, 3, 64, 9, Costs(1, 5, 6, 1)),
        ([64, 64, 64, 64, 6400], 1, 3, 64, 9, Costs(1, 5, 6, 1)),  # the longest starts last
        ([1], 8, 132, 128, 4, Costs(100, 50, 10, 1)),
    ],
    random=_random_splits,
    explain=_times,
    misconceptions={
        "They take the same time: then fewer splits are better.": partial(best_splits, chosen=-1),
        "One split leaves nothing to merge: no second kernel.": partial(
            best_splits, merge=lambda splits, costs: costs.launch + splits * costs.part
        ),
        "With more than one split there is a second kernel: its launch, and a part of it for each split.": partial(
            best_splits, merge=lambda splits, costs: 0
        ),
        "The second kernel costs its launch once, whatever it merges.": partial(
            best_splits, merge=lambda splits, costs: splits * costs.part if splits > 1 else 0
        ),
        "Programs start in their order, not the longest first.": partial(
            best_splits, end=lambda times, places: last_end(sorted(times, reverse=True), places)
        ),
        "A place takes the next program as soon as it is free: there are no waves.": partial(
            best_splits, end=lambda times, places: -(-len(times) // places) * max(times)
        ),
        "Only as many programs run at a time as there are places.": partial(
            best_splits, end=lambda times, places: max(times)
        ),
        "A split takes ceil(tiles / num_splits) tiles while there are any; the last ones may get fewer, or none.":
            partial(best_splits, even=True),
        "A program without tiles is started all the same, and costs its start.": partial(best_splits, idle=False),
        "This is the work of all, shared out evenly. A program is not divided among places.": partial(
            best_splits, end=lambda times, places: sum(times) // places
        ),
    },
    forbid=_PAGED,
)  # fmt: skip
