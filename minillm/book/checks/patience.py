"""A limit on what an answer may compute, for exercises that ask for a fast way. Built in chapter 15."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from minillm.book.checks.case import Case

SECONDS = 3  # of computing, for what is stated to be fast; a good answer takes less than one


class _TooSlow(BaseException):
    """Not an Exception: the student's `except Exception` must not swallow it."""


@contextlib.contextmanager
def within(case: Case, what: str, hint: str) -> Iterator[None]:
    """Fails the case when what is inside computes for more than SECONDS. It is stopped then, and need not return.

    Time of this process is counted, so that a busy machine stops nobody. Where there are no such alarms (Windows, or
    another thread than the main one), the clock is read afterwards.
    """
    start, can_stop = (
        time.process_time(),
        hasattr(signal, "SIGPROF") and threading.current_thread() is threading.main_thread(),
    )

    def stop(*_: object) -> None:
        raise _TooSlow

    if can_stop:
        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
    slow = False
    try:
        yield
    except _TooSlow:
        slow = True
    finally:
        if can_stop:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
    case.true(
        not slow and time.process_time() - start < SECONDS, f"{what} took more than {SECONDS} s of computing", hint=hint
    )
