"""Guards before what CPython reports to no hook: each call becomes an audited event, and is judged as one.

A signal's handler is given a frame. torch lets its caller register kernels for its own operations, replace code as it
is called, and make a tensor of any address. Modules that are loaded already are found without an event.
Loaded privately, as `zygote` does it, this module is in no table of modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

FRAMES = "looks at the frames of the code that called it, which hold what the check expects"
_CODE = "replaces the code of functions as they are called"
_MEMORY = "reaches into the memory of the process"
_OPERATIONS = "registers kernels of its own for torch's operations"
_TIMERS = "changes the timers or signal handlers that stop an answer that takes too long"
_LOADED = "reads the files of the checks, which hold the reference answers"
_JUDGES = ("minillm.book.checks", "minillm.book.proofs", "minillm.course")
_OPEN = ("minillm.book.checks", "minillm.book.checks.failure")
_INNARDS = ("_testcapi", "_testinternalcapi", "_cffi_backend", "_xxsubinterpreters", "_interpreters")
_TORCHS = ("aten", "prim", "prims")  # namespaces of its operations
_HOOKS = ("set_eval_frame", "set_bytecode_debugger_callback", "_load_precompile_entry", "register_breakpoint_code")
# Functions of libraries that return a frame, or its variables: for callers that name them, and no student's.
_GIVING = frozenset(
    "_find_user_frame _find_user_code_frame _get_user_frame _find_frame_for_code parent_frame_namespace".split()
)
_REACH = "reaches from a function to the module or the variables that it was written with"
_BUILT_IN = "takes a built-in function past the guard that sees which names it is called with"
# What a cell spells is looked at before it runs; these names are looked for where it puts one together.
_NAMES = {
    **dict.fromkeys("f_back f_locals f_globals f_builtins".split(), FRAMES),
    **dict.fromkeys("__globals__ __closure__ cell_contents __subclasses__".split(), _REACH),
    **dict.fromkeys("__array_interface__ __array_struct__ __cuda_array_interface__".split(), _MEMORY),
    **dict.fromkeys("getattr setattr delattr hasattr".split(), _BUILT_IN),
}
_OF_ALL = dict.fromkeys("__dict__ __builtins__ __getattribute__ __getattr__ __match_args__".split(), _REACH)

Judge = Callable[[str, tuple, FrameType], Any]


def guarded(function: Callable, event: str, told: Callable[..., tuple] = lambda *arguments: arguments) -> Callable:
    """`function`, each call of which raises an audited event first. told: from its arguments to those of the event.

    The function itself is a variable of a generator, and to look at that one's frame is an audited event too.
    """

    def answer(audit: Callable = sys.audit) -> Iterator[Any]:
        arguments, keywords = yield
        try:
            audit(event, *told(*arguments, **keywords))
            outcome = function(*arguments, **keywords), None
        except BaseException as error:  # it belongs to the caller
            outcome = None, error
        yield outcome

    def answers() -> Iterator[Callable]:
        """One for each call: a module that is imported imports others."""
        while True:
            one = answer()
            next(one)
            yield one.send

    new = answers().__next__

    def asked(*arguments: Any, **keywords: Any) -> Any:
        result, error = new()((arguments, keywords))
        if error is not None:
            raise error
        return result

    return asked


def install() -> None:
    """Put the guards in place, before a student's code runs."""
    import _signal
    import importlib
    import pkgutil
    import signal

    import torch
    from torch._C import _dynamo

    def whole(name: str, *package: str | None, **keywords: Any) -> tuple[str]:
        inside = keywords.get("package") or (package and package[0]) or ""
        return ((f"{inside}{name}" if name[:1] == "." else f"{name}").replace(":", "."),)

    importlib.import_module = guarded(importlib.import_module, "minillm.looked_up", whole)
    pkgutil.resolve_name = guarded(pkgutil.resolve_name, "minillm.looked_up", whole)
    _signal.signal = guarded(_signal.signal, "minillm.signal")
    if hasattr(signal.signal, "__wrapped__"):
        signal.signal.__wrapped__ = _signal.signal
    torch._C._dispatch_library = guarded(torch._C._dispatch_library, "minillm.registered")
    pointer = "_construct_storage_from_data_pointer"
    setattr(torch._C, pointer, guarded(getattr(torch._C, pointer), "minillm.pointer"))
    for name in _HOOKS:
        if hook := getattr(_dynamo.eval_frame, name, None):
            _replace(hook, guarded(hook, "minillm.hooked"), name)


def by_name() -> dict[str, Callable]:
    """The built-in functions that take an attribute's name, guarded: for the namespace of the cells."""
    return {
        one.__name__: guarded(one, "minillm.named", lambda of, name, *value: (of, name))
        for one in (getattr, setattr, delattr, hasattr)
    }


def _replace(before: Callable, after: Callable, name: str) -> None:
    """In every module of torch's that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and vars(module).get(name) is before:
            setattr(module, name, after)


def judges(
    behind: Callable[..., FrameType | None],
    seen_at: Callable[..., Any],
    is_importing: Callable[[FrameType | None], bool],
    library: Callable[..., tuple[str, ...]],
) -> dict[str, Judge]:
    """For each of our own events a function that says what a person should read of it, as in `rules.judges`."""
    torchs, asyncs = library("torch"), library("asyncio", "multiprocessing")

    def refused(reason: str, matters: Callable[..., bool], allowed: tuple[str, ...] = ()) -> Judge:
        def judge(event: str, arguments: tuple, frame: FrameType) -> Any:
            caller = frame.f_back and frame.f_back.f_back  # the generator's frame, then the guard's
            if is_importing(caller) or not matters(caller, *arguments):
                return None
            return seen_at(own, reason, True) if (own := behind(caller, allowed)) else None

        return judge

    def is_judge(caller: FrameType | None, name: str) -> bool:
        return name.startswith(_JUDGES) and name not in _OPEN

    def is_torchs(caller: FrameType | None, kind: str, namespace: str, *rest: object) -> bool:
        return namespace in _TORCHS

    def is_own_hook(caller: FrameType | None, hook: object, *rest: object) -> bool:
        """`torch.compile` sets torch's own."""
        inner = getattr(hook, "_torchdynamo_orig_backend", None) if _made_in(hook, torchs) else None
        fair = all(one is None or isinstance(one, bool) or _made_in(one, torchs) for one in (hook, inner))
        return not (fair and caller and caller.f_code.co_filename.startswith(torchs))

    def looked_up(event: str, arguments: tuple, frame: FrameType) -> Any:
        return innards(event, arguments, frame) or checks(event, arguments, frame)

    def named(event: str, arguments: tuple, frame: FrameType) -> Any:
        """An attribute by its name: refused; where every object has one of that name, it is not given, and told."""
        caller, (of, name) = frame.f_back and frame.f_back.f_back, arguments
        text = str.__str__(name) if isinstance(name, str) else ""
        reason = _NAMES.get(text) or _OF_ALL.get(text) or _of_modules(of, text)
        is_spelled = caller is not None and text in caller.f_code.co_consts and _NAMES.get(text) is not _BUILT_IN
        if reason is None or is_spelled:
            return None
        return seen_at(own, reason, text not in _OF_ALL) if (own := behind(caller)) else None

    innards, checks = refused(_MEMORY, lambda caller, name: name in _INNARDS), refused(_LOADED, is_judge)
    return {
        "minillm.looked_up": looked_up,
        "minillm.named": named,
        "minillm.signal": refused(_TIMERS, lambda *arguments: True, asyncs),
        "minillm.registered": refused(_OPERATIONS, is_torchs),
        "minillm.hooked": refused(_CODE, is_own_hook),
        "minillm.pointer": refused(_MEMORY, lambda *arguments: True),
    }


def _of_modules(of: object, name: str) -> str | None:
    """Why a module's attribute is not given, by its name."""
    if of is sys and name == "modules":
        return "takes a module out of those that are loaded"
    if not isinstance(of, ModuleType):
        return None
    whole = f"{vars(of).get('__name__')}.{name}"
    return _LOADED if whole.startswith(_JUDGES) and name not in ("last_call", "CheckFailed") else None


def _made_in(value: object, folders: tuple[str, ...]) -> bool:
    """Whether the code that runs when this is called lies there."""
    value = value.func if isinstance(value, partial) else value
    function = value if isinstance(value, FunctionType) else vars(type(value)).get("__call__")
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(folders)


def imports_innards(name: str, frame: FrameType | None, is_own: Callable[[str], bool]) -> FrameType | None:
    """The student's frame that imports what CPython has for its own tests; None where a library does."""
    while frame and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame if name in _INNARDS and frame and is_own(frame.f_code.co_filename) else None


def hands_out(asker: FrameType, checks: tuple[str, ...]) -> bool:
    """Whether a library's function that looks at a frame gives it, or what is in it, to who may not have it."""
    caller, name = asker.f_back, asker.f_code.co_name
    if name in _GIVING:
        return caller is None or name not in caller.f_code.co_names
    depths = [value for key, value in asker.f_locals.items() if key.endswith("depth") and isinstance(value, int)]
    depths.append(getattr(asker.f_locals.get("self"), "_parent_depth", 0))  # pydantic's, which evaluates names there
    frame: FrameType | None = asker
    for _ in range(max(depths)):
        frame = frame and frame.f_back
        if frame and frame.f_code.co_filename.startswith(checks):
            return True
    return False
