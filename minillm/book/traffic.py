"""Counting what a kernel reads and writes, access by access, in Triton's interpreter. Built in chapter 10.

    with record_traffic() as traffic:
        rms_norm(x, weight, 1e-6)
    traffic.bytes_loaded, traffic.loads("x")

The interpreter runs a kernel in Python and goes to memory in four functions. While a recording is on, tensor arguments
are handed to the kernel under made-up addresses, each tensor far from the next; the four functions look the tensor up,
check the bounds, write the access down, and go on with the true address. So an access beyond a tensor's end is an error
that names it, where a GPU would read whatever lies there. What is counted is what the program asks for: caches, and the
32-byte sectors in which a GPU fetches, are not in it.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from minillm.book.recorder import Access, Launch, OutOfBounds, Recorder
from minillm.book.torch_traffic import record_torch_traffic
from minillm.kernels.language import MODE
from minillm.kernels.shipping import last_line, pack, run_module, unpack

__all__ = ["Access", "Launch", "OutOfBounds", "Traffic", "count_traffic", "record_torch_traffic", "record_traffic"]


@dataclass
class Traffic:
    """What the launches of a recording asked of memory."""

    launches: list[Launch] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list, repr=False)

    @property
    def bytes_loaded(self) -> int:
        """Bytes of all loads; what is loaded twice counts twice."""
        return sum(access.num_bytes for access in self.loads())

    @property
    def bytes_stored(self) -> int:
        """Bytes of all stores; what is stored twice counts twice."""
        return sum(access.num_bytes for access in self.stores())

    @property
    def bytes(self) -> int:
        """Loaded and stored together."""
        return self.bytes_loaded + self.bytes_stored

    @property
    def unique_bytes_loaded(self) -> int:
        """Bytes of all loads, each address counted once in a launch: what a cache of boundless size would fetch."""
        return self._unique("load")

    @property
    def unique_bytes_stored(self) -> int:
        """Bytes of all stores, each address counted once in a launch."""
        return self._unique("store")

    def loads(self, tensor: str | None = None) -> list[Access]:
        """The loads, in order: all, or those of one of the kernel's parameters."""
        return [access for access in self.accesses if access.kind == "load" and tensor in (None, access.tensor)]

    def stores(self, tensor: str | None = None) -> list[Access]:
        """The stores, in order: all, or those of one of the kernel's parameters."""
        return [access for access in self.accesses if access.kind == "store" and tensor in (None, access.tensor)]

    def _unique(self, kind: str) -> int:
        groups: dict[tuple[int, int], list[np.ndarray]] = {}
        for access in self.accesses:
            if access.kind == kind:
                key = (access.launch_index, access.itemsize)
                groups.setdefault(key, []).append(access.address + access.elements * access.itemsize)
        return sum(len(np.unique(np.concatenate(parts))) * size for (_, size), parts in groups.items())


@contextlib.contextmanager
def record_traffic(*, poison: bool = False) -> Iterator[Traffic]:
    """Record every access of the kernels launched in this block, and check its bounds.

    Raises RuntimeError where kernels are not interpreted (`count_traffic` counts there too), and, out of the launch,
    OutOfBounds when a program leaves a tensor: a view ends where its own elements end, not where its storage does.

    poison: lanes that a load masks without an `other` hold NaN (float16 to float64). On a GPU what they hold is
            undefined;
    the interpreter alone makes it 0.
    """
    if MODE != "interpreted":
        raise RuntimeError(
            f"Triton is {MODE} here; traffic is recorded in its interpreter (TRITON_INTERPRET=1): use count_traffic"
        )
    interpreter = importlib.import_module("triton.runtime.interpreter")
    traffic = Traffic()
    with Recorder(interpreter, traffic.launches, traffic.accesses, poison).in_place():
        yield traffic


def count_traffic(
    kernel_or_launcher: Callable, *args, grid: tuple[int, ...] | None = None, helpers: Sequence[Callable] = (), **kwargs
) -> Traffic:
    """The traffic of `kernel_or_launcher(*args, **kwargs)`, or with a `grid` of `kernel_or_launcher[grid](...)`.

    Where kernels are interpreted the call is made here and its results stand. Where they are compiled, a process of its
    own interprets it on copies of the arguments, in the host's memory: the caller's tensors stay as they are. `helpers`
    are functions of the notebook that the call needs and that cannot be found by following names from it.
    """
    if MODE == "interpreted":
        return _count_here(kernel_or_launcher, args, grid, kwargs)
    return _count_apart(kernel_or_launcher, args, grid, helpers, kwargs)


def _count_here(function, args, grid, kwargs) -> Traffic:
    with record_traffic() as traffic:
        (function if grid is None else function[grid])(*args, **kwargs)
    return traffic


def _count_apart(function, args, grid, helpers, kwargs) -> Traffic:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(
            {"function": pack(function, helpers), "args": args, "grid": grid, "kwargs": kwargs}, folder / "call.pt"
        )
        done = run_module("minillm.book.traffic", name, interpret=True)
        if not (folder / "answer.pickle").exists():
            raise RuntimeError(f"counting {getattr(function, '__name__', function)} in a process of its own failed: "
                               f"{last_line(done.stderr)}")  # fmt: skip
        answer = pickle.loads((folder / "answer.pickle").read_bytes())
    if isinstance(answer, OutOfBounds):
        raise answer
    return answer


def answer_call(folder: Path) -> None:
    """The process that interprets: call.pt holds the call, answer.pickle gets its traffic, or where it went astray."""
    call = torch.load(folder / "call.pt", map_location="cpu", weights_only=False)
    try:
        answer = _count_here(unpack(call["function"], folder), call["args"], call["grid"], call["kwargs"])
    except OutOfBounds as error:
        answer = error
    (folder / "answer.pickle").write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    # Under its own name, so that what is pickled can be found.
    from minillm.book import traffic  # noqa: PLW0406

    traffic.answer_call(Path(sys.argv[1]))
