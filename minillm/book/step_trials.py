"""What chapter 14 measures with: a profile of one step, a timer for functions, the layer in a list of operations.
Built in chapter 14."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes its own log into the notebook

from torch.profiler import ProfilerActivity, profile

from minillm.book.rungs import Served, without
from minillm.engine.engine import Engine


def profiled(served: Served, steps: int = 3) -> profile:
    """The profile of a decode step: the least disturbed of several."""
    profiles = []
    with without(*served.rung.off):
        served.begin(steps)
        for _ in range(steps):
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                served.engine.step()
            profiles.append(prof)
    return min(profiles, key=lambda prof: sum(e.self_cpu_time_total for e in prof.key_averages()))


def microseconds(function: Callable, inputs: Sequence, rounds: int) -> float:
    """The least time of a call, over seven measurements of `rounds` calls each."""
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(rounds):
            function(*inputs)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / rounds


def layer_of(operations: Sequence) -> Sequence | None:
    """The longest stretch that comes three times in a row: a layer."""
    for period in range(len(operations) // 3, 0, -1):
        for end in range(len(operations), 3 * period - 1, -1):
            one, two, three = (operations[end - (i + 1) * period : end - i * period] for i in range(3))
            if one == two == three:
                return one
    return None


def record_launches(engine: Engine) -> list[str]:
    """The requests of each step that `engine` launches from now on, as one string a step."""
    launched, launch = [], engine.runner.launch

    def recording(output):
        launched.append("".join(row.request_id for row in output.rows))
        return launch(output)

    engine.runner.launch = recording
    return launched
