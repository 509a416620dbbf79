"""Checks of chapter 13: a prefix merged in, the number of splits, a gather over pages, addresses. Built in chapter 13.

The references are in `ch13_oracle`; `ch13_launches` looks at what the programs of a gather touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch13_launches import Gather, launched
from minillm.book.checks.ch13_oracle import Costs, gathered, kept, mistaken_times, slot_places, split_time, state_of

__all__ = ["Costs", "check_best_splits", "check_gather_window", "check_merge_prefix", "check_slot_places"]

_PAGED = tuple(
    f"minillm.kernels.paged_decode.{name}"
    for name in ("merge_splits", "torch_merge_splits", "paged_decode", "torch_paged_decode", "choose_num_splits")
)

check_merge_prefix = Checker(
    "merge_prefix",
    hint="A part weighs exp(its log - the log of both); the log of both is log(exp(a) + exp(b)).",
    forbid=_PAGED,
)
check_best_splits = Checker(
    "best_splits",
    hint=(
        "Let the programs start one after the other, each at the place that is free first; try every number of splits."
    ),
    forbid=_PAGED,
)
check_gather_window = Checker(
    "gather_window",
    hint="One program for each column of each row of the table: it loads its entry, then the page.",
    forbid=("minillm.kernels.paged_prefill.gather_pages",),
)
check_slot_places = Checker(
    "slot_places", hint="A product of two int32 is an int32. What is converted to int64, and when?"
)


@check_merge_prefix.part("example")
def _prefix_example(case: Case) -> None:
    _merges(case, 3, 2, [4, 2, 3], [2, 0], 5)
    _merges(case, 2, 1, [1, 2], [0, 1], 3)


@check_merge_prefix.part("edges")
def _prefix_edges(case: Case) -> None:
    _merges(case, 3, 2, [2, 3, 1], [], 4)  # nobody shares anything
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


@check_best_splits.part("example")
def _splits_example(case: Case) -> None:
    costs = Costs(start=2, tile=3, launch=5, part=1)
    _chooses(case, [640], 2, 8, 64, 6, costs)
    _chooses(case, [700, 64, 300], 1, 4, 64, 8, costs)


@check_best_splits.part("edges")
def _splits_edges(case: Case) -> None:
    _chooses(case, [640], 2, 8, 64, 1, Costs(2, 3, 5, 1))  # splitting is not allowed
    _chooses(case, [0, 0], 2, 4, 64, 4, Costs(2, 3, 5, 1))  # padding only
    _chooses(case, [0, 650, 1], 2, 4, 64, 8, Costs(2, 3, 0, 0))
    _chooses(case, [640], 1, 10, 64, 20, Costs(0, 1, 0, 0))  # 10 splits are as good as 20
    _chooses(case, [1024], 1, 16, 64, 16, Costs(1, 4, 0, 0))
    _chooses(case, [1024], 1, 16, 64, 16, Costs(1, 4, 40, 0))  # merging costs more than it brings
    _chooses(case, [1024], 1, 16, 64, 16, Costs(0, 4, 0, 5))
    _chooses(case, [640], 1, 16, 64, 12, Costs(9, 1, 0, 0))
    _chooses(case, [704], 3, 7, 64, 12, Costs(3, 10, 4, 1))  # 11 tiles: not every number of splits gives shorter ones
    _chooses(case, [6400, 64, 64, 64, 64, 64], 1, 3, 64, 9, Costs(1, 5, 6, 1))
    _chooses(case, [64, 64, 64, 64, 6400], 1, 3, 64, 9, Costs(1, 5, 6, 1))  # the longest starts last
    _chooses(case, [1], 8, 132, 128, 4, Costs(100, 50, 10, 1))


@check_best_splits.part("random")
def _splits_random(case: Case) -> None:
    for _ in range(40):
        seq_lens = [
            case.rng.choice((0, case.randint(1, 200), case.randint(1, 3000))) for _ in range(case.randint(1, 6))
        ]
        costs = Costs(case.randint(0, 20), case.randint(1, 20), case.randint(0, 60), case.randint(0, 6))
        _chooses(
            case,
            seq_lens,
            case.randint(1, 5),
            case.randint(1, 24),
            case.rng.choice((16, 64, 128)),
            case.randint(1, 14),
            costs,
        )


def _chooses(
    case: Case, seq_lens: list[int], num_kv_heads: int, places: int, tile_n: int, max_splits: int, costs: Costs
) -> None:
    arguments = seq_lens, num_kv_heads, places, tile_n
    got = case.call(*arguments, max_splits, costs)
    told = f"for seq_lens={seq_lens}, num_kv_heads={num_kv_heads}, places={places}, tile_n={tile_n}, {costs}"
    case.true(isinstance(got, tuple) and len(got) == 2, f"the result is {got!r}, not (num_splits, time)")
    for value, name in zip(got, ("num_splits", "time")):
        case.is_a(value, int, name)
    case.true(1 <= got[0] <= max_splits, f"num_splits is {got[0]} {told}; expected 1 to {max_splits}")
    times = [split_time(*arguments, splits, costs) for splits in range(1, max_splits + 1)]
    mine = times[got[0] - 1]
    if got[1] != mine:
        fits = [hint for hint, time in mistaken_times(*arguments, got[0], costs).items() if time == got[1]]
        case.fail(
            f"time is {got[1]} {told}, with num_splits={got[0]}; expected {mine}, with so many splits",
            hint=fits[0] if fits else None,
        )
    right = times.index(min(times)) + 1
    near = " ".join(f"{splits}: {times[splits - 1]}" for splits in sorted({1, right, got[0], max_splits}))
    case.true(
        got[1] == min(times),
        f"num_splits is {got[0]} {told}, which takes {mine}; expected {right}, which takes {min(times)}",
        hint=(
            f"The time neither falls nor rises all the way, so every number up to max_splits={max_splits} must be "
            f"tried. Splits and their times: {near}."
        ),
    )
    case.equal(
        got[0],
        right,
        f"num_splits {told}\n  num_splits",
        hint=f"They take the same time, {mine}: then fewer splits are better.",
    )


@check_gather_window.part("example")
def _gather_example(case: Case) -> None:
    _gathers(case, [6, 3], 5, (4, 2, 4))


@check_gather_window.part("edges")
def _gather_edges(case: Case) -> None:
    for seq_lens, window, shape in (([8, 4], 4, (4, 1, 16)), ([9, 5], 4, (4, 1, 16)), ([1], 1, (16, 1, 1)),
                                    ([0, 7, 0], 100, (8, 2, 8)), ([13, 26], 13, (13, 3, 5)),
                                    ([40, 2], 1, (8, 2, 3)), ([16, 17], 16, (16, 2, 8))):  # fmt: skip
        _gathers(case, seq_lens, window, shape)
    _gathers(case, [30, 30], 30, (8, 2, 4), null=2)
    _gathers(case, [30, 12], 20, (8, 2, 4), null=1, dtype=torch.float16)
    _gathers(case, [30, 28], 28, (8, 2, 4), share=True)


@check_gather_window.part("random")
def _gather_random(case: Case) -> None:
    for dtype in (torch.float32, torch.float16, torch.float32, torch.float32):
        seq_lens = [case.rng.choice((0, case.randint(1, 40))) for _ in range(case.randint(1, 4))] + [
            case.randint(1, 40)
        ]
        shape = case.rng.choice((4, 8, 12)), case.randint(1, 4), case.rng.choice((4, 6, 16))
        _gathers(
            case,
            seq_lens,
            case.rng.choice((case.randint(1, 20), 64)),
            shape,
            null=case.randint(0, 3),
            share=case.rng.random() < 0.4,
            dtype=dtype,
        )


_OUTSIDE = {
    "pages": "Was a table entry used that stands for no position of the window? Those behind the end hold anything.",
    "out": (
        "A slot that is not kept has no row in the output: before the window its row is less than "
        "starts[sequence], behind the end it is the next one's."
    ),
    "block_table": "Row after row of the table lies max_blocks further on.",
}


def _gathers(
    case: Case,
    seq_lens: list[int],
    window: int,
    shape: tuple[int, int, int],
    *,
    null: int = 0,
    share: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Pages of a pool in which all that must not be read is NaN, and table entries that must not be used are wild."""
    block_size, num_kv_heads, head_dim = shape
    columns = max(1, *(-(-length // block_size) for length in seq_lens)) + 1
    needed = [-(-length // block_size) for length in seq_lens]
    fresh = iter(case.rng.sample(range(1, sum(needed) + 4), sum(needed)))
    wild = [10**6, -3, 10**9]
    tables = [
        [next(fresh) for _ in range(count)] + [case.rng.choice(wild) for _ in range(columns - count)]
        for count in needed
    ]
    if share and len(full := [row for row, count in enumerate(needed) if count]) > 1:
        tables[full[1]][0] = tables[full[0]][0]
    pages = torch.full((sum(needed) + 4, block_size, 2, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    for table, length, count in zip(tables, seq_lens, needed):
        held = [column for column in range(count) if column * block_size >= max(length - window, 0)]
        for column in case.rng.sample(held, min(null, len(held))):
            table[column] = 0
        for column in range(max(length - window, 0) // block_size):
            table[column] = 0  # it left the window long ago
        for position in kept(length, window):
            if table[position // block_size]:
                pages[table[position // block_size], position % block_size] = case.randn(2, num_kv_heads, head_dim).to(
                    dtype
                )
    block_table = torch.tensor(tables, dtype=torch.int32)
    gather = Gather(pages, block_table, seq_lens, window)
    starts = torch.tensor([0] + [len(kept(length, window)) for length in seq_lens]).cumsum(0).to(torch.int32)
    got, traffic = launched(
        case, _OUTSIDE, pages, block_table, torch.tensor(seq_lens, dtype=torch.int32), starts, gather.total, window
    )
    gather.judge(case, traffic)
    case.is_a(got, dtype, f"the output {gather.told()}")
    case.equal(
        got,
        gathered(pages, block_table, seq_lens, window),
        f"the output [keys or values, KV head, row, dim] {gather.told()}\n  the output",
        hint=f"Row {starts.tolist()} are the starts. Keys first, then values; a head's rows lie side by side.",
    )


@check_slot_places.part("example")
def _places_example(case: Case) -> None:
    _places(case, [3, -1, 131_071, 2_239_999], 140_000, 16, 8, 128)


@check_slot_places.part("edges")
def _places_edges(case: Case) -> None:
    _places(case, [0, 5, -1, 47], 3, 16, 2, 24)  # a small cache
    _places(case, [-1, -1, -1], 3, 16, 2, 24)
    _places(case, [2**21 - 1, 2**21, 2**21 + 1], 131_073, 16, 8, 128)  # at 2^31
    _places(case, [2**22 - 1, 2**22, 2**22 + 1], 262_145, 16, 8, 128)  # at 2^32, where places are positive again
    _places(case, [0, 1, 2**20], 131_072, 16, 8, 128)  # low slots in a large cache
    _places(case, [0, 1, -1], 1_000_000, 16, 8, 128)
    _places(case, [7, 2**31 - 1], 2**27, 16, 4, 40)  # the last slot that an int32 can name
    _places(case, [-1, *range(20_000_000, 20_000_033), -1], 2_000_000, 16, 1, 120)


@check_slot_places.part("random")
def _places_random(case: Case) -> None:
    for _ in range(6):
        num_blocks, block_size = (
            case.rng.choice((case.randint(1, 100), case.randint(50_000, 500_000), case.randint(10**6, 10**8))),
            case.rng.choice((8, 16)),
        )
        slots = [
            case.rng.choice((-1, case.randint(0, num_blocks * block_size), num_blocks * block_size - 1))
            for _ in range(case.randint(1, 24))
        ]
        _places(case, slots, num_blocks, block_size, case.randint(1, 8), case.rng.choice((24, 64, 128)))


def _places(case: Case, slots: list[int], num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> None:
    width = num_kv_heads * head_dim
    got, _ = launched(
        case,
        dict.fromkeys(("slot_mapping", "places"), "A lane that has no token, or no number of its row, needs a mask."),
        torch.tensor(slots, dtype=torch.int32),
        num_blocks,
        block_size,
        num_kv_heads,
        head_dim,
    )
    case.is_a(got, torch.int64, "the result")
    expected = slot_places(slots, num_blocks, block_size, width)
    case.equal(tuple(got.shape), tuple(expected.shape), "the shape of the result")
    if torch.equal(got, expected):
        case.comparisons += 1
        return
    half, token, inner = (int(i) for i in (got != expected).nonzero()[0])
    mine, right, slot, name = (
        int(got[half, token, inner]),
        int(expected[half, token, inner]),
        slots[token],
        ("keys", "values")[half],
    )
    base, row = num_blocks * block_size * width * half, slot * width
    facts = (
        f"Of {num_blocks:,} blocks with {block_size} slots of {width} numbers: "
        f"slot * width = {row:,}{f', num_blocks * block_size * width = {base:,}' if half else ''}; "
        f"an int32 ends at {2**31 - 1:,}."
    )
    case.true(
        slot >= 0,
        f"the place of the {name} of token {token}, a row of padding, is {mine:,}; expected -1",
        hint="Slot -1 is padding: it has no place.",
    )
    case.true(
        mine != -1,
        f"the place of the {name} of token {token}, slot {slot:,}, is -1, as if it were padding; expected {right:,}",
        hint=f"{facts} What overflows can turn negative. Convert before you multiply.",
    )
    wrapped = f"They differ by {(right - mine) >> 32} times 2^32. " if (right - mine) % 2**32 == 0 else ""
    case.fail(
        f"the place of number {inner} of the {name} of token {token}, slot {slot:,}, is {mine:,}; expected {right:,}",
        hint=f"{wrapped}{facts}",
    )
