"""Checks of chapter 09: a key that ages, a patient queue, fair shares, a race. Built in chapter 09.

The fair shares are in `ch09_fair`, the references in `ch09_oracle`, the runs that compare with them in `ch09_drives`.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch09_drives import BASES, POLICIES, Pair, Veiled, drive, name_of, named, serve
from minillm.book.checks.ch09_fair import check_fair_queue
from minillm.book.checks.ch09_oracle import (
    BOUND,
    Patient,
    ask,
    given_queues,
    run_race,
    small_engine,
    small_trace,
    steps_of,
)
from minillm.book.checks.ch09_priorities import check_make_way
from minillm.book.checks.compare import kind_of
from minillm.engine.workload import to_requests

__all__ = ["check_ageing_key", "check_beat_it", "check_fair_queue", "check_make_way", "check_patient_queue", "race"]

check_ageing_key = Checker("ageing_key", hint="Expand the expression: which term is the same for all waiting requests?")
check_patient_queue = Checker(
    "patient_queue",
    forbid=POLICIES,
    allow=BASES,
    hint=(
        "First those that were put back, then the first one overtaken `patience` times, then the shortest. "
        "A popped request overtakes those added before it."
    ),
)
check_beat_it = Checker(
    "beat_it",
    forbid=POLICIES,
    allow=BASES,
    hint="Serve a request early only if its wait comes close to the bound; else the shortest.",
)


@check_ageing_key.part("example")
def _key_example(case: Case) -> None:
    knobs = dict(ageing=10.0, grace=2.0, cheapest=20)
    small = _key(case, (40, 15, 0.0, 0), knobs)  # cost 100
    large = _key(case, (100, 25, 0.0, 0), knobs)  # cost 200
    _in_order(case, [(100.0, small, "cost 100, came at 0"), (200.0, large, "cost 200, came at 0")])
    late = _key(case, (40, 15, 9.0, 0), knobs)
    later = _key(case, (40, 15, 11.0, 0), knobs)
    _in_order(
        case,
        [
            (190.0, late, "cost 100, came at 9 s"),
            (200.0, large, "cost 200, came at 0"),
            (210.0, later, "cost 100, came at 11 s"),
        ],
    )
    case.close(
        small[1],
        8.0,
        "safe, of a cost of 100",
        hint="(100 - 20) / 10: a request of cost 20 that arrives 8 s later has the same key.",
    )
    case.close(large[1], 18.0, "safe, of a cost of 200")


@check_ageing_key.part("edges")
def _key_edges(case: Case) -> None:
    knobs = dict(ageing=10.0, grace=2.0, cheapest=20)
    plain, second, third = (_key(case, (40, 15, at, p), knobs) for at, p in ((4.0, 0), (2.0, 1), (0.0, 2)))
    _in_order(
        case,
        [
            (140.0, plain, "cost 100, came at 4 s, priority 0"),
            (140.0, second, "cost 100, came at 2 s, priority 1"),
            (140.0, third, "cost 100, came at 0 s, priority 2"),
        ],
    )
    case.close(
        third[1],
        12.0,
        "safe, of a cost of 100 and priority 2",
        hint="Two levels of priority add 2 * grace = 4 seconds.",
    )
    case.equal(_key(case, (12, 2, 5.0, 0), knobs)[1], 0.0, "safe, of a cheapest request of priority 0")
    case.close(_key(case, (12, 2, 5.0, 3), knobs)[1], 6.0, "safe, of a cheapest request of priority 3")
    still = dict(ageing=0.0, grace=2.0, cheapest=20)
    with case.hinting("Here ageing is 0: waiting earns nothing, so neither arrival nor priority counts."):
        dear, cheap = _key(case, (40, 15, 0.0, 0), still), _key(case, (12, 2, 50.0, 4), still)
        _in_order(case, [(20.0, cheap, "cost 20, came at 50 s, priority 4"), (100.0, dear, "cost 100, came at 0")])
        case.equal(dear[1], math.inf, "safe, of a cost of 100")
        case.equal(cheap[1], 0.0, "safe, of a cheapest request")
    for wrong in (dict(ageing=-1.0, grace=2.0), dict(ageing=10.0, grace=-2.0)):
        case.raises(
            ValueError, case.student, 40, 15, 0.0, 0, *wrong.values(), 20, hint=f"{wrong}: both have to be at least 0."
        )


@check_ageing_key.part("random")
def _key_random(case: Case) -> None:
    for _ in range(25):
        knobs = dict(ageing=case.randint(1, 40) / 4, grace=case.randint(0, 20) / 4, cheapest=case.randint(5, 20))
        now, told = 100.0, []
        for _ in range(12):
            prompt, most, at, level = (
                case.randint(20, 200),
                case.randint(1, 60),
                case.randint(0, 800) / 8,
                case.randint(0, 4),
            )
            cost, counts_from = prompt + 4 * most, at + level * knobs["grace"]
            got = _key(case, (prompt, most, at, level), knobs)
            told.append(
                (cost - knobs["ageing"] * (now - counts_from), got, f"cost {cost}, came at {at:g} s, priority {level}")
            )
            case.close(
                got[1],
                (cost - knobs["cheapest"]) / knobs["ageing"] + level * knobs["grace"],
                f"safe, of ({told[-1][2]})",
                hint=f"{knobs}",
            )
        _in_order(case, sorted(told, key=lambda one: one[0]), hint=f"{knobs}")


def _key(case: Case, request: tuple, knobs: dict) -> tuple[float, float]:
    got = case.call(*request, *knobs.values())
    case.true(type(got) is tuple and len(got) == 2, f"the result is {got!r}, not a pair", hint="(key, safe)")
    for name, value in zip(("key", "safe"), got):
        case.true(type(value) in (int, float), f"{name} must be a float; got {kind_of(value)}")
    return got


def _in_order(case: Case, told: list, hint: str | None = None) -> None:
    """`told` holds (urgency, (key, safe), words), the most urgent first."""
    for (urgent, (key, _), words), (less, (other, _), other_words) in pairwise(told):
        near = abs(key - other) <= 1e-6 * max(1.0, abs(key))
        if urgent == less:
            case.true(
                near,
                (
                    f"the keys of ({words}) and ({other_words}) are {key:g} and {other:g}; "
                    "both requests have the same value at any time, so the keys must be equal"
                ),
                hint=hint,
            )
        else:
            case.true(
                key < other and not near,
                (
                    f"the key of ({words}) is {key:g} and that of ({other_words}) is {other:g}; "
                    f"the value of the first is smaller by {less - urgent:g} at any time"
                ),
                hint=hint,
            )


def _patient(case: Case, patience: int) -> Pair:
    return Pair(case, Patient(patience), patience)


@check_patient_queue.part("example")
def _patient_example(case: Case) -> None:
    pair = _patient(case, 2)
    pair.peek()
    for name, prompt in (("long", 90), ("a", 10), ("middle", 40), ("b", 12), ("c", 11)):
        pair.tell("add", ask(name, prompt))
    pair.pops("a c long b middle")
    pair.peek()


@check_patient_queue.part("edges")
def _patient_edges(case: Case) -> None:
    with case.hinting("patience=0: no request is ever overtaken, so it is first come, first served."):
        pair = _patient(case, 0)
        for name, prompt in (("a", 30), ("b", 10), ("c", 20)):
            pair.tell("add", ask(name, prompt))
        pair.pops("a b c")
    with case.hinting("A peek overtakes no request, however often it is called."):
        pair = _patient(case, 1)
        for name, prompt in (("long", 50), ("a", 10), ("b", 20)):
            pair.tell("add", ask(name, prompt))
        for _ in range(3):
            pair.peek()
        pair.pops("a long b")
    with case.hinting("The length is prompt and max_tokens together; ties go to the one that was added first."):
        pair = _patient(case, 9)
        for name, prompt, most in (("a", 10, 30), ("b", 30, 5), ("c", 20, 15), ("d", 5, 35)):
            pair.tell("add", ask(name, prompt, most))
        pair.pops("b c a d")
    with case.hinting("Requests are added in another order than they arrived; rules 2 and 3 go by the order of add."):
        pair = _patient(case, 1)
        for name, prompt, at in (("first", 40, 9.0), ("second", 40, 3.0), ("short", 5, 6.0), ("as short", 5, 1.0)):
            pair.tell("add", ask(name, prompt, at=at))
        pair.pops("short first second")
    with case.hinting("A request that was put back goes first, by arrival; that overtakes no request."):
        pair = _patient(case, 1)
        pair.tell("add", ask("long", 50, at=3.0))
        pair.tell("put_back", ask("late", 90, at=2.0))
        pair.tell("put_back", ask("early", 95, at=1.0))
        pair.tell("put_back", ask("as early", 5, at=1.0))
        pair.tell("add", ask("short", 5, at=4.0))
        pair.all_there()
        pair.pops("early")
        pair.pop(), pair.pop()
        pair.pops("short long")
    with case.hinting(
        "A request that was aborted while it waited is never returned, and the queue behaves as if it were not there."
    ):
        pair = _patient(case, 1)
        waiting = [
            ask(name, prompt) for name, prompt in (("gone", 5), ("long", 60), ("also gone", 7), ("a", 20), ("b", 10))
        ]
        for one in waiting:
            pair.tell("add", one)
        pair.abort(waiting[0]), pair.abort(waiting[2])
        pair.all_there()
        pair.pops("b long a")
        pair.peek()
    running = [ask(name, at=at) for name, at in (("d", 3.0), ("a", 1.0), ("c", 2.0), ("b", 1.0))]
    pair.order(running, "By arrival_time; ties keep their order.")


@check_patient_queue.part("random")
def _patient_random(case: Case) -> None:
    for _ in range(15):
        patience = case.randint(0, 5)
        pair, running = _patient(case, patience), []
        drive(case, pair, running, 60, users="x")
    for round_ in range(3):
        patience, seed = case.randint(1, 6), case.randint(0, 10**6)
        serve(case, functools.partial(Patient, patience), (patience,), seed, ("",), [], round_)


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
        hint="Which requests end soon? Count the steps that a request takes.",
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
        serve = functools.partial(
            steps_of, engine, requests, lambda step, aborted=aborted: aborted[step // 4 % 3], lambda step: None
        )
        case.run(named(serve), engine, may_change=True)
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


@check_beat_it.part("random")
def _beat_random(case: Case) -> None:
    for seed in case.rng.sample((1, 2, 3, 5), 3):
        _wins(case, seed)
