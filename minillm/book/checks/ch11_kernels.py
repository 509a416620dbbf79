"""Checks of chapter 11: split-K, a repaired last tile, a fused epilogue. Built in chapter 11."""

from __future__ import annotations

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch11_launches import Matrix, judge_programs, whole_numbers
from minillm.book.checks.ch11_oracle import offsets, parts, silu_of_gate_times_up, slices
from minillm.book.checks.ch11_sums import judge_sum
from minillm.book.checks.kernels import launch, only_values

TILE = 16  # of the kernels: the smallest that tl.dot takes
_MATMUL = (
    "minillm.kernels.matmul.matmul",
    "minillm.kernels.matmul.matmul_kernel",
    "minillm.kernels.matmul.torch_matmul",
)
check_split_k = Checker(
    "split_k",
    hint="One program for each tile and slice stores its partial sum in float32; a second kernel adds them up.",
    forbid=_MATMUL,
)
check_last_tile = Checker(
    "last_tile", hint="Count by hand for k = 40: which columns of a does each turn of the loop load?", forbid=_MATMUL
)
check_fused_epilogue = Checker(
    "fused_epilogue",
    hint="Two sums in one loop, over one tile of x; the rest happens in registers, and one store ends it.",
    forbid=(*_MATMUL, "minillm.kernels.activation.silu_mul", "minillm.kernels.activation.torch_silu_mul"),
)


@check_split_k.part("example")
def _split_example(case: Case) -> None:
    first = _splits(case, 20, 18, 80, 3, whole=True)
    again, _ = launch(case, *first[0], 3)
    case.equal(
        again, first[1], "the output of a second run", hint="The same sums in the same order give the same bits."
    )


@check_split_k.part("edges")
def _split_edges(case: Case) -> None:
    _splits(case, 5, 33, 40, 2, whole=True, dtype=torch.float16)  # the last K tile has 8
    _splits(case, 17, 3, 50, 9, whole=True)  # more splits than tiles of K: 4 are left
    _splits(case, 16, 16, 32, 1, whole=True)
    _splits(case, 1, 1, 1, 4, whole=True)
    _splits(case, 16, 16, 70, 4, whole=True)  # 5 tiles of K in 4 slices: 2, 1, 1, 1
    _in_order(case, torch.float16, [2048, 1, 1], "in float16, 2048 + 1 would be 2048: round once, at the end")
    _in_order(
        case, torch.float32, [4096 * 4096, 1, 1, -4096 * 4096], "so large a number swallows a 1 that is added to it"
    )
    _in_order(
        case, torch.float16, [4096 * 4096, 1, 1, -4096 * 4096], "float16 ends at 65,504: partial sums are float32"
    )


@check_split_k.part("random")
def _split_random(case: Case) -> None:
    for dtype in (torch.float32, torch.float16):
        _splits(case, case.randint(1, 40), case.randint(1, 40), case.randint(1, 100), case.randint(1, 6), dtype=dtype)


def _splits(
    case: Case, m: int, n: int, k: int, num_splits: int, *, whole: bool = False, dtype: torch.dtype = torch.float32
):
    make = whole_numbers if whole else lambda case, *shape, dtype: case.randn(*shape).to(dtype)
    a, b = make(case, m, k, dtype=dtype), make(case, k, n, dtype=dtype)
    inner, told = slices(k, num_splits, TILE), f"for m={m}, n={n}, k={k}, num_splits={num_splits}"
    got, traffic = launch(case, a, b, num_splits)
    case.equal(
        len(traffic.launches),
        2,
        f"the number of launches {told}\n  the number of launches",
        hint="One kernel multiplies, one adds the partial sums.",
    )
    cut = f"{told} (slices of k: {', '.join(f'{r[0]}–{r[-1]}' for r in inner)})"
    partials = Matrix(
        "partials", (len(inner), m, n), 4, lambda key, part: key[0] * m * n + offsets(part.rows, part.cols, n)
    )
    judge_programs(case, traffic, 0, parts(m, n, inner, TILE), _factors(m, n, k, dtype), partials, cut)
    judge_sum(case, traffic, 1, partials.shape, dtype.itemsize, told)
    only_values(case, got, (a.double() @ b.double()).to(dtype), told, exact=whole)
    return (a, b), got


def _in_order(case: Case, dtype: torch.dtype, sums: list[int], told: str) -> None:
    """In which order, and in which dtype, the partial sums are added."""
    a, b, expected = _one_output(dtype, sums)
    got, _ = launch(case, a, b, len(sums))
    only_values(
        case,
        got,
        expected.to(dtype),
        f"where the partial sums are {sums} ({str(dtype)[6:]})",
        hint=f"From the first to the last, in float32, that gives {expected.item():g}; {told}.",
    )


def _one_output(dtype: torch.dtype, sums: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row, a column, and their product in float32 [1, 1], where tile s of k adds up to sums[s]:
    the order of the sum shows."""
    a, b = torch.zeros(1, TILE * len(sums), dtype=dtype), torch.zeros(TILE * len(sums), 1, dtype=dtype)
    expected = torch.zeros(1, dtype=torch.float32)
    for s, value in enumerate(sums):
        factor = 64 if abs(value) == 2048 else 4096 if abs(value) > 1 else 1
        a[0, s * TILE], b[s * TILE, 0] = value // factor, factor
        expected += value
    return a, b, expected.view(1, 1)


@check_last_tile.part("example")
def _last_example(case: Case) -> None:
    _multiplies(case, 16, 16, 40)


@check_last_tile.part("edges")
def _last_edges(case: Case) -> None:
    for m, n, k in ((16, 16, 32), (16, 16, 5), (3, 18, 17), (33, 1, 31), (1, 1, 1)):
        _multiplies(case, m, n, k)
    _multiplies(case, 20, 20, 47, torch.float16)
    _multiplies(case, 9, 17, 40, whole=False)
    a, b, expected = _one_output(torch.float16, [2048, 1, 1])
    got, _ = launch(case, a, b)
    only_values(
        case,
        got,
        expected.half(),
        "where the tiles of k add up to 2048, 1 and 1 (float16)",
        hint=(
            "2049 is no float16: the sum stays in float32 through all turns of the loop, and is rounded once, "
            "by the store."
        ),
    )


@check_last_tile.part("random")
def _last_random(case: Case) -> None:
    for dtype, whole in ((torch.float32, True), (torch.float16, True), (torch.float32, False)):
        _multiplies(case, case.randint(1, 40), case.randint(1, 40), case.randint(1, 70), dtype, whole=whole)


def _multiplies(case: Case, m: int, n: int, k: int, dtype: torch.dtype = torch.float32, *, whole: bool = True) -> None:
    make = whole_numbers if whole else lambda case, *shape, dtype: case.randn(*shape).to(dtype)
    a, b, told = make(case, m, k, dtype=dtype), make(case, k, n, dtype=dtype), f"for m={m}, n={n}, k={k}"
    got, traffic = launch(case, a, b)
    case.equal(
        len(traffic.launches),
        1,
        f"the number of launches {told}\n  the number of launches",
        hint="A kernel is launched by kernel[grid](arguments), once.",
    )
    judge_programs(
        case, traffic, 0, parts(m, n, [range(k)], TILE), _factors(m, n, k, dtype), _output(m, n, dtype), told
    )
    only_values(case, got, (a.double() @ b.double()).to(dtype), told, exact=whole)


@check_fused_epilogue.part("example")
def _fused_example(case: Case) -> None:
    _fuses(case, 20, 24, 40)


@check_fused_epilogue.part("edges")
def _fused_edges(case: Case) -> None:
    for m, n, k in ((16, 16, 16), (1, 33, 20), (17, 5, 7), (1, 1, 1)):
        _fuses(case, m, n, k)
    _fuses(case, 9, 20, 40, torch.float16)
    _rounds_once(case, [(1, 1), (32, 64)], [(1, 1.5)], "2049 is no float16, 2049 · 1.5 is near one")
    _rounds_once(case, [(250, 280)], [(250, 2**-14)], "70,000 is more than float16 holds, and the product is not")


@check_fused_epilogue.part("random")
def _fused_random(case: Case) -> None:
    for dtype in (torch.float32, torch.float16):
        _fuses(case, case.randint(1, 36), case.randint(1, 36), case.randint(1, 70), dtype)


def _fuses(case: Case, m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> None:
    x, weight, told = case.randn(m, k).to(dtype), case.randn(2 * n, k).to(dtype) * k**-0.5, f"for m={m}, n={n}, k={k}"
    got, traffic = launch(case, x, weight)
    case.equal(
        len(traffic.launches),
        1,
        f"the number of launches {told}\n  the number of launches",
        hint="Neither product is ever stored: one kernel does it all.",
    )
    reads = [
        Matrix("x", (m, k), dtype.itemsize, lambda key, part: offsets(part.rows, part.inner, k)),
        Matrix(
            "gate_up",
            (2 * n, k),
            dtype.itemsize,
            lambda key, part: offsets([*part.cols, *(n + c for c in part.cols)], part.inner, k),
        ),
    ]
    judge_programs(case, traffic, 0, parts(m, n, [range(k)], TILE), reads, _output(m, n, dtype), told)
    only_values(
        case,
        got,
        silu_of_gate_times_up(x, weight).to(dtype),
        told,
        exact=False,
        hint="silu(g) · u with g = x gateᵀ and u = x upᵀ; the gate is the first half of the rows.",
    )


def _rounds_once(case: Case, gate: list[tuple[float, float]], up: list[tuple[float, float]], told: str) -> None:
    """One output, whose gate and up are sums of these products x · weight."""
    x, weight = torch.ones(1, 2, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.float16)
    for row, terms in enumerate((gate, up)):
        for column, (left, right) in enumerate(terms):
            x[0, column], weight[row, column] = left, right
    got, _ = launch(case, x, weight)
    g, u = (sum(left * right for left, right in terms) for terms in (gate, up))
    only_values(
        case,
        got,
        silu_of_gate_times_up(x, weight).half(),
        f"where the gate is {g:,g} and up is {u:g}",
        hint=f"Round once, at the store: {told}.",
    )


def _factors(m: int, n: int, k: int, dtype: torch.dtype) -> list[Matrix]:
    return [
        Matrix("a", (m, k), dtype.itemsize, lambda key, part: offsets(part.rows, part.inner, k)),
        Matrix("b", (k, n), dtype.itemsize, lambda key, part: offsets(part.inner, part.cols, n)),
    ]


def _output(m: int, n: int, dtype: torch.dtype) -> Matrix:
    return Matrix("out", (m, n), dtype.itemsize, lambda key, part: offsets(part.rows, part.cols, n))
