"""Where an object comes from: a checker takes the student's own work, not the package's. Built in chapter 00."""
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

from minillm.book.checks.case import CheckFailed

_PACKAGE = "minillm"
_FOLDER = str(Path(__file__).resolve().parents[2])
_WRAPPERS = (functools.partial, functools.partialmethod)


def refuse_reference(student: object, name: str, forbid: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> None:
    """Raise CheckFailed when `student` is, wraps or derives from something of the package."""
    found = reference_behind(student, allow) or _forbidden_call(student, forbid)
    if found:
        raise CheckFailed(f"{name}: this is the package's {found}, or made from it. Write your own; "
                          "the exercise asks for a variant, so the package's version would not pass anyway.")


def reference_behind(obj: object, allow: tuple[str, ...] = ()) -> str | None:
    """The dotted name of the first thing of the package found in or under `obj`, None when there is none."""
    waiting, seen = [obj], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        name = f"{getattr(item, '__module__', None)}.{getattr(item, '__qualname__', getattr(item, '__name__', ''))}"
        if name in allow:
            continue
        if _is_reference(item):
            return name
        waiting += list(_under(item))
    return None


def _is_reference(item: object) -> bool:
    if not isinstance(item, (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    code = getattr(item, "__code__", None)
    module = getattr(item, "__module__", None) or ""
    return module.split(".")[0] == _PACKAGE or (code is not None and code.co_filename.startswith(_FOLDER))


def _under(item: object) -> Iterator[object]:
    """What an object is made of, as far as that could hide someone else's code."""
    if isinstance(item, type):
        yield from item.__mro__[1:]
        yield from (value for value in vars(item).values() if _may_hide(value))
    elif isinstance(item, types.FunctionType):
        yield from filter(_may_hide, (cell.cell_contents for cell in item.__closure__ or () if _filled(cell)))
        yield from filter(_may_hide, [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()])
        yield from filter(_may_hide, vars(item).values())
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, _WRAPPERS):
        yield from filter(_may_hide, [item.func, *item.args, *item.keywords.values()])
    elif isinstance(item, (staticmethod, classmethod)):
        yield item.__func__
    elif isinstance(item, property):
        yield from filter(None, (item.fget, item.fset, item.fdel))
    elif not isinstance(item, types.BuiltinFunctionType):
        yield type(item)
        yield from filter(_may_hide, [getattr(item, "__wrapped__", None), *getattr(item, "__dict__", {}).values()])


def _may_hide(value: object) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property, functools.partialmethod))


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:   # a closure variable that is assigned later
        return False


def _forbidden_call(student: object, forbid: tuple[str, ...]) -> str | None:
    """The first name in `forbid` that the student's own functions mention, also as an attribute of a module."""
    functions = [student] if inspect.isfunction(student) else [f for _, f in inspect.getmembers(student, inspect.isfunction)]
    for function in functions:
        for code in _codes(function.__code__):
            for dotted in forbid:
                module, _, name = dotted.rpartition(".")
                values = [function.__globals__.get(n) for n in code.co_names]
                mentioned = any(getattr(v, "__module__", None) == module and getattr(v, "__name__", None) == name for v in values)
                reached = name in code.co_names and any(isinstance(v, types.ModuleType) and v.__name__.split(".")[0] == _PACKAGE for v in values)
                imported = name in code.co_names and module in code.co_names
                if mentioned or reached or imported:
                    return dotted
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
