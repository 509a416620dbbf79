"""Checks of chapter 09: a key that ages, a patient queue, fair shares, a race. Built in chapter 09.

`ch09_ageing` has the key, `ch09_patient` and `ch09_fair` the queues, `ch09_priorities` the preemptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial

from minillm.book.checks import Case
from minillm.book.checks.ch09_ageing import check_ageing_key
from minillm.book.checks.ch09_desk import BASES, POLICIES, Veiled, name_of
from minillm.book.checks.ch09_fair import check_fair_queue
from minillm.book.checks.ch09_oracle import (
    BOUND,
    NothingToDo,
    given_queues,
    run_race,
    small_engine,
    small_trace,
    steps_of,
)
from minillm.book.checks.ch09_patient import check_patient_queue
from minillm.book.checks.ch09_priorities import check_make_way
from minillm.book.checks.trial import TrialChecker
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.workload import to_requests

__all__ = ["check_ageing_key", "check_beat_it", "check_fair_queue", "check_make_way", "check_patient_queue", "race"]


def race(queue: type, seed: int = 0) -> tuple[float, ...]:
    """Mean E2E with first come, first served, with `sjf` and with `queue(clock, bound)`;
    then the three longest TTFTs."""
    (fcfs_mean, fcfs_longest), (sjf_mean, sjf_longest) = given_queues(seed)
    mean, longest = run_race(lambda clock: Veiled(queue(lambda: clock(), BOUND * fcfs_longest)), seed)
    return fcfs_mean, sjf_mean, mean, fcfs_longest, sjf_longest, longest


class Cautious(NothingToDo):
    """The shortest first, and the oldest when it has waited for a part of the bound. The keywords are mistakes."""

    def __init__(
        self, clock: Callable[[], float], bound: float, *, part: float = 2 / 3, shown: bool = False,
        drops: bool = False, loses: bool = False,
    ) -> None:  # fmt: skip
        self.clock, self.danger = clock, bound * part
        self.shown, self.drops, self.loses = shown, drops, loses
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        self.requests += [request] * (not self.drops or request.max_tokens < 100)

    def put_back(self, request: Request) -> None:
        self.requests += [request] * (not self.loses)

    def peek(self) -> Request | None:
        there = [request for request in self.requests if self.shown or not request.is_finished]
        oldest = min(there, key=lambda request: request.arrival_time, default=None)
        if oldest is None or self.clock() - oldest.arrival_time > self.danger:
            return oldest
        return min(there, key=lambda request: request.max_tokens + request.num_prompt_tokens / 20)

    def pop(self) -> Request:
        request = self.peek()
        self.requests.remove(request)
        return request

    def order(self, running: list[Request]) -> None:
        running.sort(key=lambda request: request.arrival_time)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self.requests if self.shown or not request.is_finished)


def _wins(case: Case, seed: int) -> None:
    _, sjf_mean, mean, fcfs_longest, _, longest = case.run(_racing, case.student, seed)
    case.true(
        longest <= BOUND * fcfs_longest,
        (
            f"on the trace {seed} a request waits {longest:.2f} s for the first token, "
            f"allowed are {BOUND * fcfs_longest:.2f}"
        ),
        hint="Choose the oldest request earlier: several may come close to the bound at a time.",
    )
    case.true(
        mean < sjf_mean,
        f"on the trace {seed} the mean E2E is {mean:.3f} s, sjf has {sjf_mean:.3f}",
        hint="Which requests end soon? Count the steps that a request takes. "
        "And serve the oldest first only where its wait comes close to the bound: all others wait meanwhile.",
    )


def _racing(queue: type, seed: int) -> tuple[float, ...]:
    return _race_of_mistake(queue, seed) if isinstance(queue, partial) else race(queue, seed)


_race_of_mistake = cache(race)  # each stays as it is, and races whenever another answer fails


def _serves(case: Case, seed: int) -> None:
    engine, aborted = small_engine(None), ["3", "7", "11"]
    engine.scheduler.waiting = policy = Veiled(case.run(case.student, lambda: engine.clock(), 2.0))
    requests = to_requests(small_trace(seed))
    case.run(_serving_with_your_queue, engine, requests, aborted, may_change=True)
    left = [one.request_id for one in requests if not one.is_finished]
    case.equal(left, [], "the list of requests that were never served")
    waiting, hint = [name_of(one) for one in policy], "All have finished; none waits."
    case.equal(waiting, [], "what __iter__ shows at the end", hint=hint)
    case.true(
        sum(one.num_preemptions for one in requests) > 0,
        "no request was preempted",
        hint="The memory is too small to serve this trace without preemptions.",
    )


def _serving_with_your_queue(engine: Engine, requests: list[Request], aborted: list[str]) -> None:
    steps_of(engine, requests, lambda step: aborted[step // 4 % 3], lambda step: None)


check_beat_it = TrialChecker(
    "beat_it",
    lambda case, play, seed: play(case, seed),
    examples=[(_wins, 0)],
    edges=[(_serves, 0), (_serves, 1), (_serves, 2)],
    random=lambda draw: [(_wins, seed) for seed in draw.rng.sample((1, 2, 3, 5), 3)],
    hint="Serve a request early only if its wait comes close to the bound; else the shortest.",
    misconceptions={
        "Serve the oldest first only where its wait comes close to the bound: all others wait meanwhile.": partial(
            Cautious, part=0.0
        ),
        "Where the wait of the oldest comes close to the bound, it is next.": partial(Cautious, part=math.inf),
        "Choose the oldest earlier: when its wait reaches the bound, it is too late.": partial(Cautious, part=1),
        "__iter__ shows the waiting requests that are not finished.": partial(Cautious, shown=True),
        "Every request is served in the end, the longest, too.": partial(Cautious, drops=True),
        "A request that was preempted waits again: put_back keeps it.": partial(Cautious, loses=True),
    },
    forbid=POLICIES,
    allow=BASES,
)
