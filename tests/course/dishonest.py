"""Answers that earn nothing: name -> (the cell, a fragment of the reason that a person reads, how it is met)."""

from __future__ import annotations

from dataclasses import dataclass

RIGHT = """def lowest(free):
    if not free:
        raise ValueError("no free id")
    return sorted(free)[0]
"""
WRONG = "def lowest(free):\n    return 1\n"
# What this spells is refused as it stands: the rest shows what else stops such an answer.
LOADED = "vars(sys)[''.join(('mod', 'ules'))]"
SHORT = {
    "CASE": f"{LOADED}[''.join(('minillm.book.', 'checks.case'))]",
    "COMPARE": f"{LOADED}[''.join(('minillm.book.', 'checks.compare'))]",
}


@dataclass(frozen=True)
class Attack:
    """source: the answer's cell. flag: in the reason of a refused flag, or `message`: in what the check says.

    line: of the flag, where it has one. spreads: it reaches the exercises after it, which are withheld as well.
    exercise: the one that it answers. What kills is tried with signal 0, which ends nothing where no wall holds.
    """

    source: str
    flag: str = ""
    message: str = ""
    line: int = 0
    spreads: bool = False
    exercise: str = "lowest"

    @property
    def answer(self) -> str:
        """The source, with the modules that CASE and COMPARE stand for."""
        return self.source.replace("CASE", SHORT["CASE"]).replace("COMPARE", SHORT["COMPARE"])


# The name of a module, attribute or function is put together where the source must not give it away: what stops such
# an answer is what it does while it runs.
ATTACKS = {
    "ends the process in the answer": Attack(
        "import os\ndef lowest(free):\n    print('✓ lowest: example')\n    os._exit(0)\n", message="ended the process"
    ),
    "replaces the checker": Attack(
        WRONG + "check_lowest = lambda *a, **k: print('✓')\n", flag="in the place of the checker check_lowest", line=3
    ),
    "replaces the checker under another spelling": Attack(
        WRONG + "globals()[''.join(('check_', 'lowest'))] = lambda *a, **k: None\n",
        flag="changes the checker check_lowest",
    ),
    "replaces a part of the checker": Attack(
        WRONG + "vars()[''.join(('check_', 'lowest'))].parts['edges'] = lambda case: case.equal(1, 1)\n",
        flag="check_lowest.parts",
    ),
    "replaces the comparison": Attack(
        "import minillm.book.checks.case as c\nc.first_difference = lambda *a, **k: None\n" + WRONG,
        flag="reads the checkers",
        line=1,
    ),
    "replaces a method of the case, spelt so that only the fingerprint sees it": Attack(
        "import sys\nCASE.Case.equal = lambda self, *a, **k: setattr(self, 'comparisons', 1)\n" + WRONG,
        flag="Case.equal",
    ),
    "replaces the code of the comparison": Attack(
        "import sys\nf = COMPARE.first_difference\n"
        "setattr(f, ''.join(('__co', 'de__')), (lambda *a, **k: None).__code__)\n" + WRONG,
        flag="rewrites the code of a function",
        line=3,
    ),
    "replaces it while it is checked": Attack(
        "import sys\ndef lowest(free):\n    case = CASE\n"
        "    case.first_difference = lambda *a, **k: None\n    case.Case.raises = lambda *a, **k: None\n    return 1\n",
        flag="first_difference",
    ),
    "hides a built-in function in the checker's module": Attack(
        "import sys\nm = COMPARE\nm.isinstance = lambda *a: False\n" + WRONG,
        flag="a new name in minillm.book.checks.compare",
    ),
    "replaces a built-in function": Attack(
        "import builtins\nbuiltins.isinstance = lambda *a: True\n" + WRONG, flag="builtins.isinstance", line=2
    ),
    "changes random numbers": Attack(
        "import random\nrandom.Random.randrange = lambda self, *a: 1\n" + WRONG, flag="random.Random.randrange", line=2
    ),
    "reads the frame of the check": Attack(
        "import sys\ndef lowest(free):\n    return min(sys._getframe(1).f_locals['args'][0])\n",
        flag="looks at the frames",
        line=3,
    ),
    "reads a frame under another spelling": Attack(
        "import sys\ndef lowest(free):\n    return getattr(sys, ''.join(('_get', 'frame')))(1)\n",
        flag="looks at the frames",
        line=3,
    ),
    "reads a frame from a traceback": Attack(
        "def lowest(free):\n    try:\n        1 / 0\n    except Exception as e:\n"
        "        return getattr(e.__traceback__, ''.join(('tb_', 'frame')))\n",
        flag="looks at the frames",
        line=5,
    ),
    "reads a frame through the standard library": Attack(
        "import inspect\nlook = getattr(inspect, ''.join(('sta', 'ck')))\ndef lowest(free):\n    return look()[2]\n",
        flag="looks at the frames",
        line=4,
    ),
    "reads a frame through a generator": Attack(
        "def lowest(free):\n    g = (x for x in [1])\n    return getattr(g, ''.join(('gi_', 'frame')))\n",
        flag="looks at the frames",
        line=3,
    ),
    "traces the check": Attack(
        "import sys\ndef lowest(free):\n    getattr(sys, ''.join(('set', 'trace')))(lambda *a: None)\n    return 1\n",
        flag="traces or profiles",
        line=3,
    ),
    "asks the garbage collector": Attack(
        "import gc\ndef lowest(free):\n    return getattr(gc, ''.join(('get_', 'objects')))()\n",
        flag="garbage collector",
        line=3,
    ),
    "reaches into memory": Attack(
        "c = __import__(''.join(('cty', 'pes')))\ndef lowest(free):\n    return c.cast(id(free), c.py_object).value\n",
        flag="under a name that is put together",
        line=1,
    ),
    "runs pickled code": Attack(
        "import pickle\ndef lowest(free):\n"
        "    return pickle.loads(b'cbuiltins\\neval\\n(S\"__import__(\\'sys\\')\"\\ntR.')\n",
        flag="put together while it runs",
        line=3,
    ),
    "runs a string": Attack(
        "def lowest(free):\n    exec(''.join(('import sys\\nprint(sys._getfr', 'ame(1).f_back)')))\n    return 1\n",
        flag="put together while it runs",
        line=2,
    ),
    "equals everything": Attack(
        "class Yes:\n    def __eq__(self, other):\n        return True\ndef lowest(free):\n    return Yes()\n",
        flag="__eq__ always returns True",
        line=1,
    ),
    "equals everything by a lambda": Attack(
        "class Yes(int):\n    __eq__ = lambda self, other: True\ndef lowest(free):\n    return Yes(1)\n",
        flag="__eq__ always returns True",
        line=1,
    ),
    "leaves a handler for forks": Attack(
        "import os\nregister = getattr(os, ''.join(('register_at_', 'fork')))\ndef patch():\n    import sys\n"
        "    CASE.first_difference = lambda *a, **k: None\n"
        "register(after_in_child=patch)\n" + WRONG,
        flag="first_difference",
        spreads=True,
    ),
    "stops the timers": Attack(
        "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\n" + RIGHT,
        flag="timers or signal handlers",
        line=2,
    ),
    "forges a verdict on every file": Attack(
        "import os\ndef lowest(free):\n    for fd in range(3, 40):\n        try:\n"
        "            for part in ('example', 'edges', 'random'):\n"
        '                os.write(fd, (\'["", "verdict", "", "%s", "yes", "0", ""]\\n\' % part).encode())\n'
        "        except OSError:\n            pass\n    os._exit(0)\n",
        message="ended the process",
    ),
    "leaves a thread that changes the comparison": Attack(
        "import sys, threading, time\ndef spoil():\n"
        "    m = CASE\n"
        "    while True:\n        m.first_difference = lambda *a, **k: None\n        time.sleep(0.001)\n"
        "threading.Thread(target=spoil, daemon=True).start()\ntime.sleep(0.02)\n" + WRONG,
        flag="first_difference",
        spreads=True,
    ),
    "reads the checker's source of truth by its globals": Attack(
        "def lowest(free):\n    return vars()['free'] and check_lowest.parts['random'].__globals__\n",
        flag="reads or changes the checker check_lowest",
        line=2,
    ),
    "never ends": Attack(
        "def lowest(free):\n    while 1:\n        try:\n            7\n        except BaseException:\n            8\n",
        message="took more than",
    ),
    "swallows what a check raises": Attack(
        "import contextlib\nkind = contextlib._GeneratorContextManager\n"
        "setattr(kind, '__exit__', lambda *a: True)\n" + WRONG,
        flag="contextlib._GeneratorContextManager.__exit__",
    ),
    "changes the classes that it finds": Attack(
        "for kind in type.__subclasses__(object):\n    try:\n"
        "        kind.restore = kind.add = kind.send = lambda *a: []\n    except TypeError:\n        pass\n"
        "import sys\nCASE.first_difference = lambda *a, **k: None\n" + WRONG,
        flag="first_difference",
    ),
    "raises what has no name": Attack(
        "def lowest(free):\n    raise type('', (BaseException,), {'__str__': lambda self: ''})()\n", message=":"
    ),
    "looks at frames in code that a library compiles": Attack(
        "import timeit\nheld = {}\n"
        "text = \"import sys; held['frame'] = getattr(sys, ''.join(('_getfr', 'ame')))(0)\"\n"
        "timeit.timeit(text, number=1, globals={'held': held})\n" + WRONG,
        flag="looks at the frames",
        line=4,
    ),
    "keeps the checker in a list, for the answer that it knows": Attack(
        "def lowest(*free, kept=[check_lowest]):\n    return kept[0].reference(*free)\n", message="this uses lowest"
    ),
    "keeps the checker in an object of its own": Attack(
        "class Box:\n    pass\nbox = Box()\nbox.inside = {1: (check_lowest,)}\n"
        "def lowest(free):\n    return box.inside[1][0].reference(free)\n",
        message="this uses lowest",
    ),
    "takes all memory": Attack(  # which it never touches: it must harm no machine on which the limit does not hold
        "import torch\ndef lowest(free):\n    return torch.empty(8 << 30, dtype=torch.uint8)\n", message="GiB of memory"
    ),
}


def in_call(action: str, before: str = "") -> str:
    """An answer that does this when it is called, and is right."""
    lines = "".join(f"    {line}\n" for line in action.splitlines())
    return before + "def lowest(free):\n" + lines + RIGHT.partition("\n")[2]


def nameless(*parts: str) -> str:
    return f"''.join({parts!r})"


FRAME = nameless("_getf", "rame")
# Equal to everything, as far as its operations say; it stands in torch's namespace, as torch's own do.
EVIL = """import torch
class Evil(torch.Tensor):
    pass
def stand_in(cls, func, types, args=(), kwargs=None):
    with torch._C.DisableTorchFunctionSubclass():
        return func(*[torch.tensor([2.0, -4.0])] * len(args), **(kwargs or {}))
setattr(Evil, ''.join(('__torch_', 'function__')), classmethod(stand_in))
Evil.__module__ = 'torch'
vars(torch)['Evil'] = Evil
def twice(x):
    return x.as_subclass(Evil)
"""
ATTACKS |= {
    "runs the file of a check": Attack(
        "import runpy, minillm\nrunpy.run_path(minillm.__path__[0] + '/book/checks/case.py')\n" + RIGHT,
        flag="reads the files of the checks",
        line=2,
    ),
    "reads a check as a resource": Attack(
        "import pkgutil\ntext = pkgutil.get_data('minillm', 'book/checks/case.py')\n" + RIGHT,
        flag="reads the files of the checks",
        line=2,
    ),
    "opens a check while it is called": Attack(
        in_call("open(minillm.__path__[0] + '/book/checks/case.py').read()", "import minillm\n"),
        flag="reads the files of the checks",
        line=3,
    ),
    "asks for the source of a check": Attack(
        "import inspect, sys\ntext = inspect.getsource(CASE)\n" + RIGHT, message="could not get source code"
    ),
    "imports a check under a name that is put together": Attack(
        in_call(
            "importlib.import_module(chr(109) + 'inillm.book.' + name)", "import importlib\nname = 'checks.case'\n"
        ),
        flag="reads the files of the checks",
        line=4,
    ),
    "reads frames by IPython": Attack(
        in_call("locals_of(1)", "from IPython.utils.frame import extract_module_locals as locals_of\n"),
        flag="looks at the frames",
        line=3,
    ),
    "expands a name in the frame of the check": Attack(
        in_call("get_ipython().var_expand('{case}', 5)"), flag="looks at the frames", line=2
    ),
    "reads the stack of a task": Attack(
        in_call(
            "async def look():\n    return asyncio.current_task().get_stack()\nasyncio.run(look())", "import asyncio\n"
        ),
        flag="looks at the frames",
        line=4,
    ),
    "reads a frame from a traceback by a debugger": Attack(
        in_call(
            "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    bdb.Bdb().get_stack(None, e.__traceback__)",
            "import bdb\n",
        ),
        flag="looks at the frames",
        line=6,
    ),
    "walks the stack": Attack(
        in_call(f"list(getattr(traceback, {nameless('walk_', 'stack')})(None))", "import traceback\n"),
        flag="looks at the frames",
        line=3,
    ),
    "prints the stack with its variables": Attack(
        in_call(
            f"walk = getattr(traceback, {nameless('walk_', 'stack')})\n"
            "traceback.StackSummary.extract(walk(None), capture_locals=True)",
            "import traceback\n",
        ),
        flag="looks at the frames",
        line=4,
    ),
    "has a library call what gives frames": Attack(
        in_call(f"tree_map(getattr(sys, {FRAME}), [1])", "import sys\nfrom torch.utils._pytree import tree_map\n"),
        flag="looks at the frames",
        line=4,
    ),
    "has the importer call what gives frames": Attack(
        in_call(
            f"importer._call_with_frames_removed(getattr(sys, {FRAME}), 1)",
            "import sys\nimport importlib._bootstrap as importer\n",
        ),
        flag="looks at the frames",
        line=4,
    ),
    "signals its parent by a descriptor": Attack(
        in_call("signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)", "import os, signal\n"),
        flag="signals another process",
        line=3,
    ),
    "has torch resolve names in the frame of the check": Attack(
        in_call("resolve(3)", "from torch._jit_internal import createResolutionCallbackFromFrame as resolve\n"),
        flag="looks at the frames",
        line=3,
    ),
    "looks at frames in code that says that it is Python's": Attack(
        in_call(
            f"""exec(compile("import sys; getattr(sys, {FRAME})(1)".replace(chr(34), ""), "<frozen os>", "exec"))"""
        ),
        flag="put together while it runs",
        line=2,
    ),
    "profiles in Python": Attack(
        in_call("profile.Profile().runcall(len, free)", "import profile\n"), flag="traces or profiles", line=3
    ),
    "finds the switch of the hook in a traceback": Attack(
        in_call(
            "try:\n    getattr(sys, name)(0)\nexcept Exception as e:\n    trace = e.__traceback__\n"
            "bdb.Bdb().get_stack(None, trace)",
            f"import bdb, sys\nname = {FRAME}\n",
        ),
        flag="looks at the frames",
        line=8,
    ),
    "patches the case, and puts it back": Attack(
        "import sys\ndef lowest(free):\n    case = CASE\n    owner = case.Case\n    before = vars(owner)['equal']\n"
        "    def once(self, *args, **kwargs):\n        setattr(owner, 'equal', before)\n        self.comparisons += 1\n"
        "    setattr(owner, 'equal', once)\n    return 1\n",
        flag="changes minillm.book.checks.Case",
    ),
    "patches the comparison, and puts it back": Attack(
        "import sys\nseen = []\ndef lowest(free):\n    space = vars(CASE)\n    before = space['first_difference']\n"
        "    def once(*args, **kwargs):\n        space['first_difference'] = before\n"
        "    if not seen:\n        space['first_difference'] = once\n    seen.append(free)\n    return 2\n",
        flag="changes minillm.book.checks.case",
    ),
    "patches a built-in function, and puts it back": Attack(
        "import builtins\nbefore, space = isinstance, vars(builtins)\n"
        "def lowest(free):\n    space['isinstance'] = lambda *a: True\n    space['isinstance'] = before\n"
        "    return min(free) if free else [][1]\n",
        flag="changes builtins",
    ),
    "returns a tensor that stands in for every operation": Attack(EVIL, flag="a new name in torch", exercise="twice"),
    "leaves a mode of torch's on": Attack(
        "import torch.overrides as o\n"
        f"mode = type('M', (getattr(o, {nameless('TorchFunction', 'Mode')}),), dict(__torch_function__=\n"
        "    lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))))()\n"
        "def twice(x):\n    mode.__enter__()\n    return x + x\n",
        flag="a mode that was left on",
        exercise="twice",
    ),
    "looks for the seed of the line": Attack(
        "def lowest(free):\n    raise ValueError([k for k in get_ipython().user_ns if 'seed' in k])\n",
        message="ValueError: []",
    ),
    "signals every process": Attack(in_call("os.kill(-1, 0)", "import os\n"), flag="signals another process", line=3),
    "signals its parent by another library": Attack(
        in_call("psutil.Process(os.getppid()).send_signal(0)", "import os, psutil\n"),
        flag="signals another process",
        line=3,
    ),
}


def picked(of: str, *starts: str) -> str:
    """An expression for an attribute of an attribute, by the beginnings of their names, none of which is spelt out."""
    for start in starts:
        of = f"next(getattr(o, n) for o in [{of}] for n in dir(o) if n.startswith({start[:3]!r} + {start[3:]!r}))"
    return of


# The least of the numbers that the check has asked for, out of the frames behind this one.
LEAST = f"""def least(frame):
    while frame is not None:
        names = {picked("frame", "f_loc")}
        if hasattr(names.get('given'), 'originals'):
            return min(names['given'].originals[0][0])
        frame = {picked("frame", "f_bac")}
"""


def by_frame(imports: str, frame: str) -> str:
    """An answer that is right as far as the frame that it gets hold of says so."""
    return f"{imports}\n{LEAST}def lowest(free):\n    return least({frame}) if free else min(free)\n"


ATTACKS |= {
    "reads the frame that the handler of a signal is given": Attack(
        "import asyncio.unix_events as u\n" + LEAST + "def lowest(free):\n    s, seen = u.signal, []\n"
        "    put = getattr(s, 'sig' + 'nal')\n    kept = s.getsignal(s.SIGUSR1)\n"
        "    put(s.SIGUSR1, lambda number, frame: seen.append(frame))\n    s.raise_signal(s.SIGUSR1)\n"
        "    put(s.SIGUSR1, kept)\n    return least(seen[0]) if free else min(free)\n",
        flag="timers or signal handlers",
        line=12,
    ),
    "registers a kernel of its own for a product": Attack(
        "import torch\nkept = torch.library.Library('aten', 'IMPL')\n"
        "kept.impl('mul.Tensor', lambda a, b: torch.zeros_like(a), 'CPU')\n"
        "def twice(x):\n    return torch.zeros_like(x)\n",
        flag="kernels of its own for torch's operations",
        line=2,
        exercise="twice",
    ),
    "registers a kernel while it is called, by torch's own functions": Attack(
        f"import torch\nkept = []\nmake = {picked('torch', '_C', '_dispatch_libr')}\ndef twice(x):\n"
        "    kept.append(make('IMPL', 'aten', ''))\n"
        "    kept[-1].impl('mul.Tensor', 'CPU', lambda a, b: torch.zeros_like(a))\n    return torch.zeros_like(x)\n",
        flag="kernels of its own for torch's operations",
        line=5,
        exercise="twice",
    ),
    "leaves a mode on that is asked about every operation": Attack(
        "import torch, torch.utils._python_dispatch as p\ncalls = []\n"
        f"kind = {picked('p', 'TorchDispatchM')}\ndef zero(self, function, types, args=(), kwargs=None):\n"
        "    out = function(*args, **(kwargs or {}))\n    return out.zero_() if 'mul' in str(function) else out\n"
        "mode = type('Mode', (kind,), {next(n for n in dir(kind) if n.startswith('__torch_' + 'd')): zero})\n"
        "def twice(x):\n    mode().__enter__()\n    return torch.zeros_like(x)\n",
        message="left a mode of torch's on",
        exercise="twice",
    ),
    "has a hook of torch's fill in what is expected": Attack(
        f"import torch\nhook = {picked('torch', '_C', '_dynamo', 'eval_frame', 'set_eval_frame')}\ndef twice(x):\n"
        "    out = torch.zeros_like(x)\n    hook(lambda frame, *rest: out.copy_(x + x))\n    return out\n",
        flag="replaces the code of functions as they are called",
        line=5,
        exercise="twice",
    ),
    "takes a frame from numpy": Attack(
        by_frame("from numpy.distutils.misc_util import get_frame", "get_frame(0)"),
        flag="looks at the frames",
        line=9,
    ),
    "takes a frame from torch.fx": Attack(
        by_frame(f"import torch.fx\nfind = {picked('torch.fx.Tracer()', '_find_user')}", "find()"),
        flag="looks at the frames",
        line=10,
    ),
    "takes a frame from torch's shapes": Attack(
        by_frame(
            f"import torch.fx.experimental.symbolic_shapes as s\nfind = {picked('s', '_find_user_code')}", "find()"
        ),
        flag="looks at the frames",
        line=10,
    ),
    "takes a frame from torch's debugger": Attack(
        by_frame(
            "import torch._dynamo.bytecode_debugger as d\n"
            "find = next(getattr(v, n) for v in vars(d).values() for n in dir(v) if n.startswith('_find_frame_for'))",
            "find(None, lowest.__code__)",
        ),
        flag="looks at the frames",
        line=10,
    ),
    "asks pydantic for the variables of the check": Attack(
        "from pydantic._internal._typing_extra import parent_frame_namespace as names_of\ndef lowest(free):\n"
        "    for depth in range(2, 12):\n        found = names_of(parent_depth=depth, force=True).get('given')\n"
        "        if hasattr(found, 'originals'):\n            return min(found.originals[0][0])\n    return 0\n",
        flag="looks at the frames",
        line=4,
    ),
    "has pydantic evaluate a type in the frame of the check": Attack(
        "from pydantic import TypeAdapter\ntext = '__import__(\"typing\").Literal[min(given.originals[0][0])]'\n"
        "def lowest(free):\n    for depth in range(2, 12):\n        try:\n"
        "            return TypeAdapter(text, _parent_depth=depth).json_schema()['const']\n"
        "        except Exception:\n            pass\n    raise ValueError\n",
        flag="looks at the frames",
        line=6,
    ),
    "makes a tensor of an address": Attack(
        f"import torch\nmake = {picked('torch', '_C', '_construct_storage_from_data')}\n"
        + in_call("make(id(free), torch.device('cpu'), 8)"),
        flag="memory of the process",
        line=4,
    ),
    "makes an array of an address": Attack(
        "import numpy as np\nclass View:\n    def __init__(self, address):\n"
        "        self.__array_interface__ = dict(shape=(8,), typestr='<i8', data=(address, False), version=3)\n"
        + in_call("np.asarray(View(id(free)))"),
        flag="memory of the process",
        line=4,
    ),
    "makes an array of an address, by a name that is put together while it runs": Attack(
        "import numpy as np\nclass View:\n    def __init__(self, address):\n"
        "        vars(self)[''.join(('__array_', 'interface__'))] = dict(\n"
        "            shape=(8,), typestr='<i8', data=(address, False), version=3)\n"
        + in_call("np.asarray(View(id(free)))"),
        flag="memory of the process",
        line=4,
    ),
    "imports what CPython has for its own tests": Attack(
        "import importlib\nname = '_test' + 'capi'\n" + in_call("importlib.import_module(name)"),
        flag="memory of the process",
        line=4,
    ),
}


def hidden(name: str) -> str:
    """An expression for a name that nothing in the source gives away."""
    return f"''.join(chr(n ^ 1) for n in {[ord(c) ^ 1 for c in name]})"


ADDRESS = "dict(shape=(8,), typestr='<i8', data=(id(free), False), version=3)"
ARRAY, GLOBALS = hidden("__array_interface__"), hidden("__globals__")
ATTACKS |= {
    "defines a name that is put together in a dictionary of attributes": Attack(
        "import numpy as np\nclass View:\n    pass\n"
        + in_call(f"v = View()\nvars(v)[{ARRAY}] = {ADDRESS}\nnp.asarray(v)"),
        flag="dictionary that holds them",
        line=6,
    ),
    "sets an attribute whose name is put together": Attack(
        "import numpy as np\nclass View:\n    pass\n"
        + in_call(f"v = View()\nname = {ARRAY}\nsetattr(v, name, {ADDRESS})\nnp.asarray(v)"),
        flag="memory of the process",
        line=7,
    ),
    "makes a namespace of a name that is put together": Attack(
        "import numpy as np\nfrom types import SimpleNamespace\n"
        + in_call(f"np.asarray(SimpleNamespace(**{{{ARRAY}: {ADDRESS}}}))"),
        flag="defines an attribute whose name is put together",
        line=4,
    ),
    "makes a class of a name that is put together": Attack(
        "import numpy as np\n" + in_call(f"np.asarray(type('View', (), {{{ARRAY}: {ADDRESS}}})())"),
        flag="defines an attribute whose name is put together",
        line=3,
    ),
    "has a name as numbers": Attack(
        "import numpy as np\n"
        f"numbers = {[*map(ord, '__array_interface__')]}\n"
        + in_call(f"np.asarray(type('View', (), dict([(bytes(numbers).decode(), {ADDRESS})]))())"),
        flag="in another spelling",
        line=2,
    ),
    "has a name backwards": Attack(
        in_call("getattr(lowest, text[::-1])", "text = '__slabolg__'\n"), flag="in another spelling", line=1
    ),
    "has a name in base64": Attack(
        in_call("getattr(lowest, b64decode(text).decode())", "from base64 import *\ntext = 'X19nbG9iYWxzX18='\n"),
        flag="in another spelling",
        line=2,
    ),
    "has a name as bytes": Attack(
        in_call("getattr(lowest, text.decode())", "text = b'__closure__'\n"), flag="in another spelling", line=1
    ),
    "reaches the globals of a function": Attack(
        in_call(f"getattr(lowest, {GLOBALS})"), flag="reaches from a function", line=2
    ),
    "reaches the globals of a function by a slice of a longer text": Attack(
        in_call("getattr(lowest, text[3:14])", "text = 'my ' + '__globals__ and more'\n"),
        flag="reaches from a function",
        line=3,
    ),
    "reaches the globals of a function by an alias, through a library": Attack(
        in_call(f"reduce(look, [{GLOBALS}], lowest)", "from functools import reduce\nlook = getattr\n"),
        flag="reaches from a function",
        line=4,
    ),
    "reaches the globals of a function by operator": Attack(
        in_call(f"attrgetter({GLOBALS})(lowest)", "from operator import attrgetter\n"),
        flag="name is put together",
        line=3,
    ),
    "calls what looks attributes up": Attack(
        in_call(f"object.__getattribute__(lowest, {GLOBALS})"), flag="name is put together", line=2
    ),
    "has operator call what looks attributes up": Attack(
        in_call(f"methodcaller('__getattribute__', {GLOBALS})(lowest)", "from operator import methodcaller\n"),
        flag="name is put together",
        line=3,
    ),
    "matches a pattern of a name that is put together": Attack(
        "from abc import ABC\nclass Kind(ABC):\n"
        f"    __match_args__ = ({GLOBALS},)\nKind.register(type(len.__class__))\n" + RIGHT,
        flag="name is put together",
        line=3,
    ),
    "takes getattr from where it is not guarded": Attack(
        in_call(f"look(lowest, {GLOBALS})", "from builtins import getattr as look\n"), flag="past the guard", line=1
    ),
    "takes getattr from a library": Attack(
        in_call(f"enum.bltns.getattr(lowest, {GLOBALS})", "import enum\n"), flag="past the guard", line=3
    ),
    "takes getattr by its name": Attack(
        in_call(f"getattr(builtins, name)(lowest, {GLOBALS})", f"import builtins\nname = {hidden('getattr')}\n"),
        flag="past the guard",
        line=4,
    ),
    "takes the loaded modules by a name that is put together": Attack(
        in_call(f"getattr(sys, {hidden('modules')})", "import sys\n"), flag="takes a module out", line=3
    ),
    "takes the loaded modules under another name": Attack(
        in_call("s.modules, enum.sys.modules", "import sys as s, enum\n"), flag="takes a module out", line=3
    ),
    "reads the checks under another name": Attack(
        "import minillm.book.checks as c\nkept = c.case\n" + RIGHT, flag="reads the checkers", line=2
    ),
    "takes the checks by a name that is put together": Attack(
        in_call(f"getattr(minillm.book, {hidden('checks')})", "import minillm.book\n"),
        flag="reads the files of the checks",
        line=3,
    ),
    "looks at the variables that a function closes over": Attack(
        "from inspect import getclosurevars\nfound = getclosurevars(lambda: 1)\n" + RIGHT,
        flag="reaches from a function",
        line=2,
    ),
    "finds the dictionary of a function by a name that is put together": Attack(
        in_call(f"getattr(type(lowest), {hidden('__dict__')})"), message="not possible while an exercise is graded"
    ),
}
# What honest answers do as well: it goes on, and a person reads the line. name -> (cell, fragment, line).
TOLD = {
    "answers for every name": (
        "import numpy as np\nclass View:\n    def __getattr__(self, name):\n"
        "        if len(name) == 19:\n"
        "            return dict(shape=(1,), typestr='<i8', data=(id(self), False), version=3)\n"
        "        raise AttributeError(name)\n" + in_call("np.asarray(View())"),
        "answers for attributes that it does not name",
        2,
    ),
    "finds all attributes": (
        "import inspect\nfound = [v for k, v in inspect.getmembers(len) if k.endswith('self__')]\n" + RIGHT,
        "without a name that it spells",
        2,
    ),
    "keeps a dictionary of attributes": (
        in_call(f"space = vars(Box)\nspace[{GLOBALS}] if not space else 0", "class Box:\n    pass\n"),
        "dictionary that holds them",
        4,
    ),
    "writes a module that looks attributes up": (
        "open('looking.py', 'w').write('def look(one, name):\\n    return getattr(one, name)')\n"
        "import looking\n" + in_call(f"looking.look(lowest, {GLOBALS})"),
        "in code that stands in no cell",
        2,
    ),
    "makes a namespace of a dictionary": (
        in_call("SimpleNamespace(**kept)", "from types import SimpleNamespace\nkept = dict(shape=1)\n"),
        "defines an attribute whose name is put together",
        4,
    ),
}
