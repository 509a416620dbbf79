"""Checks of chapter 09: a key that ages, a patient queue, fair shares, a race. Built in chapter 09.

`ch09_ageing` has the key, `ch09_patient` and `ch09_fair` the queues, `ch09_priorities` the preemptions.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch09_ageing import check_ageing_key
from minillm.book.checks.ch09_desk import BASES, POLICIES, Veiled, name_of
from minillm.book.checks.ch09_fair import check_fair_queue
from minillm.book.checks.ch09_oracle import BOUND, given_queues, run_race, small_engine, small_trace, steps_of
from minillm.book.checks.ch09_patient import check_patient_queue
from minillm.book.checks.ch09_priorities import check_make_way
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.workload import to_requests

__all__ = ["check_ageing_key", "check_beat_it", "check_fair_queue", "check_make_way", "check_patient_queue", "race"]

check_beat_it = Checker(
    "beat_it",
    forbid=POLICIES,
    allow=BASES,
    hint="Serve a request early only if its wait comes close to the bound; else the shortest.",
)


def race(queue: type, seed: int = 0) -> tuple[float, ...]:
    """Mean E2E with first come, first served, with `sjf` and with `queue(clock, bound)`;
    then the three longest TTFTs."""
    (fcfs_mean, fcfs_longest), (sjf_mean, sjf_longest) = given_queues(seed)
    mean, longest = run_race(lambda clock: Veiled(queue(lambda: clock(), BOUND * fcfs_longest)), seed)
    return fcfs_mean, sjf_mean, mean, fcfs_longest, sjf_longest, longest


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
    return race(queue, seed)


@check_beat_it.part("example")
def _beat_example(case: Case) -> None:
    _wins(case, 0)


@check_beat_it.part("edges")
def _beat_edges(case: Case) -> None:
    for seed in range(3):
        engine = small_engine(None)
        engine.scheduler.waiting = policy = Veiled(case.run(case.student, lambda engine=engine: engine.clock(), 2.0))
        aborted = ["3", "7", "11"]
        requests = to_requests(small_trace(seed))
        case.run(_serving_with_your_queue, engine, requests, aborted, may_change=True)
        left = [one.request_id for one in requests if not one.is_finished]
        case.equal(left, [], "the list of requests that were never served")
        case.equal(
            [name_of(one) for one in policy],
            [],
            "what __iter__ shows at the end",
            hint="All have finished; none waits.",
        )
        case.true(
            sum(one.num_preemptions for one in requests) > 0,
            "no request was preempted",
            hint="The memory is too small to serve this trace without preemptions.",
        )


def _serving_with_your_queue(engine: Engine, requests: list[Request], aborted: list[str]) -> None:
    steps_of(engine, requests, lambda step: aborted[step // 4 % 3], lambda step: None)


@check_beat_it.part("random")
def _beat_random(case: Case) -> None:
    for seed in case.rng.sample((1, 2, 3, 5), 3):
        _wins(case, seed)
