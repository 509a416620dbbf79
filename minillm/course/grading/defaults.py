"""What a notebook may set for all that runs after it (torch's default dtype, say), and how it is put back for a check.

The checks draw their cases and compute what they expect under the same settings for everybody.
Loaded privately, as `zygote` does it, this module is in no table of modules.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


def keeper() -> tuple[Callable[[], list[str]], Callable[[], list[str]]]:
    """Two functions. The first puts the settings back and names those that were other; the second ends the modes of
    torch that stand in for its functions, and names them."""
    import numpy
    import torch

    kept: list[tuple[str, Callable[[], Any], Callable[[Any], object], Any]] = []

    def keep(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        kept.append((name, read, write, read()))

    filters = warnings.filters

    def errors() -> list:
        return [one for one in filters if one[0] == "error"]

    def set_errors(before: list) -> None:
        filters[:] = [*before, *(one for one in filters if one[0] != "error")]
        warnings.filters = filters
        mutated()

    mutated = getattr(warnings, "_filters_mutated", lambda: None)
    set_device, stack = torch.set_default_device, torch._C._len_torch_function_stack
    dispatching, pop_dispatching = torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack
    keep("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    keep("torch's default device", torch.get_default_device, lambda device: set_device(None))
    keep("whether torch records gradients", torch.is_grad_enabled, torch._C._set_grad_enabled)
    deterministic = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    keep("torch's deterministic algorithms", *deterministic)
    seterr = numpy.seterr
    keep("what NumPy does about floating-point errors", numpy.geterr, lambda before: seterr(**before))
    keep("which warnings are errors", errors, set_errors)
    output, pop, put = sys.stdout, torch._C._pop_torch_function_stack, vars(sys).__setitem__

    def put_back() -> list[str]:
        put("stdout", output)
        put("stderr", output)
        changed = []
        for name, read, write, before in kept:
            if read() != before:
                changed.append(name)
                write(before)
        return changed

    def end_modes() -> list[str]:
        if stack():
            set_device(None)
        left, dispatched = stack(), dispatching()
        for _ in range(left):
            pop()
        for _ in range(dispatched):
            pop_dispatching(None)
        return ["torch's functions, by a mode that was left on"] if left or dispatched else []

    return put_back, end_modes
