"""Threads of a step: no more than the native kernels' team has at the moment. Built in chapter 14.

A loop that a team shares ends with its slowest thread. Where another process takes a core, the native kernels make
their team smaller for a while (`team_size` in native_base.h); torch's own loops in the same step, such as an argmax
over a large vocabulary, would still wait for a thread that has no core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_of_team(kernels: ctypes.CDLL | None) -> Iterator[None]:
    """Run torch's operations of this thread with as many threads as the team of `kernels`, and then as before. Without
    kernels, or while the team has all its threads, nothing changes.

    torch lets a thread that uses it for the first time begin with the number that was set last, here too."""
    most = torch.get_num_threads()
    # `team_size` counts from the number that is set: it has to be read before.
    if kernels is None or (size := kernels.team_size()) >= most:
        yield
        return
    torch.set_num_threads(size)
    try:
        yield
    finally:
        torch.set_num_threads(most)
