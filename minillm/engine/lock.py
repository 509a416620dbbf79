"""FairLock: threads take turns at one engine. Built in chapter 05.

    thread 1   | step |      | step |      | step |
    thread 2          | step |      | step |          each step computes tokens for the requests of both

`threading.Lock` may go to the very thread that has just released it. A thread that steps in a loop would keep every
other thread waiting until it has nothing left to do.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Self


class FairLock:
    """A reentrant lock for `with` statements; it goes to the thread that has waited longest.

    Ctrl-C may raise KeyboardInterrupt in the main thread at every call, so nothing here is half done where one is:
    what belongs together has no call in its middle, and what was begun is undone.
    """

    def __init__(self):
        self._process = os.getpid()
        self._guard = threading.RLock()  # held for a moment, while one of these changes
        self._owner: int | None = None
        self._depth = 0  # of the owner's `with` statements
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # each thread with the lock that it sleeps on
        self._soon: deque[Callable[[], None]] = deque()  # what is called at the end of a turn

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> Self:
        if os.getpid() != self._process:  # a forked child has none of the threads that held it or waited
            self.__init__()
        thread = threading.get_ident()
        if self._owner == thread:
            self._depth += 1
            return self
        sleep = threading.Lock()
        try:
            with self._guard:
                if self._owner is None:
                    self._owner = thread
                else:
                    sleep.acquire()
                    self._waiting.append((thread, sleep))
            if self._owner != thread:
                sleep.acquire()
            self._depth = 1
            return self
        except BaseException:  # a KeyboardInterrupt: this thread no longer waits
            with self._guard:
                if (thread, sleep) in self._waiting:
                    self._waiting.remove((thread, sleep))
            if self._owner == thread:  # its turn had come already
                self.__exit__()
            raise

    def __exit__(self, *_) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            while self._soon:
                self._call_first()
        finally:
            with self._guard:
                if self._waiting:
                    self._owner, sleep = self._waiting[0]
                    del self._waiting[0]
                    sleep.release()
                else:
                    self._owner = None
            if self._soon:
                self._call_if_free()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Call `action` in a turn: at once where no turn is taken, else at the end of the turn that is; once more where
        an interrupt ends it. This never waits for a turn, so a finalizer may do it, which Python runs in any thread at
        any moment, in the middle of a turn too."""
        self._soon.append(action)
        self._call_if_free()

    def _call_first(self) -> None:
        try:
            self._soon[0]()
        except Exception:
            del self._soon[0]
            raise
        del self._soon[0]

    def _call_if_free(self) -> None:
        if self._guard._is_owned():  # by this thread, which a finalizer has interrupted; it ends a turn later
            return
        thread, free = threading.get_ident(), False
        try:
            with self._guard:
                if self._owner is None:
                    self._owner, self._depth, free = thread, 1, True
        finally:
            if free:
                self.__exit__()


def locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that holds its object's `lock`."""

    @wraps(method)
    def holding(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return holding
