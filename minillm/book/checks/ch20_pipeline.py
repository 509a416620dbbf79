"""The stretch exercise of chapter 20: which request enters the pipeline next. Built in chapter 20."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch20_oracle import fewest_slots
from minillm.book.checks.patience import within

check_fewest_bubbles = Checker(
    "fewest_bubbles", hint="First comes the request that needs the most time slots until its last pass enters."
)


@check_fewest_bubbles.part("example")
def _example(case: Case) -> None:
    _plan(case, [(2, 1), (1, 0)], 3)
    _plan(case, [(1, 2), (1, 2)], 2)


@check_fewest_bubbles.part("edges")
def _edges(case: Case) -> None:
    _plan(case, [], 4)
    _plan(case, [(3, 0)], 4)
    _plan(case, [(1, 3)], 4)  # alone: a token each four slots
    _plan(case, [(1, 3)], 1)  # one stage: no bubble
    _plan(case, [(6, 0), (1, 3)], 3)  # the short prompt first
    _plan(case, [(4, 1), (1, 1), (1, 1)], 3)
    _plan(case, [(1, 2)] * 4, 3)  # as many as stages, and one more
    _plan(case, [(3, 1), (2, 2), (1, 3)], 4)
    with within(
        case,
        "12 requests",
        "Decide one time slot after the other. So many requests have too many orders to try them all.",
    ):
        requests = [(place % 4 + 1, place % 5) for place in range(12)]
        got = case.call(requests, 4)
        _is_valid(case, got, requests, 4)
        passes = sum(chunks + tokens for chunks, tokens in requests)
        case.equal(
            len(got),
            passes,
            "the number of time slots for 12 requests on 4 stages",
            hint="So many requests leave no time slot empty, if those with many tokens left go first.",
        )


@check_fewest_bubbles.part("random")
def _random(case: Case) -> None:
    for _ in range(30):
        requests = [(case.randint(1, 4), case.randint(0, 4)) for _ in range(case.randint(1, 5))]
        _plan(case, requests, case.randint(1, 5))


def _plan(case: Case, requests: list[tuple[int, int]], num_stages: int) -> None:
    got = case.call(requests, num_stages)
    _is_valid(case, got, requests, num_stages)
    best = fewest_slots(requests, num_stages)
    case.true(len(got) == best,
              f"{requests} on {num_stages} stages takes {len(got)} time slots: {got}; {best} are enough")  # fmt: skip


def _is_valid(case: Case, got: list[int | None], requests: Sequence[tuple[int, int]], num_stages: int) -> None:
    case.is_a(got, list, "the plan")
    told, last, done = f"{requests} on {num_stages} stages", {}, [0] * len(requests)
    for slot, place in enumerate(got):
        if place is None:
            case.true(slot + 1 < len(got), f"{told}: the plan ends with an empty time slot: {got}")
            continue
        case.true(type(place) is int and 0 <= place < len(requests), f"{told}: time slot {slot} holds {place!r}",
                  hint="The index of a request, or None.")  # fmt: skip
        chunks, tokens = requests[place]
        case.true(done[place] < chunks + tokens,
                  f"{told}: request {place} enters again in time slot {slot}, "
                  f"and has {chunks + tokens} passes")  # fmt: skip
        gap = num_stages if done[place] >= chunks else 1
        case.true(slot - last.get(place, -gap) >= gap,
                  f"{told}: in time slot {slot} request {place} enters for a token, and its last pass entered in "
                  f"time slot {last.get(place)}; it leaves the last stage {num_stages} time slots "
                  "after it entered")  # fmt: skip
        last[place], done[place] = slot, done[place] + 1
    left = [place for place, (chunks, tokens) in enumerate(requests) if done[place] < chunks + tokens]
    case.true(not left, f"{told}: requests {left} have passes left when the plan ends: {got}")
