"""Checks of chapter 05: stop conditions, admission, a scheduler, a repaired one, memory that suffices.
Built in chapter 05.

`ch05_schedulers` has the scheduler, `ch05_jobs` the repaired one.
"""

from __future__ import annotations

from functools import partial

from minillm.book.checks import Draw, FunctionChecker, Timed
from minillm.book.checks.ch05_jobs import Job, check_repair_scheduler, watch
from minillm.book.checks.ch05_schedulers import check_scheduler
from minillm.sampling.params import SamplingParams

__all__ = [
    "Job",
    "check_admission",
    "check_enough_memory",
    "check_repair_scheduler",
    "check_scheduler",
    "check_stop_conditions",
    "watch",
]

# 1 · when a request ends


def taken(
    params, eos_id, num_outputs, new_token_ids, *, rules=("end", "stop", "length"), first=1, late=0, before=True,
    minimum=("end", "stop"), ignores=("end",), keeps=1, zero=True,
) -> tuple[list[int], str | None, int | None]:  # fmt: skip
    for index, token in enumerate(new_token_ids):
        number = num_outputs * before + index + first
        found = {
            "end": token == eos_id and (zero or token != 0),
            "stop": token in params.stop_token_ids,
            "length": number == params.max_tokens,
        }
        for rule in rules:
            too_early = rule in minimum and number < params.min_tokens + late
            if found[rule] and not too_early and not (rule in ignores and params.ignore_eos):
                reason = "length" if rule == "length" else "stop"
                return (
                    new_token_ids[: index + keeps],
                    reason,
                    (token or (0 if zero else None)) if rule == "stop" else None,
                )
    return list(new_token_ids), None, None


def _explain_taken(got, expected, params, eos_id, num_outputs, new_token_ids) -> str:
    return (
        f"The request had {num_outputs} output tokens; max_tokens={params.max_tokens}, min_tokens={params.min_tokens}, "
        f"stop_token_ids={params.stop_token_ids}, ignore_eos={params.ignore_eos}, eos_id={eos_id}."
    )


def _random_tokens(draw: Draw) -> tuple:
    most = draw.randint(1, 10)
    params = SamplingParams(
        max_tokens=most,
        min_tokens=draw.randint(0, most + 1),
        ignore_eos=draw.rng.random() < 0.3,
        stop_token_ids=draw.rng.sample(range(6), draw.randint(0, 3)),
    )
    new = [draw.randint(0, 9) for _ in range(draw.randint(0, 7))]
    return params, draw.rng.choice((None, 0, 1, 2)), draw.randint(0, most), new


_PLAIN = SamplingParams(max_tokens=5, stop_token_ids=[7, 8])
_LATE = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=[7])
_THREE = SamplingParams(max_tokens=3, min_tokens=3, stop_token_ids=[7])

check_stop_conditions = FunctionChecker(
    "stop_conditions",
    taken,
    hint="Token by token: eos_id, a stop token, the limit; the first rule that applies ends the request.",
    examples=[(_PLAIN, 2, 0, [11, 12]), (_PLAIN, 2, 2, [11, 2]), (_PLAIN, 2, 2, [7, 11]), (_PLAIN, 2, 4, [11, 12])],
    edges=[
        (_PLAIN, 2, 4, [7]),  # the stop token is also the last token allowed
        (_PLAIN, 2, 4, [2]),
        (_PLAIN, 2, 3, [11, 12, 7]),  # the limit is reached before the stop token
        (_PLAIN, 2, 0, [8, 7, 2]),
        (_PLAIN, 2, 0, []),
        (_PLAIN, None, 0, [2, 11]),
        (_PLAIN, 0, 0, [11, 0, 12]),
        (SamplingParams(max_tokens=9, stop_token_ids=[0]), 2, 0, [0, 11]),
        (SamplingParams(max_tokens=9, stop_token_ids=[2]), 2, 0, [2]),
        (SamplingParams(max_tokens=9, ignore_eos=True), 2, 0, [2, 11]),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[2]), 2, 0, [2, 11]),
        (_LATE, 2, 1, [7, 2]),  # the second output cannot end it, the third can
        (_LATE, 2, 1, [2, 7]),
        (_LATE, 2, 0, [2, 7, 11]),
        (_THREE, 2, 0, [7, 7, 11]),
        (_THREE, 2, 0, [7, 7, 7]),
        (SamplingParams(max_tokens=1, min_tokens=0), 2, 0, [11, 12]),
    ],
    random=_random_tokens,
    trials=150,
    returns=("the list of kept tokens", "finish_reason", "stop_reason"),
    misconceptions={
        "n is at least min_tokens: with min_tokens=3 the third output token can end the request.": dict(late=1),
        "The first new token is output token number num_outputs + 1.": dict(first=0),
        "max_tokens and min_tokens count the num_outputs tokens that the request has already, too.": dict(before=False),
        "Rule 1, too, needs min_tokens output tokens.": dict(minimum=("stop",)),
        "Rule 2, too, needs min_tokens output tokens.": dict(minimum=("end",)),
        "ignore_eos changes rule 1 only; a stop token still ends the request.": dict(ignores=("end", "stop")),
        "rule 1 comes before rule 2: stop_reason is None for eos_id, also if it is a stop token.": dict(
            rules=("stop", "end", "length")
        ),
        "Rules 1 and 2 come before rule 3.": dict(rules=("length", "end", "stop")),
        "The token that ends a request is kept.": dict(keeps=0),
        "0 is a token like any other; only None means that there is none.": dict(zero=False),
    },
    explain=_explain_taken,
    forbid=("minillm.engine.request.Request",),
)

# 2 · the requests that join


def admitted(
    waiting, budget, free_slots, min_chunk, *, rest=True, piece=0,
    whole=lambda num_tokens, left, least: num_tokens <= left, passes=True, spends=True, slots=0, cuts=True,
    key=lambda pair: 0,
) -> list[tuple[str, int]]:  # fmt: skip
    joined: list[tuple[str, int]] = []
    for name, num_tokens in sorted(waiting, key=key):
        left = budget - spends * sum(count for _, count in joined)
        count = num_tokens
        if not whole(num_tokens, left, min_chunk):
            count = min(left, num_tokens - min_chunk) if rest else left
            if count < min_chunk + piece or not cuts:
                if passes:
                    continue
                break
        if len(joined) < free_slots + slots:
            joined.append((name, count))
    return joined


def _explain_admitted(got, expected, waiting, budget, free_slots, min_chunk) -> str | None:
    sizes = dict(waiting)
    if len(got) > free_slots:
        return f"{len(got)} requests join, but {free_slots} batch slots are free. A request that is cut takes one, too."
    if sum(count for _, count in got) > budget:
        return f"{sum(count for _, count in got)} tokens, but the budget is {budget}. Every request counts."
    for name, count in got:
        rest = sizes[name] - count
        if count <= 0:
            return f"{name} joins with {count} tokens. Leave out the requests that do not join."
        if rest and min(count, rest) < min_chunk:
            return f"{name} is cut into {count} and {rest} tokens. Neither part may be shorter than min_chunk."
    return None


def _random_queue(draw: Draw) -> tuple:
    longest = draw.rng.choice((6, 15, 40))
    waiting = [(f"r{i}", draw.randint(1, longest)) for i in range(draw.randint(0, 9))]
    return waiting, draw.randint(0, 60), draw.randint(0, 7), draw.randint(1, 12)


check_admission = FunctionChecker(
    "admission",
    admitted,
    hint="A request joins whole if it fits; else cut into two parts of at least min_chunk; else not at all.",
    examples=[([("A", 5), ("B", 4), ("C", 20)], 16, 8, 4), ([("A", 10), ("B", 7), ("C", 6)], 16, 8, 4)],
    edges=[
        ([], 16, 4, 4),
        ([("A", 5)], 0, 4, 4),
        ([("A", 5)], 16, 0, 4),
        ([("A", 3), ("B", 2)], 5, 4, 8),  # whole requests may be shorter than min_chunk
        ([("A", 16), ("B", 1)], 16, 4, 4),  # exactly the budget
        ([("A", 20)], 4, 4, 4),  # exactly min_chunk fits
        ([("A", 20), ("B", 3)], 3, 4, 4),
        ([("A", 20), ("B", 20), ("C", 3), ("D", 4)], 3, 4, 4),
        ([("A", 18), ("B", 2), ("C", 1)], 16, 4, 4),  # 14 + 4, and two tokens are left for B
        ([("A", 17), ("B", 2), ("C", 9), ("D", 1)], 16, 4, 4),
        ([("A", 7), ("B", 6)], 6, 4, 4),  # 7 cannot be two parts of 4
        ([("A", 8)], 7, 4, 4),  # 4 + 4
        ([("A", 30), ("B", 2), ("C", 2)], 29, 2, 4),  # no slot is left for C
        ([("A", 2), ("B", 30), ("C", 2)], 11, 1, 4),
        ([("A", 6), ("B", 9)], 10, 4, 1),
        ([("B", 4), ("A", 4), ("C", 4)], 9, 4, 4),
    ],
    random=_random_queue,
    trials=150,
    returns="the list of (name, tokens)",
    misconceptions={
        "The tokens of a request are subtracted from the budget of those behind it.": dict(spends=False),
        "Neither part may be shorter than min_chunk: not the piece, and not the rest.": dict(rest=False),
        "A piece of exactly min_chunk tokens is allowed.": dict(piece=1),
        "A request that does not join is passed over; the requests behind it still get their turn.": dict(passes=False),
        "A whole request may be shorter than min_chunk.": dict(
            whole=lambda num_tokens, left, least: least <= num_tokens <= left
        ),
        "A request that needs exactly what is left fits whole.": dict(
            whole=lambda num_tokens, left, least: num_tokens < left
        ),
        "No more than free_slots requests join.": dict(slots=1),
        "A request that does not fit whole is cut if the rule allows it.": dict(cuts=False),
        "Requests join in the order of the queue.": dict(key=lambda pair: pair[1]),
    },
    explain=_explain_admitted,
)

# 5 · memory that suffices


def by_walking(requests) -> int:
    """The most tokens in memory, found by walking through the steps."""
    longest = max((left for _, left in requests), default=0)
    return max(
        (sum(held + step for held, left in requests if left >= step) for step in range(1, longest + 1)), default=0
    )


def by_sorting(requests, *, key=lambda request: -request[1], early=0, most=max) -> int:
    """The same in one pass over the sorted requests; with switches for mistakes."""
    peak = total = 0
    for count, (held, left) in enumerate(sorted(requests, key=key), 1):
        total += held
        peak = most(peak, total + count * (left - early))
    return peak


_ONE_PASS = "Memory grows until a request finishes: look only at the last step of each, in one pass over them, sorted."

check_enough_memory = FunctionChecker(
    "enough_memory",
    by_walking,
    hint="In its last step a request of (held, left) holds held + left tokens; after it, none.",
    examples=[([(10, 2), (4, 5)],)],
    edges=[
        ([(0, 9), (0, 2)],),
        ([],),
        ([(7, 3)],),
        ([(0, 4)],),
        ([(5, 1), (5, 1)],),
        ([(3, 6), (1, 6), (2, 6)],),
        ([(1, 9), (20, 1)],),
        ([(0, 1), (0, 2), (0, 3), (0, 4)],),
        ([(4, 5), (10, 2)],),
        ([(8, 3), (0, 10), (2, 3)],),
        ([(2, 40), (30, 1), (1, 12)],),
    ],
    random=lambda draw: (
        [(draw.randint(0, 30), draw.randint(1, draw.rng.choice((4, 25)))) for _ in range(draw.randint(1, 12))],
    ),
    trials=120,
    returns="the peak",
    misconceptions={
        "The requests do not end together: after its last step a request holds nothing.": lambda requests: sum(
            map(sum, requests)
        ),
        "Memory grows in every step until a request finishes.": lambda requests: sum(held + 1 for held, _ in requests),
        "In its last step a request still holds all its tokens.": partial(by_sorting, early=1),
        "In the last step of a request, all requests with at least as many steps left are still running.": partial(
            by_sorting, key=lambda request: request[1]
        ),
        "The peak may come before the last request finishes.": partial(by_sorting, most=lambda peak, now: now),
        _ONE_PASS: by_walking,
    },
    timed=(
        Timed(
            "20,000 requests with up to 10**12 steps left",  # together more than 2**53 tokens, which a float rounds
            lambda draw: ([(draw.randint(0, 999), 10**12 - draw.randint(0, 10**9)) for _ in range(20_000)],),
            hint=_ONE_PASS,
            expected=by_sorting,
            seconds=1,
        ),
    ),
)
