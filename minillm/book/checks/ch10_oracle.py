"""What the checks of chapter 10 launch a student's kernel with: tensors watched byte by byte. Built in chapter 10."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minillm.book.checks.case import Case
from minillm.book.checks.kernels import innermost, not_written, own_line
from minillm.book.traffic import Access, OutOfBounds, Traffic, record_torch_traffic, record_traffic
from minillm.kernels.language import MODE

ONE_LAUNCH = "A kernel is launched by kernel[grid](arguments): once, for all the numbers."
MASK = "Which lanes of this program have no number to work on? Their mask must be False."
STRIDE = "A view: its rows lie further apart than they are long. How far, its strides say: x.stride(0) and so on."


class Watched:
    """One call of a launcher: what its kernel loaded and stored, of the tensors that it was given.

    tensors: name -> tensor, for the messages; `writes` are those that the statement lets it write, `reads`
    those of them that it reads too.
    """

    def __init__(self, case: Case, launcher: Callable, args: tuple, tensors: dict[str, Tensor], writes: tuple[str, ...],
                 reads: tuple[str, ...] = ()):  # fmt: skip
        self.case, self.tensors = case, tensors
        before = {name: tensor.clone() for name, tensor in tensors.items() if name not in writes}
        self.traffic, outside, ops = record(case, launcher, args)
        if outside is not None:
            case.fail(f"{outside}", hint=STRIDE if "between the elements" in str(outside) else MASK)
        case.true(self.traffic.launches, "no Triton kernel was launched", hint=ONE_LAUNCH)
        launched = [one.name for one in self.traffic.launches]
        case.true(
            len(launched) == 1,
            f"{len(launched)} kernels were launched, expected 1: {', '.join(launched)}",
            hint=ONE_LAUNCH,
        )
        for name in tensors:  # before the count of torch operations: numpy leaves no trace but this one
            if name in writes and name not in reads:
                case.true(
                    not self.accesses(name, "load"),
                    f"the kernel loads numbers of {name}",
                    hint=(
                        f"{name} holds nothing yet: each of its numbers is computed by the kernel, "
                        "from what the kernel loads."
                    ),
                )
        case.true(
            not ops,
            f"a torch operation read or wrote numbers: {ops[0][0] if ops else ''}",
            hint="Views are free; all else is the kernel's work.",
        )
        for name, tensor in before.items():
            case.equal(tensors[name], tensor, name, hint=f"{name} is read only.")

    def written(self, name: str) -> None:
        """Fail at the first number of `name` that no program stored."""
        times = self.times(name, "store")
        place = first(times == 0)
        if place is not None:
            [launch] = self.traffic.launches
            self.case.fail(
                (
                    f"{name}{list(place)} was never stored; the grid {launch.grid} has {launch.num_programs} "
                    f"program{'s' * (launch.num_programs != 1)}"
                ),
                hint=f"All programs together have to write all of {name}, of shape {list(times.shape)}.",
            )
        self.case.comparisons += 1

    def minimum(self, name: str, kind: str, wanted: int | Tensor = 1, *, hint: str) -> None:
        """Each number of `name` was loaded, or stored, just `wanted` times (one number, or one for each)."""
        times = self.times(name, kind)
        wanted = np.broadcast_to(np.asarray(wanted), times.shape)
        place = first(times != wanted)
        if place is not None:
            verb = "loaded" if kind == "load" else "stored"
            programs = [access.program for access in self.accesses(name, kind) if self.covers(access, name, place)]
            by = (
                f", by program {' and program '.join(str(p) for p in dict.fromkeys((programs[0], programs[-1])))}"
                if programs
                else ""
            )
            self.case.fail(
                f"{name}{list(place)} was {verb} {plural(times[place])}{by}; expected {plural(wanted[place])}",
                hint=hint,
            )
        self.case.comparisons += 1

    def times(self, name: str, kind: str) -> np.ndarray:
        """How many times each number was touched, in the shape of the tensor; its bytes may come one by one."""
        tensor = self.tensors[name]
        counts = np.zeros(extent(tensor), np.int64)
        for access in self.accesses(name, kind):
            np.add.at(counts, self.places(access, name), 1)
        starts = element_starts(tensor)
        return counts[starts.reshape(-1, 1) + np.arange(tensor.itemsize)].max(1).reshape(starts.shape)

    def accesses(self, name: str, kind: str) -> list[Access]:
        """The accesses of one kind that touch the tensor `name`."""
        return [one for one in self.traffic.accesses if one.kind == kind and len(self.places(one, name))]

    def places(self, access: Access, name: str) -> np.ndarray:
        """The bytes of `name` that an access touches, counted from its first element."""
        tensor = self.tensors[name]
        start = access.address - tensor.data_ptr() + access.elements.reshape(-1, 1) * access.itemsize
        touched = (start + np.arange(access.itemsize)).ravel()
        return touched[(touched >= 0) & (touched < extent(tensor))]

    def covers(self, access: Access, name: str, place: tuple[int, ...]) -> bool:
        """Whether an access touches the number `name[place]`."""
        return bool((self.places(access, name) == element_starts(self.tensors[name])[place]).any())


def record(case: Case, launcher: Callable, args: tuple) -> tuple[Traffic, OutOfBounds | None, list]:
    """Call the launcher: its traffic, the access that left a tensor if one did, and the torch operations."""
    if MODE != "interpreted":
        case.fail(
            f"this exercise is judged in Triton's interpreter, and here kernels are {MODE}",
            hint=(
                "Restart the notebook and run its first cells before anything else: they set TRITON_INTERPRET=1. "
                "Triton needs Linux."
            ),
        )
    outside = raised = None

    @functools.wraps(launcher)
    def recorded(*args):
        nonlocal outside, raised
        try:
            launcher(*args)
        except OutOfBounds as error:
            outside = error
        except Exception as error:  # the interpreter wraps what a kernel raised: the student wants to see that
            raised = error
            if not_written(innermost(error)):
                raise innermost(error) from error

    with record_traffic() as traffic, OutsideLaunches() as torch_traffic, np.errstate(all="ignore"):
        case.run(recorded, *args, may_change=True)
    if raised is not None:
        told = innermost(raised)
        case.fail(
            f"{launcher.__name__} raised {type(told).__name__}: {told}",
            hint=". ".join(filter(None, (own_line(raised), advice(told)))),
            cause=raised,
        )
    return traffic, outside, torch_traffic.ops


class OutsideLaunches(record_torch_traffic):
    """The torch operations of a launcher. The interpreter brings each argument back after a launch:
    on a CPU, onto itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def advice(error: Exception) -> str:
    """What is behind some of the interpreter's less clear messages."""
    if "is_ptr" in str(error):
        return "A kernel is launched with a grid: kernel[grid](arguments)"
    if "object is not iterable" in str(error) or "is not subscriptable" in str(error):
        return "A pointer has no elements: tl.load(x + 2 * index, mask), not x[2 * index]"
    return ""


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first number to behind its last one."""
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.itemsize


def element_starts(tensor: Tensor) -> np.ndarray:
    """Where each number of a tensor begins, in bytes from the first one, in the tensor's shape."""
    grids = np.meshgrid(*(np.arange(size) for size in tensor.shape), indexing="ij")
    return sum(grid * stride for grid, stride in zip(grids, tensor.stride())) * tensor.itemsize


def first(wrong: np.ndarray) -> tuple[int, ...] | None:
    """The first place where an array is true."""
    places = np.argwhere(wrong)
    return tuple(int(i) for i in places[0]) if len(places) else None


def plural(times: int) -> str:
    return {0: "never", 1: "once"}.get(int(times), f"{times} times")


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output full of NaN, so that what is never written shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


def alternating(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gates at the even places, ups at the odd ones."""
    return x[..., ::2], x[..., 1::2]


def gated_reference(x: Tensor, limit: float, *, split: Callable = alternating, alpha: float = 1.702, shift: float = 1.0,
                    gate: tuple[float, float] | None = None,
                    up: tuple[float, float] | None = None) -> Tensor:  # fmt: skip
    """The activation in float64; the keywords are for the mistakes that a hint can name."""
    gates, ups = split(x.double())
    gates, ups = gates.clamp(*(gate or (-np.inf, limit))), ups.clamp(*(up or (-limit, limit)))
    return gates * torch.sigmoid(alpha * gates) * (ups + shift)


def rotated(x: Tensor, positions: Tensor, table: Tensor, *, neighbours: bool = True, sign: int = 1) -> Tensor:
    """x with the first dimensions of its heads turned, in float64."""
    x, dim = x.double().clone(), table.shape[1]
    cos, sin = table.double()[positions][:, None].chunk(2, -1)  # [num_tokens, 1, num_pairs]
    first_ones, second_ones = (
        (slice(0, dim, 2), slice(1, dim, 2)) if neighbours else (slice(0, dim // 2), slice(dim // 2, dim))
    )
    a, b = x[..., first_ones].clone(), x[..., second_ones].clone()
    x[..., first_ones], x[..., second_ones] = a * cos - sign * b * sin, sign * a * sin + b * cos
    return x


def unpacked(packed: Tensor, *, reverse: bool = False, signed: bool = False, all_bits: bool = False) -> Tensor:
    """The four weights of each word, in float64: [num_rows, width]."""
    order = [3, 2, 1, 0] if reverse else [0, 1, 2, 3]
    weights = torch.stack([(packed.long() >> 8 * byte) & (-1 if all_bits else 0xFF) for byte in order], -1).flatten(1)
    return (torch.where(weights > 127, weights - 256, weights) if signed else weights).double()


def dequantized(weights: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """(q - zero) * scale, in float64."""
    scale, zero = (part.double().repeat_interleave(group, 1)[:, : weights.shape[1]] for part in (scales, zeros))
    return (weights - zero) * scale
