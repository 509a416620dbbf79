"""Runs an attention kernel in Triton's interpreter and judges what each of its programs touched. Built in chapter 12.

The launch itself, with fresh memory as NaN, is that of `kernels`. A program is known by the outputs it stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from minillm.book.checks import Case
from minillm.book.checks.kernels import by_program, elements_of

__all__ = ["Need", "judge_programs", "rows_of"]


@dataclass(frozen=True)
class Need:
    """What one program has to do: tensor -> the elements it loads, or for `out` stores;
    `told` says whose work it is."""

    told: str
    elements: dict[str, numpy.ndarray]


def rows_of(rows: Sequence[int], width: int) -> numpy.ndarray:
    """The elements of these rows of a matrix whose rows have `width`."""
    return (numpy.array(rows, dtype=numpy.int64)[:, None] * width + numpy.arange(width)[None, :]).reshape(-1)


def judge_programs(
    case: Case,
    traffic: Any,
    needs: Sequence[Need],
    shapes: dict[str, tuple[int, ...]],
    itemsize: dict[str, int],
    told: str,
    unseen: str,
    also: Sequence[str] = (),
) -> None:
    """One launch, in which each of `needs` is one program's: it loads its elements once and no others,
    and stores its own.

    unseen: the hint where a program loads what it does not need; also: tensors that may be read at will.
    """
    case.equal(
        len(traffic.launches),
        1,
        f"the number of launches {told}\n  the number of launches",
        hint="A kernel is launched by kernel[grid](arguments), once.",
    )
    [one] = traffic.launches
    case.true(
        one.num_programs == len(needs),
        f"{one.name} has {one.num_programs} programs {told}; expected {len(needs)}",
        hint="One program for each tile of queries, the last one, which may not be full, too.",
    )
    owner: dict[int, Any] = {}
    for program, accesses in sorted(by_program(traffic, 0).items()):
        for access in accesses:
            _on_its_way(case, access, {**{name: itemsize[name] for name in shapes}, **dict.fromkeys(also, 0)}, told)
        stored = elements_of(accesses, "store", "out")
        case.true(
            stored.size,
            f"program {program} stores nothing in `out` {told}",
            hint="Every program has a tile of queries.",
        )
        index = max(range(len(needs)), key=lambda i: numpy.isin(stored, needs[i].elements["out"]).sum())
        case.true(
            index not in owner,
            f"programs {owner.get(index)} and {program} both have {needs[index].told} {told}",
            hint="Look at what program_id gives.",
        )
        owner[index] = program
        where = f"program {program} {told}, which has {needs[index].told},"
        for name, expected in needs[index].elements.items():
            got = stored if name == "out" else elements_of(accesses, "load", name)
            _same(case, got, expected, name, shapes[name], where, unseen)


def _on_its_way(case: Case, access: Any, sizes: dict[str, int], told: str) -> None:
    name, size = access.tensor, access.itemsize
    case.true(
        name in sizes,
        f"program {access.program} {access.kind}s `{name}` {told}; expected only {', '.join(f'`{n}`' for n in sizes)}",
        hint="The counting goes by the parameters' names: keep those of the statement.",
    )
    case.true(
        access.kind == "load" or name == "out",
        f"program {access.program} stores into `{name}` {told}",
        hint="Inputs are only read.",
    )
    case.true(
        sizes[name] in (0, size),
        f"an element of `{name}` has {size} bytes {told}; expected {sizes[name]}",
        hint="What is returned has the dtype of q.",
    )


def _same(
    case: Case, got: numpy.ndarray, expected: numpy.ndarray, name: str, shape: tuple[int, ...], where: str, unseen: str
) -> None:
    """Each expected element once, and no other."""
    if numpy.array_equal(numpy.sort(got), numpy.sort(expected)):
        case.comparisons += 1
        return
    verb, width = "stores" if name == "out" else "loads", int(numpy.prod(shape[1:]))
    extra, missing = numpy.setdiff1d(got, expected), numpy.setdiff1d(expected, got)
    if extra.size:
        hint = (
            unseen
            if name in "kv"
            else (
                "That row is another program's, or none's. Which rows has this program, "
                "and of which heads? And a lane without a query of its own needs a mask."
            )
        )
        case.fail(
            f"{where} {verb} {_named(name, shape, extra)}: not its own (too many: {_rows(extra, width)})", hint=hint
        )
    if missing.size:
        case.fail(
            f"{where} never {verb} {_named(name, shape, missing)} (missing: {_rows(missing, width)})",
            hint="Compare where your loops begin and end with the positions of this program's first and last query."
            if name in "kv"
            else (
                "Of the queries named above all are this program's, with all heads that it has. "
                "The last tile may not be full; it counts all the same."
            ),
        )
    element, times = Counter(got.tolist()).most_common(1)[0]
    case.fail(
        f"{where} {verb} {_named(name, shape, numpy.array([element]))} {times} times",
        hint="Once is enough. If two loops have this key in common, it also counts twice in the softmax."
        if name in "kv"
        else "Once is enough: what a tile needs stays in registers.",
    )


def _named(name: str, shape: tuple[int, ...], elements: numpy.ndarray) -> str:
    return f"{name}{[int(i) for i in numpy.unravel_index(int(elements.min()), shape)]}"


def _rows(elements: numpy.ndarray, width: int) -> str:
    """The rows that elements belong to: "rows 3, 7–9"."""
    rows = numpy.unique(elements // width)
    runs = numpy.split(rows, numpy.flatnonzero(numpy.diff(rows) > 1) + 1)
    told = [f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"row{'s' * (len(rows) > 1)} {', '.join(told[:4])}{', ...' if len(told) > 4 else ''}"
