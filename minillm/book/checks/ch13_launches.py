"""Runs a student's kernels over pages, and judges what all programs together touched. Built in chapter 13."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
from torch import Tensor

from minillm.book.checks import Case
from minillm.book.checks.ch13_oracle import kept
from minillm.book.checks.kernels import count_launches, launch, refuse_borrowed
from minillm.book.checks.touched import elements_of


def launched(case: Case, outside: dict[str, str], *args: Any) -> tuple[Any, Any]:
    """(what the launcher returned, the traffic of its one launch);
    `outside` has the hint where a program leaves that tensor."""
    refuse_borrowed(case)
    got, traffic = launch(case, *args, outside=outside)
    count_launches(case, traffic)
    return got, traffic


class Gather:
    """One call of a gather over pages [num_blocks, block_size, 2, num_kv_heads, head_dim], and what it has to touch."""

    def __init__(self, pages: Tensor, block_table: Tensor, seq_lens: list[int], window: int):
        self.shape, self.seq_lens, self.window = tuple(pages.shape), seq_lens, window
        self.tables, self.columns = block_table.tolist(), block_table.shape[1]
        self.slot = int(numpy.prod(self.shape[2:]))  # numbers of a slot
        self.itemsize, self.total = pages.itemsize, sum(len(kept(length, window)) for length in seq_lens)
        self.entries, slots = Counter(), []
        for seq, length in enumerate(seq_lens):
            for position in kept(length, window):
                column = position // self.shape[1]
                self.entries[seq * self.columns + column] = 1
                if self.tables[seq][column]:
                    slots.append(self.tables[seq][column] * self.shape[1] + position % self.shape[1])
        self.slots = Counter(slots)  # two sequences may share a page: each reads it

    def told(self) -> str:
        return f"for seq_lens={self.seq_lens}, window={self.window}, pages of shape {list(self.shape)}"

    def judge(self, case: Case, traffic: Any) -> None:
        """Each table entry, each number of each page and each output once, and nothing else."""
        sizes = {"pages": self.itemsize, "out": self.itemsize, "block_table": 4, "seq_lens": 4, "starts": 4}
        for access in traffic.accesses:
            case.true(
                access.tensor in sizes,
                (
                    f"program {access.program} {access.kind}s `{access.tensor}`; "
                    f"expected only {', '.join(f'`{n}`' for n in sizes)}"
                ),
                hint="The counting goes by the parameters' names: keep those of the statement.",
            )
            case.true(
                (access.kind == "store") == (access.tensor == "out"),
                f"program {access.program} {access.kind}s `{access.tensor}`",
                hint="Inputs are read, `out` is stored.",
            )
            case.true(
                access.itemsize == sizes[access.tensor],
                f"an element of `{access.tensor}` has {access.itemsize} bytes; expected {sizes[access.tensor]}",
                hint="What is returned has the dtype of pages.",
            )
        everything = {
            name: numpy.concatenate([elements_of([a for a in traffic.accesses if a.tensor == name], kind, name)])
            for name, kind in (("block_table", "load"), ("pages", "load"), ("out", "store"))
        }
        self._entries(case, Counter(everything["block_table"].tolist()))
        self._pages(case, everything["pages"])
        self._stores(case, everything["out"])

    def _entries(self, case: Case, found: Counter) -> None:
        for entry in sorted(set(found) | set(self.entries)):
            seq, column = divmod(entry, self.columns)
            where = (
                f"block_table[{seq}, {column}], which stands for the positions {column * self.shape[1]} to "
                f"{(column + 1) * self.shape[1] - 1}"
            )
            positions = kept(self.seq_lens[seq], self.window)
            span = (
                f"Sequence {seq} keeps "
                f"{f'the positions {positions[0]} to {positions[-1]}' if positions else 'no position'}."
            )
            case.true(
                self.entries[entry] or not found[entry],
                f"{where}, is loaded {self.told()}",
                hint=(
                    f"{span} What lies outside of the window, or behind the end, was never written, "
                    "or belongs to another request by now."
                ),
            )
            case.true(found[entry] >= self.entries[entry], f"{where}, is never loaded {self.told()}", hint=span)
            case.true(
                found[entry] == self.entries[entry],
                f"{where}, is loaded {found[entry]} times {self.told()}",
                hint=(
                    "One load for a block serves all its KV slots, both keys and values, and all heads. "
                    "A vector of equal addresses is as many loads."
                ),
            )

    def _pages(self, case: Case, elements: numpy.ndarray) -> None:
        found = numpy.bincount(elements, minlength=int(numpy.prod(self.shape)))
        wanted = numpy.zeros(self.shape[0] * self.shape[1], dtype=numpy.int64)
        for slot, times in self.slots.items():
            wanted[slot] = times
        wrong = numpy.flatnonzero(found != numpy.repeat(wanted, self.slot))
        case.comparisons += 1
        if not len(wrong):
            return
        block, offset, which, head, dim = (int(i) for i in numpy.unravel_index(int(wrong[0]), self.shape))
        name, times, right = (
            f"pages[{block}, {offset}, {which}, {head}, {dim}]",
            int(found[wrong[0]]),
            int(wanted[block * self.shape[1] + offset]),
        )
        if not block:
            case.fail(
                f"{name} is loaded {self.told()}",
                hint=(
                    "Block 0 is the null block: there is nothing in it. Its positions are zeros in the output, "
                    "and they are never read."
                ),
            )
        owners = [
            (seq, table.index(block))
            for seq, table in enumerate(self.tables)
            if block in table[: -(-self.seq_lens[seq] // self.shape[1])]
        ]
        place = [
            (
                f"position {column * self.shape[1] + offset} of sequence {seq}, "
                f"which keeps {_span(kept(self.seq_lens[seq], self.window))}"
            )
            for seq, column in owners
        ]
        mine = f"It is {' and '.join(place) or 'in no table'}."
        wide = (
            ""
            if self.shape[1] & (self.shape[1] - 1) == 0
            else (
                f" A tile has a power of two of rows, and a block has {self.shape[1]} KV slots: "
                "the lanes after them are in the next block."
            )
        )
        case.true(times or not right, f"{name} is never loaded {self.told()}", hint=mine)
        case.true(
            right,
            f"{name} is loaded {self.told()}",
            hint=(
                f"{mine} A lane outside needs a mask; if it is inside, compare the address with the layout "
                f"[num_blocks, block_size, 2, num_kv_heads, head_dim].{wide}"
            ),
        )
        case.fail(
            f"{name} is loaded {times} times {self.told()}; expected {right}",
            hint=f"{mine} Once for each sequence that has it is enough.{wide}",
        )

    def _stores(self, case: Case, elements: numpy.ndarray) -> None:
        shape = (2, self.shape[3], self.total, self.shape[4])
        found = numpy.bincount(elements, minlength=int(numpy.prod(shape)))
        wrong = numpy.flatnonzero(found != 1)
        place = [int(i) for i in numpy.unravel_index(int(wrong[0]), shape)] if len(wrong) else []
        case.true(
            not len(wrong) or found[wrong[0]],
            f"out{place} is never stored {self.told()}",
            hint=(
                "Each position in a window has a row in the output, also where its block is the null block: "
                "its row is zeros, and that too is a store."
            ),
        )
        case.true(
            not len(wrong),
            f"out{place} is stored {int(found[wrong[0]]) if len(wrong) else 0} times {self.told()}",
            hint=(
                "The row of a position is starts[sequence] + position - the window's first position; "
                "the layout is [2, num_kv_heads, total, head_dim]."
            ),
        )


def _span(positions: range) -> str:
    return f"{positions[0]} to {positions[-1]}" if positions else "nothing"
