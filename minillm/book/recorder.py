"""Inside Triton's interpreter: who goes where in memory. Built in chapter 10.

The interpreter hands a kernel the addresses of its tensors as numbers, and comes to memory through four native
functions. `Recorder` changes both ends: each tensor gets a made-up address, far from every other,
and the four functions, before they go to the true address, see from the made-up one which tensor is meant,
and how far from its first element.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch.utils._pytree import tree_leaves

MARK = 1 << 62  # in every made-up address, in no true one
SPACING = 1 << 44  # from the made-up address of one tensor to the next


class OutOfBounds(IndexError):
    """A kernel went to memory outside the tensor whose pointer it used."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its name and its grid of programs."""

    name: str
    grid: tuple[int, int, int]

    @property
    def num_programs(self) -> int:
        """How many programs were run."""
        return math.prod(self.grid)


@dataclass(frozen=True, eq=False)
class Access:
    """One load or store of one program: the lanes that the mask let through, in the order of the block."""

    launch_index: int
    program: tuple[int, int, int]
    kind: str  # "load" | "store"; an atomic operation is one of each
    tensor: str | None  # the kernel's parameter; None for an address that came from none of them
    elements: np.ndarray  # int64 [active lanes]: offsets from the tensor's first element, in units of itemsize
    itemsize: int
    address: int = field(default=0, repr=False)  # of the tensor's first element

    @cached_property
    def num_bytes(self) -> int:
        """Bytes asked for: every lane its own, even where two ask for the same."""
        return len(self.elements) * self.itemsize


class Recorder:
    """Stands in for the interpreter's native functions while `in_place()` lasts; `launches` and `accesses` fill up."""

    def __init__(self, interpreter, launches: list[Launch], accesses: list[Access], poison: bool = False) -> None:
        self.interpreter = interpreter
        self.poison = poison
        self.launches = launches
        self.accesses = accesses
        self.native = interpreter._interpreter
        self.convert_argument = interpreter._implicit_cvt
        self.places: list[Place] = []  # of the running launch, by number
        self.expected: list[tuple[object, str]] = []  # its tensors that have no place yet, with their parameters' names
        self.fault: OutOfBounds | None = None

    def __getattr__(self, name: str):
        return getattr(self.native, name)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Hook into the interpreter, and out of it again whatever happens."""
        executor = self.interpreter.GridExecutor
        hooks = [
            (self.interpreter, "_interpreter", self),
            (self.interpreter, "_implicit_cvt", self.convert),
            (executor, "_init_args_hst", self.around_arguments(executor._init_args_hst)),
            (executor, "__call__", self.around_launch(executor.__call__)),
        ]
        if self.poison:
            builder = self.interpreter.InterpreterBuilder
            hooks.append((builder, "create_masked_load", self.around_masked_load(builder.create_masked_load)))
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in hooks]
        try:
            for owner, name, hook in hooks:
                setattr(owner, name, hook)
            yield
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)

    def around_launch(self, call: Callable) -> Callable:
        """GridExecutor.__call__, which runs the programs of one launch."""

        def launch(executor, *args, **kwargs):
            builder = self.interpreter.interpreter_builder
            self.places, self.expected, self.fault = [], [], None
            index, name = len(self.launches), executor.fn.__name__
            builder.grid_dim = (0, 0, 0)
            self.launches.append(Launch(name, builder.grid_dim))
            try:
                return call(executor, *args, **kwargs)
            except Exception:
                if self.fault is not None:  # it arrives wrapped, once for every function it went through
                    raise self.fault from None
                raise
            finally:
                self.launches[index] = Launch(name, tuple(int(n) for n in builder.grid_dim))

        return launch

    def around_arguments(self, initialise: Callable) -> Callable:
        """GridExecutor._init_args_hst, which brings the arguments to the host: here they still have names."""

        def arguments(executor, args, kwargs):
            host_args, host_kwargs = initialise(executor, args, kwargs)
            for name, value in inspect.getcallargs(executor.fn, *host_args, **host_kwargs).items():
                for part in tree_leaves(value):
                    self.expected.append((part if is_pointer(part) else getattr(part, "base", part), name))
            return host_args, host_kwargs

        return arguments

    def around_masked_load(self, load: Callable) -> Callable:
        """InterpreterBuilder.create_masked_load, which fills masked lanes without `other` with zeros:
        here, with NaN."""

        def masked_load(builder, addresses, mask, other, *rest, **options):
            loaded = load(builder, addresses, mask, other, *rest, **options)
            if other is None and np.issubdtype(loaded.data.dtype, np.floating):
                loaded.data = np.where(mask.data, loaded.data, loaded.data.dtype.type(np.nan))
            return loaded

        return masked_load

    def convert(self, argument):
        """_implicit_cvt, which turns an argument into what the kernel sees: for a tensor, a pointer."""
        converted = self.convert_argument(argument)
        if is_pointer(argument):
            known = [position for position, (value, _) in enumerate(self.expected) if value is argument]
            name = self.expected.pop(known[0])[1] if known else None
            place = Place.of(argument, name, len(self.places), converted.handle.data.item())
            self.places.append(place)
            converted.handle.data = np.array([place.made_up], dtype=np.uint64)
        return converted

    def load(self, addresses, mask, other, dtype):
        """Native: the elements at `addresses` where `mask`, else `other`."""
        return self.native.load(self.visit(["load"], addresses, mask, np.dtype(dtype).itemsize), mask, other, dtype)

    def store(self, addresses, values, mask):
        """Native: `values` to `addresses` where `mask`."""
        return self.native.store(self.visit(["store"], addresses, mask, values.itemsize), values, mask)

    def atomic_rmw(self, operation, addresses, values, mask, *order):
        """Native: read, combine, write, where `mask`."""
        true = self.visit(["load", "store"], addresses, mask, values.itemsize)
        return self.native.atomic_rmw(operation, true, values, mask, *order)

    def atomic_cas(self, addresses, compare, values, *order):
        """Native: write where what is there equals `compare`. Counted as a store whether it was one or not."""
        true = self.visit(["load", "store"], addresses, np.ones(addresses.shape, dtype=bool), values.itemsize)
        return self.native.atomic_cas(true, compare, values, *order)

    def visit(self, kinds: list[str], addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> np.ndarray:
        """Check one access and write it down; returns the true addresses, in the shape of the made-up ones."""
        mask = np.broadcast_to(mask, addresses.shape).astype(bool)
        true = addresses.astype(np.uint64)  # a copy
        active = addresses[mask].astype(np.int64)
        numbers = np.where(active & MARK, (active - MARK) // SPACING, -1)
        moved = active.copy()
        for number in np.unique(numbers):  # one tensor, but for a kernel that chooses between pointers lane by lane
            place = self.places[number] if 0 <= number < len(self.places) else Place()
            lanes = numbers == number
            offsets = active[lanes] - place.made_up
            if (wrong := place.first_outside(offsets, itemsize)) is not None:
                self.fault = OutOfBounds(self.complaint(kinds[0], place, wrong, itemsize))
                raise self.fault
            moved[lanes] = offsets + place.true
            for kind in kinds:
                self.accesses.append(
                    Access(
                        len(self.launches) - 1,
                        self.program,
                        kind,
                        place.name,
                        offsets // itemsize,
                        itemsize,
                        place.address,
                    )
                )
        true[mask] = moved.astype(np.uint64)
        return true

    @property
    def program(self) -> tuple[int, int, int]:
        """The program that is running."""
        return tuple(int(i) for i in self.interpreter.interpreter_builder.grid_idx)

    def complaint(self, kind: str, place: Place, offset: int, itemsize: int) -> str:
        """What to say of an access at `offset` bytes from the first element of `place`."""
        size = math.prod(place.shape)
        where = (
            f"{self.launches[-1].name}, program {self.program}: {kind} at element {offset // place.itemsize} of "
            f"{place.name!r}"
        )
        if 0 <= offset and offset + itemsize <= place.num_bytes:
            return f"{where}, between the elements of a view of shape {place.shape} with strides {place.strides}"
        return f"{where}, which has {size} elements, shape {place.shape}: mask the lanes that lie outside"


def is_pointer(argument: object) -> bool:
    """Whether the interpreter hands this argument to a kernel as a pointer."""
    return hasattr(argument, "data_ptr")


@dataclass(frozen=True)
class Place:
    """A tensor argument and its made-up address. Without arguments: memory that belongs to no argument."""

    name: str | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    itemsize: int = 1
    made_up: int = 0
    true: int = 0  # what the interpreter would have used
    address: int = 0

    @classmethod
    def of(cls, argument, name: str | None, number: int, true: int) -> Place:
        """The place of the launch's tensor argument `number`; `true` is what it was converted to."""
        made_up = MARK + number * SPACING + SPACING // 2 + argument.data_ptr() % 4096  # as well aligned as the true one
        tensor = getattr(argument, "base", argument)  # a tensor reinterpreted as another dtype has one
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return cls(name, shape, strides, tensor.element_size(), made_up, true, argument.data_ptr())

    @cached_property
    def num_bytes(self) -> int:
        """From the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    @cached_property
    def dims(self) -> list[tuple[int, int]]:
        """(stride, size) of the dimensions that move, longest stride first; empty where rows lie over each other."""
        dims = sorted(
            (stride, size) for stride, size in zip(self.strides, self.shape, strict=True) if stride and size > 1
        )
        reach = 0
        for stride, size in dims:
            if stride <= reach:
                return []
            reach += stride * (size - 1)
        return dims[::-1]

    def first_outside(self, offsets: np.ndarray, itemsize: int) -> int | None:
        """The first of these byte offsets at which no element of the tensor lies; None where all is well."""
        if not self.made_up:
            return None
        outside = (offsets < 0) | (offsets + itemsize > self.num_bytes)
        rest = offsets // self.itemsize
        for stride, size in self.dims:
            outside |= rest // stride >= size
            rest = rest % stride
        if self.dims:
            outside |= rest != 0
        return int(offsets[outside][0]) if outside.any() else None
