"""Threads of a step: no more than the native kernels' team has at the moment. Built in chapter 14.

A loop that a team shares ends with its slowest thread. Where another process takes a core, the native kernels make
their team smaller for a while (`team_size` in native_base.h); torch's own loops in the same step, such as an argmax
over a large vocabulary, would still wait for a thread that has no core.

And no other team beside it: each thread that starts a parallel loop gets a team of its own, which OpenMP keeps as long
as that thread lives. Once all teams together have more threads than the machine has cores, GCC's OpenMP lets idle
threads sleep between two loops instead of spinning, and each loop begins with waking them.

A forked child cannot use its parent's team: a fork copies only the thread that forks, and GCC's OpenMP in the child
would wait for the others forever. So a thread that forks first ends its team, and both processes start a new one.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch

_AS_THEY_ARE = nullcontext()
_PAUSE_SOFT = 1  # of OpenMP's omp_pause_resource_t: resources go, and come again when they are needed


def release_team() -> None:
    """End the OpenMP threads that this thread has gathered; its next parallel loop starts new ones. For a thread that
    has loaded a model which another thread will run. Without effect where torch does not use GCC's OpenMP."""
    for name in ("libgomp.so.1", *map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*"))):
        try:
            openmp = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # only where it is in use
            openmp.omp_pause_resource_all(_PAUSE_SOFT)
        except (OSError, AttributeError):  # another OpenMP, or GCC's before version 9
            pass


@cache
def release_team_at_fork() -> None:
    """From now on let every `os.fork` of this process, and of its children, begin with `release_team`."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=release_team)


def threads_of_team(kernels: ctypes.CDLL | None, num_tokens: int = 0) -> AbstractContextManager:
    """`with` it, torch's operations of this thread run with as many threads as the team of `kernels`, and behind it as
    before. Without kernels, or while the team has all its threads, nothing changes; nor in a step of so many tokens
    that each thread takes some of them through a layer on its own, where no thread waits for long.

    torch lets a thread that uses it for the first time begin with the number that was set last, here too."""
    most = torch.get_num_threads()
    # `team_size` counts from the number that is set: it has to be read before.
    if kernels is None or (size := kernels.team_size()) >= most:
        return _AS_THEY_ARE
    if num_tokens and num_tokens >= kernels.chunks_from() * most:
        return _AS_THEY_ARE
    return _Threads(size, most)


class _Threads:
    def __init__(self, size: int, most: int):
        self.size, self.most = size, most

    def __enter__(self) -> None:
        torch.set_num_threads(self.size)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self.most)
