"""Quoting live source in a notebook, never a copy. Built in chapter 00."""

from __future__ import annotations

import ast
import html
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType


def show(
    obj,
    *,
    only: str | list[str] | None = None,
    between: tuple[str, str] | None = None,
    lines: tuple[int, int] | str | None = None,
    docstrings: bool = True,
) -> Quote:
    """The source of a function, class or module as it is in the package now.

    only:       names of methods of a class (or of definitions in a module); the rest is left out, the header stays.
    between:    two fragments of text; quotes from the line that holds the first to the line that holds the second.
    lines:      `(first, last)` counted from 1 at the top of the quoted object, or "first..last" as two fragments.
    docstrings: False leaves docstrings out.

    Line numbers count from the top of the object, so that a change elsewhere in the file leaves a quote as it is.
    Raises LookupError when the object has no source, or when what was asked for is no longer in it.
    """
    obj = inspect.unwrap(obj) if callable(obj) else obj
    obj = obj.fget if isinstance(obj, property) else obj
    source, label = _source_of(obj)
    numbered = list(enumerate(source.splitlines(), 1))
    if only is not None:
        numbered = _only(numbered, source, [only] if isinstance(only, str) else list(only), label)
    if isinstance(lines, str):
        between, lines = tuple(lines.split("..", 1)), None
    if between is not None:
        numbered = _between(numbered, between, label)
    if lines is not None:
        first, last = lines
        if not 1 <= first <= last <= len(source.splitlines()):
            raise LookupError(f"lines={lines}: {label} has lines 1 to {len(source.splitlines())}")
        numbered = [(n, text) for n, text in numbered if first <= n <= last]
    if not docstrings:
        hidden = _docstring_lines(source)
        numbered = [(n, text) for n, text in numbered if n not in hidden]
    return Quote(label, tuple(_trim(numbered)))


@dataclass(frozen=True)
class Quote:
    """Quoted lines with their numbers; HTML in a notebook, plain text anywhere else."""

    label: str
    numbered: tuple[tuple[int, str], ...]

    @property
    def text(self) -> str:
        """The quoted lines, without numbers, moved to the left margin."""
        return textwrap.dedent("\n".join(text for _, text in self.numbered))

    def __repr__(self) -> str:
        rows = [f"{mark} {text}".rstrip() for mark, text in zip(self._marks(), self.text.split("\n"), strict=True)]
        return "\n".join([self.label, *rows])

    def _repr_html_(self) -> str:
        box = "border:1px solid #d0d7de;border-radius:6px;overflow:hidden;margin:6px 0;background:#f8f9fa;color:#24292f"
        head = "padding:4px 12px;background:#eef1f4;border-bottom:1px solid #d0d7de;font:12px sans-serif;color:#57606a"
        pre = (
            "margin:0;padding:8px 12px;background:transparent;color:inherit;"
            "font:12.5px/1.45 monospace;white-space:pre;overflow-x:auto"
        )
        gutter = "color:#9aa3ad;user-select:none"
        rows = zip(self._marks(), _highlight(self.text).split("\n"), strict=True)
        code = "\n".join(f'<span style="{gutter}">{mark}  </span>{line}' for mark, line in rows)
        return (
            f'<div style="{box}"><div style="{head}">{html.escape(self.label)}</div>'
            f'<pre style="{pre}">{code}</pre></div>'
        )

    def _marks(self) -> list[str]:
        """Line numbers, right-aligned; three dots where lines were left out."""
        width = len(str(self.numbered[-1][0]))
        return [(str(number) if number else "⋮").rjust(width) for number, _ in self.numbered]


def _source_of(obj) -> tuple[str, str]:
    """Dedented source and a caption such as `minillm/model/layers.py · RMSNorm.forward`."""
    if isinstance(getattr(obj, "fn", None), FunctionType):
        obj = obj.fn  # the function under @triton.jit
    try:
        source, file = inspect.getsource(obj), inspect.getsourcefile(obj)
    except (TypeError, OSError) as error:
        raise LookupError(f"{obj!r} has no Python source to quote: {error}") from error
    module = obj if isinstance(obj, ModuleType) else inspect.getmodule(obj)
    parts = (module.__name__ if module else "").split(".")
    path = (
        "/".join([*parts[:-1], Path(file).name]) if Path(file).stem != "__init__" else "/".join([*parts, "__init__.py"])
    )
    if parts == ["__main__"] or file.startswith("<") or "ipykernel" in file:
        path = "this notebook"
    name = "" if isinstance(obj, ModuleType) else f" · {obj.__qualname__}"
    return textwrap.dedent(source), path + name


def _only(numbered, source: str, names: list[str], label: str):
    """The header of the class (or nothing of a module) and the named definitions."""
    tree = ast.parse(source)
    body = tree.body
    keep: set[int] = set()
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        node = body[0]
        keep.update(range(_first_line(node), node.lineno + 1))
        body = node.body
    there = {name: node for node in body for name in _names(node)}
    for name in names:
        if name not in there:
            raise LookupError(f"{label} has no {name!r} any more; it has {', '.join(there) or 'no definitions'}")
        keep.update(range(_first_line(there[name]), there[name].end_lineno + 1))
    return [(n, text) for n, text in numbered if n in keep]


def _names(node) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _first_line(node) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _between(numbered, marks: tuple[str, str], label: str):
    start = next((i for i, (_, text) in enumerate(numbered) if marks[0] in text), None)
    if start is None:
        raise LookupError(f"{label} no longer holds the line {marks[0]!r}")
    end = next((i for i, (_, text) in enumerate(numbered[start:], start) if marks[1] in text), None)
    if end is None:
        raise LookupError(f"{label} no longer holds the line {marks[1]!r} after {marks[0]!r}")
    return numbered[start : end + 1]


def _docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def _trim(numbered):
    """Without blank lines at the ends and beside gaps; a row numbered 0 stands for lines left out."""
    runs: list[list[tuple[int, str]]] = []
    for number, text in numbered:
        if runs and runs[-1][-1][0] == number - 1:
            runs[-1].append((number, text))
        else:
            runs.append([(number, text)])
    kept: list[tuple[int, str]] = []
    for run in runs:
        filled = [i for i, (_, text) in enumerate(run) if text.strip()]
        if filled:
            kept += [(0, "")] * bool(kept) + run[filled[0] : filled[-1] + 1]
    if not kept:
        raise LookupError("nothing is left to quote")
    return kept


def _highlight(code: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    formatter = HtmlFormatter(nowrap=True, noclasses=True, style="default", nobackground=True)
    return highlight(code, PythonLexer(stripnl=False, ensurenl=False), formatter).rstrip("\n")
