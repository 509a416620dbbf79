"""Limits on what an answer may compute: seconds, or lines of Python. Built in chapter 15.

A thread beside the answer looks at the clock of the process and sends the main thread a signal when time is up:

    main thread    |== answer =========X  _Stopped, raised by the handler of SIGPROF
    watcher        .....|.....|.....|..^  every AGAIN seconds

The alarm that the system has for this (ITIMER_PROF) goes to the thread that computes. A main thread that waits for
such a thread would not wake.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from minillm.book.checks.case import Case
from minillm.book.checks.failure import CheckFailed

SECONDS = 3  # of computing, for what is stated to be fast; a good answer takes less than one
BOUNDED_SECONDS = 10  # for what is stopped by its lines: an answer that switches their count off
ALL_THREADS = 4  # times the limit, or as often as torch has threads: what all threads of the process together may take
AGAIN = 0.1  # seconds between two looks, and two signals: what is raised inside a callback of the collector is lost
LOOKS, LOOKS_AGAIN = 20, 0.005  # at threads that are to be ended, and seconds between two

_PATHS = sysconfig.get_paths()
_LIBRARIES = (*(_PATHS[name] for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[2]), "<frozen ")


class _Stopped(BaseException):
    """Raised inside the answer; not an Exception, so that its `except Exception` does not swallow it."""

    def __init__(self, limit: Limit | None = None):
        self.limit = limit


class Limit:
    """Stops what is inside when it computes for more than `seconds`; then `exceeded` is true.

        with Limit(3) as limit:
            answer()
        if limit.exceeded: ...

    Time of this thread is counted, so that a busy machine stops no answer. One that makes other threads compute is
    stopped when all threads of the process have taken ALL_THREADS times as long, and those that it has started are
    ended. An operation in C ends before the answer is stopped. Where there are no signals (Windows, or another thread
    than the main one), the clock is read afterwards.
    """

    def __init__(self, seconds: float, steady: bool = False):
        self.seconds, self.exceeded = seconds, False
        self._steady = steady and _Steady()
        self._stops, self._inside = False, False

    def __enter__(self) -> Self:
        self._collects, self._threads = gc.isenabled(), set(threading.enumerate())
        self._all_threads = max(ALL_THREADS, torch.get_num_threads())
        if self._steady:
            self._steady.begin()
        self._started, self._inside = (time.thread_time(), time.process_time()), True
        self._stops = hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread()
        if self._stops:
            self._begin_to_watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._inside = False
        if self._stops:
            self._end_watch()
        own = isinstance(error, _Stopped) and error.limit is self
        self.exceeded = own or self._is_over()
        (gc.enable if self._collects else gc.disable)()
        if self._steady:
            self._steady.end()
        if self.exceeded:
            _end(set(threading.enumerate()) - self._threads)
        return own

    def _begin_to_watch(self) -> None:
        self._sends, self._left = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="limit of computing", daemon=True)
        self._before, self._timer = signal.signal(signal.SIGPROF, self._stop), signal.getitimer(signal.ITIMER_PROF)
        try:
            self._watcher.start()
        except RuntimeError:  # no memory for a thread: the clock is read afterwards
            self._left.set()

    def _end_watch(self) -> None:
        self._left.set()
        with self._sends:  # none is sent once the old handler is back, which may be to end the process
            if not any(self._timer):
                signal.setitimer(signal.ITIMER_PROF, 0)  # an answer's
            signal.signal(signal.SIGPROF, signal.SIG_DFL if self._before is None else self._before)
        if self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        """In a thread of its own, which does not see how much time the main thread has taken."""
        main = threading.main_thread().ident
        while not self._left.wait(AGAIN):
            with self._sends:
                if not self._left.is_set() and time.process_time() - self._started[1] >= self.seconds:
                    signal.pthread_kill(main, signal.SIGPROF)

    def _is_over(self) -> bool:
        own, all_threads = time.thread_time() - self._started[0], time.process_time() - self._started[1]
        return own >= self.seconds or all_threads >= self._all_threads * self.seconds

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._inside or not self._is_over():
            if callable(self._before):
                self._before(number, frame)
        elif not _enters_or_leaves(frame):
            raise _Stopped(self)


class _Judged(Limit):
    """A limit that fails the case."""

    def __init__(self, case: Case, what: str, hint: str, seconds: float, steady: bool):
        super().__init__(seconds, steady)
        self.case, self.what, self.hint = case, what, hint

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        own = super().__exit__(kind, error, trace)
        if error is None or own or (self.exceeded and isinstance(error, Exception)):  # which it raised when stopped
            self.case.comparisons += 1
            if self.exceeded:
                told = f"{self.what} took more than {self.seconds:g} s of computing"
                self.case.fail(told, hint=self.hint, cause=error)
        return False


class _Steady:
    """What an answer takes does not depend on what else this process holds, or on what else the machine does.

    The garbage collector looks at new objects alone: one full collection of the old ones can take a second. torch has
    one thread: of two, on a busy machine, one computes while it waits for the other.
    """

    def begin(self) -> None:
        """Takes some 30 ms, because the old objects are counted."""
        self._freezes = not gc.get_freeze_count()  # a caller that has frozen them keeps them so
        if self._freezes:
            gc.freeze()
        self._num_threads = torch.get_num_threads()
        if self._num_threads > 1:
            torch.set_num_threads(1)

    def end(self) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._num_threads > 1:
            torch.set_num_threads(self._num_threads)


def stopped_after(case: Case, what: str, hint: str, seconds: float) -> Limit:
    """Fails the case when what is inside computes for more than `seconds`. See `Limit`."""
    return _Judged(case, what, hint, seconds, steady=False)


def within(case: Case, what: str, hint: str, seconds: float = SECONDS) -> Limit:
    """`stopped_after` for what is stated to be fast. See `_Steady`."""
    return _Judged(case, what, hint, seconds, steady=True)


def bounded(case: Case, limit: int, told: str, function: Callable, *args: Any) -> Any:
    """`case.run(function, *args)`, stopped with the hint `told` once more than `limit` lines of Python have run.

    A loop inside a built-in function (`min`, `sorted`, `in`) is one line: where that matters, measure with `within`.
    """
    count, still_counting, before = 0, True, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal count
        count += 1
        if count > limit:
            raise _Stopped
        return trace

    def counted(*args):
        nonlocal still_counting
        gc.disable()  # what `trace` raises in a callback of the garbage collector is lost, and the count with it
        sys.settrace(trace)
        try:
            return function(*args)
        finally:
            still_counting = sys.gettrace() is trace
            sys.settrace(before)

    counted.__qualname__ = name = getattr(function, "__qualname__", type(function).__name__)
    result, failed = None, None
    with Limit(BOUNDED_SECONDS) as clock:
        try:
            result = case.run(counted, *args)
        except (_Stopped, CheckFailed) as where:
            failed = where
    sys.settrace(before)
    if count > limit:  # an answer that swallows what stops it is too slow all the same
        case.fail(f"{name} was stopped after {limit:,} lines of Python", hint=told, cause=failed)
    if clock.exceeded:
        case.fail(f"{name} took more than {clock.seconds:g} s of computing", hint=told, cause=failed)
    if failed:
        raise failed
    case.true(still_counting, f"{name} switched off the count of its lines (sys.settrace)", hint="")
    return result


def _enters_or_leaves(frame: FrameType | None) -> bool:
    """Whether a limit is being set or taken back: half of that would stay."""
    if frame is not None and frame.f_code is _Judged.__exit__.__code__:
        return True
    while frame is not None:
        if frame.f_code in (Limit.__enter__.__code__, Limit.__exit__.__code__):
            return True
        frame = frame.f_back
    return False


def _end(threads: set[threading.Thread]) -> None:
    """Raise SystemExit in those that run an answer's code.

    Not while one is inside a library: it may wait for work, as the thread of a pool does, or have just taken a lock.
    `Thread.is_alive` is not asked: it says no of a thread whose `join` was interrupted.
    """
    for _ in range(LOOKS):
        frames = sys._current_frames()
        threads = {one for one in threads if one.ident in frames}
        for thread in threads:
            if not frames[thread.ident].f_code.co_filename.startswith(_LIBRARIES):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        del frames
        if not threads:
            return
        time.sleep(LOOKS_AGAIN)
