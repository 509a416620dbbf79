"""Checks of chapter 06: slots of a step's tokens. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.book.checks import Case, Checker

check_slot_mapping = Checker(
    "slot_mapping", hint="Position p lies in block table[p // block_size], at offset p % block_size."
)


@check_slot_mapping.part("example")
def _slots_example(case: Case) -> None:
    _slots(case, [[4, 7]], [0], [6], 4)
    _slots(case, [[5, 2], [3, 8, 1]], [6, 4], [1, 3], 4)


@check_slot_mapping.part("edges")
def _slots_edges(case: Case) -> None:
    _slots(case, [[9, 4, 6]], [2], [7], 3)  # begins inside a block and crosses two edges
    _slots(case, [[3], [5], [2]], [3, 0, 1], [1, 4, 0], 4)  # the last slot of a block, a whole block, nothing
    _slots(case, [[8, 6, 7]], [0], [3], 1)
    _slots(case, [[0, 0, 5, 8]], [8], [5], 4)  # a window has passed over the first two blocks
    _slots(case, [[0, 3], [0, 0]], [2, 1], [4, 5], 4)
    _slots(case, [[6, 6]], [1], [2], 2)  # nobody said that the blocks differ
    _slots(case, [], [], [], 16)
    _slots(case, [[], [2]], [0, 1], [0, 2], 4)
    _slots(case, [[1], [4]], [400, 0], [0, 1], 4)  # no token, so nothing lies beyond the table
    for tables, starts, counts in (([[4, 7]], [7], [2]), ([[1, 2, 3], [5]], [0, 4], [1, 1]), ([[]], [0], [1])):
        last = next(s + c - 1 for t, s, c in zip(tables, starts, counts) if s + c > 4 * len(t))
        case.raises(
            ValueError,
            case.student,
            tables,
            starts,
            counts,
            4,
            hint=f"No block of the table holds position {last}: a ValueError, before anything is written.",
        )


@check_slot_mapping.part("random")
def _slots_random(case: Case) -> None:
    for _ in range(40):
        size, tables, starts, counts = case.rng.choice((1, 2, 3, 8, 16)), [], [], []
        for _ in range(case.randint(1, 6)):
            table = [case.randint(1, 60) for _ in range(case.randint(1, 7))]
            nulls = case.randint(0, len(table)) if case.rng.random() < 0.3 else 0
            tables.append([0] * nulls + table[nulls:])
            starts.append(case.randint(0, len(table) * size))
            counts.append(case.rng.choice((1, case.randint(0, len(table) * size - starts[-1] + 1))))
        _slots(case, tables, starts, counts, size)


def _slots(case: Case, tables: list[list[int]], starts: list[int], counts: list[int], size: int) -> None:
    """Compare, and recognise the likeliest mistakes by what they give."""
    tokens = [(table, start + i, i) for table, start, count in zip(tables, starts, counts) for i in range(count)]
    expected = [table[p // size] * size + p % size if table[p // size] else -1 for table, p, _ in tokens]
    got = case.call(tables, starts, counts, size)
    guesses = {
        "Sequence i's first token of this step stands at position starts[i], not at 0.": lambda t, p, i: (
            t[i // size] * size + i % size
        ),
        "A token that would fall into the null block, 0, is written nowhere: its slot is -1.": lambda t, p, i: (
            t[p // size] * size + p % size
        ),
        "One block too far: position block_size - 1 is the last one of the first block.": lambda t, p, i: (
            t[(p + 1) // size] * size + p % size
        ),
        "A block has block_size slots: block b begins at slot b * block_size.": lambda t, p, i: t[p // size] + p % size,
        "Blocks are counted from 0, and block 0 has slots too: block b begins at b * block_size.": lambda t, p, i: (
            (t[p // size] - 1) * size + p % size
        ),
        "Every sequence has a table of its own.": lambda t, p, i: tables[0][p // size] * size + p % size,
        "That is the position. The table says where its block really lies.": lambda t, p, i: p,
    }
    hint = None
    for told, slot in guesses.items():
        if (
            hint is None
            and tokens
            and got != expected
            and isinstance(got, Sequence)
            and list(got) == _tried(slot, tokens)
        ):
            hint = told
    case.equal(got, expected, "the list of slots", hint=hint)


def _tried(slot, tokens: list[tuple[list[int], int, int]]) -> list[int] | None:
    try:
        return [slot(*token) for token in tokens]
    except IndexError:
        return None
