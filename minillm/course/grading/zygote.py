"""The process that has imported everything once and forks for each submission; it never runs a student's code.

    python -m minillm.course.grading.zygote FD

FD is one end of a socket pair. The first line from there is JSON: the imports of the assignment. Then b"s" with a
file descriptor forks a child that talks on it; b"w PID" waits for one that is ending, b"k PID" kills one at once;
b"i" imports the modules of a list that follows.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import json
import linecache
import os
import pkgutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from minillm.course.grading import confine, landlock


def private(name: str) -> ModuleType:
    """A module of this room under no name, with built-in functions of its own: nothing outside can replace either."""
    spec = importlib.util.spec_from_file_location(f"<{name}>", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = dict(vars(builtins))
    sys.modules[spec.name] = module  # dataclasses look it up while the module is executed
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


def make_shell() -> Any:
    """IPython's shell as a notebook has it, without history, and silent about errors."""
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Compiler(CachingCompiler):
        name = "<cell>"  # of the cell that is compiled next

        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            return self.name

    class Shell(InteractiveShell):
        compiler_class = Compiler

        def showtraceback(self, *args: object, **kwargs: object) -> None:
            pass

        showsyntaxerror = showindentationerror = showtraceback

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    return Shell.instance(config=config)


class Zygote:
    """Imports what an assignment needs, then forks on demand."""

    def __init__(self, control: socket.socket, imports: str, figures: bool) -> None:
        import torch

        from minillm.book.checks import CheckFailed

        torch.set_num_threads(1)  # no thread of torch's may be running when this process forks
        exec(imports, {"__name__": "imports"})
        import_checks()
        if figures:
            import matplotlib.pyplot  # noqa: F401
        self.control, self.check_failed, self.shell = control, CheckFailed, make_shell()
        self.audit, self.child, self.stop = private("audit"), private("child"), private("stop")
        self.rules, self.defaults, self.written = private("rules"), private("defaults"), private("written")
        self.guards = private("guards")
        self.gpu = torch.cuda.is_available()
        sys.path[:] = [p for p in sys.path if p and p != os.getcwd()]
        self.load(())

    def load(self, names: Sequence[str]) -> None:
        """Import what the reference answers were seen to import while they ran, and take the fingerprint after that.

        A module that a child imports first is imported by every child, and may change others as it comes in.
        """
        for name in names:
            with contextlib.suppress(Exception):  # a name of no file, or one that needs another module before it
                importlib.import_module(name)
        forget_sources()
        self.fingerprint = private("fingerprint").Fingerprint(self.written)
        gc.collect()
        gc.freeze()  # a collection in a child does not touch, and so does not copy, what is here

    def serve(self) -> None:
        self.control.sendall(json.dumps({"gpu": self.gpu}).encode() + b"\n")
        while True:
            order, fds, _, _ = socket.recv_fds(self.control, 1, 1)
            if not order:
                return
            if order == b"i":
                self.load(json.loads(self._line()))
                self.control.sendall(b"0\n")
            elif order == b"s":
                pid = os.fork()
                if pid == 0:
                    self._become_child(fds[0])
                os.close(fds[0])
                self.control.sendall(b"%d\n" % pid)
            else:
                self.control.sendall(b"%d\n" % end_of(int(self._line()), 2.0 if order == b"w" else 0.0))

    def _line(self) -> bytes:
        return self.child.read_line(self.control.fileno())

    def _become_child(self, fd: int) -> NoReturn:
        """Read the job, leave the machine behind, run it; the process that enters the new namespaces waits outside."""
        try:
            self.control.close()
            os.setsid()
            confine.die_with_parent()
            job = json.loads(self.child.read_line(fd))
            apart = job["namespaces"] and confine.enter_namespaces()
            if apart and (inner := os.fork()):
                os.close(fd)
                _, status = os.waitpid(inner, 0)
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            if apart:
                os.setsid()  # the process that waits outside is in another group
            confine.die_with_parent()
            run = self._shut_in(fd, job, apart)
        except BaseException as error:  # of ours or of the machine's: a student's code has not run yet
            self.child.sender(fd, job["token"])("broken", f"{type(error).__name__}: {error}")
            os._exit(1)
        try:
            run()
        finally:
            os._exit(1)

    def _shut_in(self, fd: int, job: dict, apart: bool) -> Callable[[], NoReturn]:
        folder, unseen = job["folder"], [*job["hidden"], *job["references"]]
        if apart:
            walls, wrong = "namespaces", confine.shut_in(folder, unseen)
        else:
            walls, wrong = ("landlock" if landlock.shut_in(folder, unseen) else "none"), []
        send = self.child.sender(fd, job["token"])
        send("confined", walls, *wrong)
        move_into(folder)
        confine.adopt_orphans()
        confine.set_limits(confine.Limits(memory=job["memory"]), job["cpu_seconds"], apart)
        judges = self.rules.judges(folder, job["hidden"], job["references"], apart, self.guards)
        self.audit.install(judges, partial(send, "seen"))
        return self.child.prepare(
            fd,
            job,
            self.shell,
            self.fingerprint,
            self.defaults,
            self.guards,
            self.check_failed,
            self.stop.TimeIsUp,
            self.stop.stop,
            confine.die_with_parent,
        )


def import_checks() -> None:
    """What the checks of the chapters may import later: where a submission runs, their files are hidden."""
    from minillm.book import checks

    chapters = {name[len(checks.__name__) + 1 :] for name in sys.modules if name.startswith(f"{checks.__name__}.ch")}
    for module in pkgutil.iter_modules(checks.__path__):
        if any(module.name.startswith(f"{chapter}_") for chapter in chapters):
            importlib.import_module(f"{checks.__name__}.{module.name}")


def forget_sources() -> None:
    """The lines of the checks cannot be looked up; but Triton reads those of a kernel that it interprets."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("minillm.book.checks.") and file:
            text = Path(file).read_text(encoding="utf-8")
            lines = text.splitlines(keepends=True) if "triton.jit" in text else []
            linecache.cache[file] = len(text), None, lines, file


def end_of(pid: int, seconds: float) -> int:
    """The exit status of a child, which is killed if it has not ended after so many seconds.

    Raises ValueError for a number that is no child's: 0 would be the group of this process, -1 every process there is.
    """
    if pid <= 1:
        raise ValueError(f"pid={pid}: the id of a child")
    deadline = time.monotonic() + seconds
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # of another zygote, which has ended
        return -signal.SIGKILL
    while not ended and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)  # it may not have come to have a group of its own
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def move_into(folder: str) -> None:
    """Make `folder` the home, the place for temporary files and the working folder; output goes nowhere."""
    places = "HOME TMPDIR XDG_CACHE_HOME IPYTHONDIR MPLCONFIGDIR TRITON_CACHE_DIR"
    os.environ.update(dict.fromkeys(places.split(), folder))
    import tempfile

    tempfile.tempdir = None
    os.chdir(folder)
    sys.path.insert(0, folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
    sys.stderr = sys.stdout


def main(arguments: Sequence[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    with control.makefile("rb", buffering=0) as lines:
        setup = json.loads(lines.readline())
    try:
        zygote = Zygote(control, setup["imports"], setup["figures"])
    except Exception as error:
        control.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    zygote.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
