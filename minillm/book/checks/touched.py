"""What the programs of a launch touched: each program its own part, or all of them each number so many times.
Built in chapter 10.

`judge_programs` knows a tensor by the name of the kernel's parameter. `Seen` knows it by its address, to the byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from torch import Tensor

from minillm.book.checks.case import Case
from minillm.book.traffic import Access, Traffic

Program = tuple[int, int, int]
_EXTRA = (
    "What runs over the end of a row goes on in the next one. Compare the rows, the columns and k named above with "
    "those that you compute."
)
_TWICE = "Once is enough: what a tile needs stays in registers."


@dataclass(frozen=True)
class Matrix:
    """A tensor of a kernel, by the name of its parameter.

    itemsize: bytes of an element. extra, missing, twice: the hints where a program touches too much of it, too little,
    or some of it more than once.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    missing: str
    extra: str = _EXTRA
    twice: str = _TWICE


@dataclass(frozen=True)
class Need:
    """What one program has to do: tensor -> the elements that it loads, or stores; `told` says whose work it is."""

    told: str
    elements: dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Plan:
    """What the programs of one launch have to do, and the tensors that they have it to do with.

    stores: the tensor that they write; free: tensors that may be read at will.
    """

    needs: Sequence[Need]
    matrices: Sequence[Matrix]
    told: str
    stores: str = "out"
    free: tuple[str, ...] = ()
    programs: str = "One program for each tile, the last one, which may not be full, too."
    dtype: str = "What is returned has the dtype of the inputs, rounded by the store itself."


def judge_programs(case: Case, traffic: Traffic, plan: Plan, index: int = 0) -> None:
    """In launch `index` each need is one program's: it loads its elements once and no others, and stores its own."""
    launched = traffic.launches[index]
    name = f"launch {index + 1}, {launched.name}," if len(traffic.launches) > 1 else launched.name
    case.true(
        launched.num_programs == len(plan.needs),
        f"{name} has {launched.num_programs} programs {plan.told}; expected {len(plan.needs)}",
        hint=plan.programs,
    )
    touched = by_program(traffic, index)
    no_strays(case, touched, plan)
    owner: dict[int, Program] = {}
    for program in sorted(touched):
        stored = elements_of(touched[program], "store", plan.stores)
        case.true(
            stored.size,
            f"program {program} stores nothing in `{plan.stores}` {plan.told}",
            hint="Every program has a tile of its own to store.",
        )
        mine = _nearest(stored, plan)
        need = plan.needs[mine]
        case.true(
            mine not in owner,
            f"programs {owner.get(mine)} and {program} both have {need.told} {plan.told}",
            hint="Different programs have different tiles: look at what program_id gives.",
        )
        owner[mine] = program
        where = f"program {program} {plan.told}, which has {need.told},"
        for matrix in plan.matrices:
            kind = "store" if matrix.name == plan.stores else "load"
            found = elements_of(touched[program], kind, matrix.name)
            same_elements(case, found, need.elements[matrix.name], matrix, where, f"{kind}s")


def no_strays(case: Case, touched: dict[Program, list[Access]], plan: Plan) -> None:
    """Only the tensors of the statement are touched, and stores go where they should."""
    sizes = {matrix.name: matrix.itemsize for matrix in plan.matrices}
    known = [*sizes, *plan.free]
    for access in (access for accesses in touched.values() for access in accesses):
        name, size = access.tensor, access.itemsize
        case.true(
            name in known,
            f"program {access.program} {access.kind}s `{name}` {plan.told}; "
            f"expected only {', '.join(f'`{one}`' for one in known)}",
            hint="The counting goes by the parameters' names: keep those of the statement.",
        )
        case.true(
            access.kind == "load" or name == plan.stores,
            f"program {access.program} stores into `{name}` {plan.told}",
            hint="Inputs are only read.",
        )
        case.true(
            sizes.get(name, size) == size,
            f"an element of `{name}` has {size} bytes {plan.told}; expected {sizes.get(name)}",
            hint=plan.dtype,
        )


def same_elements(
    case: Case, got: numpy.ndarray, expected: numpy.ndarray, matrix: Matrix, where: str, verb: str
) -> None:
    """Each expected element once, and no other; tells the first that is too many, missing or doubled."""
    if numpy.array_equal(numpy.sort(got), numpy.sort(expected)):
        case.comparisons += 1
        return
    extra, missing = numpy.setdiff1d(got, expected), numpy.setdiff1d(expected, got)
    if extra.size:
        rows = f"too many: {_rows(matrix, extra)}; {extra.size} lanes"
        case.fail(f"{where} {verb} {_named(matrix, extra)}, which is not its own ({rows})", hint=matrix.extra)
    if missing.size:
        rows = f"missing: {_rows(matrix, missing)}; {missing.size} of {expected.size} elements"
        case.fail(f"{where} never {verb} {_named(matrix, missing)} ({rows})", hint=matrix.missing)
    element, times = Counter(got.tolist()).most_common(1)[0]
    case.fail(f"{where} {verb} {_named(matrix, numpy.array([element]))} {times} times", hint=matrix.twice)


def by_program(traffic: Traffic, index: int) -> dict[Program, list[Access]]:
    """The accesses of one launch, program by program, in order."""
    found = defaultdict(list)
    for access in traffic.accesses:
        if access.launch_index == index:
            found[tuple(access.program)].append(access)
    return found


def elements_of(accesses: Sequence[Access], kind: str, name: str) -> numpy.ndarray:
    found = [numpy.asarray(a.elements).reshape(-1) for a in accesses if a.kind == kind and a.tensor == name]
    return numpy.concatenate(found).astype(numpy.int64) if found else numpy.zeros(0, numpy.int64)


def block_of(tall: Sequence[int], wide: Sequence[int], width: int) -> numpy.ndarray:
    """The elements of these rows and columns of a matrix whose rows have `width`."""
    rows = numpy.array(tall, dtype=numpy.int64)[:, None]
    return (rows * width + numpy.array(wide, dtype=numpy.int64)[None, :]).reshape(-1)


def rows_of(rows: Sequence[int], width: int) -> numpy.ndarray:
    """The elements of these rows of a matrix whose rows have `width`."""
    return block_of(rows, range(width), width)


def span(r: range, dash: str = "–") -> str:
    """A range by its ends: "3", "0–15"."""
    return f"{r[0]}" if len(r) == 1 else f"{r[0]}{dash}{r[-1]}"


def _nearest(stored: numpy.ndarray, plan: Plan) -> int:
    """The need that most of the stored elements belong to."""
    return max(range(len(plan.needs)), key=lambda i: numpy.isin(stored, plan.needs[i].elements[plan.stores]).sum())


def _named(matrix: Matrix, elements: numpy.ndarray) -> str:
    return f"{matrix.name}{[int(i) for i in numpy.unravel_index(int(elements.min()), matrix.shape)]}"


def _rows(matrix: Matrix, elements: numpy.ndarray) -> str:
    """The rows that elements belong to: "rows 3, 7–9"."""
    rows = numpy.unique(elements // int(numpy.prod(matrix.shape[1:])))
    runs = numpy.split(rows, numpy.flatnonzero(numpy.diff(rows) > 1) + 1)
    told = [span(run) for run in runs]
    return f"row{'s' * (len(rows) > 1)} {', '.join(told[:4])}{', ...' if len(told) > 4 else ''}"


@dataclass(frozen=True)
class Touch:
    """How often all programs together load (or store) each number of a tensor: `times`, one number or one for each."""

    name: str
    kind: str
    hint: str
    times: int | Tensor = 1


class Seen:
    """What a kernel loaded and stored of tensors that it was given: name -> tensor."""

    def __init__(self, case: Case, traffic: Traffic, tensors: dict[str, Tensor]) -> None:
        self.case, self.traffic, self.tensors = case, traffic, tensors

    def unread(self, name: str) -> None:
        """Fail where the kernel loads a tensor that it is to fill."""
        self.case.true(
            not self.accesses(name, "load"),
            f"the kernel loads numbers of {name}",
            hint=f"{name} holds nothing yet: each of its numbers is computed by the kernel, from what it loads.",
        )

    def written(self, name: str) -> None:
        """Fail at the first number of `name` that no program stored."""
        times = self.times(name, "store")
        place = first(times == 0)
        if place is not None:
            [launch] = self.traffic.launches
            programs = f"{launch.num_programs} program{'s' * (launch.num_programs != 1)}"
            self.case.fail(
                f"{name}{list(place)} was never stored; the grid {launch.grid} has {programs}",
                hint=f"All programs together have to write all of {name}, of shape {list(times.shape)}.",
            )
        self.case.comparisons += 1

    def judge(self, touch: Touch) -> None:
        """Fail at the first number that was touched more or less often than it should be."""
        name, times = touch.name, self.times(touch.name, touch.kind)
        wanted = numpy.broadcast_to(numpy.asarray(touch.times), times.shape)
        place = first(times != wanted)
        if place is not None:
            found = [a.program for a in self.accesses(name, touch.kind) if self._covers(a, name, place)]
            told = " and ".join(f"program {one}" for one in dict.fromkeys((*found[:1], *found[-1:])))
            verb = "loaded" if touch.kind == "load" else "stored"
            self.case.fail(
                f"{name}{list(place)} was {verb} {_plural(times[place])}{told and f', by {told}'}; "
                f"expected {_plural(wanted[place])}",
                hint=touch.hint,
            )
        self.case.comparisons += 1

    def times(self, name: str, kind: str) -> numpy.ndarray:
        """How many times each number was touched, in the shape of the tensor; its bytes may come one by one."""
        tensor = self.tensors[name]
        counts = numpy.zeros(_extent(tensor), numpy.int64)
        for access in self.accesses(name, kind):
            numpy.add.at(counts, self._places(access, name), 1)
        starts = _element_starts(tensor)
        return counts[starts.reshape(-1, 1) + numpy.arange(tensor.itemsize)].max(1).reshape(starts.shape)

    def accesses(self, name: str, kind: str) -> list[Access]:
        """The accesses of one kind that touch the tensor `name`."""
        return [one for one in self.traffic.accesses if one.kind == kind and len(self._places(one, name))]

    def _places(self, access: Access, name: str) -> numpy.ndarray:
        """The bytes of `name` that an access touches, counted from its first element."""
        tensor = self.tensors[name]
        start = access.address - tensor.data_ptr() + access.elements.reshape(-1, 1) * access.itemsize
        touched = (start + numpy.arange(access.itemsize)).ravel()
        return touched[(touched >= 0) & (touched < _extent(tensor))]

    def _covers(self, access: Access, name: str, place: tuple[int, ...]) -> bool:
        """Whether an access touches the number `name[place]`."""
        return bool((self._places(access, name) == _element_starts(self.tensors[name])[place]).any())


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first number to behind its last one."""
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.itemsize


def _element_starts(tensor: Tensor) -> numpy.ndarray:
    """Where each number of a tensor begins, in bytes from the first one, in the tensor's shape."""
    grids = numpy.meshgrid(*(numpy.arange(size) for size in tensor.shape), indexing="ij")
    return sum(grid * stride for grid, stride in zip(grids, tensor.stride())) * tensor.itemsize


def first(wrong: numpy.ndarray) -> tuple[int, ...] | None:
    """The first place where an array is true."""
    places = numpy.argwhere(wrong)
    return tuple(int(i) for i in places[0]) if len(places) else None


def _plural(times: int) -> str:
    return {0: "never", 1: "once"}.get(int(times), f"{times} times")
