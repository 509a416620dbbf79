"""What the checkers and all that they call were before a student's code ran: compared, and put back.

A fingerprint holds the objects themselves: the functions of the package and of the modules that checks call, with
their code, defaults and closures; classes with their methods; the checkers with their parts; hooks and signal handlers.
Loaded privately, as `zygote` does it, its own globals are out of a student's reach.
"""

from __future__ import annotations

import builtins
import copyreg
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType

PACKAGE, CHECKS = "minillm", "minillm.book.checks"
CALLED = frozenset(
    "builtins math cmath random _random operator functools itertools heapq bisect collections collections.abc copy "
    "statistics fractions decimal string re json struct hashlib hmac io os posixpath time threading signal types "
    "inspect traceback linecache dataclasses contextlib enum typing asyncio torch torch.nn.functional torch.linalg "
    "torch.testing torch.fft torch.random numpy numpy.linalg numpy.random numpy.testing triton triton.language".split()
)
_CLASSES = ("torch.Tensor", "random.Random", "collections.Counter", "collections.OrderedDict", "threading.Thread")
_RELIED_ON = "builtins math operator itertools functools copy random collections re torch numpy".split()
_LARGE = ("builtins", "torch", "numpy", "triton")  # of their classes those in _CLASSES count
_HOOKS = ("excepthook", "displayhook", "unraisablehook")
_SIGNALS = tuple(getattr(signal, n) for n in ("SIGPROF", "SIGVTALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, n))
_BOOKKEEPING = ("__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__slotnames__")
_MISSING = object()


class Fingerprint:
    """Taken once, before a student's code runs.

    restore: a function that puts back what has changed since and returns its names. It is a function of its own and no
    method, since code that finds this class can change its methods.
    """

    def __init__(self, written: ModuleType) -> None:
        """written: the module of that name."""
        self._written = written
        self._spaces: list[tuple[str, dict]] = []  # of the checks: nothing may write to them
        self._shared = [(name, vars(sys.modules[name])) for name in _RELIED_ON if name in sys.modules]
        self._entries: list[tuple[str, Callable[[], bool], Callable[[], object]]] = []
        self._known: dict[int, object] = {}  # by id; the values keep the ids from being given away again
        for name, module in sorted(sys.modules.items()):
            if isinstance(module, ModuleType) and (name in CALLED or _is_in(name, PACKAGE)):
                self._note_item(f"sys.modules[{name!r}]", sys.modules, name)
                self._note_module(name, module)
        for dotted in _CLASSES:
            module, _, name = dotted.rpartition(".")
            if isinstance(kind := getattr(sys.modules.get(module), name, None), type):
                self._note_class(dotted, kind)
        self._note_hooks()
        self.restore = _restorer(self._entries)

    def add(self, names: Iterable[str], space: dict) -> None:
        """Also the checkers of these names that a notebook's locked cell made; they are in no module of the package."""
        for name in names:
            if _is_in(type(space.get(name)).__module__, CHECKS):
                self._note_value(name, space[name])

    def watcher(self) -> Callable[[], list[str]]:
        """A function that names what was written to since it was called last, also where it was put back."""
        return self._written.watcher(self._spaces, self._shared)

    def _note(self, name: str, read: Callable[[], object], write: Callable[[object], object]) -> None:
        """The object that `read` gives is noted, and what is in it, where it is a container."""
        before = read()
        if type(before) not in (dict, list):
            self._entries.append((name, lambda: read() is before, lambda: write(before)))
            return
        kept = before.copy()

        def refill() -> None:
            before.clear()
            before.extend(kept) if type(before) is list else before.update(kept)
            write(before)

        self._entries.append((name, lambda: read() is before and _same_content(before, kept), refill))

    def _note_module(self, name: str, module: ModuleType) -> None:
        space = vars(module)
        if _is_in(name, CHECKS) and not any(_is_in(type(one).__module__, "triton") for one in space.values()):
            self._spaces.append((name, space))  # Triton's interpreter writes to the names of a kernel as it runs
        for key, value in list(space.items()):
            if key.startswith("__") and name != "builtins":
                continue
            kind = getattr(type(value), "__module__", "")
            is_checker = _is_in(name, CHECKS) and (key.strip("_").isupper() or _is_in(kind, CHECKS))
            # The state of a library changes as it is used; what a checker goes by does not.
            if name == "torch" and key in ("Storage", "manual_seed"):  # follow the default dtype, and `torch.compile`
                continue
            if not (is_checker or isinstance(value, FunctionType | BuiltinFunctionType | type | ModuleType)):
                continue
            self._note_item(f"{name}.{key}", space, key)
            if is_checker or _is_in(getattr(value, "__module__", None), PACKAGE) or isinstance(value, FunctionType):
                self._note_value(f"{name}.{key}", value)
            if isinstance(value, type) and value.__module__ == name and name.partition(".")[0] not in _LARGE:
                self._note_value(f"{name}.{key}", value)
        if name != "builtins":
            hides = lambda key, value: (
                not key.startswith("__")
                and (
                    getattr(builtins, key, value) is not value
                    or (isinstance(value, type | FunctionType) and name in _LARGE and value.__module__ != "builtins")
                )
            )
            self._note_new_names(name, space, hides)

    def _note_value(self, name: str, value: object) -> None:
        if id(value) in self._known:
            return
        self._known[id(value)] = value
        if isinstance(value, FunctionType):
            self._note_function(name, value)
        elif isinstance(value, type):
            self._note_class(name, value)
        elif isinstance(value, dict):
            self._spaces.append((name, value))
            for key, inner in list(value.items()):
                self._note_value(f"{name}[{key!r}]", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                self._note_value(f"{name}[{index}]", inner)
        elif _is_in(type(value).__module__, CHECKS):
            self._note_value(type(value).__qualname__, type(value))
            self._spaces += [(name, vars(value))] if hasattr(value, "__dict__") else []
            for key, inner in list(getattr(value, "__dict__", {}).items()):
                self._note_item(f"{name}.{key}", vars(value), key)
                self._note_value(f"{name}.{key}", inner)

    def _note_class(self, name: str, kind: type) -> None:
        space = vars(kind)
        if _is_in(kind.__module__, CHECKS) or name == "random.Random":
            copyreg._slotnames(kind)  # which copying an object notes on its class
            self._spaces.append((name, self._written.dict_of(kind)))
        for key, value in list(space.items()):
            plain = getattr(value, "__func__", value)
            if key in _BOOKKEEPING or not (callable(plain) or isinstance(value, property)):
                continue
            self._note(f"{name}.{key}", _reader(space, key), _attribute_writer(kind, key))
            for function in (plain, getattr(value, "fget", None), getattr(value, "fset", None)):
                if isinstance(function, FunctionType):
                    self._note_value(f"{name}.{key}", function)

        def is_override(key: str, value: object) -> bool:
            return callable(value) or any(key in vars(base) for base in kind.__mro__[1:])

        self._note_new_names(name, space, is_override, lambda key: type.__delattr__(kind, key))

    def _note_new_names(
        self, name: str, space, matters: Callable[[str, object], bool], remove: Callable[[str], object] | None = None
    ) -> None:
        """A name that comes in later may hide a built-in function, or a method of a base class."""
        before = frozenset(space)

        def news() -> list[str]:
            return [k for k in space if k not in before and k not in _BOOKKEEPING and matters(k, space[k])]

        def put_back() -> None:
            for key in news():
                remove(key) if remove else space.pop(key)

        self._entries.append((f"a new name in {name}", lambda: len(space) <= len(before) or not news(), put_back))

    def _note_function(self, name: str, function: FunctionType) -> None:
        code, defaults, by_name = function.__code__, function.__defaults__, function.__kwdefaults__
        kept = dict(by_name or {})

        def is_same() -> bool:
            return (
                function.__code__ is code
                and function.__defaults__ is defaults
                and function.__kwdefaults__ is by_name
                and (not kept or _same_content(by_name, kept))
            )

        def put_back() -> None:
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, by_name and dict(kept)

        self._entries.append((f"the code of {name}", is_same, put_back))
        for cell in function.__closure__ or ():
            if isinstance(content := _content(cell), FunctionType | BuiltinFunctionType | type):
                self._note(f"the closure of {name}", _cell_reader(cell), _cell_writer(cell))
                self._note_value(f"the closure of {name}", content)

    def _note_item(self, name: str, space: dict, key: str) -> None:
        self._note(name, _reader(space, key), lambda value: space.__setitem__(key, value))

    def _note_hooks(self) -> None:
        for key in _HOOKS:
            self._note_item(f"sys.{key}", vars(sys), key)
        self._note_item("gc.callbacks", vars(gc), "callbacks")
        self._note("the trace function", sys.gettrace, sys.settrace)
        self._note("the profile function", sys.getprofile, sys.setprofile)
        self._note("the trace function of threads", threading.gettrace, threading.settrace)
        self._note("the profile function of threads", threading.getprofile, threading.setprofile)
        for number in _SIGNALS:
            self._note(
                f"the handler of {signal.Signals(number).name}",
                lambda number=number: signal.getsignal(number),
                lambda value, number=number: signal.signal(number, value),
            )


def _restorer(entries: list[tuple[str, Callable[[], bool], Callable[[], object]]]) -> Callable[[], list[str]]:
    def restore() -> list[str]:
        changed = []
        for name, is_same, put_back in entries:
            if not is_same():
                changed.append(name)
                put_back()
        return changed

    return restore


def _is_in(name: str | None, package: str) -> bool:
    return isinstance(name, str) and (name == package or name.startswith(f"{package}."))


def _reader(space, key: str) -> Callable[[], object]:
    return lambda: space.get(key, _MISSING)


def _attribute_writer(kind: type, key: str) -> Callable[[object], object]:
    return lambda value: type.__setattr__(kind, key, value)


def _content(cell) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a closure variable that is assigned later
        return _MISSING


def _cell_reader(cell) -> Callable[[], object]:
    return lambda: _content(cell)


def _cell_writer(cell) -> Callable[[object], object]:
    return lambda value: setattr(cell, "cell_contents", value)


def _same_content(found: dict | list, kept: dict | list) -> bool:
    if len(found) != len(kept):
        return False
    if type(found) is list:
        return all(a is b for a, b in zip(found, kept))
    return all(found.get(key, _MISSING) is value for key, value in kept.items())
