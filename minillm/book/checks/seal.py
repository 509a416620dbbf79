"""Whether what judges an answer is still what was imported: an answer may not rebind it. Built in chapter 00.

In a notebook an answer and its judge live in one process, so this notices what is done plainly and no more. Where a
mark depends on it, `minillm course grade` decides: a fresh process, another seed, and a person who sees the flags.
"""

from __future__ import annotations

import builtins
import copy
import math
import random
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

_BUILTINS = (
    "abs all any bool callable dict enumerate float getattr hasattr id int isinstance issubclass iter len "
    "list map max min next range repr set sorted str sum tuple type vars zip AssertionError Exception"
)
# What the checks rely on: to compare, to copy, to draw cases, to look at the clock.
_RELIED_ON: tuple[tuple[Any, str], ...] = (
    (builtins, _BUILTINS),
    (math, "isclose isnan isfinite prod"),
    (copy, "copy deepcopy"),
    (random.Random, "random randrange randint choice sample shuffle"),
    (time, "process_time"),
    (signal, "signal setitimer"),
    (sys, "settrace gettrace"),
)
_RELIED_ON_IF_THERE = {
    "torch": "equal allclose isclose randn randint Generator",
    "numpy": "isnan isfinite argwhere asarray",
}


class Seal:
    """The functions that judge, as they were when the seal was made."""

    def __init__(self, *modules: types.ModuleType) -> None:
        self._modules = modules
        self._before = dict(self._now())

    def broken(self) -> str | None:
        """The dotted name of the first function that is no longer what it was; None when all are."""
        now = dict(self._now())
        return next((name for name, value in self._before.items() if now.get(name, (None,)) != value), None)

    def _now(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Dotted name -> what stands for it: identities, so that nothing of an answer is asked whether it is equal."""
        there = [(sys.modules[name], names) for name, names in _RELIED_ON_IF_THERE.items() if name in sys.modules]
        for owner, names in (*_RELIED_ON, *there):
            for name in names.split():
                found = next(
                    (vars(one)[name] for one in getattr(owner, "__mro__", (owner,)) if name in vars(one)), None
                )
                yield f"{owner.__name__}.{name}", (id(found),)
        for module in self._modules:
            yield from _functions(module.__name__, vars(module), module.__name__)


def _functions(prefix: str, names: dict[str, Any], module: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What a module and its classes can call: each by itself, functions with their code and defaults."""
    for name, value in list(names.items()):
        if isinstance(value, type) and value.__module__ == module:
            yield f"{prefix}.{name}", (id(value),)
            yield from _functions(f"{prefix}.{name}", dict(vars(value)), module)
        elif isinstance(value, types.FunctionType):
            yield f"{prefix}.{name}", (id(value), id(value.__code__), id(value.__defaults__), id(value.__kwdefaults__))
        elif callable(value):
            yield f"{prefix}.{name}", (id(value),)
