"""Judges the second kernel of split-K: every partial sum read once, in order, every output stored once.
Built in chapter 11."""

from __future__ import annotations

from typing import Any

import numpy

from minillm.book.checks import Case
from minillm.book.checks.ch11_launches import Matrix, nobody_strays, same_elements
from minillm.book.checks.kernels import by_program, elements_of


def judge_sum(case: Case, traffic: Any, index: int, shape: tuple[int, int, int], itemsize: int, told: str) -> None:
    """Launch `index` reads `partials` of this shape slice by slice from the first,
    and stores each element of `out` once."""
    splits, m, n = shape
    partials = Matrix("partials", shape, 4, lambda *_: numpy.arange(splits * m * n))
    out = Matrix("out", shape[1:], itemsize, lambda *_: numpy.arange(m * n))
    touched = by_program(traffic, index)
    nobody_strays(case, touched, [partials, out], {"out"}, f"in the second kernel {told}")
    every = [access for accesses in touched.values() for access in accesses]
    where = f"the second kernel {told}"
    same_elements(
        case,
        elements_of(every, "load", "partials"),
        partials.block(),
        partials,
        where,
        "loads",
        "Every slice is added, the last one too.",
    )
    same_elements(
        case,
        elements_of(every, "store", "out"),
        out.block(),
        out,
        where,
        "stores",
        "Every element of the output has a total.",
    )
    for program, accesses in touched.items():
        before = -1
        for access in accesses:
            if access.kind != "load" or not len(access.elements):
                continue
            found = sorted({int(e) // (m * n) for e in access.elements})
            case.true(
                len(found) == 1,
                f"program {program} of {where} loads the slices {found} at once",
                hint="Load one slice after the other and add it to the sum: the order of tl.sum is not promised.",
            )
            case.true(
                found[0] >= before,
                f"program {program} of {where} loads slice {found[0]} after slice {before}",
                hint="From the first slice to the last, so that every element is summed in the same order.",
            )
            before = found[0]
