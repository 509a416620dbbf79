"""Statistics of a step: numbers that are always kept, and the events of a trace. Built in chapter 08."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from minillm.engine.request import Request
from minillm.engine.step import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from minillm.engine.engine import Engine


class StepStats(NamedTuple):
    """One step in numbers, as the scheduler decided it; kept without a trace."""

    num_tokens: int = 0  # that it processes
    num_running: int = 0  # requests
    num_waiting: int = 0  # requests, the preempted ones among them
    num_preempted: int = 0  # requests that this step preempted
    kv_cache_usage: float = 0.0  # share of the blocks that are owned, 0 to 1


def note_step(engine: Engine, output: SchedulerOutput) -> StepStats:
    """The numbers of a step that was just scheduled. Its new requests are told when they first got tokens."""
    scheduler = engine.scheduler
    for new in output.arrived:
        request = scheduler.requests[new.request_id]
        if request.scheduled_time is None:
            request.scheduled_time = engine.clock()
    if engine.trace.enabled:
        _trace(engine, output)
    num_running = len(scheduler.running)
    return StepStats(
        output.num_tokens,
        num_running,
        len(scheduler.requests) - num_running,
        len(output.preempted),
        getattr(engine.kv_cache.pool, "usage", 0.0),  # a pool of your own may not count
    )


def note_tokens(
    engine: Engine, output: SchedulerOutput, result: StepResult, added: Sequence[tuple[Request, int | None]]
) -> None:
    """When the tokens came that the scheduler took of a step, and, for those who watch, whose they are."""
    now = engine.clock()
    for request, token_id in added:
        if token_id is not None:
            request.token_times.append(now)
    for log in tuple(engine.step_logs):
        log.add(engine.scheduler, output, result, added, now)


def _trace(engine: Engine, output: SchedulerOutput) -> None:
    """What the figures and the metrics of the book are drawn from."""
    count, scheduler = engine.trace.count, engine.scheduler
    for row in output.rows:
        prompt = scheduler.requests[row.request_id].num_prompt_tokens
        count("tokens", row.num_tokens, request=row.request_id, start=row.start, prompt=prompt)
    count("running", len(scheduler.running))
    count("waiting", len(scheduler.requests) - len(scheduler.running))
    count("blocks used", engine.kv_cache.pool.num_blocks - engine.kv_cache.pool.num_free)
    for kind in ("to_disk", "swap_out", "from_disk", "copies", "swap_in"):
        if moved := len(getattr(output.moves, kind)):
            count(kind, moved)
