"""What a kernel is measured on. Built in chapter 12."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Case:
    """One shape of one kernel. `make` gives the inputs; each candidate takes them and returns the output."""

    name: str
    make: Callable[[], tuple]
    candidates: dict[str, Callable[..., Tensor]]  # ours first
    num_bytes: int  # that have to move
    flops: int = 0
    tolerance: float = 2e-2
    unchecked: str = ""  # a candidate that is given other inputs on purpose

    @property
    def ours(self) -> str:
        return next(iter(self.candidates))
