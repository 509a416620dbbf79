"""Checks of chapter 23: chunks for a slow reader, admission by tokens, adapters packed by rank.
Built in chapter 23.

`ch23_streams` has the parser and the client that reconnects, `ch23_service` the service that leaks.
"""

from __future__ import annotations

import copy

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch23_oracle import Budget, Event, merged, packed
from minillm.book.checks.ch23_service import Client, ToyEngine, check_repair_service, trace_of
from minillm.book.checks.ch23_streams import check_event_reader, check_resume
from minillm.book.torch_traffic import record_torch_traffic

__all__ = [
    "Client",
    "Event",
    "ToyEngine",
    "check_admission",
    "check_event_reader",
    "check_merge_pieces",
    "check_packed_lora",
    "check_repair_service",
    "check_resume",
    "trace_of",
]

check_merge_pieces = Checker(
    "merge_pieces", hint="One chunk for each sample: all of its text that waits, cut at `most`; what is cut off waits."
)
check_admission = Checker(
    "admission",
    hint="Keep for each request the tokens that are still to be computed; their sum is the work under way.",
    forbid=("minillm.serving.gate.Gate",),
)
check_packed_lora = Checker(
    "packed_lora",
    hint="For each adapter in the batch: take its rows of a and b, and multiply all of its tokens at once.",
    forbid=(
        "minillm.kernels.lora.add_lora_",
        "minillm.kernels.lora.torch_add_lora_",
    ),
)

# 1 · chunks for a slow reader


@check_merge_pieces.part("example")
def _merge_example(case: Case) -> None:
    _merges(case, [(0, "Once", None), (0, " upon", None), (0, " a time", None)], 100)
    _merges(case, [(0, "Once", None), (1, "There", None), (0, " upon", "length"), (1, " was", None)], 100)
    _merges(case, [(0, "Once upon a time", "stop"), (1, "Hi", "stop")], 9)


@check_merge_pieces.part("edges")
def _merge_edges(case: Case) -> None:
    _merges(case, [], 10)
    _merges(case, [(2, "b", None), (0, "a", None), (2, "c", None)], 10)  # in the order of the first pieces
    _merges(case, [(0, "", None), (1, "", "stop")], 10)  # nothing to send; an end without text
    _merges(case, [(0, "abc", None), (0, "", "length")], 3)  # exactly full: the end goes with it
    _merges(case, [(0, "abcd", None), (0, "", "length")], 3)
    _merges(case, [(1, "", None), (0, "a", None), (1, "b", None)], 1)
    _merges(case, [(0, "é☕é", None), (0, "☕", "stop")], 1)  # characters, not bytes


@check_merge_pieces.part("random")
def _merge_random(case: Case) -> None:
    for _ in range(200):
        open_samples, waiting = list(range(case.randint(1, 5))), []
        for _ in range(case.randint(0, 12)):
            if not open_samples:
                break
            index = case.rng.choice(open_samples)
            reason = case.rng.choice(("stop", "length")) if case.rng.random() < 0.15 else None
            waiting.append((index, "".join(case.rng.choice("abcdé ") for _ in range(case.randint(0, 5))), reason))
            if reason:
                open_samples.remove(index)
        _merges(case, waiting, case.randint(1, 9))


def _merges(case: Case, waiting: list, most: int) -> None:
    got, expected, hint = case.call(waiting, most), merged(waiting, most), None
    case.is_a(got, tuple, "the result")
    ended = [reason for _, text, reason in expected[1] if reason]
    if ended and any(reason for _, text, reason in got[0] if len(text) == most):
        hint = "A finish reason is sent with the last character: while text of the sample waits, so does its reason."
    elif [chunk[0] for chunk in expected[0]] != sorted({chunk[0] for chunk in expected[0]}):
        hint = "The chunks are in the order of each sample's first piece."
    elif any(not text and not reason for _, text, reason in got[0]):
        hint = "Leave out a chunk without text and without a finish reason."
    elif sum(len(text.encode()) for _, text, _ in waiting) > sum(len(text) for _, text, _ in waiting):
        hint = "`most` counts characters, not bytes."
    case.equal(got, expected, f"(chunks, rest) for {waiting}, most={most}", hint=hint)


# 3 · admission by tokens


@check_admission.part("example")
def _admission_example(case: Case) -> None:
    both = _Both(case, 1000, 100.0)
    both.ask("a", 200, 300)
    both.ask("b", 100, 300)
    both.ask("c", 50, 100)  # 50 too many: a second
    both.computed("a", 200)
    both.ask("c", 50, 100)
    both.leave("b")
    both.ask("d", 100, 300)


@check_admission.part("edges")
def _admission_edges(case: Case) -> None:
    both = _Both(case, 100, 10.0)
    both.ask("large", 500, 500)  # alone it may
    both.ask("a", 1, 1)
    both.computed("large", 1000)
    both.ask("a", 50, 50)  # nothing is left of it to compute
    both.leave("large")
    both.ask("b", 1, 0)
    both.ask("huge", 60, 60)  # never beside others: when all are through
    both.again("a")
    both.computed("a", 30)
    both.computed("unknown", 3)
    both.leave("unknown")
    both.leave("a")
    both.leave("a")
    both.ask("a", 40, 60)
    both.computed("a", 70)
    both.computed("a", 70)  # more than it had asked for
    both.ask("c", 50, 50)
    both = _Both(case, 100, 7.0, reserve=40)
    both.ask("a", 30, 30)
    both.ask("b", 1, 0)
    both.ask("b", 20, 20, urgent=True)
    both.ask("c", 1, 0, urgent=True)
    both.ask("d", 30, 40)  # fits under 100, never under 60
    both.leave("b")
    both.ask("d", 0, 1)
    both = _Both(case, 100, 10.0, reserve=100)
    both.ask("a", 100, 100)  # an empty server
    both.ask("b", 5, 5)


@check_admission.part("random")
def _admission_random(case: Case) -> None:
    for _ in range(40):
        most = case.randint(10, 400)
        both = _Both(case, most, case.rng.choice((1.0, 3.0, 12.5, 100.0)), case.rng.choice((0, 0, most // 4, most)))
        names = [f"r{place}" for place in range(9)]
        for _ in range(40):
            name, draw = case.rng.choice(names), case.rng.random()
            if draw < 0.45 and name not in both.oracle.left:
                both.ask(name, case.randint(1, 120), case.randint(0, 120), case.rng.random() < 0.3)
            elif draw < 0.5 and name in both.oracle.left:
                both.again(name)
            elif draw < 0.8:
                both.computed(name, case.randint(1, 80))
            else:
                both.leave(name)


class _Both:
    """The student's object and the oracle, told the same."""

    def __init__(self, case: Case, max_tokens: int, rate: float, reserve: int = 0):
        self.case, self.oracle = case, Budget(max_tokens, rate, reserve)
        self.student = case.run(case.student, max_tokens, rate, reserve)
        self.told = f"Admission({max_tokens}, {rate:g}, reserve={reserve})"

    def ask(self, name: str, prompt_tokens: int, max_tokens: int, urgent: bool = False) -> None:
        before = copy.deepcopy(self.oracle)
        expected = self.oracle.ask(name, prompt_tokens, max_tokens, urgent)
        got = self.case.run(self.student.ask, name, prompt_tokens, max_tokens, urgent)
        work, claim = sum(before.left.values()), prompt_tokens + max_tokens
        hint = None
        if expected and not got:
            hint = f"{work} tokens of work are under way, and this request claims {claim}: that is too many."
            if before.reserve and not urgent:
                hint += " The reserve is for urgent requests."
        elif got and not expected:
            hint = (
                f"{work} tokens of work are under way, and this request claims {claim}. Computed tokens are not work."
            )
            if not before.left:
                hint = "An empty server admits anything: otherwise a large request would wait for ever."
        elif got != expected:
            hint = "The excess divided by the rate, rounded up to whole seconds, and at least 1."
            if claim > before.max_tokens - (0 if urgent else before.reserve):
                hint = "Its claim alone exceeds the limit, so it has to wait for all the work under way."
        self.case.is_a(got, int, "what ask returns")
        self.case.equal(
            got, expected, f"{self.told}: ask({name!r}, {prompt_tokens}, {max_tokens}, {urgent})", hint=hint
        )

    def again(self, name: str) -> None:
        hint = "A name that is under way is refused, and nothing changes."
        self.case.raises(ValueError, self.student.ask, name, 1, 1, hint=hint)

    def computed(self, name: str, count: int) -> None:
        self.oracle.computed(name, count)
        self.case.run(self.student.computed, name, count)

    def leave(self, name: str) -> None:
        self.oracle.leave(name)
        self.case.run(self.student.leave, name)


# 4 · adapters packed by rank

MOST_OPERATIONS = 24  # of torch, for each adapter in the batch, and as many again for the rest


@check_packed_lora.part("example")
def _packed_example(case: Case) -> None:
    _adds(case, ranks=[2, 3], slots=[0, 1, 1, -1, 0], width=6, height=5)
    _adds(case, ranks=[4], slots=[0, 0, 0], width=8, height=8)


@check_packed_lora.part("edges")
def _packed_edges(case: Case) -> None:
    _adds(case, ranks=[2, 3], slots=[], width=4, height=4)
    _adds(case, ranks=[2, 3], slots=[-1, -1], width=4, height=4)
    _adds(case, ranks=[2, 0, 1], slots=[1, 0, 2, 1], width=4, height=7)  # an adapter of rank 0 adds nothing
    _adds(case, ranks=[3, 2, 4], slots=[2, 0, 2, -1], width=4, height=4, poisoned=(1,))
    _adds(case, ranks=[3, 2, 4], slots=[1], width=4, height=4, poisoned=(0, 2))
    _adds(case, ranks=[8, 16], slots=[0, 1, 0], width=32, height=48, dtype=torch.float64)
    with case.hinting("Loop over the adapters in the batch, never over its tokens."):
        _adds(case, ranks=[4, 8, 2], slots=[place % 4 - 1 for place in range(600)], width=16, height=16)
    _adds(case, ranks=[2] * 60, slots=[3, 58, 3], width=8, height=8)  # many adapters, two in the batch
    _adds(case, ranks=[4, 4], slots=[0, 1, 1, 0], width=512, height=512)


@check_packed_lora.part("random")
def _packed_random(case: Case) -> None:
    for _ in range(30):
        ranks = [case.randint(0, 9) for _ in range(case.randint(1, 6))]
        slots = [case.randint(-1, len(ranks)) for _ in range(case.randint(0, 20))]
        unused = [slot for slot in range(len(ranks)) if slot not in slots]
        _adds(
            case,
            ranks,
            slots,
            case.randint(1, 24),
            case.randint(1, 24),
            poisoned=unused if case.rng.random() < 0.3 else (),
        )


def _adds(case: Case, ranks, slots, width: int, height: int, poisoned=(), dtype=torch.float32) -> None:
    starts = [sum(ranks[:place]) for place in range(len(ranks) + 1)]
    x, a, b = (
        case.randn(*shape).to(dtype) for shape in ((len(slots), width), (starts[-1], width), (starts[-1], height))
    )
    for slot in poisoned:
        a[starts[slot] : starts[slot + 1]] = b[starts[slot] : starts[slot + 1]] = float("nan")
    scales = [case.rng.choice((0.5, 1.0, 2.0, 4.0)) for _ in ranks]
    rows = torch.tensor(slots, dtype=torch.int64)
    with record_torch_traffic() as traffic:
        got = case.call(x, a, b, starts, scales, rows)
    case.is_a(got, dtype, "the result")
    expected = packed(x, a, b, starts, scales, rows).to(dtype)
    told = f"the product of {len(slots)} tokens, ranks {ranks if len(ranks) < 9 else len(ranks)}"
    hint = None
    if isinstance(got, torch.Tensor) and got.shape == expected.shape and got.isnan().any():
        hint = "An adapter that no token uses may hold anything, NaN too: 0 times NaN is NaN, so leave its rows out."
    elif isinstance(got, torch.Tensor) and got.shape == expected.shape and got[rows < 0].any():
        hint = "Slot -1 is a token without an adapter: its row is 0. An index of -1 would take the last one."
    case.close(got, expected, told, atol=1e-4, rtol=1e-4, hint=hint)
    in_batch = len({slot for slot in slots if slot >= 0})
    allowed = MOST_OPERATIONS * (in_batch + 1)
    case.true(
        len(traffic.ops) <= allowed,
        f"{told} took {len(traffic.ops)} torch operations; {allowed} are allowed for {in_batch} adapters in the batch",
        hint="Loop over the adapters in the batch, never over its tokens, nor over adapters that no token uses.",
    )
    largest = max((written for _, _, written in traffic.ops), default=0)
    case.true(
        not slots or width * height < 10**5 or largest < width * height * x.element_size(),
        f"{told}: an operation wrote {largest:,} bytes, as many as a whole [in, out] matrix has",
        hint="Multiply x by a first, then the result by b: never multiply a and b with each other.",
    )
