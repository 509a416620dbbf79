"""Comparing what came back with what was expected: the first element that differs. Built in chapter 00."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """The first place where two values part, and what stands there."""

    place: str
    expected: str
    got: str
    problem: str = ""


def first_difference(
    got: Any, expected: Any, atol: float = 0.0, rtol: float = 0.0, place: str = ""
) -> Difference | None:
    """None when `got` equals `expected`, floats within `atol + rtol * |expected|`; NaN equals NaN."""
    if _is_array(expected):
        return _array_difference(got, expected, atol, rtol, place)
    if isinstance(expected, Mapping):
        return _mapping_difference(got, expected, atol, rtol, place)
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        return _sequence_difference(got, expected, atol, rtol, place)
    if _is_array(got) and got.ndim == 0:
        got = got.item()
    if _number_equal(got, expected, atol, rtol):
        return None
    problem = f"{_a(_kind(got))}, not {_a(_kind(expected))}" if _kind(got) != _kind(expected) else ""
    return Difference(place, short(expected), short(got), problem)


def same(left: Any, right: Any) -> bool:
    return first_difference(left, right) is None


def short(value: Any, limit: int = 120) -> str:
    """A value in one line: small tensors with their values, large ones by shape and dtype."""
    if _is_array(value):
        kind = "tensor" if hasattr(value, "detach") else "array"
        size = math.prod(value.shape)
        if size <= 12:
            text = f"{kind}({_rounded(value.tolist())})"
            return text if len(text) <= limit else f"{text[: limit - 3]}..."
        return f"{kind}{list(value.shape)} {str(value.dtype).replace('torch.', '')}"
    text = repr(_rounded(value)) if isinstance(value, (float, list, tuple)) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def kind_of(value: Any) -> str:
    """What a value is, for a sentence: "an int", "None", "a float32 tensor"."""
    if _is_array(value) and hasattr(value, "detach"):
        return _a(f"{str(value.dtype).replace('torch.', '')} tensor")
    return _a(_kind(value))


def kind_wanted(kind: Any) -> str:
    """`kind_of` every value of a Python type or of a torch dtype."""
    return _a(kind.__name__) if isinstance(kind, type) else _a(f"{str(kind).replace('torch.', '')} tensor")


def _array_difference(got, expected, atol, rtol, place) -> Difference | None:
    if not _is_array(got):
        return Difference(place, short(expected), short(got), f"{_a(_kind(got))}, not {_a(_kind(expected))}")
    if tuple(got.shape) != tuple(expected.shape):
        return Difference(place, f"shape {list(expected.shape)}", f"shape {list(got.shape)}", "another shape")
    if _family(got) != _family(expected):
        return Difference(place, f"dtype {expected.dtype}", f"dtype {got.dtype}", "another kind of number")
    left, right = _numpy(got), _numpy(expected)
    wrong = _mismatch(left, right, atol, rtol)
    if not wrong.any():
        return None
    import numpy

    index = tuple(int(i) for i in numpy.argwhere(wrong)[0])
    count = int(wrong.sum())
    problem = f"{count} of {wrong.size} elements differ, this is the first" if wrong.size > 1 else ""
    return Difference(
        place + (str(list(index)) if index else ""), short(right[index].item()), short(left[index].item()), problem
    )


def _mismatch(left, right, atol, rtol):
    import numpy

    if left.dtype.kind not in "fc":
        return left != right
    with numpy.errstate(invalid="ignore", over="ignore"):
        equal = (left == right) | (numpy.isnan(left) & numpy.isnan(right))
        near = numpy.isfinite(left) & numpy.isfinite(right) & (abs(left - right) <= atol + rtol * abs(right))
    return ~(equal | near)


def _mapping_difference(got, expected, atol, rtol, place) -> Difference | None:
    if not isinstance(got, Mapping):
        return Difference(place, short(expected), short(got), f"{_a(_kind(got))}, not a dict")
    for key in expected:
        if key not in got:
            return Difference(place, f"a key {key!r}", f"keys {short(list(got))}", "a key is missing")
    for key in got:
        if key not in expected:
            return Difference(place, f"keys {short(list(expected))}", f"also {key!r}", "a key too many")
    return _first(first_difference(got[key], expected[key], atol, rtol, f"{place}[{key!r}]") for key in expected)


def _sequence_difference(got, expected, atol, rtol, place) -> Difference | None:
    if not isinstance(got, Sequence) or isinstance(got, (str, bytes)):
        return Difference(place, short(expected), short(got), f"{_a(_kind(got))}, not {_a(_kind(expected))}")
    found = _first(first_difference(g, e, atol, rtol, f"{place}[{i}]") for i, (g, e) in enumerate(zip(got, expected)))
    if found is None and len(got) != len(expected):
        return Difference(place, _sized(expected), _sized(got), "another length")
    return found


def _sized(values: Sequence) -> str:
    return f"{len(values)} element{'' if len(values) == 1 else 's'}: {short(values)}"


def _first(differences) -> Difference | None:
    return next((difference for difference in differences if difference is not None), None)


def _number_equal(got: Any, expected: Any, atol: float, rtol: float) -> bool:
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        if got == expected or (math.isnan(got) and math.isnan(expected)):
            return True
        return math.isfinite(got) and math.isfinite(expected) and abs(got - expected) <= atol + rtol * abs(expected)
    if isinstance(expected, bool) != isinstance(got, bool):
        return False
    return bool(got == expected)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "tolist")


def _numpy(value):
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.double() if value.dtype.is_floating_point else value).numpy()


def _family(value) -> str:
    name = str(value.dtype)
    return "bool" if "bool" in name else "float" if "float" in name else "int" if "int" in name else name


def _kind(value: Any) -> str:
    if _is_array(value):
        return "tensor" if hasattr(value, "detach") else "array"
    return "None" if value is None else type(value).__name__


def _a(kind: str) -> str:
    return kind if kind == "None" else f"an {kind}" if kind[0] in "aeio" else f"a {kind}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_rounded(v) for v in value)
    return value
