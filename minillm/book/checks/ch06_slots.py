"""Checks of chapter 06: slots of a step's tokens. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.book.checks import Draw, FunctionChecker, Raised

SlotOf = Callable[[list[list[int]], list[int], int, int, int], int]  # all tables, its own, position, token, size


def slots(
    tables: list[list[int]],
    starts: list[int],
    counts: list[int],
    size: int,
    *,
    slot: SlotOf = lambda tables, table, p, i, size: table[p // size] * size + p % size,
    null: bool = True,
) -> list[int]:
    """slot: where a token goes, unless that is the null block."""
    found = []
    for table, start, count in zip(tables, starts, counts):
        for p in range(start, start + count):
            if p >= len(table) * size:
                raise ValueError(f"position {p}")
            found.append(-1 if null and not table[p // size] else slot(tables, table, p, p - start, size))
    return found


def _explain_slots(got: Any, expected: Any, tables, starts, counts, size) -> str | None:
    if not isinstance(expected, Raised):
        return None
    last = next(s + c - 1 for t, s, c in zip(tables, starts, counts) if c and s + c > size * len(t))
    return f"No block of the table holds position {last}: raise ValueError."


def _random_slots(draw: Draw) -> tuple:
    size, tables, starts, counts = draw.rng.choice((1, 2, 3, 8, 16)), [], [], []
    for _ in range(draw.randint(1, 6)):
        table = [draw.randint(1, 60) for _ in range(draw.randint(1, 7))]
        nulls = draw.randint(0, len(table)) if draw.rng.random() < 0.3 else 0
        tables.append([0] * nulls + table[nulls:])
        starts.append(draw.randint(0, len(table) * size))
        counts.append(draw.rng.choice((1, draw.randint(0, len(table) * size - starts[-1] + 1))))
    return tables, starts, counts, size


check_slot_mapping = FunctionChecker(
    "slot_mapping",
    slots,
    hint="Position p lies in block table[p // block_size], at offset p % block_size.",
    examples=[([[4, 7]], [0], [6], 4), ([[5, 2], [3, 8, 1]], [6, 4], [1, 3], 4)],
    edges=[
        ([[9, 4, 6]], [2], [7], 3),  # begins inside a block and crosses two edges
        ([[3], [5], [2]], [3, 0, 1], [1, 4, 0], 4),  # the last slot of a block, a whole block, nothing
        ([[8, 6, 7]], [0], [3], 1),
        ([[0, 0, 5, 8]], [8], [5], 4),  # a window has passed over the first two blocks
        ([[0, 3], [0, 0]], [2, 1], [4, 5], 4),
        ([[6, 6]], [1], [2], 2),  # the same block twice
        ([], [], [], 16),
        ([[], [2]], [0, 1], [0, 2], 4),
        ([[1], [4]], [400, 0], [0, 1], 4),  # no token, so nothing lies beyond the table
        ([[4, 7]], [7], [2], 4),
        ([[1, 2, 3], [5]], [0, 4], [1, 1], 4),
        ([[]], [0], [1], 4),
    ],
    random=_random_slots,
    raises=(ValueError,),
    returns="the list of KV slots",
    misconceptions={
        "The first token of sequence i in this step is at position starts[i], not at 0.": dict(
            slot=lambda tables, t, p, i, size: t[i // size] * size + i % size
        ),
        "A token whose block is the null block, 0, is not stored: its KV slot is -1.": dict(null=False),
        "One block too far: position block_size - 1 is the last one of the first block.": dict(
            slot=lambda tables, t, p, i, size: t[min((p + 1) // size, len(t) - 1)] * size + p % size
        ),
        "A block has block_size KV slots: block b begins at KV slot b * block_size.": dict(
            slot=lambda tables, t, p, i, size: t[p // size] + p % size
        ),
        "Blocks are counted from 0, and block 0 has KV slots, too: block b begins at b * block_size.": dict(
            slot=lambda tables, t, p, i, size: (t[p // size] - 1) * size + p % size
        ),
        "Every sequence has a table of its own.": dict(
            slot=lambda tables, t, p, i, size: tables[0][p // size % len(tables[0])] * size + p % size
        ),
        "This is the position. The table says in which block it is.": dict(slot=lambda tables, t, p, i, size: p),
    },
    explain=_explain_slots,
)
