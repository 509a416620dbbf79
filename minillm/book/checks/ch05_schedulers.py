"""The check of chapter 05's scheduler, and the mistakes that it knows. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch05_jobs import FORBIDDEN
from minillm.book.checks.ch05_oracle import Ask, call, drive
from minillm.book.checks.trial import TrialChecker
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import ScheduledRequest, SchedulerOutput, StepResult
from minillm.kv_cache.manager import KVCacheManager

_PLENTY, _TIGHT = {"blocks": 60, "block_size": 4}, {"blocks": 6, "block_size": 4}


class Shortest:
    """Running requests first, then the shortest prompt. slip: a mistake, as `_SLIPS` names it."""

    def __init__(self, kv_cache: KVCacheManager, max_num_seqs: int, budget: int, slip: str = "") -> None:
        self.kv_cache, self.max_num_seqs, self.budget, self.slip = kv_cache, max_num_seqs, budget, slip
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput(moves=[(0, 1)]) if self.slip == "moves" else SchedulerOutput()
        if self.slip == "waiting first":
            old = len(self.running)
            left = self._serve_waiting(output, self.budget)
            self.running, joined = self.running[:old], self.running[old:]
            self._serve_running(output, left)
            self.running += joined
        else:
            self._serve_waiting(output, self._serve_running(output, self.budget))
        return output

    def _serve_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while request in self.running and not self.kv_cache.allocate_slots(request, count):
                place = {"first goes": 0, "asker goes": self.running.index(request)}.get(self.slip, -1)
                self._preempt(self.running[place], output)
            if request not in self.running and self.slip != "goes on":
                break
            self._add_row(output, request, count)
            budget -= count * (self.slip != "running free")
            index += 1
        return budget

    def _serve_waiting(self, output: SchedulerOutput, budget: int) -> int:
        seqs, slip = self.max_num_seqs + (self.slip == "one too many"), self.slip
        while self.waiting and (not output.preempted or slip == "admits") and budget and len(self.running) < seqs:
            request = self._next(budget)
            computed = self.kv_cache.get_computed_blocks(request)
            count = min(request.num_tokens - computed.num_tokens, budget)
            whole = count == request.num_tokens - computed.num_tokens or slip != "never cuts"
            known = () if slip == "forgets computed" else (computed,)
            if not whole or not self.kv_cache.allocate_slots(request, count, *known):
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.num_computed_tokens = computed.num_tokens * (slip != "computes again")
            request.status = request.status if slip == "silent" else RequestStatus.RUNNING
            self._add_row(output, request, count)
            budget -= count * (slip != "joining free")
        return budget

    def _next(self, budget: int) -> Request:
        is_back = self.waiting[0].status is RequestStatus.PREEMPTED
        if self.slip == "first come" or (is_back and not self.slip.startswith("overtakes")):
            return self.waiting[0]
        line = sorted(self.waiting[:: -1 if self.slip == "last tie" else 1], key=lambda one: one.num_prompt_tokens)
        if self.slip == "overtakes":
            room = self.kv_cache.pool.num_free * self.kv_cache.block_size
            line.sort(key=lambda one: one.status is not RequestStatus.PREEMPTED)
            return next((one for one in line if min(one.num_tokens, budget) <= room), line[0])
        return line[0]

    def _add_row(self, output: SchedulerOutput, request: Request, count: int) -> None:
        start, blocks = request.num_computed_tokens, self.kv_cache.tables[request.request_id]
        last = {"samples pieces": 0, "samples early": request.num_prompt_tokens}.get(self.slip, request.num_tokens)
        output.rows.append(ScheduledRequest(request.request_id, start, count, blocks, int(start + count >= last)))

    def _preempt(self, victim: Request, output: SchedulerOutput) -> None:
        self.running.remove(victim)
        if self.slip != "preempted keep blocks" or not self.running:
            self.kv_cache.free(victim)
        victim.status = RequestStatus.WAITING if self.slip == "called waiting" else RequestStatus.PREEMPTED
        victim.num_computed_tokens *= self.slip == "preempted computed"
        if self.slip != "loses the preempted":
            self.waiting.insert(len(self.waiting) * (self.slip == "preempted last"), victim)
        output.preempted.append(victim.request_id)

    def finish(self, request: Request, reason: str) -> None:
        if request.is_finished and self.slip != "finishes twice":
            return
        for name, queue in (("keeps running", self.running), ("keeps waiting", self.waiting)):
            if request in queue and self.slip != name:
                queue.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        if self.slip != "keeps blocks":
            self.kv_cache.free(request)
        if self.slip != "stays known":
            del self.requests[request.request_id]

    def update(self, output: SchedulerOutput, result: StepResult) -> list:
        added = []
        for row in output.rows:
            request = self.requests.get(row.request_id)
            if request is None and self.slip != "aborted too":
                continue
            if self.slip != "stands still" and (row.samples or self.slip != "moves where sampled"):
                request.num_computed_tokens = row.start + row.num_tokens
            if self.slip != "tells no cache":
                self.kv_cache.cache_blocks(request)
            for token_id in result.token_ids.get(row.request_id, []):
                request.append(token_id)
                added.append([request, token_id] if self.slip == "lists" else (request, token_id))
                if request.finish_reason:
                    self.finish(request, request.finish_reason)
        return added


_SLIPS = {
    "running free": "The row of a running request counts against the budget.",
    "joining free": "The row of a request that joins counts against the budget.",
    "waiting first": "Running requests first: those that wait share what is left of the budget.",
    "stands still": "update() sets num_computed_tokens to the end of the row.",
    "moves where sampled": "update() sets num_computed_tokens to the end of every row, also where none is sampled.",
    "keeps running": "A request that finishes leaves `running`.",
    "keeps waiting": "A request that is aborted while it waits leaves `waiting`.",
    "keeps blocks": "A request that finishes gives its blocks back: kv_cache.free(request).",
    "stays known": "A request that finishes leaves `requests`.",
    "finishes twice": "A request that has finished stays as it is: the second finish changes nothing.",
    "loses the preempted": "A preempted request waits again: it goes to the front of `waiting`.",
    "preempted last": "A preempted request goes to the front of `waiting`, not to its end.",
    "preempted keep blocks": "A request that is preempted gives its blocks back, even while other requests run.",
    "preempted computed": "A preemption sets num_computed_tokens to 0: the blocks are gone.",
    "called waiting": "The status of a preempted request is PREEMPTED.",
    "admits": "In a step that preempts, no request joins: it would be preempted again in the next step.",
    "first goes": "The last of `running` is preempted, not the first.",
    "asker goes": "The last of `running` is preempted, not the one that needs the block.",
    "goes on": "A request may be preempted for its own sake: then it gets no row, and part 1 ends.",
    "one too many": "A request may join while fewer than max_num_seqs run.",
    "samples pieces": "A piece of a prompt samples nothing: only the row that reaches the last token does.",
    "samples early": "After a preemption the output tokens are computed again: a row samples at the last token.",
    "never cuts": "A request that joins may be cut: it gets what is left of the budget.",
    "first come": "Not the first in the queue joins next, but the shortest prompt.",
    "last tie": "Of equally long prompts, the one nearest to the front joins next.",
    "overtakes the preempted": "A preempted request at the front of the queue joins first, whatever its length.",
    "overtakes": "If the next to join does not fit into memory, no other request overtakes it.",
    "computes again": "A request that joins starts at computed.num_tokens: these are in the cache.",
    "forgets computed": "For a waiting request, pass `computed` to allocate_slots, too.",
    "silent": "The method that moves a request sets its status: RUNNING when it joins.",
    "aborted too": "A request may have been aborted between schedule and update: skip its row.",
    "tells no cache": "update() calls kv_cache.cache_blocks(request), so that others find its prefix.",
    "moves": "Leave `moves` of the output as it is.",
    "lists": "update() returns tuples (request, token_id).",
}


def _edges(draw: Draw) -> Iterator[tuple]:
    yield [Ask("A", 1, 1)], {"seqs": 1, "budget": 1, **_PLENTY}
    yield [Ask("A", 9, 3), Ask("B", 5, 1)], {"seqs": 4, "budget": 1, **_PLENTY}  # one token a step
    yield [Ask(name, 4, 3) for name in "ABCDE"], {"seqs": 2, "budget": 64, **_PLENTY}  # equal prompts: who came first
    # Running takes the budget.
    asks = [Ask("A", 3, 9), Ask("B", 3, 9), Ask("C", 3, 9), Ask("D", 3, 2)]
    yield asks, {"seqs": 4, "budget": 3, **_PLENTY}
    yield [Ask("A", 5, 4, stops_early=True), Ask("B", 6, 4), Ask("C", 7, 1)], {"seqs": 2, "budget": 8, **_PLENTY}
    # B and C do not fit beside A.
    yield [Ask("A", 20, 2), Ask("B", 3, 2), Ask("C", 8, 2, arrives=4)], {"seqs": 3, "budget": 6, **_TIGHT}
    # Who runs comes before who waits.
    yield [Ask("A", 3, 9), Ask("B", 9, 3, arrives=3)], {"seqs": 4, "budget": 2, **_PLENTY}
    # B needs a block, and C makes way.
    yield [Ask("A", 3, 4), Ask("B", 4, 4), Ask("C", 13, 2)], {"seqs": 3, "budget": 32, "preempts": True, **_TIGHT}
    yield [Ask("A", 7, 9), Ask("B", 7, 9), Ask("C", 7, 9)], {"seqs": 3, "budget": 32, "preempts": True, **_TIGHT}
    asks = [Ask("A", 8, 12), Ask("B", 6, 12), Ask("C", 1, 1, arrives=5), Ask("D", 2, 3, arrives=5)]
    yield asks, {"seqs": 4, "budget": 9, "preempts": True, **_TIGHT}
    asks = [Ask("A", 2, 14), Ask("B", 3, 14), Ask("C", 4, 14), Ask("D", 1, 9, arrives=6)]
    yield asks, {"seqs": 4, "budget": 16, "preempts": True, "blocks": 20, "block_size": 1}
    asks = [Ask("A", 6, 8), Ask("B", 7, 8, aborted=3), Ask("C", 9, 8, aborted=2), Ask("D", 9, 4, aborted_inside=5)]
    yield asks, {"seqs": 2, "budget": 16, **_PLENTY}
    asks = [Ask("A", 7, 9), Ask("B", 7, 9), Ask("C", 7, 9, aborted=6), Ask("D", 4, 2, aborted_inside=1)]
    yield asks, {"seqs": 4, "budget": 32, **_TIGHT}
    asks = [Ask("A", 12, 3), Ask("B", 14, 3, arrives=2), Ask("C", 13, 3, arrives=2), Ask("D", 8, 2, arrives=4)]
    yield asks, {"seqs": 4, "budget": 16, "cached": True, **_PLENTY}  # prompts that the cache knows already
    # X is cached but for one token, and Y is shorter: the prompt decides, not what is left of it.
    asks = [Ask("A", 12, 6), Ask("X", 13, 2, arrives=2), Ask("Y", 8, 2, arrives=2)]
    yield asks, {"seqs": 2, "budget": 16, "cached": True, **_PLENTY}
    yield [], {}


def _random(draw: Draw) -> Iterator[tuple]:
    for trial in range(30):
        block_size, asks = draw.rng.choice((1, 2, 4)), []
        for index in range(draw.randint(3, 9)):
            sizes = draw.randint(1, draw.rng.choice((5, 25))), draw.randint(1, draw.rng.choice((6, 25)))
            arrives = draw.rng.choice((0, 0, draw.randint(0, 20)))
            asks.append(Ask(f"r{index}", *sizes, arrives, stops_early=draw.rng.random() < 0.2))
            when = draw.rng.choice(("aborted", "aborted_inside")) if draw.rng.random() < 0.15 else ""
            if when:
                setattr(asks[-1], when, asks[-1].arrives + draw.randint(1, 9))
        largest = max(-(-(ask.prompt + ask.outputs + 3) // block_size) for ask in asks)
        blocks = largest + draw.randint(0, largest) if trial % 3 else largest
        limits = {"seqs": draw.randint(1, 6), "budget": draw.randint(1, 40), "cached": trial % 5 == 4}
        yield asks, {"blocks": blocks, "block_size": block_size, **limits}


def _served(case: Case, asks: list[Ask], limits: dict[str, int]) -> None:
    if asks:
        drive(case, asks, **limits)
    else:
        _finish_twice(case)


def _finish_twice(case: Case) -> None:
    cache, request = KVCacheManager(4, 4), Ask("A", 3, 2).request()
    scheduler, told = call(case, case.student, "at the start", cache, 2, 8), "in a step with one request"
    call(case, scheduler.add, told, request)
    call(case, scheduler.schedule, told)
    for reason in ("abort", "length"):
        call(case, scheduler.finish, "when a request is finished twice", request, reason)
    case.equal(
        request.finish_reason,
        "abort",
        "finish_reason after finish(request, 'abort') and then finish(request, 'length')",
        hint="The request has finished: the second call changes nothing.",
    )


check_scheduler = TrialChecker(
    "scheduler",
    _served,
    # 13 tokens of B do not fit beside A's 6: they are cut. C is short and overtakes D, which came earlier.
    examples=[
        (
            [Ask("A", 6, 3), Ask("B", 13, 4), Ask("D", 9, 2, arrives=1), Ask("C", 2, 3, arrives=1)],
            {"blocks": 40, "block_size": 4, "seqs": 3, "budget": 8},
        )
    ],
    edges=_edges,
    random=_random,
    hint="Running requests first; then, if none was preempted, the waiting ones.",
    misconceptions={hint: partial(Shortest, slip=slip) for slip, hint in _SLIPS.items()},
    forbid=FORBIDDEN,
)
