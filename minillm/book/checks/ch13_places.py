"""Checks of chapter 13: a window gathered from its pages, and the slots of new tokens. Built in chapter 13."""

from __future__ import annotations

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch13_launches import Gather, launched
from minillm.book.checks.ch13_oracle import gathered, kept, slot_places

check_gather_window = Checker(
    "gather_window",
    hint="One program for each column of each row of the table: it loads its entry, then the page.",
    forbid=("minillm.kernels.paged_prefill.gather_pages",),
)
check_slot_places = Checker(
    "slot_places", hint="A product of two int32 is an int32. What is converted to int64, and when?"
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
        "A KV slot that is not kept has no row in the output: before the window its row is less than "
        "starts[sequence], after the end it is a row of the next sequence."
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
        f"Of {num_blocks:,} blocks with {block_size} KV slots of {width} numbers: "
        f"slot * width = {row:,}{f', num_blocks * block_size * width = {base:,}' if half else ''}; "
        f"an int32 ends at {2**31 - 1:,}."
    )
    case.true(
        slot >= 0,
        f"the place of the {name} of token {token}, a row of padding, is {mine:,}; expected -1",
        hint="KV slot -1 is padding: it has no place.",
    )
    case.true(
        mine != -1,
        f"the place of the {name} of token {token}, KV slot {slot:,}, is -1, as if it were padding; expected {right:,}",
        hint=f"{facts} What overflows can turn negative. Convert before you multiply.",
    )
    wrapped = f"They differ by {(right - mine) >> 32} times 2^32. " if (right - mine) % 2**32 == 0 else ""
    case.fail(
        f"the place of number {inner} of the {name} of token {token}, KV slot {slot:,}, is {mine:,}; "
        f"expected {right:,}",
        hint=f"{wrapped}{facts}",
    )
