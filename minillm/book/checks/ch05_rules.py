"""What holds after every call of a scheduler, in the checks of chapter 05. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.book.checks import Case
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import ScheduledRequest, SchedulerOutput
from minillm.kv_cache.manager import KVCacheManager


@dataclass
class World:
    """One scheduler with its cache manager and its requests."""

    kv_cache: KVCacheManager
    scheduler: Any
    requests: dict[str, Request] = field(default_factory=dict)


_ROW = ScheduledRequest("A", 0, 1, (), 1)
_FIELDS = {
    "request_id": "One row for each request, in the order in which they got tokens; a row names its request by its id.",
    "start": "A row starts at request.num_computed_tokens.",
    "samples": "A token is sampled only where the row reaches the last token of the request.",
    "block_ids": "kv_cache.tables[request.request_id], after allocate_slots has been called for this row.",
}


def as_planned(
    case: Case, world: World, output: SchedulerOutput, expected: SchedulerOutput, ran: Sequence[str], told: str,
    budget: int, seqs: int,
) -> None:  # fmt: skip
    """The student's step is the one that the statement's rules ask for: first the limits, then who, then the rows."""
    case.is_a(output, SchedulerOutput, f"what schedule() returned in {told}\n  it")
    told_rows, plain = f"`rows` in {told}\n  it", "A step is plain data: ids and numbers, and no request."
    case.is_a(output.rows, list, told_rows, of=ScheduledRequest, hint=f"A list of ScheduledRequest. {plain}")
    case.equal([row[5:] for row in output.rows], [_ROW[5:]] * len(output.rows), f"the rest of {told_rows}", hint=plain)
    case.equal(sorted(vars(output)), sorted(vars(SchedulerOutput())), f"the names in the {told}\n  list", hint=plain)
    case.equal(output.moves, SchedulerOutput().moves, f"moves in {told}\n  moves", hint="Leave moves as it is.")
    total, running = sum(row.num_tokens for row in output.rows), world.scheduler.running
    case.true(
        total <= budget,
        f"{total} tokens are planned in {told}",
        hint="Every row counts against the budget, that of a waiting request and that of a running one.",
    )
    case.true(
        len(running) <= seqs,
        f"{len(running)} requests run in {told}",
        hint="A request may join while fewer than max_num_seqs run.",
    )
    case.equal(
        output.preempted,
        list(expected.preempted),
        f"the list of preempted requests in {told}\n  preempted",
        hint=(
            "Preempt only while allocate_slots returns False for a running request: "
            "the last of `running` goes, its blocks are freed, and its request_id is appended to the list."
        ),
    )
    got, plan = ([(row.request_id, row.num_tokens) for row in out.rows] for out in (output, expected))
    if output.preempted and len(got) > len(plan):
        joined = [name for name, _ in got if name not in dict(plan)]
        case.fail(
            f"{output.preempted} preempted and {joined} admitted in {told}",
            hint="In a step that preempts, no request joins: it would be preempted again in the next step.",
        )
    first = [pair for pair in plan if pair[0] in ran]
    if got[: len(first)] != first:
        hint = (
            "Running requests first, in the order in which they joined; "
            "each gets the tokens that are not computed yet, or what is left of the budget."
        )
    else:
        hint = (
            "The next to join: a preempted request at the front of the queue, else the shortest prompt, "
            "ties to the one nearest to the front; it gets the tokens that are not computed yet, "
            "or what is left of the budget. If it does not fit into memory, no other request overtakes it."
        )
    if world.kv_cache.enable_prefix_caching:
        hint += " Here prompts share a prefix: update() calls cache_blocks, and computed.num_tokens are cached."
    case.equal(got, plan, f"the list of (request, tokens) in {told}\n  the list", hint=hint)
    tables = [list(world.kv_cache.tables[name]) for name, _ in plan]
    for name, hint in _FIELDS.items():
        mine, right = ([getattr(row, name) for row in out.rows] for out in (output, expected))
        if name == "block_ids":
            mine, right = [list(table) for table in mine], tables
        case.equal(mine, right, f"the {name} of the rows in {told}\n  the {name}", hint=hint)


def scene(world: World) -> str:
    """The state of all requests, in one line."""
    scheduler, pool = world.scheduler, world.kv_cache.pool
    running = ", ".join(
        f"{r.request_id} ({r.num_tokens - r.num_computed_tokens} to compute)" for r in scheduler.running
    )
    waiting = ", ".join(
        f"{r.request_id} ({'preempted, ' * (r.status is RequestStatus.PREEMPTED)}{r.num_tokens} tokens)"
        for r in scheduler.waiting
    )
    return f"running {running or 'none'}; waiting {waiting or 'none'}; {pool.num_free} of {pool.num_blocks} blocks free"
