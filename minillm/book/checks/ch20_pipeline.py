"""The stretch exercise of chapter 20: which request enters the pipeline next. Built in chapter 20."""

from __future__ import annotations

from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Timed

Requests = list[tuple[int, int]]  # of each its chunks and its tokens
_ALL_ORDERS = "Decide one time slot after the other. So many requests have too many orders to try them all."


def fewest_slots(requests: Requests, num_stages: int) -> int:
    """The least number of slots, by trying every order: breadth first over what is left and when it may go on."""
    states, slots = {tuple(sorted((chunks, tokens, 0) for chunks, tokens in requests))}, 0
    while not any(all(chunks + tokens == 0 for chunks, tokens, _ in state) for state in states):
        following = set()
        for state in states:
            aged = [(chunks, tokens, max(0, wait - 1)) for chunks, tokens, wait in state]
            ready = [place for place, (chunks, tokens, wait) in enumerate(state) if chunks + tokens and not wait]
            if not ready:
                following.add(tuple(sorted(aged)))
            for place in ready:  # to leave a slot empty while something is ready never helps
                chunks, tokens, _ = state[place]
                chunks, tokens = (chunks - 1, tokens) if chunks else (0, tokens - 1)
                wait = num_stages - 1 if tokens and not chunks else 0
                following.add(tuple(sorted([*aged[:place], *aged[place + 1 :], (chunks, tokens, wait)])))
        states, slots = following, slots + 1
    return slots


def _is_valid(case: Case, got: Any, requests: Requests, num_stages: int) -> None:
    case.is_a(got, list, "the plan")
    told, last, done = f"{requests} on {num_stages} stages", {}, [0] * len(requests)
    for slot, place in enumerate(got):
        if place is None:
            case.true(slot + 1 < len(got), f"{told}: the plan ends with an empty time slot: {got}")
            continue
        case.true(
            type(place) is int and 0 <= place < len(requests),
            f"{told}: time slot {slot} holds {place!r}",
            hint="The index of a request, or None.",
        )
        chunks, tokens = requests[place]
        case.true(
            done[place] < chunks + tokens,
            f"{told}: request {place} enters again in time slot {slot}, and has {chunks + tokens} passes",
        )
        gap = num_stages if done[place] >= chunks else 1
        case.true(
            slot - last.get(place, -gap) >= gap,
            f"{told}: in time slot {slot} request {place} enters for a token, and its last pass entered in time slot "
            f"{last.get(place)}; it leaves the last stage {num_stages} time slots after it entered",
            hint="A token needs the one before it: its pass enters num_stages time slots after the last one, or later.",
        )
        last[place], done[place] = slot, done[place] + 1
    left = [place for place, (chunks, tokens) in enumerate(requests) if done[place] < chunks + tokens]
    case.true(not left, f"{told}: requests {left} have passes left when the plan ends: {got}")


def _random(draw: Draw) -> tuple:
    requests = [(draw.randint(1, 4), draw.randint(0, 4)) for _ in range(draw.randint(1, 5))]
    return requests, draw.randint(1, 5)


check_fewest_bubbles = FunctionChecker(
    "fewest_bubbles",
    fewest_slots,
    observe=lambda plan, *given: plan if isinstance(plan, int) else len(plan),
    returns=lambda requests, num_stages: f"the number of time slots of the plan for {requests} on {num_stages} stages",
    form=_is_valid,
    examples=[([(2, 1), (1, 0)], 3), ([(1, 2), (1, 2)], 2)],
    edges={
        "there is no request": ([], 4),
        "one request has chunks only": ([(3, 0)], 4),
        "one request is alone: a token each four slots": ([(1, 3)], 4),
        "one stage has no bubble": ([(1, 3)], 1),
        "the short prompt goes first": ([(6, 0), (1, 3)], 3),
        "a long prompt has few tokens": ([(4, 1), (1, 1), (1, 1)], 3),
        "there is one request more than stages": ([(1, 2)] * 4, 3),
        "chunks and tokens are mixed": ([(3, 1), (2, 2), (1, 3)], 4),
    },
    timed=(
        Timed(
            "a plan for 12 requests",
            lambda draw: ([(place % 4 + 1, place % 5) for place in range(12)], 4),
            _ALL_ORDERS,
            expected=lambda requests, num_stages: sum(map(sum, requests)),  # none of the slots is empty
        ),
    ),
    random=_random,
    trials=30,
    hint="First comes the request that needs the most time slots until its last pass enters.",
)
