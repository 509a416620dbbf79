"""Comparing what came back with what was expected: the first element that differs. Built in chapter 00.

No comparison calls a method that an answer brings along: an object whose `__eq__` always says yes is of another kind.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
import math
import operator
import sys
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from minillm.book.checks.wording import (
    apart,
    dtype_of,
    is_array,
    kind_of,
    name_of_kind,
    of_library,
    short,
    with_article,
)

_DICTS = (dict, collections.defaultdict, collections.OrderedDict, collections.Counter)
_SEQUENCES = (list, tuple, range, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ATOMS = frozenset(_PLAIN)


@dataclass(frozen=True)
class Difference:
    """The first place where two values part, and what stands there."""

    place: str
    expected: str
    got: str
    problem: str = ""


def first_difference(
    got: Any,
    expected: Any,
    atol: float = 0.0,
    rtol: float = 0.0,
    place: str = "",
    *,
    kinds: bool = True,
    dtypes: bool = False,
) -> Difference | None:
    """None when `got` equals `expected`, floats within `atol + rtol * |expected|`; NaN equals NaN.

    kinds:  a tuple is no list, a float no int, a bool no int, and NumPy's numbers are not Python's.
            (An int is taken for a float, as Python's own annotations do.) False: only the values count.
    dtypes: float32 is no float64. False: of arrays and tensors only int, float or bool counts.
    """
    torch = sys.modules.get("torch")
    # a mode that an answer left on would stand in for torch's functions, those of the comparison among them
    with torch._C.DisableTorchFunction() if torch else contextlib.nullcontext():
        return _Comparison(atol, rtol, kinds, dtypes).of(got, expected, place)


def same(left: Any, right: Any, atol: float = 0.0, rtol: float = 0.0, *, kinds: bool = True) -> bool:
    """Whether `first_difference` finds none."""
    return first_difference(left, right, atol, rtol, kinds=kinds) is None


def modes_on() -> int:
    """How many modes of torch's stand in for its operations, as a `TorchDispatchMode` does."""
    torch = sys.modules.get("torch")
    return torch._C._len_torch_dispatch_stack() if torch else 0


def end_modes(count: int) -> bool:
    """End the last `count` of them; whether there were any."""
    for _ in range(count):
        sys.modules["torch"]._C._pop_torch_dispatch_stack(None)
    return count > 0


class _Comparison:
    """One comparison: tolerances, and what counts as another kind."""

    def __init__(self, atol: float, rtol: float, kinds: bool, dtypes: bool) -> None:
        self.atol, self.rtol, self.kinds, self.dtypes = atol, rtol, kinds, dtypes
        self.open: set[tuple[int, int]] = set()  # objects that are being compared, where one holds itself

    def of(self, got: Any, expected: Any, place: str) -> Difference | None:
        if got is expected or _plainly_equal(got, expected):
            return None
        if not self.kinds and is_array(got) and not is_array(expected) and tuple(got.shape) == ():
            got = _numpy(got).item()
        if not self._kinds_agree(got, expected):
            return self._another_kind(got, expected, place)
        if is_array(expected):
            return self._array(got, expected, place)
        if isinstance(expected, Mapping) and isinstance(got, Mapping):
            return self._mapping(got, expected, place)
        if isinstance(expected, AbstractSet) and isinstance(got, AbstractSet):
            return self._set(got, expected, place)
        if isinstance(expected, _SEQUENCES):
            return self._sequence(got, expected, place)
        if isinstance(expected, _PLAIN):
            return None if self._number(got, expected) else Difference(place, *apart(expected, got))
        return self._object(got, expected, place)

    def _kinds_agree(self, got: Any, expected: Any) -> bool:
        kind, wanted = type(got), type(expected)
        if is_array(expected):
            return is_array(got) and hasattr(got, "detach") == hasattr(expected, "detach")
        if kind is wanted or (wanted is float and kind is int):
            return True
        if any(one.__name__ == "Size" and of_library(one) for one in (kind, wanted)):  # the shape of a tensor
            return isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple))
        if wanted in _DICTS:
            return kind in _DICTS
        if self.kinds or wanted is bool:
            return False
        for family in (_SEQUENCES, (set, frozenset)):
            if isinstance(expected, family):
                return isinstance(got, family) and of_library(kind)
        return wanted in (int, float) and kind in (int, float)

    def _another_kind(self, got: Any, expected: Any, place: str) -> Difference:
        kind, wanted = kind_of(got), kind_of(expected)
        problem = (
            f"{kind}, not {wanted}" if kind != wanted else f"{kind} of {type(got).__module__}, not the one asked for"
        )
        if is_array(expected) and not is_array(got):
            problem = f"{kind}, not {with_article(name_of_kind(expected))}"
        return Difference(place, short(expected), short(got), problem)

    def _array(self, got: Any, expected: Any, place: str) -> Difference | None:
        if tuple(got.shape) != tuple(expected.shape):
            return Difference(place, f"shape {list(expected.shape)}", f"shape {list(got.shape)}", "another shape")
        if (dtype_of(got) != dtype_of(expected)) if self.dtypes else (_family(got) != _family(expected)):
            problem = "another dtype" if _family(got) == _family(expected) else "another kind of number"
            return Difference(place, f"dtype {expected.dtype}", f"dtype {got.dtype}", problem)
        left, right = _numpy(got), _numpy(expected)
        wrong = _mismatch(left, right, self.atol, self.rtol)
        if not wrong.any():
            return None
        import numpy

        index = tuple(int(i) for i in numpy.argwhere(wrong)[0])
        problem = f"{int(wrong.sum())} of {wrong.size} elements differ, this is the first" if wrong.size > 1 else ""
        at = place + (str(list(index)) if index else "")
        return Difference(at, *apart(right[index].item(), left[index].item()), problem)

    def _mapping(self, got: Mapping, expected: Mapping, place: str) -> Difference | None:
        known = {type(key) for key in expected}
        strange = [key for key in got if not _can_be_key(key, known)]
        if not strange and self.kinds and len(got) == len(expected):  # True is no 1
            kinds = [sorted(map(name_of_kind, one)) for one in (expected, got)]
            strange = [key for key in got if kinds[0] != kinds[1] and type(key) not in known]
        if strange:
            return Difference(place, f"keys {short(list(expected))}", f"also {short(strange[0])}", "a key too many")
        for key in expected:
            if key not in got:
                return Difference(place, f"a key {short(key)}", f"keys {short(list(got))}", "a key is missing")
        for key in got:
            if key not in expected:
                return Difference(place, f"keys {short(list(expected))}", f"also {short(key)}", "a key too many")
        return _first(self.of(got[key], expected[key], f"{place}[{key!r}]") for key in expected)

    def _set(self, got: AbstractSet, expected: AbstractSet, place: str) -> Difference | None:
        known = {type(element) for element in expected} | set(_PLAIN)
        strange = [element for element in got if not _can_be_key(element, known)]
        alike = not self.kinds or sorted(map(name_of_kind, got)) == sorted(map(name_of_kind, expected))
        if not strange and alike and got == expected:
            return None
        return Difference(place, *apart(expected, got))

    def _sequence(self, got: Sequence, expected: Sequence, place: str) -> Difference | None:
        pairs = enumerate(zip(got, expected))
        found = _first(self.of(g, e, f"{place}[{i}]") for i, (g, e) in pairs)
        if found is None and len(got) != len(expected):
            return Difference(place, _sized(expected), _sized(got), "another length")
        return found

    def _number(self, got: Any, expected: Any) -> bool:
        if type(expected) in (int, float) and type(got) in (int, float):
            if got == expected or (math.isnan(got) and math.isnan(expected)):
                return True
            close = type(expected) is float and math.isfinite(got) and math.isfinite(expected)
            return close and abs(got - expected) <= self.atol + self.rtol * abs(expected)
        return bool(got == expected)  # both of one built-in type, or of a library's subclass of it

    def _object(self, got: Any, expected: Any, place: str) -> Difference | None:
        if (id(got), id(expected)) in self.open:
            return None
        self.open.add((id(got), id(expected)))
        kind = type(expected)
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind) if field.compare]
        elif isinstance(expected, enum.Enum) or kind.__eq__ is object.__eq__:
            return Difference(place, *apart(expected, got), "another object")
        elif of_library(kind):
            return None if bool(expected == got) else Difference(place, *apart(expected, got))
        else:
            names = sorted(vars(expected).keys() | vars(got).keys()) if hasattr(expected, "__dict__") else []
        absent = object()
        fields = [(name, getattr(got, name, absent), getattr(expected, name, absent)) for name in names]
        return _first(self.of(g, e, f"{place}.{name}") for name, g, e in fields)


def _plainly_equal(got: Any, expected: Any) -> bool:
    """A fast yes for large containers of plain values; no is no verdict."""
    kind = type(expected)
    if type(got) is not kind or kind not in (list, tuple, dict, set) or len(got) != len(expected):
        return False
    if kind is set:
        first = type(next(iter(expected), None))
        agree = all(map(operator.is_, map(type, itertools.chain(got, expected)), itertools.repeat(first)))
        return first in _PLAIN and agree and got == expected
    for left, right in ((got, expected), (got.values(), expected.values()) if kind is dict else ((), ())):
        if not all(map(operator.is_, map(type, left), map(type, right))) or not _ATOMS.issuperset(map(type, right)):
            return False
    return got == expected


def _can_be_key(key: Any, known: set[type]) -> bool:
    """Whether a key may be looked up among others: of a built-in type, or of one that is expected."""
    if isinstance(key, (tuple, frozenset)) and type(key) in (tuple, frozenset):
        return all(_can_be_key(part, known) for part in key)
    return type(key) in known or type(key) in _PLAIN or of_library(type(key))


def _mismatch(left, right, atol, rtol):
    import numpy

    if left.dtype.kind not in "fc":
        return left != right
    with numpy.errstate(invalid="ignore", over="ignore"):
        equal = (left == right) | (numpy.isnan(left) & numpy.isnan(right))
        near = numpy.isfinite(left) & numpy.isfinite(right) & (abs(left - right) <= atol + rtol * abs(right))
    return ~(equal | near)


def _sized(values: Sequence) -> str:
    return f"{len(values)} element{'' if len(values) == 1 else 's'}: {short(values)}"


def _first(differences) -> Difference | None:
    return next((difference for difference in differences if difference is not None), None)


def _numpy(value):
    import numpy

    if not hasattr(value, "detach"):
        return numpy.asarray(value)
    import torch

    value = torch.Tensor.detach(value).cpu()  # not value.detach(): an answer may have put its own there
    return (value.double() if value.dtype.is_floating_point else value).numpy()


def _family(value) -> str:
    if kind := getattr(value.dtype, "kind", ""):  # NumPy's; a field of a structured dtype may be called "float"
        return {"b": "bool", "f": "float", "i": "int", "u": "int"}.get(kind, kind)
    name = str(value.dtype)
    return "bool" if "bool" in name else "float" if "float" in name else "int" if "int" in name else name
