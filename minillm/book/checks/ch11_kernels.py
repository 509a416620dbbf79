"""Checks of chapter 11: split-K, a repaired last tile, a fused epilogue. Built in chapter 11."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy
import torch
from torch import Tensor

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch11_oracle import Part, parts, product, silu_of_gate_times_up, slices
from minillm.book.checks.launcher import KernelChecker, Launch
from minillm.book.checks.touched import (
    Matrix,
    Need,
    Plan,
    block_of,
    by_program,
    elements_of,
    no_strays,
    same_elements,
    span,
)
from minillm.book.traffic import Traffic

TILE = 16  # of the kernels: the smallest that tl.dot takes
_MATMUL = tuple(f"minillm.kernels.matmul.{name}" for name in ("matmul", "matmul_kernel", "torch_matmul"))
_LOADED = "Tiles go into tl.dot as they were loaded. All sums are in float32, and rounded to the output's dtype once."
_POISON = (
    "NaN is an element that no program stored, or a masked lane that came into a sum: "
    "what it holds is undefined unless tl.load has an `other`, 0.0. "
)
_checker = partial(KernelChecker, near={torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 2e-3)}, forbid=_MATMUL)


def _whole_numbers(case: Case, *shape: int, dtype: torch.dtype) -> Tensor:
    """Small ones: their products have one answer, whatever the order of the sum."""
    return case.randint(-4, 5, *shape).to(dtype)


def _drawn(case: Case, *shape: int, dtype: torch.dtype) -> Tensor:
    return case.randn(*shape).to(dtype)


def _says(hint: str, exact: bool = True) -> Callable[[Tensor, Tensor], str]:
    def why(got: Tensor, wanted: Tensor) -> str:
        poison = _POISON if got.isnan().any() else ""
        if not exact and torch.allclose(got.double(), wanted.double(), 3e-2, 3e-2):
            return (
                f"{poison}Nearly right: some number was rounded too early. Tiles go into tl.dot as they were loaded; "
                "sums stay in float32 to the end."
            )
        return f"{poison}{hint}"

    return why


def _plan(
    work: list[tuple[int, Part]],
    reads: dict[Matrix, Callable[[Part], numpy.ndarray]],
    writes: Matrix,
    told: str,
) -> Plan:
    """reads: each matrix with the elements of it that a part of the work loads."""
    shape, needs = writes.shape, []
    for slice_number, part in work:
        first = slice_number * shape[-2] * shape[-1]
        mine = {matrix.name: block(part) for matrix, block in reads.items()}
        mine[writes.name] = first + block_of(part.rows, part.cols, shape[-1])
        who = f"the tile of rows {span(part.rows)}, columns {span(part.cols)}, k {span(part.inner)}"
        needs.append(Need(who, mine))
    return Plan(
        needs,
        [*reads, writes],
        told,
        stores=writes.name,
        programs="One program for each tile of the output (and for each slice of k, where k is cut).",
        dtype="Partial sums stay in float32; what is returned has the dtype of the inputs, rounded by the store.",
    )


def _matrix(name: str, shape: tuple[int, ...], itemsize: int, cut: bool = False) -> Matrix:
    longer = " Of the slices of k, the longer ones come first." if cut else ""
    narrow = f"The last tile may be narrower than the others; it counts all the same.{longer}"
    return Matrix(name, shape, itemsize, missing=narrow)


def _factors(m: int, n: int, k: int, itemsize: int, cut: bool = False) -> dict[Matrix, Callable]:
    return {
        _matrix("a", (m, k), itemsize, cut): lambda part: block_of(part.rows, part.inner, k),
        _matrix("b", (k, n), itemsize, cut): lambda part: block_of(part.inner, part.cols, n),
    }


# --- 3: slices of k


def _splits(
    case: Case,
    m: int,
    n: int,
    k: int,
    num_splits: int,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    again: bool = False,
) -> Launch:
    make = _whole_numbers if whole else _drawn
    inner = slices(k, num_splits, TILE)
    told = f"for m={m}, n={n}, k={k}, num_splits={num_splits}"
    partials = _matrix("partials", (len(inner), m, n), 4, cut=len(inner) > 1)
    reads = _factors(m, n, k, dtype.itemsize, cut=len(inner) > 1)
    cut = f"{told} (slices of k: {', '.join(map(span, inner))})"
    return Launch(
        (make(case, m, k, dtype=dtype), make(case, k, n, dtype=dtype), num_splits),
        told,
        _plan(parts(m, n, inner, TILE), reads, partials, cut),
        launches=2,
        once="One kernel multiplies, one adds the partial sums.",
        before=partial(_judge_sum, shape=partials.shape, itemsize=dtype.itemsize, told=told),
        hint=_says(_LOADED, whole),
        near=(0.0, 0.0) if whole else None,
        again=again,
    )


def _judge_sum(case: Case, traffic: Traffic, seen: None, shape: tuple[int, int, int], itemsize: int, told: str) -> None:
    """The second launch reads the partial sums slice by slice from the first, and stores each output once."""
    slice_size = shape[1] * shape[2]
    where = f"the second kernel {told}"
    partials = Matrix("partials", shape, 4, missing="Every slice is added, the last one too.")
    out = Matrix("out", shape[1:], itemsize, missing="Every element of the output has a total.")
    touched = by_program(traffic, 1)
    no_strays(case, touched, Plan((), (partials, out), f"in {where}"))
    every = [access for accesses in touched.values() for access in accesses]
    loaded, stored = elements_of(every, "load", "partials"), elements_of(every, "store", "out")
    same_elements(case, loaded, numpy.arange(shape[0] * slice_size), partials, where, "loads")
    same_elements(case, stored, numpy.arange(slice_size), out, where, "stores")
    for program, accesses in touched.items():
        before = -1
        for access in accesses:
            if access.kind != "load" or not len(access.elements):
                continue
            found = sorted({int(element) // slice_size for element in access.elements})
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


def _in_order(dtype: torch.dtype, sums: list[int], why: str, *args: int) -> tuple[Launch]:
    """One output, where tile s of k adds up to sums[s]: in which order, and in which dtype, they are added shows."""
    a, b = torch.zeros(1, TILE * len(sums), dtype=dtype), torch.zeros(TILE * len(sums), 1, dtype=dtype)
    wanted = torch.zeros(1, 1, dtype=torch.float32)
    for s, value in enumerate(sums):
        factor = 64 if abs(value) == 2048 else 4096 if abs(value) > 1 else 1
        a[0, s * TILE], b[s * TILE, 0] = value // factor, factor
        wanted += value
    told = f"where the partial sums are {sums} ({str(dtype)[6:]})"
    hint = f"From the first to the last, in float32, that gives {wanted.item():g}; {why}."
    return (Launch((a, b, *args), told, hint=_says(hint), near=(0.0, 0.0), wanted=wanted.to(dtype)),)


def _random_splits(draw: Draw, dtype: torch.dtype) -> tuple:
    m, n, k = draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 100)
    return m, n, k, draw.randint(1, 6), False, dtype


_LARGE = 4096 * 4096
check_split_k = _checker(
    "split_k",
    product,
    _splits,
    examples=[(20, 18, 80, 3, True, torch.float32, True)],
    edges=[
        (5, 33, 40, 2, True, torch.float16),  # the last K tile has 8
        (17, 3, 50, 9, True),  # more splits than tiles of K: 4 are left
        (16, 16, 32, 1, True),
        (1, 1, 1, 4, True),
        (16, 16, 70, 4, True),  # 5 tiles of K in 4 slices: 2, 1, 1, 1
        _in_order(torch.float16, [2048, 1, 1], "in float16, 2048 + 1 would be 2048: round once, at the end", 3),
        _in_order(torch.float32, [_LARGE, 1, 1, -_LARGE], "so large a number swallows a 1 that is added to it", 4),
        _in_order(torch.float16, [_LARGE, 1, 1, -_LARGE], "float16 ends at 65,504: partial sums are float32", 4),
    ],
    random=_random_splits,
    trials=(torch.float32, torch.float16),
    hint="One program for each tile and slice stores its partial sum in float32; a second kernel adds them up.",
)


# --- 4: the last tile


def _multiplies(case: Case, m: int, n: int, k: int, dtype: torch.dtype = torch.float32, whole: bool = True) -> Launch:
    make, told = _whole_numbers if whole else _drawn, f"for m={m}, n={n}, k={k}"
    out = _matrix("out", (m, n), dtype.itemsize)
    return Launch(
        (make(case, m, k, dtype=dtype), make(case, k, n, dtype=dtype)),
        told,
        _plan(parts(m, n, [range(k)], TILE), _factors(m, n, k, dtype.itemsize), out, told),
        hint=_says(_LOADED, whole),
        near=(0.0, 0.0) if whole else None,
    )


def _random_products(draw: Draw, kind: tuple[torch.dtype, bool]) -> tuple:
    return draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 70), *kind


check_last_tile = _checker(
    "last_tile",
    product,
    _multiplies,
    examples=[(16, 16, 40)],
    edges=[
        (16, 16, 32),
        (16, 16, 5),
        (3, 18, 17),
        (33, 1, 31),
        (1, 1, 1),
        (20, 20, 47, torch.float16),
        (9, 17, 40, torch.float32, False),
        _in_order(
            torch.float16,
            [2048, 1, 1],
            "2049 is no float16: the sum stays in float32 through all turns of the loop, and is rounded once, "
            "by the store",
        ),
    ],
    random=_random_products,
    trials=((torch.float32, True), (torch.float16, True), (torch.float32, False)),
    hint="Count by hand for k = 40: which columns of a does each turn of the loop load?",
)


# --- 5: a fused epilogue


def _fuses(case: Case, m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> Launch:
    x, weight, told = case.randn(m, k).to(dtype), case.randn(2 * n, k).to(dtype) * k**-0.5, f"for m={m}, n={n}, k={k}"
    reads = {
        _matrix("x", (m, k), dtype.itemsize): lambda part: block_of(part.rows, part.inner, k),
        _matrix("gate_up", (2 * n, k), dtype.itemsize): lambda part: block_of(
            [*part.cols, *(n + column for column in part.cols)], part.inner, k
        ),
    }
    out = _matrix("out", (m, n), dtype.itemsize)
    return Launch(
        (x, weight),
        told,
        _plan(parts(m, n, [range(k)], TILE), reads, out, told),
        once="Neither product is ever stored: one kernel does it all.",
        hint=_says("silu(g) · u with g = x gateᵀ and u = x upᵀ; the gate is the first half of the rows.", exact=False),
    )


def _rounds_once(gate: list[tuple[float, float]], up: list[tuple[float, float]], why: str) -> tuple[Launch]:
    """One output, whose gate and up are sums of these products x · weight."""
    x, weight = torch.ones(1, 2, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.float16)
    for row, terms in enumerate((gate, up)):
        for column, (left, right) in enumerate(terms):
            x[0, column], weight[row, column] = left, right
    g, u = (sum(left * right for left, right in terms) for terms in (gate, up))
    told = f"where the gate is {g:,g} and up is {u:g}"
    return (Launch((x, weight), told, hint=_says(f"Round once, at the store: {why}."), near=(0.0, 0.0)),)


def _random_fuses(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.randint(1, 36), draw.randint(1, 36), draw.randint(1, 70), dtype


def _fused_edges(draw: Draw) -> Iterator[tuple]:
    yield from ((16, 16, 16), (1, 33, 20), (17, 5, 7), (1, 1, 1), (9, 20, 40, torch.float16))
    yield _rounds_once([(1, 1), (32, 64)], [(1, 1.5)], "2049 is no float16, 2049 · 1.5 is near one")
    yield _rounds_once([(250, 280)], [(250, 2**-14)], "70,000 is more than float16 holds, and the product is not")


check_fused_epilogue = _checker(
    "fused_epilogue",
    silu_of_gate_times_up,
    _fuses,
    examples=[(20, 24, 40)],
    edges=_fused_edges,
    random=_random_fuses,
    trials=(torch.float32, torch.float16),
    hint="Two sums in one loop, over one tile of x; the rest happens in registers, and one store ends it.",
    misconceptions={
        "Gate and up are swapped: the gate is the first half of the rows.": partial(
            silu_of_gate_times_up, gate_last=True
        ),
        "This is the gate times the up: the silu is missing.": partial(silu_of_gate_times_up, silu=False),
    },
    forbid=(*_MATMUL, "minillm.kernels.activation.silu_mul", "minillm.kernels.activation.torch_silu_mul"),
)
