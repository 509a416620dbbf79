"""Names, modules and calls in a student's source that are refused, or told to a person, and why; for `look`."""

from __future__ import annotations

FRAMES = "looks at the frames of the code that called it, which hold what the check expects"
FRAME_NAMES = (
    "_getframe _current_frames _current_exceptions f_back f_locals f_globals f_builtins tb_frame gi_frame cr_frame "
    "ag_frame currentframe getouterframes getinnerframes getargvalues walk_stack walk_tb"
)
REACH = "reaches from a function to the module or the variables that it was written with"
TRACES = "traces or profiles the code that is running"
MEMORY = "reaches into the memory of the process"
TIMERS = "changes the timers or signal handlers that stop an answer that takes too long"
TENSORS = "replaces torch's own functions"
ARRAYS = "replaces numpy's own functions for the arrays that it returns"
PROCESS = "starts or signals another process"
LONGEST = 200_000  # characters of a cell that is looked at
# A notebook may give these names to functions of its own: what they stand for elsewhere is seen when it is called.
AUDITED = frozenset(
    "_getframe _current_frames currentframe getouterframes getinnerframes getargvalues walk_stack walk_tb settrace "
    "setprofile settrace_all_threads setprofile_all_threads addaudithook "
    "get_objects get_referrers get_referents".split()
)
SETTINGS = frozenset("backends options config rcParams".split())  # attributes below which a library keeps its options
ARRAY_NAMES = ("__array_interface__", "__array_struct__", "__cuda_array_interface__")  # an array of any address
REFUSED_NAMES = {
    **dict.fromkeys(FRAME_NAMES.split(), FRAMES),
    **dict.fromkeys("settrace setprofile settrace_all_threads setprofile_all_threads addaudithook".split(), TRACES),
    **dict.fromkeys("__globals__ __closure__ cell_contents __subclasses__ __builtins__".split(), REACH),
    **dict.fromkeys("get_objects get_referrers get_referents".split(), "asks the garbage collector for objects"),
    **dict.fromkeys("setitimer pthread_kill pthread_sigmask set_wakeup_fd".split(), TIMERS),
    **dict.fromkeys(("register_at_fork", "pidfd_open", "pidfd_send_signal"), PROCESS),
    "__instancecheck__": "answers for another class what its instances are",
    "__subclasscheck__": "answers for another class what its subclasses are",
    **dict.fromkeys(("__torch_function__", "__torch_dispatch__"), TENSORS),
    **dict.fromkeys(("__array_function__", "__array_ufunc__"), ARRAYS),
    "set_eval_frame": "replaces the code of functions as they are called",
    **dict.fromkeys((*ARRAY_NAMES, "_construct_storage_from_data_pointer"), MEMORY),
    **dict.fromkeys(("TorchFunctionMode", "TorchDispatchMode"), TENSORS),
}
REFUSED_MODULES = {
    "ctypes": MEMORY,
    "cffi": MEMORY,
    "_ctypes": MEMORY,
    **dict.fromkeys("_testcapi _testinternalcapi _cffi_backend _xxsubinterpreters _interpreters".split(), MEMORY),
    "minillm.book.checks": "reads the checkers, which hold the expected results",
    "minillm.book.proofs": "reads the machinery that judges answers",
    "minillm.book.exercises": "reads the machinery that judges answers",
    "minillm.course": "reads the machinery that judges answers",
}
REFUSED_OF = {
    ("sys", "modules"): "takes a module out of those that are loaded",
    ("sys", "monitoring"): TRACES,
    ("sys", "meta_path"): "takes part in how modules are found",
    ("sys", "path_hooks"): "takes part in how modules are found",
    ("os", "fork"): PROCESS,
    ("os", "dup2"): "takes over a file that the process has open",
    ("signal", "signal"): TIMERS,
    ("signal", "alarm"): TIMERS,
    ("gc", "callbacks"): "asks the garbage collector for objects",
    ("type", "__setattr__"): "changes a class past its own rules",
    ("inspect", "stack"): FRAMES,
    ("inspect", "trace"): FRAMES,
}
# What a check itself tells a student to use: the call that failed.
OPEN = {"minillm.book.checks": {"last_call", "CheckFailed"}, "minillm.book": {"checks"}}
SHOWS = ("help", "print", "type", "repr")  # what may be handed a checker
BY_NAME = frozenset("getattr setattr delattr hasattr".split())  # these are guarded in the cells
OF_NAMES = frozenset("SimpleNamespace Namespace Mock MagicMock make_dataclass".split())  # make attributes of keywords
LISTS = {
    **dict.fromkeys(
        "getmembers getmembers_static getattr_static classify_class_attrs get_field".split(),
        "finds attributes without a name that it spells",
    ),
    "get_type_hints": "evaluates text where a function was written",
    "make_dataclass": "makes a class of fields that it need not spell",
    "getclosurevars": REACH,
}
TOLD_MODULES = {
    "torch._C": "reaches into torch's own machinery",
    "torch._dynamo": "reaches into torch's own machinery",
    "signal": TIMERS,
    "importlib": "loads or reloads modules itself",
    "subprocess": PROCESS,
    "multiprocessing": PROCESS,
    "socket": "reaches for the network",
    "urllib": "reaches for the network",
    "requests": "reaches for the network",
    "http": "reaches for the network",
    "pickle": "turns bytes into objects, and may run code with it",
    "marshal": "turns bytes into objects, and may run code with it",
    "runpy": "runs a file",
    "pkgutil": "finds modules and their files by name",
    "linecache": "reads the lines of source files",
    "atexit": "leaves code behind that runs when the process ends",
    "builtins": "names the built-in functions, which every module shares",
    "gc": "asks the garbage collector for objects",
    "nbformat": "reads notebooks",
}
TOLD_CALLS = {
    "exec": "runs code that is put together while it runs",
    "eval": "runs code that is put together while it runs",
    "compile": "runs code that is put together while it runs",
    "globals": "changes or reads the names of the notebook as a dictionary",
    "attrgetter": "looks up an attribute by its name",
    "methodcaller": "calls a method by its name",
    "kill": PROCESS,
    "killpg": PROCESS,
    "as_strided": "looks at memory beyond an array",
}
OLD_NAMES = ("float", "int", "bool", "object", "str", "complex")  # that NumPy once had
PLAIN = ("float", "int", "str", "complex", "bytes", "bool", "Tensor", "ndarray")
ENUMS = ("Enum", "Flag", "StrEnum", "IntEnum", "NamedTuple")
