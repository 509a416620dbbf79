"""Time slices: threads that do little work at a time ask the kernel to run soon. Built in chapter 22.

    engine's team      |==================|==================|     on every core, for milliseconds at a time
    text, event loop        a token is there: some 0.1 ms of work for each

Linux, from 6.12 on, lets a thread say for how long it wants to run at a time. A thread that wakes up, and asked for
less than the one that runs, takes its place at once; otherwise it may wait until that one has used up its slice, on two
cores 1.4 ms, and a token waits twice on its way. A shorter slice is no larger share: a thread that always runs gets as
much of a core as before.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

# Nanoseconds. Short is less than the kernel's default, and more than a token takes to pass through a thread: a thread
# that has used up its slice waits as long as any other. 0 stands for the default.
SHORT, USUAL = 500_000, 0
CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr and sched_getattr
SCHED_OTHER = 0


class _Attributes(ctypes.Structure):
    """struct sched_attr of linux/sched/types.h, as it was first."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def ask_for_slices(nanoseconds: int = SHORT) -> bool:
    """Ask for slices of this length, for the calling thread and those that it starts from now on. Whether the kernel
    takes the wish: older ones than Linux 6.12 ignore it, and elsewhere, or with a real-time policy, nothing is asked.
    """
    if (attributes := _attributes()) is None:
        return False
    attributes.runtime = nanoseconds
    change, _ = CALLS[platform.machine()]
    return ctypes.CDLL(None, use_errno=True).syscall(change, 0, ctypes.byref(attributes), 0) == 0


def run_with_slices(nanoseconds: int, function: Callable[[], object]) -> None:
    """Call `function`, in a thread that was started for it, with slices of this length."""
    ask_for_slices(nanoseconds)
    function()


def slice_of_thread() -> int | None:
    """What the calling thread asked for, in nanoseconds; None where that is not known. Linux tells the default where a
    thread has asked for nothing."""
    attributes = _attributes()
    return None if attributes is None else attributes.runtime


def _attributes() -> _Attributes | None:
    if not sys.platform.startswith("linux") or platform.machine() not in CALLS:
        return None
    attributes, (_, ask) = _Attributes(), CALLS[platform.machine()]
    size = ctypes.sizeof(attributes)
    failed = ctypes.CDLL(None, use_errno=True).syscall(ask, 0, ctypes.byref(attributes), size, 0)
    return None if failed or attributes.policy != SCHED_OTHER else attributes
