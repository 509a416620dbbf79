"""The shape of a piece of Python: what is left of it when names, literals, docstrings and order are taken away."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator

from minillm.course.grading.plan import python_of

WINDOW, GRAM = 4, 8  # of winnowing: of WINDOW neighbouring fingerprints of GRAM nodes each, the smallest is kept
_PASSED_OVER = (ast.expr_context, ast.Load, ast.Store, ast.Del, ast.arguments, ast.Expr, ast.Pass)


def fingerprints(source: str) -> Counter[int]:
    """The winnowed fingerprints of each definition and of the statements between them; empty where nothing parses.

    Renamed names, other numbers and strings, other annotations, docstrings and comments, and definitions in another
    order give the same ones. (Schleimer, Wilkerson, Aiken: Winnowing, 2003.)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(python_of(source))
    except (SyntaxError, ValueError, RecursionError):
        return Counter()
    found: Counter[int] = Counter()
    for piece in _pieces(tree.body):
        found.update(_winnowed(list(_shape(piece))))
    return found


def _pieces(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Each function, also each method, by itself, and what stands between them."""
    between = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _pieces(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            between.append(node)
    yield between


def _shape(nodes: list[ast.stmt]) -> Iterator[str]:
    """The kinds of the nodes, depth first, with a word for the end of what has parts of its own."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        yield from _kinds(node)


def _kinds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and node.value is not None:  # `x: int = 1` is `x = 1`
        node = ast.Assign([node.target], node.value)
    if not isinstance(node, _PASSED_OVER):
        yield _kind(node)
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [*node.args.args, *node.body]
    for child in children:
        if isinstance(child, ast.arg):
            yield "arg"
        else:
            yield from _kinds(child)
    if isinstance(node, ast.stmt) and hasattr(node, "body"):
        yield "end"


def _kind(node: ast.AST) -> str:
    """A node without its names and values, but with the method that it calls and the operator that it applies."""
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    if isinstance(node, ast.Constant):
        return type(node.value).__name__
    return type(node).__name__


def _winnowed(kinds: list[str]) -> Iterator[int]:
    """At least one fingerprint of every stretch of WINDOW + GRAM - 1 nodes; short code has one of all its nodes."""
    if not kinds:
        return
    grams = [_hash(kinds[i : i + GRAM]) for i in range(max(1, len(kinds) - GRAM + 1))]
    last = -1
    for start in range(max(1, len(grams) - WINDOW + 1)):
        window = grams[start : start + WINDOW]
        smallest = min(range(len(window)), key=lambda i: (window[i], -i)) + start
        if smallest != last:
            yield grams[smallest]
        last = smallest


def _hash(kinds: list[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(kinds).encode(), digest_size=8).digest())
