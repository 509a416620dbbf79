"""The names of a Python file: classes, functions, constants and fields, with their lines. Built in chapter 25."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator

_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
          tokenize.ENDMARKER}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Span = tuple[int, int]  # first and last line, counted from 1


def names_of(source: str) -> dict[str, Span]:
    """ "Class.method" -> its lines, for all that a module or a class defines; "Class.field" for what `__init__` sets.

    A name that is defined twice (a property and its setter, an overload) keeps its first line and its last.
    """
    found: dict[str, Span] = {}
    for name, node in _definitions(ast.parse(source).body, ""):
        first, last = found.get(name, (node.lineno, node.end_lineno))
        found[name] = min(first, node.lineno), max(last, node.end_lineno)
    return found


def code_lines(source: str) -> list[int]:
    """The lines that hold code: no comment, docstring or empty line."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _QUIET:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and (text := _docstring(node)) is not None:
            lines.difference_update(range(text.lineno, text.end_lineno + 1))
    return sorted(lines)


def _docstring(node: ast.AST) -> ast.expr | None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def _definitions(body: Iterable[ast.stmt], inside: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            yield f"{inside}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{inside}{node.name}.")
            elif node.name == "__init__" and inside:
                yield from ((f"{inside}{name}", place) for name, place in _set_on_self(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((f"{inside}{one.id}", node) for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(node, part, ()), inside)
            for handler in getattr(node, "handlers", ()):
                yield from _definitions(handler.body, inside)


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    yield target.attr, node
