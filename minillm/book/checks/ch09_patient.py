"""The check of chapter 09's patient queue. Built in chapter 09."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm.book.checks import Case, Draw
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.ch09_desk import BASES, IN_PLACE, POLICIES, WAITING, desk, turns, why
from minillm.book.checks.ch09_oracle import NothingToDo
from minillm.engine.request import Request


def _length(request: Request) -> int:
    return request.num_prompt_tokens + request.max_tokens


class Patient(NothingToDo):
    """The statement, rule by rule; everything is read off the order of the events. The keywords are mistakes."""

    def __init__(
        self, patience: int, *, full: Callable[[int, int], bool] = lambda times, most: times >= most,
        peeks: bool = False,
        earlier: bool = True, last: bool = False, length: Callable[[Request], int] = _length,
        back: Callable = lambda request: request.arrival_time, returns: bool = True, shown: bool = False,
        by_arrival: bool = False, sorts: Callable = lambda request: request.arrival_time, sorted_copy: bool = False,
    ) -> None:  # fmt: skip
        self.patience, self.events, self.chosen = patience, 0, None
        self.full, self.peeks, self.earlier, self.last, self.length = full, peeks, earlier, last, length
        self.back, self.returns, self.shown, self.by_arrival = back, returns, shown, by_arrival
        self.sorts, self.sorted_copy = sorts, sorted_copy
        self.added: dict[str, tuple[float, Request]] = {}
        self.returned: dict[str, tuple[int, Request]] = {}
        self.overtaken: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.events += 1
        self.added[request.request_id] = request.arrival_time if self.by_arrival else self.events, request
        self.overtaken[request.request_id] = 0

    def put_back(self, request: Request) -> None:
        if not self.returns:
            return self.add(request)
        self.events += 1
        self.returned[request.request_id] = self.events, request
        return None

    def peek(self) -> Request | None:
        again = [pair for pair in self.returned.values() if not pair[1].is_finished]
        first = [pair for pair in self.added.values() if not pair[1].is_finished]
        full = [pair for pair in first if self.full(self.overtaken[pair[1].request_id], self.patience)]
        self.chosen = None
        if again:
            self.chosen = min(again, key=lambda pair: (self.back(pair[1]), pair[0]))[1]
        elif full:
            self.chosen = (max if self.last else min)(full, key=lambda pair: pair[0])[1]
        elif first:
            self.chosen = min(first, key=lambda pair: (self.length(pair[1]), pair[0]))[1]
        if self.peeks:
            self.overtaken |= {one.request_id: self.overtaken[one.request_id] + 1 for _, one in first}
        return self.chosen

    def pop(self) -> Request:
        name = self.chosen.request_id
        if name in self.returned:
            return self.returned.pop(name)[1]
        event, request = self.added.pop(name)
        for other, (earlier, one) in self.added.items():
            if (earlier < event or not self.earlier) and not one.is_finished:
                self.overtaken[other] += 1
        return request

    def order(self, running: list[Request]) -> list[Request] | None:
        if self.sorted_copy:
            return sorted(running, key=self.sorts)
        running.sort(key=self.sorts)
        return None

    def __iter__(self) -> Iterator[Request]:
        there = [*self.returned.values(), *self.added.values()]
        return (one for _, one in there if self.shown or not one.is_finished)

    def told(self) -> str:
        """The waiting requests, in words, for a hint."""
        lines = [
            f"{one.request_id} (put back, came at {one.arrival_time:g})"
            for _, one in self.returned.values()
            if not one.is_finished
        ]
        lines += [
            f"{name} (length {_length(one)}, overtaken {self.overtaken[name]} times)"
            for name, (_, one) in self.added.items()
            if not one.is_finished
        ]
        return ", ".join(lines) or "none"


def _pops(times: int) -> str:
    return " · ".join(["peek()", *["pop()"] * times, "peek()"])


def _random(draw: Draw) -> Story:
    patience = draw.randint(0, 6)
    if draw.rng.random() < 0.2:
        return Story((patience,), [("serve", draw.randint(0, 10**6), ("",), [])])
    return turns(draw, (patience,), "x")


def _two_queues(case: Case) -> None:
    """Two queues that are used in turns, with requests of the same names."""
    queues = [case.run(desk(case.student), 1) for _ in range(2)]
    for queue in queues:
        case.run(queue.add, "long", 50)
        case.run(queue.add, "short", 10)
    case.run(queues[0].pop)
    hint = "Two queues share nothing: lists and counts belong to the object, not to the class."
    case.equal(case.run(queues[1].peek), "short", "peek() of a second queue, after pop() of the first", hint=hint)


check_patient_queue = ClassChecker(
    "patient_queue",
    Patient,
    adapt=desk,
    what="queue",
    shows={WAITING: lambda queue, calls: queue.waits()},
    examples=[
        Story(
            (2,),
            f"peek() · add('long', 90) · add('a', 10) · add('middle', 40) · add('b', 12) · add('c', 11) · {_pops(5)}",
        )
    ],
    edges={
        "patience is 0, and no request is ever overtaken: it is first come, first served": Story(
            (0,), f"add('a', 30) · add('b', 10) · add('c', 20) · {_pops(3)}"
        ),
        "peek is called three times: it overtakes no request, however often it is called": Story(
            (1,), f"add('long', 50) · add('a', 10) · add('b', 20) · peek() · peek() · {_pops(3)}"
        ),
        "prompt and max_tokens together are the length, and ties go to the one that was added first": Story(
            (9,), f"add('a', 10, 30) · add('b', 30, 5) · add('c', 20, 15) · add('d', 5, 35) · {_pops(4)}"
        ),
        "requests are added in another order than they arrived; rules 2 and 3 go by the order of add": Story(
            (1,),
            "add('first', 40, 4, 9.0) · add('second', 40, 4, 3.0) · add('short', 5, 4, 6.0) ·"
            f"add('as short', 5, 4, 1.0) · {_pops(3)}",
        ),
        "requests were put back: they go first, by arrival, and overtake no request": Story(
            (1,),
            "add('long', 50, 4, 3.0) · put_back('late', 90, 4, 2.0) · put_back('early', 95, 4, 1.0) ·"
            f"put_back('as early', 5, 4, 1.0) · add('short', 2, 4, 4.0) · {_pops(5)}",
        ),
        "two requests are aborted while they wait: they are never returned, and overtake no request": Story(
            (1,),
            "add('gone', 5) · add('long', 60) · add('also gone', 7) · add('a', 20) · add('b', 10) · leave('gone') ·"
            f"leave('also gone') · {_pops(3)}",
        ),
        "running requests are ordered by arrival_time, and ties keep their order": Story(
            (1,),
            "add('d', 4, 4, 3.0) · add('a', 9, 4, 1.0) · add('c', 4, 4, 2.0) · add('b', 4, 4, 1.0) · pop() · pop() ·"
            "pop() · pop() · order('d', 'a', 'c', 'b')",
        ),
    },
    random=_random,
    trials=18,
    also={"edges": _two_queues},
    explain=why,
    forbid=POLICIES,
    allow=BASES,
    hint="First those that were put back, then the first one overtaken `patience` times, then the shortest. "
    "A popped request overtakes those added before it.",
    misconceptions={
        "A request that was overtaken `patience` times is next: no request is overtaken more often.": dict(
            full=lambda times, most: times > most
        ),
        "A peek counts nothing, however often it is called.": dict(peeks=True),
        "A popped request overtakes those that were added before it, and not those behind it.": dict(earlier=False),
        "Of those without patience left, the one that was added first is next.": dict(last=True),
        "The length of a request is its prompt and its max_tokens together.": dict(
            length=lambda request: request.num_prompt_tokens
        ),
        "Of those that were put back, the one that arrived first is next, whatever its length.": dict(back=_length),
        "A request that was put back goes before all others.": dict(returns=False),
        "__iter__ shows the waiting requests that are not finished.": dict(shown=True),
        "Rules 2 and 3 go by the order of add, not by arrival_time.": dict(by_arrival=True),
        "order sorts by arrival_time: the oldest request is preempted last.": dict(sorts=_length),
        IN_PLACE: dict(sorted_copy=True),
    },
)
