"""Names that a cell does not spell: attributes that it looks up or defines by a text that is put together; for `look`.

`getattr`, `setattr`, `delattr` and `hasattr` are judged when they are called, by the name that they are called with
(`guards.by_name`). What stands here are the other ways from a text to an attribute, and texts in disguise. Where the
name is put together in the place where it is used, the answer is refused; where it comes from elsewhere, a person is
told.
"""

from __future__ import annotations

import ast
import base64
import codecs
import contextlib
from collections.abc import Callable, Iterator

from minillm.course.grading.names import (
    BY_NAME,
    LISTS,
    OF_NAMES,
    OPEN,
    REACH,
    REFUSED_MODULES,
    REFUSED_NAMES,
    REFUSED_OF,
    SHOWS,
)

_LOOKS = "looks up an attribute whose name is put together"
_DEFINES = "defines an attribute whose name is put together"
_SPACE = "reaches attributes through the dictionary that holds them"
_CHECKS = "minillm.book.checks"
_PAST = "takes {0} past the guard that sees which names it is called with"
_READERS = ("get", "pop", "setdefault", "__getitem__", "__setitem__", "__delitem__")  # of a dictionary, by one key
_BY_METHOD = ("__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__get__")
_WAYS: tuple[Callable[[bytes], bytes], ...] = (
    base64.b64decode,
    base64.b32decode,
    base64.b16decode,
    base64.b85decode,
    lambda data: bytes.fromhex(data.decode("ascii")),
    lambda data: data.decode("unicode_escape").encode("latin-1"),
    lambda data: codecs.decode(data.decode("ascii"), "rot13").encode("ascii"),
)

Found = tuple[int, str, bool]  # line, reason, whether it is refused


def unspelled(tree: ast.Module) -> Iterator[Found]:
    """Each line of a cell where this happens, why it matters, and whether it is refused."""
    yield from _under_other_names(tree)
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        for kind, judge in _JUDGES:
            if isinstance(node, kind):
                yield from ((node.lineno, reason, refused) for reason, refused in judge(node, parents))


def _under_other_names(tree: ast.Module) -> Iterator[Found]:
    """What is refused under its own name, under one that the cell has given it: `import sys as s`, `enum.sys`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname: f"{of}{alias.name}" for alias in node.names if alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(path := _path(node.value, names), str):
            module = "sys" if path.endswith(".sys") else path
            reason = REFUSED_OF.get((module, node.attr)) if module != _path(node.value, {}) else None
            if path == _CHECKS and node.attr not in OPEN[_CHECKS]:
                reason = REFUSED_MODULES[_CHECKS]
            if reason:
                yield node.lineno, reason, True


def _path(node: ast.expr, names: dict[str, str]) -> str | None:
    """`a.b` as the module that it stands for."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    before = _path(node.value, names) if isinstance(node, ast.Attribute) else None
    return before and f"{before}.{node.attr}"


Said = Iterator[tuple[str, bool]]


def _call(node: ast.Call, parents: dict[int, ast.AST]) -> Said:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in ("attrgetter", "methodcaller"):
        yield from ((_LOOKS, True) for key in node.args if is_built(key))
    if name in _BY_METHOD and node.args and isinstance(node.func, ast.Attribute):
        keys = node.args[:2]  # of the object's, or of a class's, which is given the object first
        yield from _by_key(keys[-1] if name != "__setattr__" or len(node.args) > 2 else keys[0], _LOOKS)
    if name == "type" and len(node.args) == 3:
        yield from _of_dictionary(node.args[2])
    if name in ("format", "format_map") and isinstance(node.func, ast.Attribute) and is_built(node.func.value):
        yield _LOOKS, False
    for one in node.keywords:
        if one.arg is None and (name in OF_NAMES or isinstance(one.value, ast.Dict)):
            yield from _of_dictionary(one.value)
    if name in LISTS:
        yield LISTS[name], LISTS[name] == REACH


def _space(node: ast.Call | ast.Attribute, parents: dict[int, ast.AST]) -> Said:
    """`vars(x)` and `x.__dict__`: with keys that are spelled they are attributes as any other."""
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args):
        return
    if isinstance(node, ast.Attribute) and node.attr != "__dict__":
        return
    around = parents.get(id(node))
    if isinstance(around, ast.Subscript) and around.value is node:
        yield from _by_key(around.slice, _SPACE)
        return
    method = around.attr if isinstance(around, ast.Attribute) else ""
    call = parents.get(id(around))
    if method in _READERS and isinstance(call, ast.Call) and call.func is around and call.args:
        yield from _by_key(call.args[0], _SPACE)
    elif method == "update" and isinstance(call, ast.Call) and call.args:
        yield from _of_dictionary(call.args[0])
    elif not (isinstance(around, ast.Call) and isinstance(around.func, ast.Name) and around.func.id in SHOWS):
        yield _SPACE, False


def _past(node: ast.Attribute | ast.Name | ast.ImportFrom | ast.Subscript, parents: dict[int, ast.AST]) -> Said:
    """The built-in functions themselves, where the cells have guarded ones."""
    found: set[str] = set()
    if isinstance(node, ast.ImportFrom):
        found = {alias.name for alias in node.names}
    elif isinstance(node, ast.Attribute):
        found = {node.attr}
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        found = {node.slice.value} if isinstance(node.slice.value, str) else set()
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
        found = {node.id}
    yield from ((_PAST.format(name), True) for name in sorted(found & BY_NAME))


def _class(node: ast.ClassDef, parents: dict[int, ast.AST]) -> Said:
    if any(isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in node.body):
        yield "answers for attributes that it does not name: __getattr__", False


def _patterns(node: ast.Assign, parents: dict[int, ast.AST]) -> Said:
    names = [getattr(target, "id", getattr(target, "attr", "")) for target in node.targets]
    if "__match_args__" in names and not _is_spelled(node.value):
        yield _LOOKS, True


def _disguised(node: ast.Constant | ast.List | ast.Tuple | ast.Set, parents: dict[int, ast.AST]) -> Said:
    """A name in bytes, backwards, as numbers, or encoded as libraries decode it."""
    if isinstance(node, ast.Constant):
        value = node.value.encode("utf-8", "replace") if isinstance(node.value, str) else node.value
    else:
        numbers = [one.value for one in node.elts if isinstance(one, ast.Constant) and type(one.value) is int]
        value = bytes(numbers) if len(numbers) == len(node.elts) and {*numbers} <= {*range(128)} else None
    if not isinstance(value, bytes) or not 4 <= len(value) <= 400:
        return
    spelled = isinstance(node, ast.Constant) and isinstance(node.value, str)
    for text in {value, value[::-1], *_decoded(value)} - ({value} if spelled else set()):
        name = text.decode("latin-1").strip()
        if name in REFUSED_NAMES:
            yield f"has the name {name} in another spelling: {REFUSED_NAMES[name]}", True


def _decoded(value: bytes) -> Iterator[bytes]:
    for way in _WAYS:
        with contextlib.suppress(ValueError, UnicodeError):
            yield way(value)


def is_built(node: ast.expr) -> bool:
    """Whether a text is put together here: neither spelled, nor the value of a variable."""
    if isinstance(node, ast.IfExp):
        return is_built(node.body) or is_built(node.orelse)
    if isinstance(node, ast.NamedExpr | ast.Starred):
        return is_built(node.value)
    return not _is_spelled(node) and not isinstance(node, ast.Name | ast.Attribute)


def _is_spelled(node: ast.expr) -> bool:
    """Constants, also together: these are looked at as what they are."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and _is_spelled(node.left) and _is_spelled(node.right)
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_spelled, node.elts))
    return isinstance(node, ast.Constant)


def _by_key(key: ast.expr, reason: str) -> Said:
    if not _is_spelled(key):
        yield reason, is_built(key)


def _of_dictionary(node: ast.expr) -> Said:
    """A dictionary whose keys become attributes."""
    if not isinstance(node, ast.Dict):
        yield _DEFINES, is_built(node) and not isinstance(node, ast.Call)
        return
    for key, value in zip(node.keys, node.values):
        yield from _of_dictionary(value) if key is None else _by_key(key, _DEFINES)


_JUDGES: tuple[tuple[type | tuple[type, ...], Callable[..., Said]], ...] = (
    (ast.Call, _call),
    ((ast.Call, ast.Attribute), _space),
    ((ast.Attribute, ast.Name, ast.ImportFrom, ast.Subscript), _past),
    (ast.ClassDef, _class),
    (ast.Assign, _patterns),
    ((ast.Constant, ast.List, ast.Tuple, ast.Set), _disguised),
)
