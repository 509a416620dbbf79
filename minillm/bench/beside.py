"""The throughput workload on a loaded machine: beside processes that are always busy, against the same alone.
Built in chapter 14.

    alone     | run |           | run |           | run |
    beside            | run |           | run |           | run |
    busy              #######           #######           #######

A loop that threads share ends with its slowest thread. With as many threads as cores, a single busy process takes a
core from one of them again and again, and an engine that waits for it each time loses far more than that core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from ..device import resolve_device, resolve_dtype
from ..model.checkpoint import load_config
from . import throughput
from .decode import SHAPES, Shape
from .record import Record
from .throughput import Workload

GOAL = 2.5  # times slower than alone, at most, beside one busy process
SETTLE = 1.5  # seconds before each run; a team of threads that was made smaller tries again after one at most
# It says when it has begun, and ends by itself where its parent is gone.
SPIN = """
import os, sys
print("busy", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """`count` processes, each at work on a core when this begins, and all gone when it ends, in whatever way."""
    command = [sys.executable, "-I", "-S", "-c", SPIN, str(os.getpid())]
    processes = []
    with ExitStack() as ending:
        for _ in range(count):  # in sessions of their own: Ctrl-C in a terminal is for this process alone
            process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            ending.callback(_end, process)
            processes.append(process)
        for process in processes:
            if process.stdout.readline().strip() != b"busy":
                raise RuntimeError(f"a busy process ended before its work began, with status {process.wait()}")
        yield


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def num_rounds(workload: Workload) -> int:
    return 2 * (workload.repeats + 1)


def run(
    workload: Workload,
    count: int,
    device: str = "auto",
    command: str = "minillm bench throughput --beside 1",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` with minillm alone and beside `count` busy processes, in turns; a result for `measure.save`.
    Raises ValueError for a count under 1."""
    if count < 1:
        raise ValueError(f"beside={count} is no busy process; take 1 at least")
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    record = Record(
        f"throughput-{workload.shape}-beside-{count}", command, where, asdict(workload) | {"beside": count}, keep
    )
    with tempfile.TemporaryDirectory() as folder:
        path = throughput.write_checkpoint(workload, Path(folder), shapes, where, dtype)
        prompts, lengths = workload.lengths_and_prompts(load_config(path).vocab_size)
        ours = throughput.Ours(path, workload, where, prompts, lengths)

        def timed(count: int) -> float:
            with busy_processes(count):
                time.sleep(SETTLE)
                started = time.perf_counter()
                ours.run()
                return time.perf_counter() - started

        candidates = {"alone": lambda: timed(0), "beside": lambda: timed(count)}
        with record.case("minillm"):
            record.interleave(candidates, workload.repeats, on_run=on_run)
            alone, beside = record.samples["alone"], record.samples["beside"]
            record.figures |= {
                "prompt_tokens": sum(map(len, prompts)),
                "output_tokens": sum(lengths),
                "alone_tokens_per_second": sum(lengths) / alone.median,
                "alone_spread": alone.spread,
                "beside_tokens_per_second": sum(lengths) / beside.median,
                "beside_spread": beside.spread,
                "times_slower": beside.median / alone.median,
            }
            if count == 1:
                record.figures |= {"goal_times_slower": GOAL, "goal_met": beside.median <= GOAL * alone.median}
    return record.finish()


def tables(measured: dict) -> list:
    """Tokens per second alone and beside the busy processes, and the goal where there is one (rich renderables)."""
    from rich.table import Table

    f, workload = measured["figures"], measured["workload"]
    goal = None
    if "goal_met" in f:
        goal = f"the goal, at most {f['goal_times_slower']} times slower, is {'met' if f['goal_met'] else 'missed'}"
    table = Table(
        "minillm",
        "output tokens/s",
        "± half range",
        "times slower",
        title=f"{f['prompt_tokens']:,} prompt and {f['output_tokens']:,} output tokens, {workload['shape']}, "
        f"{measured['hardware']['name']}",
        caption=goal,
    )
    table.add_row("alone", f"{f['alone_tokens_per_second']:,.0f}", f"{f['alone_spread'] / 2:.0%}", "1×")
    processes = f"{workload['beside']} busy process{'es' if workload['beside'] > 1 else ''}"
    table.add_row(
        f"beside {processes}",
        f"{f['beside_tokens_per_second']:,.0f}",
        f"{f['beside_spread'] / 2:.0%}",
        f"{f['times_slower']:.2f}×",
    )
    return [table]
