"""Checks of chapter 05: stop conditions, admission, a scheduler, a repaired one, memory that suffices.
Built in chapter 05.

The references, and the drive that serves made-up requests with a student's scheduler, are in `ch05_oracle`; the jobs
of the scheduler to be repaired are in `ch05_jobs`. `ch05_schedulers` has the two schedulers.
"""

from __future__ import annotations

from collections.abc import Iterator

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch05_jobs import Job, watch
from minillm.book.checks.ch05_oracle import admitted, peak_by_walking, taken
from minillm.book.checks.ch05_schedulers import check_repair_scheduler, check_scheduler
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


check_stop_conditions = Checker(
    "stop_conditions",
    hint="Token by token: the model's end, a stop token, the limit; the first rule that applies ends it.",
    forbid=("minillm.engine.request.Request",),
)
check_admission = Checker(
    "admission", hint="Whole if it fits; else in two parts of at least min_chunk tokens; else passed over."
)
check_enough_memory = Checker(
    "enough_memory", hint="In its last step a request of (held, left) holds held + left tokens; after it, none."
)


@check_stop_conditions.part("example")
def _stop_example(case: Case) -> None:
    params = SamplingParams(max_tokens=5, stop_token_ids=[7])
    _takes(case, params, 2, 0, [11, 12], "nothing ends it")
    _takes(case, params, 2, 2, [11, 2], "2 is the model's end")
    _takes(case, params, 2, 2, [7, 11], "7 is a stop token, 11 came after it")
    _takes(case, params, 2, 4, [11, 12], "the fifth token is the last")


@check_stop_conditions.part("edges")
def _stop_edges(case: Case) -> None:
    plain = SamplingParams(max_tokens=4, stop_token_ids=[7, 8])
    _takes(case, plain, 2, 3, [7], "the stop token is also the fourth of four tokens: the rule that comes first counts")
    _takes(case, plain, 2, 3, [2], "the end is also the fourth of four tokens")
    _takes(case, plain, 2, 2, [11, 12, 7], "the limit is reached before the stop token")
    _takes(case, plain, 2, 0, [8, 7, 2], "three tokens that could end it, the first one does")
    _takes(case, plain, 2, 0, [], "no new token")
    _takes(case, plain, None, 0, [2, 11], "a model without an end-of-sequence token")
    both = SamplingParams(max_tokens=9, stop_token_ids=[2])
    _takes(case, both, 2, 0, [2], "2 is the model's end, and a stop token too: rule 1 comes before rule 2")
    _takes(
        case,
        SamplingParams(max_tokens=9, ignore_eos=True),
        2,
        0,
        [2, 11],
        "ignore_eos: the end is a token like any other",
    )
    _takes(
        case,
        SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[2]),
        2,
        0,
        [2, 11],
        "ignore_eos, but 2 is a stop token as well",
    )
    late = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=[7])
    _takes(case, late, 2, 1, [7, 2], "min_tokens=3: the second output cannot end it, the third can")
    _takes(case, late, 2, 0, [2, 7, 11], "min_tokens=3: the first two cannot end it")
    _takes(
        case,
        SamplingParams(max_tokens=3, min_tokens=3, stop_token_ids=[7]),
        2,
        0,
        [7, 7, 11],
        "min_tokens and max_tokens are both 3",
    )
    _takes(
        case,
        SamplingParams(max_tokens=3, min_tokens=3, stop_token_ids=[7]),
        2,
        0,
        [7, 7, 7],
        "min_tokens and max_tokens are both 3",
    )
    _takes(case, SamplingParams(max_tokens=1, min_tokens=0), 2, 0, [11, 12], "one token is allowed")


@check_stop_conditions.part("random")
def _stop_random(case: Case) -> None:
    for _ in range(150):
        most = case.randint(1, 10)
        params = SamplingParams(
            max_tokens=most,
            min_tokens=case.randint(0, most + 1),
            ignore_eos=case.rng.random() < 0.3,
            stop_token_ids=case.rng.sample(range(6), case.randint(0, 3)),
        )
        new = [case.randint(0, 9) for _ in range(case.randint(0, 7))]
        _takes(case, params, case.rng.choice((None, 0, 1, 2)), case.randint(0, most), new, "random tokens")


def _takes(case: Case, params: SamplingParams, eos_id: int | None, num_outputs: int, new: list[int], told: str) -> None:
    kept, reason, stop = taken(params, eos_id, num_outputs, new)
    got = case.call(params, eos_id, num_outputs, new)
    asked = (
        f"max_tokens={params.max_tokens}, min_tokens={params.min_tokens}, "
        f"stop tokens {list(params.stop_token_ids)}, ignore_eos={params.ignore_eos}"
    )
    hint = f"Here {told}. It had {num_outputs} outputs; {asked}, eos_id={eos_id}."
    case.true(
        isinstance(got, tuple) and len(got) == 3,
        f"the result is {got!r}, not a tuple of three",
        hint="(kept, finish_reason, stop_reason)",
    )
    case.equal(list(got[0]), kept, f"the list of kept tokens of {new}", hint=hint)
    case.equal(got[1], reason, f"finish_reason for {new}", hint=hint)
    case.equal(got[2], stop, f"stop_reason for {new}", hint=hint)


@check_admission.part("example")
def _admission_example(case: Case) -> None:
    _admits(case, [("A", 5), ("B", 4), ("C", 20)], 16, 8, 4)
    _admits(case, [("A", 10), ("B", 7), ("C", 6)], 16, 8, 4)


@check_admission.part("edges")
def _admission_edges(case: Case) -> None:
    _admits(case, [], 16, 4, 4)
    _admits(case, [("A", 5)], 0, 4, 4)
    _admits(case, [("A", 5)], 16, 0, 4)
    _admits(case, [("A", 3), ("B", 2)], 5, 4, 8)  # whole prompts may be shorter than min_chunk
    _admits(case, [("A", 16), ("B", 1)], 16, 4, 4)  # exactly the budget
    _admits(case, [("A", 20)], 4, 4, 4)  # exactly min_chunk fits
    _admits(case, [("A", 20), ("B", 3)], 3, 4, 4)  # a token less: A is passed over, B goes whole
    _admits(case, [("A", 20), ("B", 20), ("C", 3), ("D", 4)], 3, 4, 4)
    _admits(case, [("A", 18), ("B", 2), ("C", 1)], 16, 4, 4)  # the rest counts: 14 + 4, and two are left for B
    _admits(case, [("A", 17), ("B", 2), ("C", 9), ("D", 1)], 16, 4, 4)
    _admits(case, [("A", 7), ("B", 6)], 6, 4, 4)  # 7 cannot be two parts of 4
    _admits(case, [("A", 8)], 7, 4, 4)  # 4 + 4
    _admits(case, [("A", 30), ("B", 2), ("C", 2)], 29, 2, 4)  # no slot is left for C
    _admits(case, [("A", 2), ("B", 30), ("C", 2)], 11, 1, 4)
    _admits(case, [("A", 6), ("B", 9)], 10, 4, 1)
    _admits(case, [("B", 4), ("A", 4), ("C", 4)], 9, 4, 4)


@check_admission.part("random")
def _admission_random(case: Case) -> None:
    for _ in range(150):
        waiting = [(f"r{i}", case.randint(1, case.rng.choice((6, 15, 40)))) for i in range(case.randint(0, 8))]
        _admits(case, waiting, case.randint(0, 40), case.randint(0, 6), case.randint(1, 12))


def _admits(case: Case, waiting: list[tuple[str, int]], budget: int, slots: int, min_chunk: int) -> None:
    got = case.call(waiting, budget, slots, min_chunk)
    told = f"for waiting={waiting}, budget={budget}, free_slots={slots}, min_chunk={min_chunk}"
    case.true(
        isinstance(got, list) and all(len(pair) == 2 for pair in got),
        f"the result is {got!r}, not a list of pairs",
        hint="[(name, tokens), ...]",
    )
    size, total = dict(waiting), sum(count for _, count in got)
    case.true(
        len(got) <= slots,
        f"{len(got)} are admitted {told}",
        hint="Every one that is admitted takes a slot, cut or not.",
    )
    case.true(total <= budget, f"{total} tokens are given {told}", hint="What one gets, the next ones do not have.")
    for name, count in got:
        rest = size[name] - count
        case.true(
            count > 0 and rest >= 0,
            f"{name} gets {count} of its {size[name]} tokens {told}",
            hint="Who gets nothing is not in the list.",
        )
        case.true(
            not rest or min(count, rest) >= min_chunk,
            f"{name} is cut into {count} and {rest} tokens {told}",
            hint="Neither part may be shorter than min_chunk: the one that goes now, and the rest.",
        )
    hint = (
        "Every request in its turn: all of it, else the largest part that the rule allows, else it is passed over, "
        "and the next one has its chance."
    )
    case.equal(
        [tuple(pair) for pair in got],
        admitted(waiting, budget, slots, min_chunk),
        f"the list of (name, tokens) {told}\n  the list",
        hint=hint,
    )


@check_enough_memory.part("example")
def _memory_example(case: Case) -> None:
    case.equal(
        case.call([(10, 2), (4, 5)]),
        18,
        "the peak of (10, 2) and (4, 5)",
        hint="In step 2 they hold 12 + 6; afterwards the second one alone, up to 9.",
    )


@check_enough_memory.part("edges")
def _memory_edges(case: Case) -> None:
    for requests in (
        [],
        [(7, 3)],
        [(0, 4)],
        [(5, 1), (5, 1)],
        [(3, 6), (1, 6), (2, 6)],
        [(1, 9), (20, 1)],
        [(0, 1), (0, 2), (0, 3), (0, 4)],
        [(4, 5), (10, 2)],
        [(8, 3), (0, 10), (2, 3)],
        [(2, 40), (30, 1), (1, 12)],
    ):
        _peaks(case, requests)
    case.equal(
        case.call(Patient(case, [(10, 10**6), (5, 10**6), (1000, 7)])),
        2 * 10**6 + 15,
        "the peak with a million steps to go",
    )


@check_enough_memory.part("random")
def _memory_random(case: Case) -> None:
    for _ in range(120):
        _peaks(
            case, [(case.randint(0, 30), case.randint(1, case.rng.choice((4, 25)))) for _ in range(case.randint(1, 9))]
        )


class Patient(list):
    """A list that one may go through a few times, not once for every step."""

    def __init__(self, case: Case, items: list) -> None:
        super().__init__(items)
        self.case, self.times = case, 0

    def __iter__(self) -> Iterator:
        self.times += 1
        if self.times > 1000:
            self.case.fail(
                "you go through the requests again for every step, and there are a million steps",
                hint="Memory grows until somebody finishes: look only at the steps in which one does.",
            )
        return super().__iter__()


def _peaks(case: Case, requests: list[tuple[int, int]]) -> None:
    case.equal(
        case.call(requests),
        peak_by_walking(requests),
        f"the peak of {requests}",
        hint="Memory grows until somebody finishes: look at the steps in which one does.",
    )
