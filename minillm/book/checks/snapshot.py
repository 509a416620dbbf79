"""Copies of arguments: an answer gets its own, and the check keeps what it gave. Built in chapter 00."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

from minillm.book.checks.compare import Difference, first_difference
from minillm.book.checks.wording import is_array, of_library

_AS_THEY_ARE = (
    bool, int, float, complex, str, bytes, range, type(None), type, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.ModuleType, types.GeneratorType,
)  # fmt: skip


_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))


class Given:
    """The arguments of one call, twice: `args` and `kwargs` for the answer, the originals for the check.

    Numbers, containers, arrays and tensors are copied for the answer. Other objects (a pool, a request, a function)
    are one and the same for both, and those that hold data are watched: dataclasses and containers of the package.
    """

    def __init__(self, args: tuple, kwargs: dict) -> None:
        self.originals = args, kwargs
        self._watched: list[tuple[Any, Any]] = []
        self.args, self.kwargs = _copied((args, kwargs), {}, self._watched)

    def swap(self) -> None:
        """The answer gets the originals, and the copies are kept for `change`."""
        self.originals, (self.args, self.kwargs) = (self.args, self.kwargs), self.originals

    def change(self) -> Difference | None:
        """What the call changed in place; None if it left all as it was."""
        pairs = [((self.args, self.kwargs), self.originals), *self._watched]
        found = (first_difference(after, before, dtypes=True) for after, before in pairs)
        return next((difference for difference in found if difference is not None), None)

    def as_they_were(self) -> tuple[tuple, dict]:
        """What was given, as it was before the call."""
        if not self._watched:
            return self.originals
        return detached(self.originals, {id(now): before for now, before in self._watched})


def detached(value: Any, known: dict[int, Any] | None = None) -> Any:
    """A copy that shares nothing that can change, objects of any class included; what cannot be copied stays.

    known: copies to take for objects, by their id.
    """
    return _copied(value, dict(known or {}), None)


def _copied(value: Any, memo: dict[int, Any], watched: list[tuple[Any, Any]] | None) -> Any:
    kind = type(value)
    if isinstance(value, _AS_THEY_ARE):
        return value
    if id(value) not in memo:
        memo[id(value)] = _copy_of(value, kind, memo, watched)
    return memo[id(value)]


def _copy_of(value: Any, kind: type, memo: dict, watched: list | None) -> Any:
    def inside(values) -> Iterator[Any]:
        return (_copied(one, memo, watched) for one in values)

    if kind in (list, dict, tuple) and _ATOMS.issuperset(map(type, value)):
        if kind is not dict or _ATOMS.issuperset(map(type, value.values())):
            return value if kind is tuple else value.copy()
    if kind is list:
        made: Any = []
        memo[id(value)] = made  # at once: a list may hold itself
        made.extend(inside(value))
        return made
    if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
        made = kind(value.default_factory) if kind is collections.defaultdict else kind()
        memo[id(value)] = made
        for key, one in zip(inside(value), inside(value.values())):
            made[key] = one
        return made
    if kind in (set, bytearray):
        return kind(value)
    if kind is collections.deque:
        return kind(inside(value), value.maxlen)
    if isinstance(value, (tuple, frozenset)):  # the same object again if nothing in it can change
        parts = list(inside(value))
        if all(new is old for new, old in zip(parts, value)):
            return value
        return value._make(parts) if hasattr(value, "_make") else kind(parts)
    if is_array(value):
        return value if getattr(value, "requires_grad", False) else copy.deepcopy(value, memo)
    if watched is None or _holds_data(value, kind):
        try:
            own = copy.deepcopy(value, dict(memo) if watched is not None else memo)
        except Exception:  # a lock, a generator, a tensor with a history: it stays as it is, and is not watched
            return value
        if watched is None:
            return own
        watched.append((value, own))
    return value


def _holds_data(value: Any, kind: type) -> bool:
    """A dataclass or a container, of the package or the standard library; no iterator, nothing that can be called."""
    if callable(value) or hasattr(kind, "__next__") or not of_library(kind):
        return False
    return dataclasses.is_dataclass(kind) or (hasattr(kind, "__len__") and hasattr(kind, "__iter__"))
