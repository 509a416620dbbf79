"""Runs a student's launcher in Triton's interpreter, for the checks of every chapter with kernels. Built in chapter 11.

Memory that the launcher allocates is NaN at first, so an element that was never stored shows. A lane beyond a tensor's
end is an error of `record_traffic`; what each program touched is judged by the chapters' own checks.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.book.checks.case import Case
from minillm.book.traffic import OutOfBounds, record_torch_traffic, record_traffic
from minillm.kernels.language import MODE

Program = tuple[int, int, int]


class _Poisoned(TorchFunctionMode):
    """Fresh memory is NaN: what was never stored is seen."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        fresh = func in (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)
        return made.fill_(float("nan")) if fresh and made.is_floating_point() else made


def launch(case: Case, *args: Any) -> tuple[Any, Any]:
    """(what the launcher returned, the traffic of its kernels); fails where it raises or changes an argument."""
    if MODE != "interpreted":
        case.fail(
            f"this exercise is judged in Triton's interpreter, and here kernels are {MODE}",
            hint=(
                "Restart the notebook and run its first cell before anything else: it sets TRITON_INTERPRET=1. "
                "Triton needs Linux."
            ),
        )
    seen, outside = [], []

    @functools.wraps(case.student)
    def counted(*args):
        with record_traffic(poison=True) as traffic, record_torch_traffic() as by_torch, _Poisoned():
            seen.extend((traffic, by_torch))
            try:
                return case.student(*args)
            except Exception as error:
                raised = innermost(error)  # the interpreter wraps what a kernel raises
                # Triton's own: the interpreter lacks something
                unknown = isinstance(raised, NotImplementedError) and not not_written(raised)
                if not unknown and not isinstance(raised, OutOfBounds):
                    raise raised from error
                outside.append((raised, error))

    got = case.run(counted, *args)
    if outside:
        raised, error = outside[0]
        if not isinstance(raised, OutOfBounds):
            case.fail(
                f"{case.student.__name__} uses what Triton's interpreter cannot do: {raised}",
                cause=raised,
                hint=f"{own_line(error)}. Load by addresses and masks, as the chapter does.",
            )
        case.fail(
            f"{raised}",
            cause=raised,
            hint="A lane outside of the matrix needs a mask: that of tl.load, not a tl.where afterwards. "
            "If its row and its column are inside, the address was made for another shape.",
        )
    traffic, by_torch = seen
    ops = [name for name, _, _ in by_torch.ops if name not in ("fill_", "copy_")]  # ours, and the interpreter's
    case.true(
        not ops,
        f"a torch operation read or wrote numbers: {ops[0] if ops else ''}",
        hint=(
            "All numbers are the kernels' work. Allocate with torch.empty: "
            "every element is stored later, and zeros would be one more pass."
        ),
    )
    return got, traffic


def attend(case: Case, *args: Any) -> tuple[Tensor, Any]:
    """(the output, the traffic) of the student's launcher, whose kernels are its own."""
    borrowed = _borrowed(case.student)
    case.true(
        not borrowed, f"this uses the package's {borrowed}, in a kernel", hint="That is the part to write yourself."
    )
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "All-NaN slice encountered": the comparison says it better
        return launch(case, *args)


def by_program(traffic: Any, index: int) -> dict[Program, list]:
    """The accesses of one launch, program by program, in order."""
    found = defaultdict(list)
    for access in traffic.accesses:
        if access.launch_index == index:
            found[tuple(access.program)].append(access)
    return found


def elements_of(accesses: list, kind: str, name: str) -> numpy.ndarray:
    found = [numpy.asarray(a.elements).reshape(-1) for a in accesses if a.kind == kind and a.tensor == name]
    return numpy.concatenate(found).astype(numpy.int64) if found else numpy.zeros(0, numpy.int64)


def only_values(
    case: Case, got: Any, expected: Tensor, told: str, *, exact: bool = True, hint: str | None = None
) -> None:
    """The output's type, shape and values."""
    case.is_a(got, expected.dtype, f"the output {told}")
    poison = (
        "NaN is an element that no program stored, or a masked lane that came into a sum: "
        "what it holds is undefined unless tl.load has an `other`, 0.0. "
    )
    hint = (poison if isinstance(got, Tensor) and got.isnan().any() else "") + (
        hint
        or "Tiles go into tl.dot as they were loaded. All sums are in float32, and rounded to the output's dtype once."
    )
    same = isinstance(got, Tensor) and got.shape == expected.shape
    if not exact and same and torch.allclose(got, expected, rtol=3e-2, atol=3e-2):
        hint = (
            "Nearly: some number was rounded too early. Tiles go into tl.dot as they were loaded; "
            "sums stay in float32 to the end."
        )
    tolerance = (
        {}
        if exact
        else {"atol": 2e-3, "rtol": 2e-3}
        if expected.dtype == torch.float16
        else {"atol": 1e-4, "rtol": 1e-5}
    )
    (case.equal if exact else case.close)(got, expected, f"the output {told}\n  the output", hint=hint, **tolerance)


def innermost(error: Exception) -> Exception:
    """What was raised in the kernel, without the interpreter's wrapping."""
    while type(error).__name__ == "InterpreterError" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def not_written(error: Exception) -> bool:
    """Whether this is the NotImplementedError of a stub, and not one of Triton's."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, NotImplementedError) and (not frames or not frames[-1].filename.startswith(_others()))


def _others() -> tuple[str, ...]:
    """Where the code lies that is not the student's: installed packages, Python's own library, this package."""
    return tuple(
        str(Path(file).parents[up]) for file, up in ((numpy.__file__, 1), (traceback.__file__, 0), (__file__, 2))
    )


def own_line(error: BaseException) -> str:
    """The last line of the student's own code that an error came through,
    before the interpreter wrapped it and since."""
    frames = []
    while error is not None:
        frames += traceback.extract_tb(error.__traceback__)
        error = error.__cause__
    own = [frame for frame in frames if not frame.filename.startswith(_others())]
    line = own[-1].line.strip() if own and own[-1].line else ""
    return f"It happened in {own[-1].name}, line {own[-1].lineno} of the cell{line and ': '}{line}" if own else ""


def _borrowed(student: Any) -> str | None:
    """The dotted name of the first kernel or helper of the package that the student's kernels name;
    None where all is their own."""
    waiting, seen = [student], set()
    while waiting:
        function = waiting.pop()
        plain = getattr(function, "fn", function)  # a kernel holds its Python function
        code = getattr(plain, "__code__", None)
        if code is None or id(plain) in seen:
            continue
        seen.add(id(plain))
        if (plain.__module__ or "").split(".")[0] == "minillm":
            return f"{plain.__module__}.{plain.__name__}"
        named = [plain.__globals__.get(name) for name in code.co_names]
        waiting += [
            value for value in named if hasattr(value, "fn") or getattr(value, "__globals__", None) is plain.__globals__
        ]
    return None
