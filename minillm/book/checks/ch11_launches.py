"""Runs a student's launcher in Triton's interpreter and judges what each of its programs touched. Built in chapter 11.

Memory that the launcher allocates is NaN at first, so an element never stored shows. A lane beyond a tensor's end
is an error of `record_traffic`; a lane that runs from the end of a row into the next one is found here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from minillm.book.checks import Case
from minillm.book.checks.ch11_oracle import Part
from minillm.book.checks.kernels import by_program, elements_of

Program = tuple[int, int, int]


@dataclass(frozen=True)
class Matrix:
    """A tensor of a kernel, by the name of its parameter, and the block of it that a part of the work may touch."""

    name: str
    shape: tuple[int, ...]
    itemsize: int  # bytes of an element
    block: Callable[[Any, Part], numpy.ndarray]


def judge_programs(
    case: Case, traffic: Any, index: int, work: dict[Any, Part], reads: Sequence[Matrix], writes: Matrix, told: str
) -> None:
    """In launch `index` each part of `work` is one program's, which reads its blocks once, each element,
    and stores its own."""
    number = traffic.launches[index].num_programs
    case.true(
        number == len(work),
        f"launch {index + 1}, {traffic.launches[index].name}, has {number} programs {told}; expected {len(work)}",
        hint="One program for each tile of the output (and for each slice of k, where k is cut).",
    )
    touched = by_program(traffic, index)
    nobody_strays(case, touched, [*reads, writes], {writes.name}, told)
    parts = {numpy.sort(writes.block(key, part)).tobytes(): (key, part) for key, part in work.items()}
    cut = len({part.inner for part in work.values()}) > 1
    missed = (
        "The last tile may be narrower than the others; it counts all the "
        f"same.{' Of the slices of k, the longer ones come first.' if cut else ''}"
    )
    owner: dict[Any, Program] = {}
    for program in sorted(touched):
        stored = elements_of(touched[program], "store", writes.name)
        case.true(
            stored.size,
            f"program {program} stores nothing in `{writes.name}` {told}",
            hint="Every program has a tile of its own to store.",
        )
        key, part = parts.get(numpy.sort(stored).tobytes()) or _nearest(stored, work, writes)
        where = f"program {program} {told}, whose tile is {_region(key, part)},"
        same_elements(case, stored, writes.block(key, part), writes, where, "stores", missed)
        case.true(
            key not in owner,
            f"programs {owner.get(key)} and {program} both store {_region(key, part)} {told}",
            hint="Different programs have different tiles: look at what program_id gives.",
        )
        owner[key] = program
        for matrix in reads:
            same_elements(
                case,
                elements_of(touched[program], "load", matrix.name),
                matrix.block(key, part),
                matrix,
                where,
                "loads",
                missed,
            )


def nobody_strays(
    case: Case, touched: dict[Program, list], matrices: Iterable[Matrix], stored: set[str], told: str
) -> None:
    """Only the tensors of the statement are touched, and stores go where they should."""
    sizes = {matrix.name: matrix.itemsize for matrix in matrices}
    for program, accesses in touched.items():
        for access in accesses:
            name, size = access.tensor, access.itemsize
            case.true(
                name in sizes,
                f"program {program} {access.kind}s `{name}` {told}; expected only {', '.join(f'`{n}`' for n in sizes)}",
                hint="The counting goes by the parameters' names: keep those of the statement.",
            )
            case.true(
                access.kind != "store" or name in stored,
                f"program {program} stores into `{name}` {told}",
                hint="Inputs are only read.",
            )
            case.true(
                size == sizes[name],
                f"an element of `{name}` has {size} bytes {told}; expected {sizes[name]}",
                hint=(
                    "Partial sums stay in float32; what is returned has the dtype of the inputs, "
                    "rounded by the store itself."
                ),
            )


def same_elements(
    case: Case, got: numpy.ndarray, expected: numpy.ndarray, matrix: Matrix, where: str, verb: str, missed: str
) -> None:
    """Each expected element once, and no other; tells the first that is too many,
    missing (with the hint `missed`) or doubled."""
    if numpy.array_equal(numpy.sort(got), numpy.sort(expected)):
        case.comparisons += 1
        return
    extra, missing = numpy.setdiff1d(got, expected), numpy.setdiff1d(expected, got)
    if extra.size:
        case.fail(
            f"{where} {verb} {_named(matrix, extra)}, which is not its own ({extra.size} lanes are not)",
            hint=(
                "What runs over the end of a row goes on in the next one. Compare the rows, "
                "the columns and k named above with those that you compute."
            ),
        )
    if missing.size:
        case.fail(
            f"{where} never {verb} {_named(matrix, missing)} ({missing.size} of {expected.size} elements are missing)",
            hint=missed,
        )
    element, times = Counter(got.tolist()).most_common(1)[0]
    case.fail(
        f"{where} {verb} {_named(matrix, numpy.array([element]))} {times} times",
        hint="Once is enough: what a tile needs stays in registers.",
    )


def whole_numbers(case: Case, *shape: int, dtype: torch.dtype = torch.float32, most: int = 4) -> Tensor:
    """Small whole numbers: their products have one answer, whatever the order of the sum."""
    return case.randint(-most, most + 1, *shape).to(dtype)


def whole_numbers_only(case: Case) -> None:
    """No `/` and no `divmod` in the function: a kernel calls it later."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(case.student)))
    except (OSError, TypeError, SyntaxError):
        return  # no text to look at: its results are judged all the same
    hint = (
        "Divide with //, so that whole numbers stay whole. The function becomes part of a kernel, "
        "and Triton has to compile it."
    )
    for node in ast.walk(tree):
        case.true(
            not isinstance(getattr(node, "op", None), ast.Div), f"{case.student.__name__} divides with /", hint=hint
        )
        case.true(
            not (isinstance(node, ast.Name) and node.id == "divmod"),
            f"{case.student.__name__} calls divmod",
            hint=f"// and % instead. {hint}",
        )


def _nearest(stored: numpy.ndarray, work: dict[Any, Part], writes: Matrix) -> tuple[Any, Part]:
    """The part that most of the stored elements belong to."""
    return max(work.items(), key=lambda item: numpy.isin(stored, writes.block(*item)).sum())


def _region(key: tuple[int, int, int], part: Part) -> str:
    return f"rows {_span(part.rows)}, columns {_span(part.cols)}, k {_span(part.inner)}"


def _span(r: range) -> str:
    return f"{r[0]}" if len(r) == 1 else f"{r[0]}–{r[-1]}"


def _named(matrix: Matrix, elements: numpy.ndarray) -> str:
    place = numpy.unravel_index(_int(elements), matrix.shape)
    return f"{matrix.name}{[int(i) for i in place]}"


def _int(elements: numpy.ndarray) -> int:
    return int(elements.min())
