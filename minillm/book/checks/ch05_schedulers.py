"""The check of chapter 05's scheduler. Built in chapter 05."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch05_jobs import FORBIDDEN
from minillm.book.checks.ch05_oracle import Ask, call, drive
from minillm.kv_cache.manager import KVCacheManager

check_scheduler = Checker(
    "scheduler",
    hint="Running requests first; then, if none was preempted, the waiting ones.",
    forbid=FORBIDDEN,
)


@check_scheduler.part("example")
def _scheduler_example(case: Case) -> None:
    # 13 tokens of B do not fit beside A's 6: they are cut. C is short and overtakes D, which came earlier.
    asks = [Ask("A", 6, 3), Ask("B", 13, 4), Ask("D", 9, 2, arrives=1), Ask("C", 2, 3, arrives=1)]
    drive(case, asks, blocks=40, block_size=4, seqs=3, budget=8)


@check_scheduler.part("edges")
def _scheduler_edges(case: Case) -> None:
    plenty, tight = {"blocks": 60, "block_size": 4}, {"blocks": 6, "block_size": 4}
    drive(case, [Ask("A", 1, 1)], seqs=1, budget=1, **plenty)
    drive(case, [Ask("A", 9, 3), Ask("B", 5, 1)], seqs=4, budget=1, **plenty)  # one token a step
    drive(case, [Ask(name, 4, 3) for name in "ABCDE"], seqs=2, budget=64, **plenty)  # equal prompts: who came first
    # Running takes the budget.
    drive(case, [Ask("A", 3, 9), Ask("B", 3, 9), Ask("C", 3, 9), Ask("D", 3, 2)], seqs=4, budget=3, **plenty)
    drive(case, [Ask("A", 5, 4, stops_early=True), Ask("B", 6, 4), Ask("C", 7, 1)], seqs=2, budget=8, **plenty)
    # B and C do not fit beside A
    drive(case, [Ask("A", 20, 2), Ask("B", 3, 2), Ask("C", 8, 2, arrives=4)], seqs=3, budget=6, blocks=6, block_size=4)
    # Who runs comes before who waits.
    drive(case, [Ask("A", 3, 9), Ask("B", 9, 3, arrives=3)], seqs=4, budget=2, **plenty)
    gone = drive(case, [Ask("A", 7, 9), Ask("B", 7, 9), Ask("C", 7, 9)], seqs=3, budget=32, **tight)
    gone += drive(
        case,
        [Ask("A", 8, 12), Ask("B", 6, 12), Ask("C", 1, 1, arrives=5), Ask("D", 2, 3, arrives=5)],
        seqs=4,
        budget=9,
        **tight,
    )
    gone += drive(
        case,
        [Ask("A", 2, 14), Ask("B", 3, 14), Ask("C", 4, 14), Ask("D", 1, 9, arrives=6)],
        seqs=4,
        budget=16,
        blocks=20,
        block_size=1,
    )
    assert gone >= 3, "the traces of the edges must preempt"
    hang_up = [Ask("A", 6, 8), Ask("B", 7, 8, aborted=3), Ask("C", 9, 8, aborted=2), Ask("D", 9, 4, aborted_inside=5)]
    drive(case, hang_up, seqs=2, budget=16, **plenty)
    drive(
        case,
        [Ask("A", 7, 9), Ask("B", 7, 9), Ask("C", 7, 9, aborted=6), Ask("D", 4, 2, aborted_inside=1)],
        seqs=4,
        budget=32,
        **tight,
    )
    shared = [Ask("A", 12, 3), Ask("B", 14, 3, arrives=2), Ask("C", 13, 3, arrives=2), Ask("D", 8, 2, arrives=4)]
    drive(case, shared, seqs=4, budget=16, cached=True, **plenty)  # prompts that the cache knows already
    # X is cached but for one token, and Y is shorter: the prompt decides, not what is left of it.
    late = [Ask("A", 12, 6), Ask("X", 13, 2, arrives=2), Ask("Y", 8, 2, arrives=2)]
    drive(case, late, seqs=2, budget=16, cached=True, **plenty)
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


@check_scheduler.part("random")
def _scheduler_random(case: Case) -> None:
    for trial in range(30):
        block_size, asks = case.rng.choice((1, 2, 4)), []
        for index in range(case.randint(3, 9)):
            sizes = case.randint(1, case.rng.choice((5, 25))), case.randint(1, case.rng.choice((6, 25)))
            arrives = case.rng.choice((0, 0, case.randint(0, 20)))
            asks.append(Ask(f"r{index}", *sizes, arrives, stops_early=case.rng.random() < 0.2))
            when = case.rng.choice(("aborted", "aborted_inside")) if case.rng.random() < 0.15 else ""
            if when:
                setattr(asks[-1], when, asks[-1].arrives + case.randint(1, 9))
        largest = max(-(-(ask.prompt + ask.outputs + 3) // block_size) for ask in asks)
        blocks = largest + case.randint(0, largest) if trial % 3 else largest
        drive(
            case,
            asks,
            blocks=blocks,
            block_size=block_size,
            seqs=case.randint(1, 6),
            budget=case.randint(1, 40),
            cached=trial % 5 == 4,
        )
