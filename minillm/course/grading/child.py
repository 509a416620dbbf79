"""Runs a submission's cells in order, and judges each exercise in a copy of the process that is forked for it.

Seeds arrive after the fork, when the cells before the graded line have run, and never reach the process in which later
cells run. A verdict counts only with the token of the job and the nonce that came with the seeds.

Loaded privately, as `zygote` does it, this module is in no table of modules. It has no class either, since a class can
be found from `object` and changed: what runs beside a student's code is functions that nothing else refers to, and all
that they call is bound before that code runs.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from _json import encode_basestring_ascii as quote
from _signal import ITIMER_REAL, SIG_IGN, SIGALRM, SIGKILL, setitimer, signal
from collections.abc import Callable
from os import (
    O_RDONLY,
    WNOHANG,
    _exit,
    close,
    fork,
    kill,
    listdir,
    open,
    read,
    setpgid,
    waitpid,
    waitstatus_to_exitcode,
    write,
)
from sys import modules, platform
from time import perf_counter, sleep
from types import CodeType
from typing import Any, NoReturn

MESSAGE = 4_000  # characters
GRACE = 5.0  # seconds after the alarm, for code that does not listen to it
_SEED = "the seed of this line"  # a name that no cell can spell


def sender(fd: int, token: str) -> Callable[..., None]:
    """A function that writes a line of JSON strings, the token first."""

    def send(*fields: object) -> None:
        line = "[" + ",".join([quote(token), *(quote(f"{f}") for f in fields)]) + "]\n"
        data = line.encode("ascii")
        while data:
            data = data[write(fd, data) :]

    return send


def read_line(fd: int) -> bytes:
    """The next line of a stream, and not a byte more; the process ends where the stream does."""
    pieces = []
    while piece := read(fd, 1):
        if piece == b"\n":
            return b"".join(pieces)
        pieces.append(piece)
    _exit(1)


def prepare(
    fd: int,
    job: dict,
    shell: Any,
    fingerprint: Any,
    defaults: Any,
    guards: Any,
    check_failed: type[BaseException],
    time_is_up: type[BaseException],
    ring: Callable[..., None],
    orphaned: Callable[[], None],
) -> Callable[[], NoReturn]:
    """A function that runs one submission in this process.

    shell: IPython's, whose namespace the cells share. fingerprint: of the checkers and what they call. defaults,
    guards: the modules of these names. check_failed: the exception of the checkers. ring: the alarm's handler, which
    raises time_is_up. orphaned: has the kernel end a fork of this process with it.
    """
    send, restore, note = sender(fd, job["token"]), fingerprint.restore, fingerprint.add
    put_back, end_modes = defaults.keeper()
    written: list[Callable[[], list[str]]] = []
    space: dict[str, Any] = shell.user_ns
    pinned: dict[str, Any] = {}  # what the lecturer's locked cells bound
    loaded = frozenset(modules)
    lines = {
        (name, part): _compiled(line, f"<given {name}_{part}>", exercise["checkers"])
        for name, exercise in job["exercises"].items()
        for part, line in exercise["lines"].items()
    }
    given = {step["index"]: _given(step) for step in job["steps"] if step["kind"] == "given"}
    watch = fingerprint.watcher
    guards.install()
    space.update(guards.by_name())
    for magic in ("reset", "reset_selective", "debug", "pdb"):  # they would take names away, or wait for input
        shell.register_magic_function(lambda line: None, "line", magic)
    stubs = {name: compile(e["stub"], "<given stub>", "exec") for name, e in job["exercises"].items() if e["stub"]}

    def alarm(seconds: float) -> None:
        """Raise after so many seconds, and again and again, for code that catches everything."""
        signal(SIGALRM, ring)
        setitimer(ITIMER_REAL, seconds, 0.1)

    def calm() -> None:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, SIG_IGN)

    def attempt(act: Callable[[], object], seconds: float) -> tuple[bool, BaseException | None, float]:
        """Whether it came to its end, what it raised, how long it took."""
        begin, is_done, error = perf_counter(), False, None
        try:
            try:
                alarm(seconds)
                act()
                is_done = True
            finally:
                calm()
        except BaseException as raised:  # also the alarm, and whatever a student's code raises
            is_done, error = False, raised
        return is_done, error, perf_counter() - begin

    def told(error: BaseException, seconds: float, what: str) -> str:
        """What a student reads of an exception; printing one may run the student's code."""
        if isinstance(error, time_is_up):
            return f"{what} took more than {seconds:g} s and was stopped"
        texts: list[str] = []

        def describe() -> None:
            failed = isinstance(error, check_failed)  # then its cause is what the answer raised
            cause = error.__cause__ if failed and error.__cause__ else error
            if isinstance(cause, MemoryError) or "can't allocate memory" in f"{cause}":
                texts.append(f"{what} needed more than {job['memory']:g} GiB of memory")
                return
            own = error._render_traceback_()[1:] if failed else []  # the lines of the answer that raised
            text = "\n".join([f"{error}", *own]) if failed else f"{type(error).__name__}: {error}"
            texts.append(str.__getitem__(text, slice(0, MESSAGE)))

        attempt(describe, GRACE)
        return (texts and texts[0]) or f"{what} raised an exception that cannot be printed"

    def report_modules() -> None:
        if job["scouts"]:
            send("modules", *sorted(name for name in list(modules) if name not in loaded))

    def run_given(step: dict) -> None:
        """A locked cell of the lecturer's, compiled before any student's code ran, and not by the shell."""
        space["__builtins__"] = builtins
        _, error, seconds = attempt(lambda: exec(given[step["index"]], space), job["cell_seconds"])
        pinned.update({name: space[name] for name in step["binds"] if name in space})
        if not written:
            note(step["binds"], space)
        what = told(error, job["cell_seconds"], "the cell") if error else ""
        send("end", step["index"], f"{seconds:.3f}", what, 0)

    def run_cell(step: dict) -> None:
        name = f"<cell {step['cell']}>"
        shell.compile.name, errors = name, []
        begin()

        def act() -> None:
            result = shell.run_cell(step["source"], store_history=False, silent=True)
            errors.append(result.error_before_exec or result.error_in_exec)

        _, raised, seconds = attempt(act, job["cell_seconds"])
        error = raised or (errors and errors[0])
        changed = restore()
        what = told(error, job["cell_seconds"], "the cell") if error else ""
        line = _line_in(error, name) if error else 0
        send("end", step["index"], f"{seconds:.3f}", what, line, *changed)

    def begin() -> None:
        """Before a student's code runs for the first time."""
        if not written:
            written.append(watch())

    def fork_and_judge(step: dict) -> None:
        begin()
        end_children()
        exercise = job["exercises"][step["exercise"]]
        pid = fork()
        if pid == 0:
            try:
                setpgid(0, 0)  # what an answer does to its group, it does to itself
                judge(exercise)
            finally:
                _exit(0)
        deadline = perf_counter() + len(exercise["lines"]) * (job["line_seconds"] + GRACE)
        ended, status = waitpid(pid, WNOHANG)
        while not ended and perf_counter() < deadline:
            sleep(0.003)
            ended, status = waitpid(pid, WNOHANG)
        if not ended:
            kill(pid, SIGKILL)
            _, status = waitpid(pid, 0)
        send("judged", step["index"], waitstatus_to_exitcode(status), "" if ended else "late")

    def judge(exercise: dict) -> None:
        """The lines of one exercise, in a process of its own."""
        changed, name = restore() + pin(exercise), exercise["id"]
        orphaned()
        if platform == "linux" and len(listdir("/proc/self/task")) > 1:
            changed.append("the threads of this process: one began with the fork")
        send("ready", name)
        nonce, *seeds = read_line(fd).decode("ascii").split()
        passed = []
        for part, seed in zip(exercise["lines"], map(int, seeds)):
            settings = put_back()
            changed += end_modes()
            send("part", nonce, part, *settings)
            written[0]()
            is_done, error, seconds = attempt(line(name, part, seed, space), job["line_seconds"])
            changed += written[0]()  # before what we write ourselves
            put_back()
            changed += [*restore(), *end_modes()]
            message = told(error, job["line_seconds"], "the check") if error else ""
            send("verdict", nonce, part, "yes" if is_done else "no", f"{seconds:.3f}", message, *changed)
            changed, passed = [], passed + ([(part, seed)] if is_done else [])
        send("stub", nonce, accepts_the_stub(name, passed))
        report_modules()

    def line(name: str, part: str, seed: int, names: dict[str, Any]) -> Callable[[], None]:
        """Runs a graded line. Its seed is a local name: what runs beside it finds it in no table."""
        return lambda: exec(lines[name, part], names, {_SEED: seed})

    def pin(exercise: dict) -> list[str]:
        """Give the names of the graded lines back what the locked cells bound; says which checkers were replaced."""
        space["__builtins__"] = builtins
        changed = []
        for name in exercise["names"]:
            if name in pinned and space.get(name) is not pinned[name]:
                changed += [f"the checker {name}"] if name in exercise["checkers"] else []
                space[name] = pinned[name]
        return changed

    def accepts_the_stub(name: str, passed: list[tuple[str, int]]) -> str:
        """The first part that the exercise's empty stub passes in this process; it must pass none."""
        fresh = {**pinned, "__name__": "__main__", "__builtins__": builtins}
        if name not in stubs or not attempt(lambda: exec(stubs[name], fresh), job["line_seconds"])[0]:
            return ""
        for part, seed in passed:
            if attempt(line(name, part, seed, fresh), job["line_seconds"])[0]:
                return part
        return ""

    act = {"given": run_given, "cell": run_cell, "grade": fork_and_judge}

    def run() -> NoReturn:
        for step in job["steps"]:
            send("begin", step["index"])
            act[step["kind"]](step)
        report_modules()
        end_children()
        send("done")
        _exit(0)

    return run


def end_children() -> None:
    """End the processes that cells have left behind, so that none of them speaks for the one that judges."""
    for _ in range(50):
        found = _children()
        for pid in found:
            kill(pid, SIGKILL)
            waitpid(pid, 0)
        if not found:
            return


def _children() -> list[int]:
    """Of this process; none where the kernel does not list them."""
    found: list[int] = []
    for task in listdir("/proc/self/task") if platform == "linux" else ():
        try:
            fd = open(f"/proc/self/task/{task}/children", O_RDONLY)
        except OSError:
            continue
        while text := read(fd, 1 << 16):
            found += map(int, text.split())
        close(fd)
    return found


def _compiled(line: str, filename: str, checkers: list[str]) -> CodeType:
    """A graded line whose call of a checker has a seed, which it takes from a global name."""
    tree = ast.parse(line)
    for node in ast.walk(tree):
        is_check = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in checkers
        if is_check and not any(keyword.arg == "seed" for keyword in node.keywords):
            node.keywords.append(ast.keyword("seed", ast.Name(_SEED, ast.Load())))
    return compile(ast.fix_missing_locations(tree), filename, "exec")


def _given(step: dict) -> CodeType:
    """A locked cell, whose lines can be looked up by its name, which is how Triton reads a kernel."""
    name, source = f"<given {step['cell']}>", step["source"]
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return compile(source, name, "exec")


def _line_in(error: BaseException, name: str) -> int:
    """The last line of the cell `name` in a traceback, 0 where it has none."""
    trace, found = error.__traceback__, 0
    if isinstance(error, SyntaxError) and type(error.lineno) is int:
        found = error.lineno
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found
