"""Limits on what an answer may compute: seconds, or lines of Python. Built in chapter 15."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from minillm.book.checks.case import Case

SECONDS = 3  # of computing, for what is stated to be fast; a good answer takes less than one
ALL_THREADS = 4  # times the limit: what all threads of the process together may take
AGAIN = 0.1  # seconds between two alarms: what is raised inside a callback of the garbage collector is lost


class _Stopped(BaseException):
    """Raised inside the answer; not an Exception, so that its `except Exception` does not swallow it."""


@contextlib.contextmanager
def within(case: Case, what: str, hint: str, seconds: float = SECONDS) -> Iterator[None]:
    """`stopped_after` for what is stated to be fast: the garbage collector looks at new objects alone meanwhile.

    How many others this process holds is not the answer's fault, and one full collection of them can take a second.
    """
    with _collecting_new_objects(), stopped_after(case, what, hint, seconds):
        yield


@contextlib.contextmanager
def stopped_after(case: Case, what: str, hint: str, seconds: float) -> Iterator[None]:
    """Fails the case when what is inside computes for more than `seconds`. It is stopped then, and need not return.

    Time of this thread is counted, so that neither a busy machine nor another thread of this process stops an answer;
    one that makes other threads compute is stopped when all of them have taken ALL_THREADS times as long. Where there
    are no such alarms (Windows, or another thread than the main one), the clock is read afterwards.
    """
    can_stop = hasattr(signal, "SIGPROF") and threading.current_thread() is threading.main_thread()
    inside, started = can_stop, (time.thread_time(), time.process_time())

    def too_long() -> bool:
        return time.thread_time() - started[0] >= seconds or time.process_time() - started[1] >= ALL_THREADS * seconds

    def stop(*_: object) -> None:
        if inside and too_long():
            raise _Stopped

    if can_stop:
        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN)
    where = None
    try:
        yield
    except _Stopped as stopped:
        inside, where = False, stopped
    finally:
        inside = False
        if can_stop:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
    case.comparisons += 1
    if where is not None or too_long():
        case.fail(f"{what} took more than {seconds:g} s of computing", hint=hint, cause=where)


@contextlib.contextmanager
def _collecting_new_objects() -> Iterator[None]:
    """A caller that has frozen the old ones keeps them frozen. Takes some 30 ms, because the frozen are counted."""
    thaws = not gc.get_freeze_count()
    if thaws:
        gc.freeze()
    try:
        yield
    finally:
        if thaws:
            gc.unfreeze()


def bounded(case: Case, limit: int, told: str, function: Callable, *args: Any) -> Any:
    """`case.run(function, *args)`, stopped with the hint `told` once more than `limit` lines of Python have run.

    A loop inside a built-in function (`min`, `sorted`, `in`) is one line: where that matters, measure with `within`.
    """
    count, still_counting = 0, True

    def trace(frame, event, arg):
        nonlocal count
        count += 1
        if count > limit:
            raise _Stopped
        return trace

    def counted(*args):
        nonlocal still_counting
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # what `trace` raises in a callback of the garbage collector is lost, and the count with it
        sys.settrace(trace)
        try:
            return function(*args)
        finally:
            still_counting = sys.gettrace() is trace
            sys.settrace(before)
            if collects:
                gc.enable()

    counted.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    try:
        result = case.run(counted, *args)
    except _Stopped as where:
        case.fail(f"{counted.__qualname__} was stopped after {limit:,} lines of Python", hint=told, cause=where)
    case.true(still_counting, f"{counted.__qualname__} switched off the count of its lines (sys.settrace)", hint="")
    return result
