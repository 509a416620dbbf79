"""Ranks as processes: each has a torch.distributed link, and none is left behind. Built in chapter 20.

parent ── spawn ──> rank 0 ─┐
       ── spawn ──> rank 1 ─┤ a pipe each: the result, or the traceback, comes back;
       ── spawn ──> rank 2 ─┘ a pipe that closes on the other side ends the rank
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch.distributed as dist

from minillm.parallel.links import GroupLink


class RankFailed(RuntimeError):
    """A rank raised an error, died, or did not answer in time; the message names it."""


def run_processes(function: Callable[..., Any], parts: Sequence[tuple], *, timeout: float = 120.0) -> list[Any]:
    """`function(link, *parts[rank])` for each rank, in a process each; returns what the ranks return, in order.

    The backend is NCCL where there is a GPU for each rank, gloo otherwise. `function` must be one that another process
    can import. timeout: seconds until all ranks must have answered.
    Raises RankFailed when a rank raises, dies or takes too long. However this ends, with Ctrl-C too, no process is
    left: they are killed, and a rank whose parent has died ends by itself.
    """
    context, processes, pipes = get_context("spawn"), [], []
    backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= len(parts) else "gloo"
    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        try:
            for rank, part in enumerate(parts):
                ours, theirs = context.Pipe()
                settings = (rank, len(parts), backend, os.path.join(folder, "store"), timeout)
                # As bytes: a tensor would travel as shared memory, which outlives a process that is killed.
                process = context.Process(
                    target=_run_rank, args=(theirs, settings, pickle.dumps((function, part))), daemon=True
                )
                with _interrupts_held_back():
                    process.start()
                    processes.append(process)
                    pipes.append(ours)
                theirs.close()
            return _answers(processes, pipes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _answers(processes: list, pipes: list[connection.Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = connection.wait([pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(map(str, missing))
            raise RankFailed(f"no answer within timeout={timeout:g} s from rank {names}; the ranks were ended")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(5)
                raise RankFailed(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if kind == "error":
                raise RankFailed(f"rank {rank} raised an error:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(pipe: connection.Connection, settings: tuple, work: bytes) -> None:
    """What a child process does."""
    rank, world_size, backend, store, timeout = settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its ranks
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one machine
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        function, part = pickle.loads(work)
        answer = "result", function(GroupLink(), *part)
        dist.barrier()  # no rank leaves while another still talks to it
    except BaseException:
        answer = "error", traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0] == "result":
        dist.destroy_process_group()


def _end_with_parent(pipe: connection.Connection) -> None:
    """The parent sends nothing: the pipe is readable when the parent is gone."""
    connection.wait([pipe])
    os._exit(1)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A child inherits the mask: an interrupt of the whole group does not reach it while it still imports torch."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
