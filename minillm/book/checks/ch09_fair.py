"""The check of chapter 09's fair shares. Built in chapter 09."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm.book.checks import Case, Draw
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.ch09_desk import BASES, POLICIES, WAITING, desk, turns, why
from minillm.engine.request import Request


class FairShares:
    """The statement, rule by rule. The keywords are mistakes."""

    def __init__(
        self, shares: dict[str, float], output_weight: float, *, alike: bool = False, times: bool = False,
        strangers: bool = True, first: Callable[[int, int], int] = max, whole: bool = False, floor: Callable = min,
        lifts: str = "up", empty: bool = True, seen: bool = False, leaves: bool = False, joins: bool = True,
        back: int = -1, ties: bool = True, sorts: bool = True, shown: bool = False, rounds: bool = False,
    ) -> None:  # fmt: skip
        self.shares, self.output_weight = shares, int(output_weight) if rounds else output_weight
        self.alike, self.times, self.strangers, self.first, self.whole = alike, times, strangers, first, whole
        self.floor, self.lifts, self.empty, self.seen, self.leaves = floor, lifts, empty, seen, leaves
        self.joins, self.back, self.ties, self.sorts, self.shown = joins, back, ties, sorts, shown
        self.counters: dict[str, float] = {}
        self.waiting: list[tuple[int, Request]] = []  # put back: negative places, the last one in front
        self.there: list[Request] = []
        self.last_to_leave: str | None = None
        self.events, self.chosen = 0, None

    def add(self, request: Request) -> None:
        here = set(self.counters) if self.seen else {one.user for one in self.there}
        if request.user not in {one.user for one in self.there}:
            floor = self.counters[self.last_to_leave] if self.last_to_leave is not None and self.empty else 0.0
            if here:
                floor = self.floor(self.counters[user] for user in here)
            old = self.counters.get(request.user, 0.0)
            self.counters[request.user] = {"up": max(old, floor), "never": old, "always": floor}[self.lifts]
        self.there.append(request)
        self.events += 1
        self.waiting.append((self.events, request))

    def put_back(self, request: Request) -> None:
        self.events += 1
        self.waiting.append((self.back * self.events, request))

    def join(self, request: Request) -> None:
        if self.joins:
            self.there.append(request)

    def leave(self, request: Request) -> None:
        if request in self.there or (self.joins and not self.leaves):
            self.there.remove(request)
        if all(one.user != request.user for one in self.there):
            self.last_to_leave = request.user

    def heads(self) -> dict[str, tuple[int, Request]]:
        """The next request of each user."""
        heads: dict[str, tuple[int, Request]] = {}
        for place, one in sorted((pair for pair in self.waiting if not pair[1].is_finished), key=lambda pair: pair[0]):
            heads.setdefault(one.user, (place, one))
        return heads

    def peek(self) -> Request | None:
        heads = self.heads()
        when = {user: one.arrival_time if self.ties else 0.0 for user, (_, one) in heads.items()}
        users = sorted(heads, key=lambda user: (self.counters[user], when[user], user))
        self.chosen = heads[users[0]] if users else None
        return self.chosen[1] if users else None

    def pop(self) -> Request:
        self.waiting.remove(self.chosen)
        if self.leaves:
            self.leave(self.chosen[1])
        return self.chosen[1]

    def order(self, running: list[Request]) -> None:
        running.sort(key=lambda request: (self.counters[request.user] * self.sorts, request.arrival_time))

    def charge(self, request: Request, num_tokens: int) -> None:
        first = self.first(request.num_computed_tokens, request.max_computed_tokens)
        share = self.shares.get(request.user, 1.0) if self.strangers else self.shares[request.user]
        for position in range(first, first + num_tokens):
            is_prompt = (first if self.whole else position) < request.num_prompt_tokens
            weight = 1.0 if is_prompt or self.alike else self.output_weight
            self.counters[request.user] += weight * share if self.times else weight / share

    def __iter__(self) -> Iterator[Request]:
        return (one for _, one in self.waiting if self.shown or not one.is_finished)

    def told(self) -> str:
        heads = self.heads()
        return ", ".join(
            f"{user}: {counter:g}" + (f", next is {heads[user][1].request_id}" if user in heads else "")
            for user, counter in self.counters.items()
        )


def _random(draw: Draw) -> Story:
    if draw.rng.random() < 0.2:
        aborted = draw.rng.sample(range(20), 4)
        return Story(({"a": 1.0, "b": 2.0}, 2.5), [("serve", draw.randint(0, 10**6), ("a", "b", "c"), aborted)])
    return turns(draw, ({"a": 2.0, "b": 4.0}, draw.randint(2, 10) / 2), "abcd", charges=True)


def _two_queues(case: Case) -> None:
    """Two queues that are used in turns, with the caller's own dictionary of shares."""
    shares = {"ann": 4.0}
    first, second = (case.run(desk(case.student), shares, 2.0, lend=True) for _ in range(2))
    case.run(first.add, "b1", 8, 4, 0.0, "bob")
    case.run(first.pop)
    case.run(first.charge, "b1", 8)
    case.equal(shares, {"ann": 4.0}, "the dict `shares`, after bob was charged,", hint="Do not change `shares`.")
    case.run(second.add, "a1", 8, 4, 0.0, "ann")
    counters = dict(second.queue.queue.counters)
    hint = "Two queues share nothing: counters and lists belong to the object, not to the class."
    case.equal(counters, {"ann": 0.0}, "the dict of counters of a second queue", hint=hint)


check_fair_queue = ClassChecker(
    "fair_queue",
    FairShares,
    adapt=desk,
    what="queue",
    shows={
        "the dict of counters": lambda queue, calls: dict(queue.queue.queue.counters),
        WAITING: lambda queue, calls: queue.waits(),
    },
    examples=[
        Story(
            ({"ann": 2.0}, 2.0),
            "add('a1', 10, 4, 0.0, 'ann') · add('a2', 10, 4, 1.0, 'ann') · add('b1', 10, 4, 2.0, 'bob') ·"
            "add('b2', 10, 4, 3.0, 'bob') · pop() · charge('a1', 10) · pop() · charge('b1', 4) · pop() ·"
            "charge('b1', 7) · pop()",
        )
    ],
    edges={
        "no request is present: the floor is the counter of the user of the request that left last": Story(
            ({}, 2.0),
            "add('b1', 50, 4, 0.0, 'bob') · pop() · charge('b1', 40) · add('a1', 50, 4, 0.0, 'ann') · pop() ·"
            "charge('a1', 9) · leave('a1') · leave('b1') · add('c1', 5, 4, 0.0, 'cem')",
        ),
        "users are lifted: to the smallest counter of those who are present, never down, and only if none of the "
        "user's requests is present": Story(
            ({}, 2.0),
            "add('e1', 30, 4, 0.0, 'eve') · leave('e1') · add('a1', 30, 4, 0.0, 'ann') · add('b1', 30, 4, 0.0, 'bob') ·"
            "pop() · charge('a1', 20) · pop() · charge('b1', 12) · add('c1', 30, 4, 0.0, 'cem') ·"
            "add('b2', 30, 4, 0.0, 'bob') · leave('a1') · add('a2', 30, 4, 0.0, 'ann')",
        ),
        "a request was preempted, and another one hit the prefix cache: the new tokens begin at the larger of "
        "num_computed_tokens and max_computed_tokens": Story(
            ({"ann": 4.0}, 3.0),
            "add('a1', 8, 20, 0.0, 'ann') · pop() · charge('a1', 8) · charge('a1', 1) · computed('a1', 0, 9) ·"
            "put_back('a1') · peek() · pop() · charge('a1', 2) · add('a2', 20, 4, 0.0, 'ann') · pop() ·"
            "computed('a2', 16, 0) · charge('a2', 4) · computed('a2', 22, 3) · charge('a2', 2)",
        ),
        "a user's next request is the one that was put back last, then in the order of add; ties between users go by "
        "arrival_time of the next, then by the name": Story(
            ({}, 2.0),
            "add('z1', 4, 4, 1.0, 'zoe') · add('b1', 4, 4, 2.0, 'bob') · add('a1', 4, 4, 2.0, 'ann') ·"
            "add('z2', 4, 4, 5.0, 'zoe') · join('z0', 4, 4, 0.5, 'zoe') · join('z9', 4, 4, 9.0, 'zoe') ·"
            "put_back('z0') · put_back('z9') · join('b9', 4, 4, 0.1, 'bob') · put_back('b9') · peek() · pop() · pop() ·"
            "pop() · pop() · pop() · pop() · pop()",
        ),
        "a request is aborted: it is never returned, and present until leave": Story(
            ({}, 2.0),
            "add('a1', 4, 4, 0.0, 'a') · add('a2', 4, 4, 1.0, 'a') · add('b1', 4, 4, 2.0, 'b') · leave('a1') · peek() ·"
            "pop() · pop() · peek()",
        ),
        "a request joined: it is present until it leaves": Story(
            ({}, 2.0),
            "add('a1', 30, 4, 0.0, 'ann') · pop() · join('a1_1', 30, 4, 0.0, 'ann') · leave('a1') ·"
            "add('b1', 30, 4, 0.0, 'bob') · pop() · charge('b1', 10) · add('a2', 4, 4, 0.0, 'ann')",
        ),
        "running requests are ordered by the user's counter, then by arrival_time": Story(
            ({}, 2.0),
            "add('b1', 30, 4, 0.0, 'bob') · add('a2', 30, 4, 2.0, 'ann') · add('a1', 30, 4, 1.0, 'ann') · pop() ·"
            "pop() · pop() · charge('b1', 10) · charge('a2', 3) · order('b1', 'a2', 'a1')",
        ),
    },
    random=_random,
    trials=18,
    also={"edges": _two_queues},
    atol=1e-5,
    rtol=1e-5,
    explain=why,
    forbid=POLICIES,
    allow=BASES,
    hint="The smallest counter first; lifted on arrival; charged by weight over share.",
    misconceptions={
        "A step may cross from the prompt into the output: each position has a weight of its own.": dict(whole=True),
        "An output token weighs output_weight, and only a token of the prompt weighs 1.": dict(alike=True),
        "The weight is divided by the user's share: who has a larger share is charged less.": dict(times=True),
        "A user who is not in `shares` has a share of 1.": dict(strangers=False),
        "Tokens below max_computed_tokens were charged before the preemption.": dict(first=lambda now, most: now),
        "Tokens that came from the prefix cache are not new: begin at the larger of the two.": dict(
            first=lambda now, most: most
        ),
        "Only users with a present request count for the floor.": dict(seen=True),
        "A user of whom no request is present is lifted to the floor.": dict(lifts="never"),
        "A counter never falls: the larger of its old value and the floor.": dict(lifts="always"),
        "The floor is the smallest counter of the users who are present, not the largest.": dict(floor=max),
        "On an empty server the floor is the counter of the user whose request left last.": dict(empty=False),
        "A request is present until leave, also while it runs.": dict(leaves=True),
        "A request that joined is present, too.": dict(joins=False),
        "A request that was put back goes before the user's others.": dict(back=1),
        "Ties go to the user whose next request arrived first, then to the smaller name.": dict(ties=False),
        "order sorts by the counter of the request's user first.": dict(sorts=False),
        "__iter__ shows the waiting requests that are not finished.": dict(shown=True),
        "output_weight need not be a whole number.": dict(rounds=True),
    },
)
