"""A queue with its requests, as chapter 09's checks drive it: by their names, and in the real scheduler.
Built in chapter 09."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from minillm.book.checks import Draw
from minillm.book.checks.beside import Story
from minillm.book.checks.ch09_oracle import ask, small_engine, small_trace, steps_of
from minillm.engine.request import Request, RequestStatus
from minillm.engine.workload import to_requests

POLICIES = tuple(
    f"minillm.engine.policies.{name}"
    for name in ("FCFS", "ByKey", "sjf", "priority", "Fair", "LongestPrefixMatch", "make_policy")
)
LISTED = (
    "request_id", "arrival_time", "user", "priority", "num_prompt_tokens", "max_tokens", "num_computed_tokens",
    "max_computed_tokens", "is_finished",
)  # fmt: skip
BASES = ("minillm.engine.policies.KeepsNoAccount",)  # what a student's queue may derive from
WAITING = "the list of those that wait, by __iter__,"
IN_PLACE = "order sorts the list in place, and returns nothing."
IN_TURN = "order sorts by what the statement names, smallest first; requests that are equal in it keep their order."


class Listed:
    """A request as a student's queue sees it: what the exercises list can be read, and nothing can be changed."""

    __slots__ = ("_request",)

    def __init__(self, request: Request):
        _SLOT.__set__(self, request)

    def __getattr__(self, name: str):
        if name in LISTED:
            return getattr(_SLOT.__get__(self), name)
        raise AttributeError(f"a queue may not read {name!r} of a request; it may read {', '.join(LISTED)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a queue must not change a request, and {name!r} was set")

    def __reduce__(self):
        raise TypeError("a queue must not copy a request")

    def __repr__(self) -> str:
        return f"<request {self.request_id}>"


_SLOT = Listed._request
del Listed._request  # so that a queue cannot read `request._request`, and change what is in it


class Veiled:
    """A student's queue for the scheduler: a policy of requests, around a queue of `Listed` ones."""

    def __init__(self, queue):
        self.queue, self._listed = queue, {}

    def __getattr__(self, name: str):
        """A method of the queue, which takes and returns requests."""
        method = getattr(self.queue, name)

        @functools.wraps(method)
        def veiled(*args):
            return self._request(method(*map(self._seen, args)))

        return veiled

    def order(self, running: list[Request]):
        seen = [self._seen(request) for request in running]
        result = self.queue.order(seen)
        running[:] = [self._request(one) for one in seen]
        return result

    def __iter__(self):
        return (self._request(one) for one in self.queue)

    def _seen(self, value):
        return self._listed.setdefault(id(value), Listed(value)) if isinstance(value, Request) else value

    def _request(self, value):
        return _SLOT.__get__(value) if type(value) is Listed else value


def name_of(request: Request | None) -> str | None:
    return request if request is None else getattr(request, "request_id", repr(request))


class Queue:
    """A queue and the requests that it was told of. Each of its methods calls the queue's of the same name."""

    def __init__(self, queue_type: Callable, *given: Any) -> None:
        self.make = lambda: Veiled(queue_type(*given))
        self.queue, self.requests = self.make(), {}

    def add(self, name: str, *how: Any) -> None:
        """how: prompt tokens, max_tokens, arrival_time and user."""
        self.queue.add(self._of(name, how))

    def join(self, name: str, *how: Any) -> None:
        self.queue.join(self._of(name, how))

    def put_back(self, name: str, *how: Any) -> None:
        self._of(name, how).status = RequestStatus.PREEMPTED
        self.queue.put_back(self.requests[name])

    def leave(self, name: str) -> None:
        """It was aborted."""
        self.requests[name].status = RequestStatus.FINISHED
        self.queue.leave(self.requests[name])

    def peek(self) -> str | None:
        return name_of(self.queue.peek())

    def pop(self) -> str | None:
        """After a peek, as the scheduler does it."""
        self.queue.peek()
        request = self.queue.pop()
        if isinstance(request, Request):
            request.status = RequestStatus.RUNNING
        return name_of(request)

    def order(self, *names: str) -> tuple[list[str], bool]:
        running = [self.requests[name] for name in names]
        nothing = self.queue.order(running) is None
        return [name_of(one) for one in running], nothing

    def charge(self, name: str, tokens: int) -> None:
        """A step of `tokens` new tokens, told as the scheduler tells it: before the request moves on."""
        request = self.requests[name]
        self.queue.charge(request, tokens)
        self.computed(name, *[max(request.num_computed_tokens, request.max_computed_tokens) + tokens] * 2)

    def computed(self, name: str, now: int, most: int) -> None:
        """Tokens that are computed now, and that were at most: after a preemption, or a hit of the prefix cache."""
        request = self.requests[name]
        request.num_computed_tokens, request.max_computed_tokens = now, most

    def waits(self) -> list[str]:
        return sorted(map(name_of, self.queue))

    def serve(self, seed: int, users: tuple[str, ...], aborted: list[int]) -> list[str]:
        """The real scheduler with a new queue, and so little memory that it preempts: what each step served."""
        policy = self.make()
        told = steps_of(
            small_engine(policy),
            to_requests(small_trace(seed, users)),
            lambda step: str(step // 9) if step // 9 in aborted else None,
            lambda step: {user: round(counter, 6) for user, counter in getattr(policy.queue, "counters", {}).items()},
        )
        return [f"{_served(summary)}{f'; counters {counters}' if counters else ''}" for summary, counters in told]

    def _of(self, name: str, how: tuple) -> Request:
        if name not in self.requests or how:
            self.requests[name] = ask(name, *how)
        return self.requests[name]


def desk(queue_type: Callable) -> Callable:
    return functools.partial(Queue, queue_type)


def _served(summary: tuple) -> str:
    rows, preempted = summary[:2]
    told = ", ".join(f"{name}[{start}:{start + tokens}]" for name, start, tokens, _ in rows)
    return told + (f" and preempted {', '.join(preempted)}" if preempted else "")


def why(got: Any, expected: Any, before: Queue, call: tuple) -> str | None:
    """What waits, for a wrong choice."""
    if call[0] == "order":
        return IN_TURN if isinstance(got, tuple) and got[1:] == (True,) else IN_PLACE
    if call[0] in ("peek", "pop"):
        return f"There are: {before.queue.told()}."
    return None


def turns(draw: Draw, given: tuple, users: str, num: int = 60, charges: bool = False) -> Story:
    """Random arrivals, admissions, preemptions, aborts."""

    def calls(right: Queue) -> Iterator[tuple]:
        waiting, running = [], []
        for turn in range(num):
            kind = draw.rng.random()
            if kind < 0.45:
                at, user = float(draw.randint(0, turn + 1)), draw.rng.choice(users)
                waiting.append(f"r{turn}")
                yield "add", waiting[-1], draw.randint(1, 30), draw.randint(1, 9), at, user
            elif kind < 0.75:
                if (yield ("peek",)) is not None:
                    running.append((yield ("pop",)))
                    waiting.remove(running[-1])
                    if charges:
                        yield "charge", running[-1], draw.randint(1, 12)
            elif kind < 0.87 and running:
                waiting.append(running.pop())
                yield "put_back", waiting[-1]
            elif kind < 0.95 and waiting:
                yield "leave", waiting.pop(draw.randint(0, len(waiting)))
            elif running:
                yield "leave", running.pop(draw.randint(0, len(running)))
            if running:
                yield "order", *running
        yield ("peek",)

    return Story(given, calls)
