"""How chapter 09's checks drive a student's queue: beside the reference, and in the real scheduler.
Built in chapter 09."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from minillm.book.checks import Case
from minillm.book.checks.ch09_oracle import ask, small_engine, small_trace, steps_of
from minillm.engine.engine import Engine
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


class Listed:
    """A request as a student's queue sees it: what the exercises list can be read, and nothing can be changed."""

    __slots__ = ("_request",)

    def __init__(self, request: Request):
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str):
        if name in LISTED:
            return getattr(self._request, name)
        raise AttributeError(f"a queue may not read {name!r} of a request; it may read {', '.join(LISTED)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a queue must not change a request, and {name!r} was set")

    def __repr__(self) -> str:
        return f"<request {self._request.request_id}>"


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
        return value._request if type(value) is Listed else value


class Pair:
    """The student's queue and the reference, driven side by side; compared at every choice."""

    def __init__(self, case: Case, reference, *args):
        self.case, self.reference = case, reference
        self.mine = Veiled(case.run(case.student, *args))

    def tell(self, name: str, *args) -> None:
        self.case.run(getattr(self.mine, name), *args, may_change=True)
        getattr(self.reference, name)(*args)

    def peek(self) -> None:
        got, expected, told = self.case.run(self.mine.peek), self.reference.peek(), self.reference.told()
        self.case.true(
            got is expected,
            f"peek returned {name_of(got)}, expected {name_of(expected)}",
            hint=f"{self.case.hint} There are: {told}.",
        )

    def pop(self) -> Request:
        self.peek()
        got, expected = self.case.run(self.mine.pop), self.reference.pop()
        self.case.true(got is expected, f"pop returned {name_of(got)}, but peek had returned {name_of(expected)}")
        expected.status = RequestStatus.RUNNING
        return expected

    def pops(self, names: str) -> None:
        for name in names.split():
            self.peek()
            self.case.equal(self.pop().request_id, name, "the reference's choice")

    def abort(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self.tell("leave", request)

    def all_there(self) -> None:
        got = sorted(name_of(one) for one in self.case.run(list, self.mine))
        self.case.equal(
            got,
            sorted(name_of(one) for one in self.reference),
            "the list of those that wait, by __iter__,",
            hint=f"{self.case.hint} All waiting requests that are not finished, each once.",
        )

    def order(self, running: list[Request], hint: str) -> None:
        mine, expected = list(running), list(running)
        result = self.case.run(self.mine.order, mine, may_change=True)
        self.case.true(result is None, "order returned something; it sorts the list in place, and returns nothing")
        self.reference.order(expected)
        self.case.equal(
            [one.request_id for one in mine],
            [one.request_id for one in expected],
            "the order of running requests",
            hint=hint,
        )


def name_of(request: Request | None) -> str:
    return getattr(request, "request_id", repr(request))


def drive(
    case: Case, pair: Pair, running: list[Request], turns: int, users: str, after: Callable = lambda request: None
) -> None:
    """Random arrivals, admissions, preemptions, aborts."""
    waiting: list[Request] = []
    for turn in range(turns):
        what = case.rng.random()
        if what < 0.45:
            waiting.append(
                ask(
                    f"r{turn}",
                    case.randint(1, 30),
                    case.randint(1, 9),
                    at=float(case.randint(0, turn + 1)),
                    user=case.rng.choice(users),
                )
            )
            pair.tell("add", waiting[-1])
        elif what < 0.75:
            pair.peek()
            if pair.reference.chosen is not None:
                running.append(pair.pop())
                waiting.remove(running[-1])
                after(running[-1])
        elif what < 0.87 and running:
            running[-1].status = RequestStatus.PREEMPTED
            waiting.append(running[-1])
            pair.tell("put_back", running.pop())
        elif what < 0.95 and waiting:
            pair.abort(waiting.pop(case.randint(0, len(waiting))))
        elif running:
            pair.abort(running.pop(case.randint(0, len(running))))
        pair.order(running, "The running requests of a random moment.")
    pair.all_there()
    pair.peek()


def serve(
    case: Case, reference: Callable, args: tuple, seed: int, users: Sequence[str], aborted: list[int], round_: int
) -> None:
    """The real scheduler with both queues: the same steps, and the same counters where there are any."""
    runs = []
    for make in (reference, lambda: Veiled(case.run(case.student, *args))):
        policy = make()
        engine = small_engine(policy)
        counters = functools.partial(
            lambda p, step: {k: round(v, 6) for k, v in getattr(p, "counters", {}).items()},
            policy if make is reference else policy.queue,
        )
        steps = functools.partial(
            steps_of,
            engine,
            to_requests(small_trace(seed, users)),
            lambda step: str(step // 9) if step // 9 in aborted else None,
            counters,
        )
        runs.append(steps() if make is reference else case.run(named(steps), engine, may_change=True))
    for index, ((expected, theirs), (got, mine)) in enumerate(zip(*runs)):
        where = f"Simulation {round_ + 1}, with the real scheduler and so little memory that it preempts."
        if got != expected:
            case.fail(f"step {index} is wrong: it served {_served(got)}, expected {_served(expected)}", hint=where)
        case.equal(mine, theirs, f"the counters after step {index}", hint=where)
    case.equal(len(runs[1]), len(runs[0]), "the number of steps")


def named(steps):
    def serving_with_your_queue(engine: Engine):
        return steps()

    return serving_with_your_queue


def _served(summary: tuple) -> str:
    rows, preempted, _ = summary
    told = ", ".join(f"{name}[{start}:{start + tokens}]" for name, start, tokens, _ in rows)
    return told + (f" and preempted {', '.join(preempted)}" if preempted else "")
