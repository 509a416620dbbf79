"""Kernels and launchers on their way to another process. Built in chapter 10.

Interpreted and compiled kernels cannot live in one process (minillm.kernels.language), so what is interpreted on a
machine with a GPU, and what is compiled on one without, goes to a process of its own. A function of an installed module
goes there as its name; a function of a notebook goes as its source, with the functions, modules and numbers it names.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

import torch

from minillm.kernels.language import MODE, tl


def pack(function: Callable, helpers: Sequence[Callable] = ()) -> dict[str, str]:
    """What `unpack` needs to find or rebuild `function`, a plain function or a `@triton.jit` one: JSON of strings.

    What the source of a notebook's function names goes along: other functions, modules, numbers, strings, dtypes.
    `helpers` are functions to add that it does not name itself. Raises LookupError for a function without source.
    """
    inner = plain(function)
    if home := address(inner):
        return dict(zip(("module", "name"), home, strict=True))
    found: dict[str, str] = {}  # name -> the lines that define it; what a definition names comes before it
    for helper in helpers:
        _collect(plain(helper).__name__, helper, found, set())
    _collect(inner.__name__, function, found, set())
    return {"source": "\n\n".join(text for text in found.values()) + "\n", "name": inner.__name__}


def unpack(packed: dict[str, str], folder: Path) -> Callable:
    """The function that `pack` packed, as this process decorates it.
    `folder` keeps its source as long as it is used."""
    if "module" in packed:
        found = importlib.import_module(packed["module"])
        for part in packed["name"].split("."):
            found = getattr(found, part)
        return found
    name = f"shipped_{sum(1 for _ in folder.glob('shipped_*.py'))}"
    file = folder / f"{name}.py"
    file.write_text(packed["source"])  # a file, for Triton reads the source of what it decorates
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, packed["name"])


def run_module(module: str, *arguments: str, interpret: bool, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` with Triton interpreting or compiling, this process's path,
    and `text` to read."""
    environment = dict(os.environ, TRITON_INTERPRET="1" if interpret else "0")
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment)


def last_line(text: str) -> str:
    """The line that says what went wrong: the last one of a traceback or of a compiler's log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"


def plain(function: Callable) -> FunctionType:
    """The Python function under `@triton.jit` and other decorators. TypeError where there is none."""
    if MODE == "absent":
        raise RuntimeError("Triton is not installed here (it needs Linux on x86-64): kernels cannot be shipped")
    inner = function
    while not isinstance(inner, FunctionType) and hasattr(inner, "fn"):
        inner = inner.fn
    inner = inspect.unwrap(inner)
    if not isinstance(inner, FunctionType):
        raise TypeError(f"{function!r} is neither a Python function nor a kernel made of one")
    return inner


def address(value: object) -> tuple[str, str] | None:
    """Module and qualified name under which another process can import this very object, or None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None) or ""
    found = sys.modules.get(module) if module and module != "__main__" else None
    if found is None or not name or not (getattr(found, "__file__", None) or module in sys.builtin_module_names):
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    same = found is value or (isinstance(value, FunctionType) and found is not None and _is_made_of(found, value))
    return (module, name) if same else None


def _is_made_of(found: object, function: FunctionType) -> bool:
    try:
        return plain(found) is function
    except TypeError:
        return False


def _collect(name: str, value: object, found: dict[str, str], begun: set[str]) -> None:
    """Add the lines that define `name` to `found`, after the lines that define what those name."""
    if name in found or name in begun:
        return
    begun.add(name)
    if isinstance(value, ModuleType):
        found[name] = _import_of(name, value)
        return
    if (written := literal(value)) is not None:
        found[name] = f"{name} = {written}"
        return
    try:
        inner = plain(value)
    except TypeError:
        inner = value  # a class, a built-in function, or some object of the notebook
    if (home := address(inner)) and "." not in home[1]:
        found[name] = f"from {home[0]} import {home[1]} as {name}"
    elif isinstance(inner, FunctionType):
        source = _source(inner)
        around = {**inner.__globals__, **_closure(inner)}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and node.id in around and node.id != inner.__name__:
                _collect(node.id, around[node.id], found, begun)
        found[name] = source + (f"\n{name} = {inner.__name__}" if name != inner.__name__ else "")
    # Anything else stays behind: where it is needed, the other process says NameError with its name.


def _import_of(name: str, module: ModuleType) -> str:
    # Triton comes from the module that chose its mode: another import of it could be of another mode.
    ours = {"triton": "triton", "triton.language": "tl"}
    if module.__name__ in ours:
        return f"from minillm.kernels.language import {ours[module.__name__]} as {name}"
    return f"import {module.__name__} as {name}"


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError) as error:
        raise LookupError(
            f"{function.__qualname__} has no source to ship ({error}); define it in a file or a cell"
        ) from error


def _closure(function: FunctionType) -> dict[str, object]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def literal(value: object) -> str | None:
    """Python text for a number, string, dtype, constexpr or tuple of these; None for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.dtype):
        return f"__import__('torch').{str(value).removeprefix('torch.')}"
    if isinstance(value, tl.constexpr):
        inner = literal(value.value)
        return None if inner is None else f"{LANGUAGE}.constexpr({inner})"
    if isinstance(value, tl.dtype):
        names = [name for name, other in vars(tl).items() if isinstance(other, tl.dtype) and other == value]
        return f"{LANGUAGE}.{names[0]}" if names else None
    if isinstance(value, tuple):
        parts = [literal(part) for part in value]
        return None if None in parts else "(" + "".join(f"{part}, " for part in parts) + ")"
    return None


LANGUAGE = "__import__('minillm.kernels.language', fromlist=['tl']).tl"
