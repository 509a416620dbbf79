"""Streams and a late document on one engine, noted step by step. Built in chapter 08."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """What happened: times in seconds since the start of the run, also those in the requests."""

    requests: list  # as given; the late one is the last
    steps: list[tuple[float, float, int, int]]  # start and end of a step, tokens of the others, tokens of the late one


def watch(engine, requests: Sequence, late=None, after: int = 8) -> Run:
    """Serve `requests` to their end; `late` arrives when the engine has taken `after` steps.

    The engine needs a trace (`Engine(..., trace=Trace())`). Sets the requests' times to count from the start.
    """
    served, steps, start = list(requests), [], engine.clock()
    for one in served:
        engine.add_request(one)
    while engine.has_unfinished:
        if late is not None and engine.num_steps == after:
            late.arrival_time = engine.clock()
            served.append(late)
            engine.add_request(late)
        before = engine.clock() - start
        engine.trace.clear()
        engine.step()
        rows = {e.args["request"]: int(e.value) for e in engine.trace.events if e.name == "tokens"}
        document = rows.pop(late.request_id, 0) if late is not None else 0
        steps.append((before, engine.clock() - start, sum(rows.values()), document))
    for one in served:
        one.arrival_time -= start
        one.token_times = [moment - start for moment in one.token_times]
    return Run(served, steps)
