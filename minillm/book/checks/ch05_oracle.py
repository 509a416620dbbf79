"""References and drives of chapter 05's checks. Built in chapter 05.

A student's scheduler runs beside the engine's own, which here has the exercise's queue. Each has a KVCacheManager and
requests of its own, both are told the same tokens, and after every call the two must stand alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.book.checks import Case
from minillm.book.checks.ch05_rules import World, as_planned, scene
from minillm.engine.policies import FCFS
from minillm.engine.request import Request, RequestStatus
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import SchedulerOutput, StepResult
from minillm.kv_cache.manager import KVCacheManager
from minillm.sampling.params import SamplingParams

STOP = 5  # the token that ends a made-up request


class ShortestFirst(FCFS):
    """Preempted requests, then the shortest prompt; ties to the one nearest to the front."""

    def peek(self) -> Request | None:
        head = super().peek()
        if head is None or head.status is RequestStatus.PREEMPTED:
            return head
        return min(self, key=lambda request: request.num_prompt_tokens)

    def pop(self) -> Request:
        request = self.peek()
        self.queue.remove(request)
        return request


@dataclass
class Ask:
    """A request to be: the step in which it arrives, and the one in which it is aborted (None: never)."""

    name: str
    prompt: int
    outputs: int
    arrives: int = 0
    aborted: int | None = None  # before this step is scheduled
    aborted_inside: int | None = None  # between schedule and update of this step
    stops_early: bool = False  # its last token is a stop token, not the one at max_tokens

    def request(self) -> Request:
        limit = self.outputs + 3 * self.stops_early
        params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[STOP])
        return Request(self.name, [10 + i for i in range(self.prompt)], params, limit, arrival_time=0.0)


def drive(
    case: Case, asks: Sequence[Ask], *, blocks: int, block_size: int, seqs: int, budget: int, cached: bool = False,
    preempts: bool = False,
) -> None:  # fmt: skip
    """Serve `asks` with the student's scheduler and with the reference, and compare every step. preempts: it must."""
    right, theirs = (KVCacheManager(blocks, block_size, enable_prefix_caching=cached) for _ in range(2))
    reference = World(right, Scheduler(right, seqs, budget, ShortestFirst()))
    student = World(theirs, call(case, case.student, "at the start", theirs, seqs, budget))
    size, preempted, step = {ask.name: ask for ask in asks}, 0, 0
    while step <= max(ask.arrives for ask in asks) or reference.scheduler.requests:
        step += 1
        for ask in asks:
            for world in (reference, student) if ask.arrives == step - 1 else ():
                world.requests[ask.name] = request = ask.request()
                call(case, world.scheduler.add, f"before step {step}", request)
        _hang_up(case, asks, "aborted", step, reference, student)
        told = f"step {step} (at most {budget} tokens and {seqs} requests)\n  {'before:':<9} {scene(reference)}"
        ran = [request.request_id for request in reference.scheduler.running]
        expected = reference.scheduler.schedule()
        order = [request.request_id for request in reference.scheduler.running]
        expected.rows.sort(key=lambda row, order=order: order.index(row.request_id))
        output = call(case, student.scheduler.schedule, f"in {told}")
        as_planned(case, student, output, expected, ran, told, budget, seqs)
        _alike(case, student, reference, f"in {told}")
        preempted += len(expected.preempted)
        _hang_up(case, asks, "aborted_inside", step, reference, student)
        right_pairs = reference.scheduler.update(expected, _said(expected, size, reference.requests))
        _updated(case, student, output, right_pairs, size, told)
        _alike(case, student, reference, f"after {told}")
    case.equal(
        theirs.pool.num_free,
        blocks,
        "the number of free blocks when all requests have finished",
        hint="Free all blocks of a request that ends: kv_cache.free(request).",
    )
    assert preempted or not preempts, "this trace must preempt"


def call(case: Case, function: Callable, told: str, *args: Any) -> Any:
    """Call something of the student's; the message of a failure says where we were instead of listing all calls."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return function(*args)
    except NotImplementedError as error:
        case.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
    except Exception as error:
        case.fail(f"{name} raised {type(error).__name__}: {error} {told}", cause=error, hint=_RAISED.get(name))


def _hang_up(case: Case, asks: Sequence[Ask], when: str, step: int, reference: World, student: World) -> None:
    for ask in asks:
        if getattr(ask, when) == step and not reference.requests[ask.name].is_finished:
            reference.scheduler.finish(reference.requests[ask.name], "abort")
            told = f"{ask.name} was aborted {'before' if when == 'aborted' else 'inside'} step {step}"
            call(case, student.scheduler.finish, f"when {told}", student.requests[ask.name], "abort")
            _alike(case, student, reference, f"after {told}")


def _said(output: SchedulerOutput, asks: dict[str, Ask], requests: dict[str, Request]) -> StepResult:
    """A made-up token for every row that wants one; the last of a request that stops early is a stop token."""
    result = StepResult()
    for row in output.rows:
        if row.samples:
            ask, number = asks[row.request_id], len(requests[row.request_id].output_token_ids) + 1
            token = STOP if ask.stops_early and number == ask.outputs else 100 + number
            result.token_ids[row.request_id] = [token]
    return result


def _updated(
    case: Case, student: World, output: SchedulerOutput, expected: list, asks: dict[str, Ask], told: str
) -> None:
    added = call(case, student.scheduler.update, f"in {told}", output, _said(output, asks, student.requests))
    case.is_a(added, list, f"what update() returns in {told}\n  it", of=tuple)
    pairs, wanted = ([(request.request_id, token_id) for request, token_id in one] for one in (added, expected))
    case.equal(
        pairs,
        wanted,
        f"what update() returns, a list of (request, token), in {told}\n  the list",
        hint="One pair for every row that sampled, but none for a request that was aborted meanwhile.",
    )


def _alike(case: Case, student: World, reference: World, told: str) -> None:
    """Every request is where it should be, and every block has the owner it should have."""
    for name, right in reference.requests.items():
        one = student.requests[name]
        for what, hint in _ASPECTS.items():
            case.equal(_aspect(one, what), _aspect(right, what), f"{what} of {name} {told}\n  {what}", hint=hint)
    for what, hint in _PLACES.items():
        got, wanted = ([one.request_id for one in getattr(world.scheduler, what)] for world in (student, reference))
        case.equal(got, wanted, f"`{what}` {told}\n  {what}", hint=hint)
    case.equal(
        sorted(student.scheduler.requests),
        sorted(reference.scheduler.requests),
        f"the keys of `requests` {told}\n  the list",
        hint="`requests` has every request that has not finished.",
    )
    owners, right = (sorted(world.kv_cache.tables) for world in (student, reference))
    case.equal(
        owners,
        right,
        f"the list of requests that own blocks {told}\n  the list",
        hint="Call kv_cache.free(request) when a request finishes, and when it is preempted.",
    )
    call(case, student.kv_cache.check_integrity, told)
    case.equal(
        student.kv_cache.pool.num_free,
        reference.kv_cache.pool.num_free,
        f"the number of free blocks {told}\n  the number",
    )


_RAISED = {
    "schedule": (
        "For a waiting request, pass `computed` to allocate_slots, too; a preempted request, "
        "perhaps the one that needed the block, has no blocks and is not in `running`."
    ),
    "update": "A request may have been aborted between schedule and update: skip its row.",
    "finish": "A request may be in `running` or in `waiting` when it ends; one that has finished stays as it is.",
}
_ASPECTS = {
    "num_computed_tokens": (
        "update() sets it to the end of the row, a preemption sets it to 0; "
        "a request that joins starts at computed.num_tokens."
    ),
    "output_token_ids": "request.append(token_id), once for every token that was sampled.",
    "status": "WAITING, RUNNING, PREEMPTED, FINISHED: the method that moves a request sets its status.",
    "finish_reason": "request.append sets it; finish(request, reason) sets it to the given reason.",
}
_PLACES = {
    "running": "In the order in which they joined, without those that finished or were preempted.",
    "waiting": (
        "In order of arrival; a preempted request goes to the front; a request that joins, or is aborted, leaves."
    ),
}


def _aspect(request: Request, what: str) -> object:
    value = getattr(request, what)
    return value.name if isinstance(value, RequestStatus) else value
