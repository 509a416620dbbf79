"""Runs a student's launcher in Triton's interpreter, for the checks of every chapter with kernels. Built in chapter 11.

Memory that the launcher allocates is NaN at first, so an element that was never stored shows. A lane beyond a tensor's
end is an error of `record_traffic`; what the programs touched is judged by `touched`.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.book.checks.case import Case
from minillm.book.traffic import OutOfBounds, Traffic, record_torch_traffic, record_traffic
from minillm.kernels.language import MODE

OUTSIDE = (
    "A lane outside of the matrix needs a mask: that of tl.load, not a tl.where afterwards. Which lanes of this "
    "program have no number to work on? If the number is inside, the address was made for another shape."
)
ONCE = "A kernel is launched by kernel[grid](arguments): once, for all the numbers."
STRIDE = "A view: its rows lie further apart than they are long. How far, its strides say: x.stride(0) and so on."


class _OutsideLaunches(record_torch_traffic):
    """The torch operations of a launcher. The interpreter brings each argument back after a launch:
    on a CPU, onto itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Poisoned(TorchFunctionMode):
    """Fresh memory is NaN: what was never stored is seen."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        fresh = func in (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)
        return made.fill_(float("nan")) if fresh and made.is_floating_point() else made


def launch(case: Case, *args: Any, outside: Mapping[str, str] | None = None) -> tuple[Any, Traffic]:
    """(what the launcher returned, the traffic of its kernels); fails where it raises, changes an argument,
    leaves a tensor, or has torch compute.

    outside: tensor -> the hint where a program leaves it.
    """
    got, traffic, ops = record(case, args, outside=outside or {})
    no_torch(case, ops)
    return got, traffic


def record(
    case: Case, args: tuple, *, in_place: bool = False, outside: Mapping[str, str] | None = None
) -> tuple[Any, Traffic, list[str]]:
    """(what the launcher returned, the traffic of its kernels, the torch operations that read or wrote numbers).

    in_place: it writes into its arguments. Otherwise what it allocates is NaN at first.
    """
    if MODE != "interpreted":
        case.fail(
            f"this exercise is judged in Triton's interpreter, and here kernels are {MODE}",
            hint="Restart the notebook and run its first cells before anything else: they set TRITON_INTERPRET=1. "
            "Triton needs Linux.",
        )
    seen, caught = [], []

    @functools.wraps(case.student)
    def recorded(*args):
        fresh = contextlib.nullcontext() if in_place else _Poisoned()
        with record_traffic(poison=not in_place) as traffic, _OutsideLaunches() as by_torch, fresh:
            seen.extend((traffic, by_torch))
            try:
                return case.student(*args)
            except Exception as error:
                raised = innermost(error)  # the interpreter wraps what a kernel raises
                if not_written(raised):
                    raise raised from error
                caught.append((raised, error))

    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "All-NaN slice encountered": the comparison says it better
        got = case.run(recorded, *args, may_change=in_place)
    if caught:
        _tell(case, *caught[0], outside or {})
    traffic, by_torch = seen
    ours = () if in_place else ("fill_", "copy_")  # ours, and the interpreter's
    return got, traffic, [name for name, _, _ in by_torch.ops if name not in ours]


def _tell(case: Case, raised: Exception, error: Exception, outside: Mapping[str, str]) -> NoReturn:
    """Fail with what went wrong in a kernel, and in which line of it."""
    if isinstance(raised, OutOfBounds):
        hint = next((hint for name, hint in outside.items() if f"'{name}'" in str(raised)), OUTSIDE)
        case.fail(f"{raised}", cause=raised, hint=STRIDE if "between the elements" in str(raised) else hint)
    name = case.student.__name__
    if isinstance(raised, NotImplementedError):  # Triton's own: the interpreter lacks something
        told = f"{name} uses what Triton's interpreter cannot do: {raised}"
        advice = "Load by addresses and masks, as the chapter does."
    else:
        told = f"{name} raised {type(raised).__name__}: {raised}"
        advice = _advice(raised)
    case.fail(told, cause=raised, hint=". ".join(filter(None, (own_line(error), advice))))


def _advice(error: Exception) -> str:
    """What is behind some of the interpreter's less clear messages."""
    if "is_ptr" in str(error):
        return "A kernel is launched with a grid: kernel[grid](arguments)"
    if "object is not iterable" in str(error) or "is not subscriptable" in str(error):
        return "A pointer has no elements: tl.load(x + 2 * index, mask), not x[2 * index]"
    return ""


def no_torch(case: Case, ops: list[str]) -> None:
    case.true(
        not ops,
        f"a torch operation read or wrote numbers: {ops[0] if ops else ''}",
        hint="All numbers are the kernels' work, and views are free. Allocate with torch.empty: "
        "every element is stored later, and zeros would be one more pass.",
    )


def count_launches(case: Case, traffic: Traffic, wanted: int = 1, told: str = "", hint: str = ONCE) -> None:
    case.true(traffic.launches, f"no Triton kernel was launched{told}", hint=hint)
    count, names = len(traffic.launches), ", ".join(one.name for one in traffic.launches)
    kernels = f"{count} kernel{'s were' if count > 1 else ' was'}"
    case.true(count == wanted, f"{kernels} launched{told}, expected {wanted}: {names}", hint=hint)


def refuse_borrowed(case: Case) -> None:
    """The student's kernels are its own."""
    borrowed = _borrowed(case.student)
    case.true(
        not borrowed, f"this uses the package's {borrowed}, in a kernel", hint="That is the part to write yourself."
    )


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
