"""The audit hook: refuses, while a student's code runs, what `rules` finds that no answer needs.

CPython reports frames, memory, processes, files and the network to a hook (PEP 578) before they are reached, under
whatever name, and a hook cannot be taken away again. What is refused is told to the grader before the student's code
goes on, so that nothing which happens afterwards can hide it.

Loaded privately, as `zygote` does it, this module is not in `sys.modules`, and its globals are out of reach.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from functools import partial
from sys import _getframe, addaudithook
from types import FunctionType

_FRAME_NAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
MOST = 200  # events that are told of one process


class Refused(PermissionError):
    """What a student's code gets instead of what it asked for."""


def _hook(decide, refused, event, arguments):
    """Its frame is in the traceback of what it raises: by then it holds nothing, and its globals are empty."""
    told = decide(event, arguments)
    if told is not None:
        kind = refused
        del decide, refused, event, arguments
        raise kind(told)


def install(judges: dict[str, Callable], tell: Callable[..., None]) -> None:
    """Audit this process from now on.

    judges: as `rules.judges` makes them. tell(reason, level, cell, line): called for each event that one of them finds.
    """
    busy, count, quiet = set(), [0], _FRAME_NAMES  # looking at a frame is an audited event itself

    def decide(event: str, arguments: tuple) -> str | None:
        if event == "object.__getattr__" and arguments[1] not in quiet:
            return None  # by far the most frequent
        judge = judges.get("ctypes" if event[:7] == "ctypes." else event)
        if judge is None or (thread := get_ident()) in busy:
            return None
        busy.add(thread)
        try:
            found = judge(event, arguments, _getframe(2))
            if found is None:
                return None
            reason, is_refused, cell, line = found
            if count[0] < MOST:
                count[0] += 1
                tell(reason, "refused" if is_refused else "told", cell, line)
            if is_refused is None:
                return None
            return f"not possible while an exercise is graded: this {reason}"
        finally:
            busy.discard(thread)

    addaudithook(partial(FunctionType(_hook.__code__, {"__builtins__": {}}), decide, Refused))
