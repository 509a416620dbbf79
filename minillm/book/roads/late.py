"""A rank that is late: the engine and the other ranks are ahead of it now and then. Built in chapter 20."""

from __future__ import annotations

import time
from random import Random
from typing import Any

MOST_SECONDS = 0.02  # longer than a step of these models, so that the next call is often there before


def be_late(worker: Any, rank: int) -> None:
    """In a worker: the runner of `rank` sleeps before and after half of the steps that it launches."""
    if worker.layout.rank != rank:
        return
    launch, rng = worker.runner.launch, Random(rank)

    def nap() -> None:
        if rng.random() < 0.5:
            time.sleep(rng.random() * MOST_SECONDS)

    def launch_late(output: Any) -> Any:
        nap()
        launched = launch(output)
        nap()
        return launched

    worker.runner.launch = launch_late
