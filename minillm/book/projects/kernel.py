"""Project 3, a kernel: add, normalise and quantize, in counted bytes, programs and launches. Built in chapter 25.

    h = x + residual        the new residual, in place
    y = h / sqrt(mean(h²) + eps) * weight
    scale = max|y| / 127    one for each row, 0 for a row of zeros
    codes = round(y / scale), int8

It is what stands before each product of a model in W8A8 (chapters 10 and 16). The submission is a launcher; its kernels
run in Triton's interpreter, where every access is recorded. The cost is that of a machine with 16 multiprocessors:
program p of a launch runs on multiprocessor p mod 16, and a launch takes as long as the busiest one.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillm.book.projects.scoring import Project, Refused, Score, called
from minillm.book.torch_traffic import record_torch_traffic
from minillm.book.traffic import Traffic, record_traffic
from minillm.kernels.language import MODE, tl, triton

NUM_SMS = 16
PER_LAUNCH, PER_PROGRAM = 4_096, 1_024  # in bytes: what the same time would have moved
TOLERANCE = 1e-5  # of the residual and of a scale, relative to float64


@dataclass(frozen=True)
class Shape:
    """Rows, and elements of a row."""

    rows: int
    size: int


def make_shapes(seed: int) -> list[Shape]:
    """A single row, and a batch; no size is a power of two."""
    rng = random.Random(f"capstone kernel {seed}")
    return [Shape(1, rng.randrange(129, 256)), Shape(rng.randrange(17, 27), rng.randrange(129, 200))]


def score(submission: Callable, seed: int = 0) -> Score:
    """Run the launcher on the shapes of `seed`; the value is the counted cost in bytes, summed over the shapes.

    Raises Refused where a result differs from float64, a kernel leaves its tensors, or torch does the work.
    """
    generator = torch.Generator().manual_seed(seed)
    total: Counter[str] = Counter()
    for shape in make_shapes(seed):
        case = Case.make(shape, generator)
        traffic = case.run(submission)
        case.check()
        total += Counter(counts(traffic))
    return Score(float(total["cost"]), dict(total))


def counts(traffic: Traffic) -> dict[str, int]:
    """What a recording amounts to; `cost` is in bytes."""
    busiest = [Counter() for _ in traffic.launches]
    for launch, busy in zip(traffic.launches, busiest):
        for program in range(launch.num_programs):
            busy[program % NUM_SMS] += PER_PROGRAM
    for access in traffic.accesses:
        launch = traffic.launches[access.launch_index]
        busiest[access.launch_index][_number(access.program, launch.grid) % NUM_SMS] += access.num_bytes
    return {
        "cost": sum(PER_LAUNCH + max(busy.values()) for busy in busiest),
        "launches": len(traffic.launches),
        "programs": sum(launch.num_programs for launch in traffic.launches),
        "loads": len(traffic.loads()),
        "stores": len(traffic.stores()),
        "bytes loaded": traffic.bytes_loaded,
        "bytes stored": traffic.bytes_stored,
    }


def _number(program: tuple[int, int, int], grid: tuple[int, int, int]) -> int:
    """A program's place in its launch: the first axis of the grid runs fastest."""
    return program[0] + grid[0] * (program[1] + grid[1] * program[2])


@dataclass
class Case:
    """One call: its arguments, and what they were before."""

    x: Tensor  # float32 [rows, size]
    residual: Tensor  # float32 [rows, size], in and out
    weight: Tensor  # float32 [size]
    codes: Tensor  # int8 [rows, size], out
    scales: Tensor  # float32 [rows], out
    before: tuple[Tensor, Tensor, Tensor]
    eps: float = 1e-6

    @classmethod
    def make(cls, shape: Shape, generator: torch.Generator) -> Case:
        """Normal numbers; one row of `x + residual` is zero, and one element is an outlier."""
        x, residual = torch.randn(2, shape.rows, shape.size, generator=generator)
        weight = torch.rand(shape.size, generator=generator) + 0.5
        x[0, shape.size // 2] = 40.0
        if shape.rows > 1:
            residual[-1] = -x[-1]
        codes = torch.full((shape.rows, shape.size), -128, dtype=torch.int8)
        scales = torch.full((shape.rows,), float("nan"))
        return cls(x, residual, weight, codes, scales, (x.clone(), residual.clone(), weight.clone()))

    def run(self, submission: Callable) -> Traffic:
        """Launch, and record every access of every program."""
        if MODE != "interpreted":
            raise Refused(f"kernels are {MODE} here, and this project counts in Triton's interpreter: set "
                          "TRITON_INTERPRET=1 before Triton is imported")  # fmt: skip
        arguments = self.x, self.residual, self.weight, self.eps, self.codes, self.scales
        with (
            record_traffic(poison=True) as traffic,
            OutsideLaunches() as outside,
            np.errstate(all="ignore"),
            warnings.catch_warnings(action="ignore"),
        ):
            called(getattr(submission, "__name__", "the launcher"), submission, *arguments)
        if not traffic.launches:
            raise Refused("no Triton kernel was launched")
        if outside.ops:
            raise Refused(f"a torch operation read or wrote numbers outside the kernels: {outside.ops[0][0]}; only "
                          "torch.empty and torch.empty_like are allowed")  # fmt: skip
        for kind, names in (("load", ("x", "residual", "weight")), ("store", ("residual", "codes", "scales"))):
            for name in names:
                if (missing := _untouched(traffic, getattr(self, name), kind)) is not None:
                    raise Refused(f"no kernel {kind}s {name}{missing}: all of it has to come from the kernels' loads, "
                                  "and go through their stores")  # fmt: skip
        return traffic

    def check(self) -> None:
        """Raise Refused at the first result that differs from float64."""
        x, residual, weight = (tensor.double() for tensor in self.before)
        if not torch.equal(self.x, self.before[0]) or not torch.equal(self.weight, self.before[2]):
            raise Refused("x or weight was changed; they are read only")
        h = x + residual
        y = h / (h.square().mean(1, keepdim=True) + self.eps).sqrt() * weight
        scales = y.abs().amax(1) / 127
        _close("residual", self.residual, h, TOLERANCE * h.abs().amax().item())
        _close("scales", self.scales, scales, TOLERANCE * scales.amax().item())
        exact = torch.where(scales[:, None] > 0, y / scales[:, None].clamp(min=1e-300), 0.0)
        _close("codes", self.codes, exact, 0.501)  # half a code, and what float32 may add to it


def _untouched(traffic: Traffic, tensor: Tensor, kind: str) -> list[int] | None:
    """The first element of a contiguous tensor that no program loads, or stores; None where all are."""
    seen = np.zeros(tensor.numel(), dtype=bool)
    for access in traffic.loads() if kind == "load" else traffic.stores():
        start = access.address - tensor.data_ptr() + access.elements * access.itemsize
        places = start[(start >= 0) & (start < tensor.numel() * tensor.itemsize)] // tensor.itemsize
        seen[places] = True
    missing = np.flatnonzero(~seen)
    return [int(place) for place in np.unravel_index(missing[0], tensor.shape)] if len(missing) else None


def _close(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    wrong = ~((got.double() - expected).abs() <= tolerance)  # NaN is wrong, too
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise Refused(
            f"{name}{list(place)} is {got[place].item():.6g}; float64 gives {expected[place].item():.6g}, for a batch "
            f"of shape {list(wrong.shape)}"
        )


class OutsideLaunches(record_torch_traffic):
    """The torch operations of a launcher. The interpreter copies each argument onto itself after a launch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@triton.jit
def add_kernel(x_ptr, residual_ptr, size, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < size
    places = row * size + columns
    h = tl.load(x_ptr + places, inside, other=0.0) + tl.load(residual_ptr + places, inside, other=0.0)
    tl.store(residual_ptr + places, h, inside)


@triton.jit
def norm_kernel(residual_ptr, weight_ptr, y_ptr, size, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < size
    h = tl.load(residual_ptr + row * size + columns, inside, other=0.0)
    weight = tl.load(weight_ptr + columns, inside, other=0.0)
    y = h / tl.sqrt(tl.sum(h * h) / size + eps) * weight
    tl.store(y_ptr + row * size + columns, y, inside)


@triton.jit
def quantize_kernel(y_ptr, codes_ptr, scales_ptr, size, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < size
    y = tl.load(y_ptr + row * size + columns, inside, other=0.0)
    scale = tl.max(tl.abs(y)) / 127
    code = tl.floor(y / tl.maximum(scale, 1e-30) + 0.5)
    tl.store(codes_ptr + row * size + columns, code.to(tl.int8), inside)
    tl.store(scales_ptr + row, scale)


def baseline(x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: Tensor, scales: Tensor) -> None:
    """Three kernels, a program for each row: y goes to memory and comes back."""
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    y = torch.empty_like(x)
    add_kernel[(rows,)](x, residual, size, BLOCK=block)
    norm_kernel[(rows,)](residual, weight, y, size, eps, BLOCK=block)
    quantize_kernel[(rows,)](y, codes, scales, size, BLOCK=block)


PROJECT = Project(
    name="kernel",
    defines="my_launcher",
    value="bytes: the counted cost",
    more=False,
    seeds=(1, 2),
    score=score,
    baseline=baseline,
    imports={
        "minillm.kernels.language": ("next_power_of_2", "tl", "triton"),
        "triton": ("cdiv", "jit", "next_power_of_2"),
        "triton.language": None,
        "torch": ("Tensor", "empty", "empty_like", "float32", "int8"),
    },
)
