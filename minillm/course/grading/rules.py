"""What a student's code may not reach while it is graded, and on whose behalf something happens.

The stack says whose: the nearest frame that is the student's or the checks'. A library may look at frames where its own
code names the function that gives them (logging does); a library that merely calls what it was handed may not.
Loaded privately, as `zygote` does it, this module is in no table of modules, and its globals are out of reach.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import path as module_path
from sysconfig import get_paths
from types import CodeType, FrameType, ModuleType

CELL = "<cell "  # file names of the student's cells: "<cell 12>"

_FRAMES = "looks at the frames of the code that called it, which hold what the check expects"
_TRACES = "traces or profiles the code that is running"
_MEMORY = "reaches into the memory of the process"
_PROCESS = "starts or signals another process"
_OBJECTS = "asks the garbage collector for the objects of others"
_REWRITES = "rewrites the code of a function"
_FILES = "opens a file of the course, or one outside its own folder"
_JUDGES = "reads the files of the checks, which hold the reference answers"
_NETWORK = "reaches for the network"
_BUILT = "runs code that is put together while it runs"
_ELSEWHERE = "looks up attributes by name in code that stands in no cell"

_FRAME_NAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_UNSEEN_NAMES = frozenset(  # what CPython reports to no hook
    "f_back f_locals f_globals f_builtins __globals__ __closure__ cell_contents __subclasses__".split()
)
_BY_NAME = frozenset("getattr setattr delattr attrgetter methodcaller __getattribute__ __dict__".split())
_UNPICKLED = ("builtins", "os", "posix", "nt", "sys", "subprocess", "importlib", "ctypes", "minillm.book.checks")
_PATHS = get_paths()
_STDLIB = _PATHS["stdlib"] + os.sep
_PACKAGE = str(Path(__file__).resolve().parents[2])
_OF_CHECKS = tuple(os.path.join(_PACKAGE, *name, "") for name in (("book", "checks"), ("course",)))
_OF_OTHERS = ("<frozen ", "<given ", "<__array_function__")  # of Python, of the lecturer, of numpy
_IMPORTERS = ("<frozen importlib", "<frozen zipimport")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_COMPILED = (".pyc", ".so", ".pyd", ".zip", ".egg")


def _library(*names: str) -> tuple[str, ...]:
    """Files and folders of these names, in the standard library and among the installed packages."""
    roots = dict.fromkeys((_PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"]))
    files = [name if name.endswith(".py") else name + os.sep for name in names]
    return tuple(os.path.join(root, file) for root in roots for file in files)


_INSPECT, _SHELL = _library("inspect.py"), _library("IPython")
_LOOKING = _library(
    *"collections typing.py enum.py dataclasses.py functools.py logging warnings.py traceback.py".split(),
    *"contextlib.py threading.py unittest asyncio concurrent importlib weakref.py six.py torch triton".split(),
    *"numpy scipy pandas sympy matplotlib transformers tqdm typing_extensions.py traitlets networkx".split(),
    *"pydantic attr sklearn seaborn numba einops tokenizers huggingface_hub PIL pyparsing fastapi".split(),
    *"starlette uvicorn httpx anyio psutil".split(),
)
_NOT_LOOKING = _library(  # these hand frames, or what is in them, to their caller
    "numpy/testing", "numpy/distutils", "pandas/core/computation", "asyncio/base_tasks.py", "torch/_jit_internal.py"
)
_CTYPES, _PICKLE = _library("ctypes"), _library("pickle.py")
_GENERATORS = ("walk_tb", "walk_stack", "_walk_tb_with_full_positions", "currentframe", "<lambda>")
_GENERATING = _library("dataclasses.py", "typing.py", "enum.py", "collections")  # methods from the names of fields
_NUMERIC = _library("torch", "triton", "numpy", "numba")

# event -> (reason, whether it is refused, files through which it may be reached, names one of which stands there)
_DIRECT: dict[str, tuple[str, bool, tuple[str, ...], tuple[str, ...]]] = {
    "sys._current_frames": (_FRAMES, True, (), ("_current_frames",)),
    "sys._current_exceptions": (_FRAMES, True, (), ()),
    "sys.settrace": (_TRACES, True, _library("threading.py", "doctest.py"), ("settrace",)),
    "sys.setprofile": (_TRACES, True, _library("threading.py", "cProfile.py"), ("setprofile", "enable", "disable")),
    "sys.monitoring.register_callback": (_TRACES, True, (), ()),
    "sys.addaudithook": (_TRACES, True, (), ()),
    "gc.get_objects": (_OBJECTS, True, _NUMERIC, ("get_objects",)),
    "gc.get_referrers": (_OBJECTS, True, _NUMERIC, ("get_referrers",)),
    "gc.get_referents": (_OBJECTS, True, _NUMERIC, ("get_referents",)),
    "code.__new__": (_REWRITES, True, (*_NUMERIC, *_library("types.py")), ("CodeType", "replace", "code")),
    "function.__new__": (_REWRITES, True, (*_NUMERIC, *_library("types.py")), ("FunctionType", "function")),
    "os.fork": (_PROCESS, True, _library("multiprocessing"), ("fork",)),
    "signal.pthread_kill": (_PROCESS, True, (), ()),
    "marshal.load": (_BUILT, True, (), ()),
    "marshal.loads": (_BUILT, True, ("<frozen ",), ("loads",)),
}
_PROGRAMS = "os.forkpty subprocess.Popen os.system os.exec os.posix_spawn os.spawn pty.spawn".split()
_BUILDERS = _library("torch", "triton")  # of machine code, with the help of compilers
_TOUCHED = frozenset(
    "os.listdir os.scandir os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod os.chown "
    "os.utime glob.glob shutil.rmtree shutil.move shutil.copyfile sqlite3.connect".split()
)
_READS = ("os.listdir", "os.scandir", "glob.glob")
_NETWORKED = frozenset("socket.connect socket.bind socket.sendto socket.sendmsg socket.getaddrinfo".split())

# What is told: the reason, whether it is refused (None: it goes on, and a person is told), the student's cell and line.
Seen = tuple[str, bool | None, int, int]
Judge = Callable[[str, tuple, FrameType], Seen | None]


def judges(
    folder: str, hidden: Sequence[str], references: Sequence[str], apart: bool, guards: ModuleType
) -> dict[str, Judge]:
    """For each audited event a function that says what a person should read of it; None where there is nothing to read.

    folder: the only one to write into. hidden: files and folders that no student's code may open; references: that it
    may not open either, but the checks may. apart: the process has namespaces; otherwise sockets and other programs
    are refused here, since it shares the machine's network and processes. guards: the module of that name.
    """
    outside = [p for p in module_path if not (folder + os.sep).startswith(p.rstrip(os.sep) + os.sep)]
    libraries = (*_OF_OTHERS, _STDLIB, _PACKAGE + os.sep, *(p + os.sep for p in (_PATHS["purelib"], *outside)))

    def is_own(name: str) -> bool:
        """Whether a file name is none of a library's: a cell, text compiled at run time, a file of its own folder."""
        return not name.startswith(libraries)

    def behind(frame: FrameType | None, allowed: tuple[str, ...] = ()) -> FrameType | None:
        """The student's frame on whose behalf this happens; None where the checks do it, or what is allowed."""
        while frame and not is_own(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith((*_OF_CHECKS, *allowed)):
                return None
            frame = frame.f_back
        return frame

    def seen_at(frame: FrameType | None, reason: str, refused: bool | None) -> Seen:
        while frame and frame.f_code.co_filename[: len(CELL)] != CELL:
            frame = frame.f_back
        cell = int(frame.f_code.co_filename[len(CELL) : -1]) if frame else -1
        return reason, refused, cell, frame.f_lineno if frame else 0

    def anyone(frame: FrameType | None) -> FrameType | None:
        """The nearest of the student's frames, also beyond the checks, which may be handed what to call."""
        while frame and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def direct(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        reason, refused, files, names = _DIRECT[event]
        is_named = not set(names).isdisjoint(frame.f_code.co_names)
        if (is_named and frame.f_code.co_filename.startswith((_PACKAGE + os.sep, *files))) or is_importing(frame):
            return None
        return seen_at(own, reason, refused) if (own := anyone(frame)) else None

    def looks(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        """At a frame, also one of a traceback, a generator, a coroutine."""
        wanted, asker, handed = event.rpartition(".")[2] if event[:3] == "sys" else arguments[1], frame, False
        while asker and asker.f_code.co_filename.startswith(_INSPECT):
            wanted, asker = asker.f_code.co_name, asker.f_back
        if wanted in ("getgeneratorstate", "getcoroutinestate"):
            return None
        if asker and asker.f_code.co_name in _GENERATORS and asker.f_code.co_filename.startswith(_STDLIB):
            if asker.f_code.co_name == "walk_stack" and event == "sys._getframe" and anyone(frame):
                return seen_at(frame, _FRAMES, True)
            handed, wanted = asker.f_code.co_name.lstrip("_").startswith("walk"), "currentframe"
            asker = asker.f_back
        own, name = anyone(asker), asker.f_code.co_filename if asker else ""
        is_named = own and (handed or wanted in asker.f_code.co_names) and not name.startswith(_NOT_LOOKING)
        is_library = is_named and name.startswith((*_OF_OTHERS, _PACKAGE + os.sep, *_LOOKING))
        if own is None or (is_library and not guards.hands_out(asker, _OF_CHECKS)):
            return None
        is_fair = expands(asker) if name.startswith(_SHELL) else is_importing(asker)
        return None if is_fair else seen_at(own, _FRAMES, True)

    def expands(frame: FrameType) -> bool:
        """`!ls {name}` and `%timeit f(x)`: IPython looks names up in the cell that calls it, or in its own frames."""
        depth = {"var_expand": "depth", "get_local_scope": "stack_depth"}.get(frame.f_code.co_name)
        is_named = "_getframe" in frame.f_code.co_names and frame.f_code.co_name in ("push", "parse_options")
        for _ in range(frame.f_locals.get(depth, 99) + 1 if depth else 1 if is_named else 99):
            frame = frame and frame.f_back
        name = frame.f_code.co_filename if frame else ""
        return name.startswith((CELL, *_SHELL))

    def is_importing(frame: FrameType | None) -> bool:
        """Whether a library's module is being loaded: its code has not met the student's."""
        inner = ""
        while frame and not is_own(frame.f_code.co_filename):
            if inner == "<module>" and frame.f_code.co_filename.startswith(_IMPORTERS):
                return True
            inner, frame = frame.f_code.co_name, frame.f_back
        return False

    def sets_attribute(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        is_code = arguments[1] in ("__code__", "__defaults__", "__kwdefaults__", "__builtins__")
        is_named = arguments[1] in frame.f_code.co_names and not is_own(frame.f_code.co_filename)
        fair = not is_code or is_named or is_importing(frame)
        return None if fair or (own := anyone(frame)) is None else seen_at(own, _REWRITES, True)

    def memory(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        while frame and frame.f_code.co_filename.startswith(_CTYPES):
            frame = frame.f_back
        return seen_at(frame, _MEMORY, True) if frame and is_own(frame.f_code.co_filename) else None

    def unpickles(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        module = str(arguments[0])
        while frame and frame.f_code.co_filename.startswith(_PICKLE):
            frame = frame.f_back
        own = module.startswith(_UNPICKLED) and frame and is_own(frame.f_code.co_filename)
        return seen_at(frame, _BUILT, True) if own else None

    def runs_code(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        code = arguments[0]
        if not isinstance(code, CodeType) or code.co_filename[: len(CELL)] == CELL:
            return None  # what a cell says was looked at before it ran
        if frame.f_code.co_filename == "<frozen zipimport>" and behind(frame):
            return seen_at(frame, _BUILT, True)
        if code.co_filename[:1] == "<" and (frame.f_code.co_filename.startswith(_GENERATING) or is_importing(frame)):
            return None
        names, unseen = _names_in(code) if is_own(code.co_filename) else set(), (_BUILT, True)
        told = unseen if _UNSEEN_NAMES & names else (_ELSEWHERE, None) if _BY_NAME & names else ()
        return seen_at(frame, *told) if told else None

    def compiles(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        """Code of a cell must not pass for code of a library."""
        name = os.fsdecode(arguments[1]) if isinstance(arguments[1], str | bytes) else ""
        if not name or is_own(name) or not behind(frame) or is_text_of(name, arguments[0]):
            return None
        is_named = "compile" in frame.f_code.co_names and frame.f_code.co_filename.startswith(_NUMERIC)
        return None if is_named else seen_at(frame, _BUILT, True)

    def is_text_of(name: str, source: object) -> bool:
        try:
            return isinstance(source, bytes) and Path(name).read_bytes() == source
        except (OSError, ValueError):
            return False

    def is_under(path: str, places: Sequence[str]) -> bool:
        return any(path == one or path.startswith(one + os.sep) for one in places)

    def is_hidden(path: str) -> bool:
        if path.startswith("/proc/") and (path.endswith("/mem") or not path.startswith("/proc/self/")):
            parts = path.split("/")
            return path.endswith("/mem") or (parts[2].isdigit() and int(parts[2]) != os.getpid() and len(parts) > 3)
        return is_under(path, hidden)

    def is_outside(path: str) -> bool:
        return not path.startswith((folder + os.sep, "/dev/", "/proc/self/")) and path != folder

    def resolved(path: object) -> str | None:
        if isinstance(path, int) or path is None:
            return None
        try:
            return os.path.realpath(os.fsdecode(path))
        except (TypeError, ValueError):
            return None

    def opens(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        path, mode, flags = resolved(arguments[0]), *arguments[1:]
        if path is None:
            return None
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool(int(flags or 0) & _WRITES)
        reason = _JUDGES if is_under(path, references) else _FILES
        refused = reason is _JUDGES or is_hidden(path)
        if not refused and not writes and path.endswith(_COMPILED) and "__pycache__" not in path:
            fair = is_outside(path) or not frame.f_code.co_filename.startswith(_IMPORTERS)
            reason, refused = _BUILT, not fair and os.path.exists(path)  # it may say that it is a library's
        if not (refused or (writes and is_outside(path))):
            return None
        own = behind(frame, _BUILDERS if reason is _BUILT else ())
        return seen_at(own, reason, refused) if own else None

    def touches(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        for path in map(resolved, arguments[:2]):
            refused = bool(path) and (is_hidden(path) or (is_under(path, references) and event not in _READS))
            if path and (refused or (event not in _READS and is_outside(path))):
                own = behind(frame)
                return seen_at(own, _FILES, refused) if own else None
        return None

    def loads(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        """`import`: machine code of its own folder, and modules that CPython has for its own tests."""
        path = resolved(arguments[1])
        own = path and path.endswith((".so", ".pyd")) and not is_outside(path) and behind(frame, _BUILDERS)
        own = own or guards.imports_innards(arguments[0], frame, is_own)
        return seen_at(own, _MEMORY, True) if own else None

    def signals(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        """Ending oneself is one's own affair, and so are the processes that one has started."""
        pid, own = arguments[0], behind(frame)
        if own is None or pid in (0, os.getpid() if event == "os.kill" else os.getpgid(0)) or is_child(pid):
            return None
        return seen_at(own, _PROCESS, True)

    def is_child(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
        except (OSError, ValueError, IndexError):
            return False

    def starts(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        """Another program: where it would not be shut in as this process is, it does not start."""
        own = None if apart else behind(frame, _BUILDERS)
        return seen_at(own, _PROCESS, False) if own else None

    def connects(event: str, arguments: tuple, frame: FrameType) -> Seen | None:
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[-1]
        host = address[0] if isinstance(address, tuple) and address else address
        if isinstance(host, bytes):
            host = host.decode(errors="replace")
        if not isinstance(host, str) or host.startswith(("127.", "/", "\0")) or host in ("localhost", "::1", ""):
            return None
        own = behind(frame)
        return seen_at(own, _NETWORK, False) if own else None

    found: dict[str, Judge] = dict.fromkeys(_DIRECT, direct) | dict.fromkeys(_TOUCHED, touches)
    found |= dict.fromkeys(_PROGRAMS, starts) | dict.fromkeys(("os.kill", "os.killpg"), signals)
    found |= dict.fromkeys(("object.__getattr__", "sys._getframe"), looks)
    found |= guards.judges(behind, seen_at, is_importing, _library)
    found |= {"object.__setattr__": sets_attribute, "ctypes": memory, "import": loads}
    found |= {"pickle.find_class": unpickles, "exec": runs_code, "compile": compiles, "open": opens}
    return found | ({} if apart else dict.fromkeys(_NETWORKED, connects))


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names) | {value for value in code.co_consts if isinstance(value, str)}
    for value in code.co_consts:
        if isinstance(value, CodeType):
            found |= _names_in(value)
    return found
