"""How values are told in one line, and which classes are a library's own. Built in chapter 00."""

from __future__ import annotations

import math
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

_MOST_SHOWN = 60  # elements: a line ends before, whatever they are
_LIBRARIES = ("minillm", "numpy", "torch")
_MADE_IN_PYTHON = 1 << 9  # a flag of a class (Py_TPFLAGS_HEAPTYPE); NumPy's own arrays and numbers do not have it
_FOLDERS = (str(Path(__file__).resolve().parents[2]), str(Path(os.__file__).resolve().parent), "<frozen", "<string>")


def short(value: Any, limit: int = 120, digits: int = 6) -> str:
    """A value in one line: small tensors with their values, large ones by shape and dtype."""
    try:
        return _cut(_told(value, digits), limit)
    except Exception as error:  # an answer's own __repr__
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def apart(expected: Any, got: Any) -> tuple[str, str]:
    """Both in one line, with as many digits as it takes until they differ."""
    if isinstance(expected, (str, bytes)) and type(got) is type(expected) and len(expected) > 100 < len(got):
        start = next((i for i, pair in enumerate(zip(expected, got)) if pair[0] != pair[1]), len(expected)) - 30
        if start > 0:
            return f"...{short(expected[start:], 110)}", f"...{short(got[start:], 110)}"
    for digits in (6, 8, 10, 12, 14, 16, 17):
        texts = short(expected, digits=digits), short(got, digits=digits)
        if texts[0] != texts[1]:
            break
    return texts


def kind_of(value: Any) -> str:
    """What a value is, for a sentence: "an int", "None", "a float32 tensor"."""
    if is_array(value) and hasattr(value, "detach"):
        return with_article(f"{dtype_of(value)} tensor")
    return with_article(name_of_kind(value))


def kind_wanted(kind: Any) -> str:
    """`kind_of` every value of a Python type or of a torch dtype."""
    return (
        with_article(kind.__name__)
        if isinstance(kind, type)
        else with_article(f"{str(kind).replace('torch.', '')} tensor")
    )


def is_array(value: Any) -> bool:
    """Whether this is a tensor, an array, or one of NumPy's numbers, and nothing derived from them.

    An answer's own subclass of a tensor may say of itself that it equals everything.
    """
    kind = type(value)
    if not (hasattr(kind, "tolist") and hasattr(kind, "shape")):
        return False
    if kind.__module__ == "numpy" and not kind.__flags__ & _MADE_IN_PYTHON:
        return True
    torch = sys.modules.get("torch")
    return torch is not None and kind in (torch.Tensor, torch.nn.Parameter)


def of_library(kind: type) -> bool:
    """Whether a class is one of Python, the package, NumPy or torch, and no answer's own under a borrowed name."""
    root = str(kind.__module__).split(".")[0]
    if root not in _LIBRARIES and (root not in sys.stdlib_module_names or root == "__main__"):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind and not any(map(_written_elsewhere, kind.__mro__))


def _written_elsewhere(kind: type) -> bool:
    """Whether a method's code is in no file of a library's: an answer can put its class into a library's module."""
    methods = (getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(kind).values())
    files = {method.__code__.co_filename for method in methods if isinstance(method, types.FunctionType)}
    return any(not file.startswith(_FOLDERS) and "-packages" not in file for file in files)


def dtype_of(value) -> str:
    return str(value.dtype).replace("torch.", "")


def name_of_kind(value: Any) -> str:
    if is_array(value):
        return "tensor" if hasattr(value, "detach") else type(value).__name__.replace("ndarray", "array")
    return "None" if value is None else type(value).__name__


def with_article(kind: str) -> str:
    return kind if kind == "None" else f"an {kind}" if kind[0] in "aeioAEIO" else f"a {kind}"


def _told(value: Any, digits: int) -> str:
    if type(value) is int:
        return repr(value)
    if type(value) is float:
        return repr(float(f"{value:.{digits}g}"))
    if is_array(value) and (hasattr(value, "detach") or type(value).__name__ == "ndarray"):
        kind = "tensor" if hasattr(value, "detach") else "array"
        if math.prod(value.shape) > 12:
            return f"{kind}{list(value.shape)} {dtype_of(value)}"
        return f"{kind}({_told(value.tolist(), digits)})"
    if type(value) in (list, tuple):
        inside = ", ".join(_told(v, digits) for v in value[:_MOST_SHOWN])
        return f"[{inside}]" if type(value) is list else f"({inside}{',' * (len(value) == 1)})"
    if type(value) is dict:
        pairs = list(value.items())[:_MOST_SHOWN]
        return "{" + ", ".join(f"{_told(k, digits)}: {_told(v, digits)}" for k, v in pairs) + "}"
    if type(value) in (set, frozenset) and {type(one) for one in value} in ({int}, {str}):
        text = "{" + ", ".join(map(repr, sorted(value))) + "}"
        return text if type(value) is set else f"frozenset({text})"
    return re.sub(r"\s*\n\s*", " ", repr(value))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
