"""The simulated engines that chapter 09's checks serve with. Built in chapter 09."""

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
