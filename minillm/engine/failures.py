"""What ends with a step that fails: the requests in it, and nothing else that is certain. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from minillm.engine.request import Request
from minillm.engine.step import SchedulerOutput

if TYPE_CHECKING:
    from minillm.engine.engine import Engine


def end_steps(engine: Engine, error: BaseException, *outputs: SchedulerOutput) -> None:
    """A step failed. End the requests in it and in the one in flight, whose blocks it may have written in part; the
    others go on. `error` is what the caller has to see: what fails here becomes a note on it."""
    if engine.in_flight is not None:
        outputs += (engine.in_flight[0],)
    names = {name for output in outputs for name in (*(row.request_id for row in output.rows), *output.preempted)}
    # Beams at rest are in no step, and share blocks that a step copies or brings back.
    moved = {block for output in outputs for _, block in (*output.moves.copies, *output.moves.swap_in)}
    if moved:
        names |= {name for name, table in engine.kv_cache.tables.items() if not moved.isdisjoint(table)}
    groups = {request.group_id for name in names if (request := engine.scheduler.requests.get(name)) is not None}
    ending = [request for request in engine.scheduler.requests.values() if request.group_id in groups]
    distrust = getattr(engine.kv_cache, "distrust", None)
    forget = (
        [engine.kv_cache.pool.evict_all]
        if distrust is None
        else [partial(distrust, output.moves) for output in outputs]
    )
    _put_away(engine, error, ending, forget)


def end_requests(engine: Engine, error: BaseException, requests: Iterable[Request]) -> None:
    """What was computed for these between two steps, such as their drafts, failed: no block was written."""
    groups = {request.group_id for request in requests}
    ending = [request for request in engine.scheduler.requests.values() if request.group_id in groups]
    _put_away(engine, error, ending, [])


def end_all(engine: Engine, error: BaseException) -> None:
    """The scheduler failed: nothing that it keeps is certain."""
    forget = [engine.kv_cache.take_moves, engine.kv_cache.pool.evict_all]
    # Some may have ended in the step whose tokens no caller will see.
    ended = [request for request in engine.announcer.known.values() if request.is_finished]
    _put_away(engine, error, list(engine.scheduler.requests.values()), forget, ended)


def _put_away(
    engine: Engine,
    error: BaseException,
    ending: list[Request],
    others: list[Callable[[], object]],
    ended: Iterable[Request] = (),
) -> None:
    engine.in_flight = None
    engine.announcer.forget_all()
    # With none in flight too: waiting for it may have failed.
    ends = [engine.scheduler.drop_in_flight] if engine.overlap else []
    ends += [partial(engine.scheduler.finish, request, "abort") for request in ending]
    groups = dict.fromkeys(request.group_id for request in (*ending, *ended))
    notify = [partial(engine.on_end, group, error) for group in groups]
    for action in (*ends, *others, *notify):
        try:
            action()
        except BaseException as another:  # an interrupt too: all are notified
            error.add_note(f"while the failed step was put away: {another!r}; make a new engine")
