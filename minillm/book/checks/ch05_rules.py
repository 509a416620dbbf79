"""What holds after every call of a scheduler, in the checks of chapter 05. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.book.checks import Case
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import SchedulerOutput
from minillm.kv_cache.manager import KVCacheManager


@dataclass
class World:
    """One scheduler with its cache manager and its requests."""

    kv_cache: KVCacheManager
    scheduler: Any
    requests: dict[str, Request] = field(default_factory=dict)


def sound(case: Case, world: World, output: SchedulerOutput, told: str, budget: int, seqs: int) -> None:
    """What must hold of a step under any policy."""
    case.true(
        isinstance(output, SchedulerOutput),
        f"schedule() returned a {type(output).__name__}, not a SchedulerOutput, in {told}",
    )
    names = [row.request_id for row in output.rows]
    case.true(
        len(set(names)) == len(names), f"a request has two rows in {told}: {names}", hint="One row a request and step."
    )
    total = sum(row.num_tokens for row in output.rows)
    case.true(
        total <= budget,
        f"{total} tokens are planned in {told}",
        hint="Every row takes its tokens from the budget, a waiting request's and a running one's alike.",
    )
    running = world.scheduler.running
    case.true(
        len(running) <= seqs,
        f"{len(running)} requests run in {told}",
        hint="A request may join while fewer than max_num_seqs run.",
    )
    for row in output.rows:
        name = row.request_id
        case.true(
            isinstance(name, str),
            f"a row's request_id is a {type(name).__name__} in {told}",
            hint="A row is plain data: it names its request by request.request_id.",
        )
        request = next((one for one in running if one.request_id == name), None)
        case.true(
            request is not None,
            f"{name} has a row, but is not in `running`, in {told}",
            hint="A row is for a request that runs now, not for one that was preempted, aborted or finished.",
        )
        case.true(
            request.status is RequestStatus.RUNNING,
            f"{name} has a row with the status {request.status.name} in {told}",
            hint="Who is admitted becomes RUNNING.",
        )
        case.equal(
            row.start,
            request.num_computed_tokens,
            f"start of {name}'s row in {told}\n  start",
            hint="A row goes on where the computed tokens end.",
        )
        case.true(
            row.num_tokens > 0,
            f"{name}'s row brings {row.num_tokens} tokens in {told}",
            hint="A request that gets nothing has no row.",
        )
        case.true(
            row.start + row.num_tokens <= request.num_tokens,
            f"{name}'s row ends at {row.start + row.num_tokens}, it has {request.num_tokens} tokens, in {told}",
        )
        wanted = int(row.start + row.num_tokens == request.num_tokens)
        case.equal(
            row.samples,
            wanted,
            (
                f"samples of {name}'s row, which computes {row.start} to {row.start + row.num_tokens - 1} of "
                f"{request.num_tokens} tokens, in {told}\n  samples"
            ),
            hint="A next token is wanted only where the row reaches the last token there is.",
        )
        table = world.kv_cache.tables.get(name)
        case.true(
            table is not None,
            f"{name} has a row but owns no blocks in {told}",
            hint="allocate_slots comes before the row; a newcomer's call gets `computed` as well.",
        )
        case.equal(
            list(row.block_ids),
            list(table),
            f"block_ids of {name}'s row in {told}\n  block_ids",
            hint="kv_cache.tables[request.request_id]",
        )
        case.true(
            len(table) * world.kv_cache.block_size >= row.start + row.num_tokens,
            f"{name} has {len(table)} blocks for {row.start + row.num_tokens} tokens in {told}",
            hint="allocate_slots(request, num_new_tokens) gets as many tokens as the row has.",
        )


def as_planned(case: Case, output: SchedulerOutput, expected: SchedulerOutput, ran: Sequence[str], told: str) -> None:
    """The student's step is the one that the statement's rules ask for."""
    gone, should = (list(out.preempted) for out in (output, expected))
    case.equal(
        gone,
        should,
        f"the list of preempted requests in {told}\n  preempted",
        hint=(
            "Only where allocate_slots says False for a running request, and as often as it does: "
            "the last of `running` goes, and its request_id into the list."
        ),
    )
    got, plan = ([(row.request_id, row.num_tokens) for row in out.rows] for out in (output, expected))
    if gone and len(got) > len(plan):
        newcomers = sorted(set(dict(got)) - set(dict(plan)))
        case.fail(
            f"{gone} preempted and {newcomers} admitted in {told}",
            hint="While anybody is preempted, nobody is admitted: the memory would go in circles.",
        )
    first = [pair for pair in plan if pair[0] in ran]
    if got[: len(first)] != first:
        hint = (
            "Running requests first, in the order in which they were admitted; "
            "each gets what it lacks, or what is left of the budget."
        )
    else:
        hint = (
            "Who joins: a preempted one at the head of the queue, else the shortest prompt, "
            "ties to who came first; it gets what it lacks, or what is left of the budget. "
            "Who does not fit into memory ends it, nobody overtakes."
        )
    case.equal(got, plan, f"the list of (request, tokens) in {told}\n  the list", hint=hint)


def scene(world: World) -> str:
    """Where everybody stands, in one line."""
    scheduler, pool = world.scheduler, world.kv_cache.pool
    running = ", ".join(
        f"{r.request_id} ({r.num_tokens - r.num_computed_tokens} to compute)" for r in scheduler.running
    )
    waiting = ", ".join(
        f"{r.request_id} ({'preempted, ' * (r.status is RequestStatus.PREEMPTED)}{r.num_tokens} tokens)"
        for r in scheduler.waiting
    )
    return (
        f"running {running or 'nobody'}; waiting {waiting or 'nobody'}; "
        f"{pool.num_free} of {pool.num_blocks} blocks free"
    )
