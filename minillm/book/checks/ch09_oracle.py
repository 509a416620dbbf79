"""References of chapter 09's checks, and the runs they are compared by. Built in chapter 09."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from minillm.engine.engine import Engine
from minillm.engine.metrics import RequestRecord, report
from minillm.engine.policies import FCFS, sjf
from minillm.engine.request import Request
from minillm.engine.simulator import CostModel, StepRecorder, replay, simulated_engine
from minillm.engine.workload import TraceRequest, poisson_trace, to_requests
from minillm.sampling.params import SamplingParams

COST = CostModel(per_step=7e-3, per_prefill_token=5e-5, per_decode=5e-5, per_decode_context=6e-8, per_prefill_pair=2e-9)
_STEPS = 5000  # more than any trace of these checks takes
BOUND = 1.5  # times the longest TTFT of first come, first served


def ask(name: str, prompt: int = 4, max_tokens: int = 4, at: float = 0.0, user: str = "") -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, [1] * prompt, params, max_tokens, arrival_time=at, user=user)


class NothingToDo:
    def charge(self, request: Request, num_tokens: int) -> None:
        pass

    def join(self, request: Request) -> None:
        pass

    def leave(self, request: Request) -> None:
        pass


class Patient(NothingToDo):
    """The statement of `patient_queue`, rule by rule; everything is read off the order of the events."""

    def __init__(self, patience: int):
        self.patience, self.events, self.chosen = patience, 0, None
        self.added: dict[str, tuple[int, Request]] = {}
        self.returned: dict[str, tuple[int, Request]] = {}
        self.overtaken: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.events += 1
        self.added[request.request_id] = self.events, request
        self.overtaken[request.request_id] = 0

    def put_back(self, request: Request) -> None:
        self.events += 1
        self.returned[request.request_id] = self.events, request

    def peek(self) -> Request | None:
        again = [pair for pair in self.returned.values() if not pair[1].is_finished]
        first = [pair for pair in self.added.values() if not pair[1].is_finished]
        full = [pair for pair in first if self.overtaken[pair[1].request_id] >= self.patience]
        if again:
            self.chosen = min(again, key=lambda pair: (pair[1].arrival_time, pair[0]))[1]
        elif full:
            self.chosen = min(full, key=lambda pair: pair[0])[1]
        elif first:
            self.chosen = min(first, key=lambda pair: (pair[1].num_prompt_tokens + pair[1].max_tokens, pair[0]))[1]
        else:
            self.chosen = None
        return self.chosen

    def pop(self) -> Request:
        name = self.chosen.request_id
        if name in self.returned:
            return self.returned.pop(name)[1]
        event, request = self.added.pop(name)
        for other, (earlier, one) in self.added.items():
            if earlier < event and not one.is_finished:
                self.overtaken[other] += 1
        return request

    def order(self, running: list[Request]) -> None:
        running.sort(key=lambda request: request.arrival_time)

    def __iter__(self):
        return (one for _, one in [*self.returned.values(), *self.added.values()] if not one.is_finished)

    def told(self) -> str:
        """The waiting requests, in words, for a hint."""
        lines = [
            f"{one.request_id} (put back, came at {one.arrival_time:g})"
            for _, one in self.returned.values()
            if not one.is_finished
        ]
        lines += [
            f"{name} (length {one.num_prompt_tokens + one.max_tokens}, overtaken {self.overtaken[name]} times)"
            for name, (_, one) in self.added.items()
            if not one.is_finished
        ]
        return ", ".join(lines) or "none"


class FairShares:
    """The statement of `fair_queue`, rule by rule."""

    def __init__(self, shares: dict[str, float], output_weight: float):
        self.shares, self.output_weight = shares, output_weight
        self.counters: dict[str, float] = {}
        self.waiting: list[tuple[int, Request]] = []  # put back: negative places, the last one in front
        self.there: list[Request] = []
        self.last_to_leave: str | None = None
        self.events, self.chosen = 0, None

    def add(self, request: Request) -> None:
        here = {one.user for one in self.there}
        if request.user not in here:
            if here:
                floor = min(self.counters[user] for user in here)
            else:
                floor = 0.0 if self.last_to_leave is None else self.counters[self.last_to_leave]
            self.counters[request.user] = max(self.counters.get(request.user, 0.0), floor)
        self.there.append(request)
        self.events += 1
        self.waiting.append((self.events, request))

    def put_back(self, request: Request) -> None:
        self.events += 1
        self.waiting.append((-self.events, request))

    def join(self, request: Request) -> None:
        self.there.append(request)

    def leave(self, request: Request) -> None:
        self.there.remove(request)
        if all(one.user != request.user for one in self.there):
            self.last_to_leave = request.user

    def heads(self) -> dict[str, tuple[int, Request]]:
        """The next request of each user."""
        heads: dict[str, tuple[int, Request]] = {}
        for place, one in sorted((pair for pair in self.waiting if not pair[1].is_finished), key=lambda pair: pair[0]):
            heads.setdefault(one.user, (place, one))
        return heads

    def peek(self) -> Request | None:
        heads = self.heads()
        users = sorted(heads, key=lambda user: (self.counters[user], heads[user][1].arrival_time, user))
        self.chosen = heads[users[0]] if users else None
        return self.chosen[1] if users else None

    def pop(self) -> Request:
        self.waiting.remove(self.chosen)
        return self.chosen[1]

    def order(self, running: list[Request]) -> None:
        running.sort(key=lambda request: (self.counters[request.user], request.arrival_time))

    def charge(self, request: Request, num_tokens: int) -> None:
        first = max(request.num_computed_tokens, request.max_computed_tokens)
        for position in range(first, first + num_tokens):
            weight = 1.0 if position < request.num_prompt_tokens else self.output_weight
            self.counters[request.user] += weight / self.shares.get(request.user, 1.0)

    def __iter__(self):
        return (one for _, one in self.waiting if not one.is_finished)

    def told(self) -> str:
        heads = self.heads()
        return ", ".join(
            f"{user}: {counter:g}" + (f", next is {heads[user][1].request_id}" if user in heads else "")
            for user, counter in self.counters.items()
        )


def small_engine(policy, num_blocks: int = 24, seqs: int = 5) -> Engine:
    """So little memory that requests are preempted, and a budget that cuts prompts."""
    engine = simulated_engine(COST, num_blocks, policy=policy, max_num_seqs=seqs, max_num_batched_tokens=48)
    engine.runner = StepRecorder(engine.runner)
    return engine


def small_trace(seed: int, users: Sequence[str] = ("",), n: int = 24) -> list[TraceRequest]:
    return poisson_trace(n, rate=40, input_length=50, output_length=25, max_length=180, seed=seed, users=users)


def steps_of(
    engine: Engine, requests: list[Request], abort: Callable[[int], str | None], after: Callable[[int], object]
) -> list[tuple]:
    """Serve `requests`; for each step its summary, and what `after` says. `abort` names whom to abort before a step."""
    todo, told = sorted(requests, key=lambda request: request.arrival_time), []
    while todo or engine.has_unfinished:
        while todo and todo[0].arrival_time <= engine.clock():
            engine.add_request(todo.pop(0))
        if not engine.has_unfinished:
            engine.clock.wait_until(todo[0].arrival_time)
            continue
        if (name := abort(len(told))) in engine.scheduler.requests:
            engine.abort(name)
        if not engine.has_unfinished:
            continue
        engine.step()
        told.append((engine.runner.summaries[-1], after(len(told))))
        if len(told) > _STEPS:
            raise RuntimeError(f"{_STEPS} steps and no end: a request is never served")
    return told


def race_trace(seed: int) -> list[TraceRequest]:
    return poisson_trace(160, rate=13, input_length=120, output_length=50, spread=0.9, max_length=500, seed=seed)


def run_race(make: Callable, seed: int) -> tuple[float, float]:
    """(mean E2E, longest TTFT) of one queue, made from the engine's clock."""
    engine = simulated_engine(COST, 400, max_num_seqs=8, max_num_batched_tokens=256)
    engine.scheduler.waiting, step, steps = make(engine.clock), engine.step, itertools.count()

    def bounded() -> list:
        if next(steps) > _STEPS:
            raise RuntimeError(f"{_STEPS} steps and no end: a request is never served")
        return step()

    engine.step = bounded
    sums = report([RequestRecord.of(request) for request in replay(engine, to_requests(race_trace(seed)))])
    return sums.e2e.mean, sums.ttft.max


@functools.cache
def given_queues(seed: int) -> tuple[tuple[float, float], tuple[float, float]]:
    return run_race(lambda clock: FCFS(), seed), run_race(lambda clock: sjf(), seed)
