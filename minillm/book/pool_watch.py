"""What each step of an engine does to its blocks, written down as it happens. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace


@contextmanager
def watch(llm) -> Iterator[list[SimpleNamespace]]:
    """Collects for each step of `llm`: tables, texts, ref_cnt, blocks used, tokens, moves, preempted and waiting."""
    scheduler, cache, steps = llm.engine.scheduler, llm.engine.kv_cache, []
    schedule = scheduler.schedule

    def watched():
        output = schedule()
        steps.append(
            SimpleNamespace(
                tables={name: tuple(table) for name, table in cache.tables.items()},
                texts={name: list(scheduler.requests[name].token_ids) for name in cache.tables},
                ref_cnt=list(cache.pool.ref_cnt),
                used=cache.pool.num_blocks - cache.pool.num_free,
                tokens=output.num_tokens,
                moves=output.moves,
                preempted=list(output.preempted),
                waiting=[request.request_id for request in scheduler.waiting],
            )
        )
        return output

    scheduler.schedule = watched
    try:
        yield steps
    finally:
        del scheduler.schedule


def state_of(request: str, steps: list[SimpleNamespace], number: int) -> str:
    """In words, what a request without a table is in step `number`, counted from 0; "" for one that has a table."""
    step = steps[number]
    if request in step.preempted:
        return "preempted"
    if request in step.tables:
        return ""
    if request not in step.waiting:
        return "finished"
    return "preempted, waits" if any(request in earlier.tables for earlier in steps[:number]) else "waiting"
