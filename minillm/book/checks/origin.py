"""Where an object comes from: a checker takes the student's own work, not the package's. Built in chapter 00.

It looks at what an answer names, so a determined reader of this file gets past it: see `seal`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from minillm.book.checks.failure import CheckFailed

_PACKAGE = "minillm"
_FOLDER = str(Path(__file__).resolve().parents[2])
_WRAPPERS = (functools.partial, functools.partialmethod)
_JUDGES = f"{_PACKAGE}.book.checks"  # no answer needs anything of it but what a chapter's checks give out
_CHAPTER = re.compile(rf"{re.escape(_JUDGES)}\.ch\d\d")
_LOOKED_AT = 2_000  # objects in an answer's containers
_SPYING = frozenset(  # names by which code looks at its caller, at all objects, or switches a trace off
    "_getframe _current_frames settrace setprofile f_back f_locals f_globals f_builtins tb_frame gi_frame cr_frame "
    "currentframe getouterframes getinnerframes get_referrers get_referents get_objects".split()
)

_MEMORY = frozenset(  # names by which code makes an array, or reads, at any address
    "__array_interface__ __array_struct__ __cuda_array_interface__ ctypes".split()
)


def refuse_reference(student: object, name: str, forbid: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> None:
    """Raise CheckFailed when `student` is, wraps or derives from something of the package,
    or calls what is forbidden."""
    found = reference_behind(student, allow)
    if found:
        raise CheckFailed(f"{name}: this is the package's {found}, or made from it. Write your own.")
    spied = spying(student)
    if spied:
        raise CheckFailed(f"{name}: this uses {spied}. An answer has no business with what judges it.")
    called = forbidden_call(student, forbid)
    if called:
        raise CheckFailed(
            f"{name}: this uses the package's {called}, here or in a function that it calls. "
            "That is the part to write yourself."
        )


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
    except ValueError:  # a closure variable that is assigned later
        return False


def forbidden_call(student: object, forbid: tuple[str, ...]) -> str | None:
    """The first name in `forbid` that the student's code mentions,
    also in functions and classes of its own that it names."""
    return _first_in(student, functools.partial(_mentioned, forbid=forbid)) if forbid else None


def spying(student: object) -> str | None:
    """What the student's code names of the checks, or of the means to look at them: "sys._getframe", say."""
    return _first_in(student, _spied)


def _first_in(student: object, find: Callable[[types.FunctionType], str | None]) -> str | None:
    """What `find` says of the first function of the student's own for which it says something.

    A library may have wrapped it, as `torch.compile` does: what that names is the library's affair.
    """
    waiting, seen = [student], {}  # seen keeps the objects alive, so that no id is given twice
    while waiting:
        item = waiting.pop()
        if id(item) in seen or _is_reference(item):
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType) and "-packages" not in item.__code__.co_filename:
            found = find(item)
            if found:
                return found
            waiting += _named(item)
        waiting += list(_under(item))
    return None


def _spied(function: types.FunctionType) -> str | None:
    named = {name for code in _codes(function.__code__) for name in code.co_names}
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    kept = [*(function.__globals__.get(name) for name in named), *cells]
    kept += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if judge := _judge_inside(kept, function.__globals__.get("__name__")):
        return judge
    for code in _codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            if name in _SPYING | _MEMORY or value is inspect or name == "inspect":
                return name
            if name.startswith(_JUDGES) or _judges(value):
                return getattr(value, "__name__", name)
            if value is sys.modules or (name == "modules" and ("sys" in named or any(one is sys for one in kept))):
                return "sys.modules"
        for text in filter(lambda constant: isinstance(constant, str), code.co_consts):
            if text in _SPYING or (_JUDGES in text and text != function.__doc__):
                return repr(text)
            if _judges(function.__globals__.get(text)):  # globals()["check_vote"]
                return text
    return spelled(_texts([*kept, *(code.co_consts for code in _codes(function.__code__))]))


def _texts(values: Iterable[object]) -> set[str]:
    """The strings among these values, and in their tuples, lists and dictionaries."""
    found, waiting = set(), list(values)
    while waiting and len(found) < _LOOKED_AT:
        value = waiting.pop()
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, (tuple, list, dict)) and len(value) < _LOOKED_AT:
            waiting += [*value, *value.values()] if isinstance(value, dict) else value
    return found


def spelled(texts: Iterable[str], names: Iterable[str] = _MEMORY) -> str | None:
    """The first of these names that can be put together from these strings, of two characters or more each."""
    pieces = {text for text in texts if len(text) > 1}
    for name in sorted(names):
        reached = {0}  # how much of the name has been put together
        for place in range(len(name)):
            if place in reached:
                reached |= {place + len(text) for text in pieces if name.startswith(text, place)}
        if len(name) in reached:
            return name
    return None


def _judges(value: object) -> bool:
    """Whether this belongs to the checks, and is not one of the types that a chapter's checks give out to be used."""
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith(_JUDGES)
    named = isinstance(value, (type, types.FunctionType)) or callable(value)
    module = getattr(value if isinstance(value, (type, types.FunctionType)) else type(value), "__module__", None) or ""
    if not named or not module.startswith(_JUDGES):
        return False
    chapters = [module for name, module in list(sys.modules.items()) if _CHAPTER.match(name)]
    name = getattr(value, "__name__", "")
    return not any(name in getattr(one, "__all__", ()) and vars(one).get(name) is value for one in chapters)


def _judge_inside(values: list[object], own_module: str | None) -> str | None:
    """The name of the first of the checks' objects in these values, in containers, and in instances of own classes."""
    waiting, seen = list(values), {}  # seen keeps the objects alive, so that no id is given twice
    while waiting and len(seen) < _LOOKED_AT:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif _judges(value):
            return getattr(value, "__name__", None) or getattr(value, "name", type(value).__name__)
        elif type(value).__module__ == own_module:
            waiting += getattr(value, "__dict__", {}).values()
        elif isinstance(value, type) and value.__module__ == own_module:
            waiting += vars(value).values()
    return None


def _mentioned(function: types.FunctionType, *, forbid: tuple[str, ...]) -> str | None:
    """The first name in `forbid` that stands in this function, also as an attribute of a module, in an import or in
    a string."""
    for code in _codes(function.__code__):
        values = [function.__globals__.get(name) for name in code.co_names]
        texts = {text for text in code.co_consts if isinstance(text, str) and text != function.__doc__}
        modules = [name for name in (*code.co_names, *texts) if name.split(".")[0] == _PACKAGE]
        reached = any(isinstance(v, types.ModuleType) and v.__name__.split(".")[0] == _PACKAGE for v in values)
        for dotted in forbid:
            module, _, name = dotted.rpartition(".")
            mentioned = any(
                getattr(v, "__module__", None) == module and getattr(v, "__name__", None) == name for v in values
            )
            imported = any(f"{module}.".startswith(f"{m}.") for m in modules)
            if mentioned or dotted in texts or (name in {*code.co_names, *texts} and (reached or imported)):
                return dotted
    return None


def _named(function: types.FunctionType) -> Iterator[object]:
    """What a function names in its own module and could call:
    other functions, classes, instances of these, partials."""
    for code in _codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            plain = inspect.unwrap(value) if callable(value) else value
            if isinstance(plain, types.FunctionType):
                if plain.__globals__ is function.__globals__:
                    yield plain
            elif isinstance(value, _WRAPPERS):
                yield value
            else:
                kind = value if isinstance(value, type) else type(value)
                if kind.__module__ == function.__globals__.get("__name__"):
                    yield kind


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
