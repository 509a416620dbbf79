"""Who goes first: the waiting queue under five policies. Built in chapter 09.

A policy is a queue. The scheduler looks at its head, takes it when it fits, and puts preempted requests back. No
policy looks at all waiting requests in a step: ten thousand of them cost a step no more than ten.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from minillm.engine.request import Request

if TYPE_CHECKING:
    from minillm.engine.scheduler import KVCache

AGEING = 50.0  # tokens that a second of waiting is worth, where a policy ages
LPM_WINDOW = 64  # requests at the head of the queue among which the longest cached prefix is looked for


class Policy(Protocol):
    """The waiting queue. A request that finished while it waited is skipped, so aborting one is cheap."""

    def add(self, request: Request) -> None: ...

    def put_back(self, request: Request) -> None:
        """A preempted request returns."""

    def peek(self) -> Request | None:
        """The next request; None when the queue is empty."""

    def pop(self) -> Request:
        """Remove the next request from the queue: the one that the last peek showed."""

    def order(self, running: list[Request]) -> None:
        """Sort the running requests in place: the first is served first, the last is preempted first."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """A step gives `request` tokens that it never had before."""

    def join(self, request: Request) -> None:
        """`request` was split off a running one and runs on, without having waited."""

    def leave(self, request: Request) -> None:
        """`request` has finished, or was aborted, wherever it was."""

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""


class KeepsNoAccount:
    """For a policy that does not count what each user is served."""

    def charge(self, request: Request, num_tokens: int) -> None:
        pass

    def join(self, request: Request) -> None:
        pass

    def leave(self, request: Request) -> None:
        pass


class FCFS(KeepsNoAccount):
    """First come, first served; preempted requests go to the front."""

    def __init__(self):
        self.queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def put_back(self, request: Request) -> None:
        self.queue.appendleft(request)

    def peek(self) -> Request | None:
        while self.queue and self.queue[0].is_finished:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def pop(self) -> Request:
        return self.queue.popleft()

    def order(self, running: list[Request]) -> None:
        pass  # they were admitted in order

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self.queue if not request.is_finished)


class ByKey(KeepsNoAccount):
    """The smallest key first, ties by arrival. The key of a request does not change while it waits."""

    def __init__(self, key: Callable[[Request], float]):
        self.key = key
        self.heap: list[tuple[float, float, int, Request]] = []
        self._count = itertools.count()

    def add(self, request: Request) -> None:
        heapq.heappush(self.heap, (self.key(request), request.arrival_time, next(self._count), request))

    put_back = add

    def peek(self) -> Request | None:
        while self.heap and self.heap[0][-1].is_finished:
            heapq.heappop(self.heap)
        return self.heap[0][-1] if self.heap else None

    def pop(self) -> Request:
        return heapq.heappop(self.heap)[-1]

    def order(self, running: list[Request]) -> None:
        running.sort(key=lambda request: (self.key(request), request.arrival_time))

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self.heap if not entry[-1].is_finished)


def priority() -> ByKey:
    """The lowest number first. Strict: low priorities may wait for ever."""
    return ByKey(lambda request: request.priority)


def sjf(ageing: float = AGEING) -> ByKey:
    """Shortest job first, by prompt and max_tokens together, in tokens.

    Waiting earns `ageing` tokens a second. All waiting requests earn alike, so the order of two of them never changes,
    and a constant key is enough: length + ageing * arrival. A long job can be overtaken only by jobs that arrive soon
    enough after it for a smaller key.
    """
    return ByKey(lambda request: request.num_prompt_tokens + request.max_tokens + ageing * request.arrival_time)


class Fair:
    """The user who received least goes first: a counter of tokens for each (VTC, Sheng et al. 2024, with weight 1).

    Recomputed tokens are not charged: the user did not cause the preemption. A user who returns after a pause is lifted
    to the smallest counter of the users present, or if there is none, to that of the user who left last: absence saves
    nothing up.
    """

    def __init__(self):
        self.counters: dict[str, float] = {}
        self.queues: dict[str, deque[Request]] = {}  # users with waiting requests
        self.present: dict[str, int] = {}  # requests of each user that wait or run
        self.last_counter = 0.0  # of the user who left last

    def add(self, request: Request) -> None:
        user = request.user
        if not self.present.get(user):
            floor = min(
                (self.counters[other] for other in self.present if self.present[other]), default=self.last_counter
            )
            self.counters[user] = max(self.counters.get(user, 0.0), floor)
        self.join(request)
        self.queues.setdefault(user, deque()).append(request)

    def put_back(self, request: Request) -> None:
        self.queues.setdefault(request.user, deque()).appendleft(request)

    def join(self, request: Request) -> None:
        self.present[request.user] = self.present.get(request.user, 0) + 1

    def leave(self, request: Request) -> None:
        self.present[request.user] -= 1
        if not self.present[request.user]:
            del self.present[request.user]
            self.last_counter = self.counters[request.user]

    def peek(self) -> Request | None:
        for user in sorted(self.queues, key=lambda user: (self.counters[user], self.queues[user][0].arrival_time)):
            queue = self.queues[user]
            while queue and queue[0].is_finished:
                queue.popleft()
            if queue:
                self._next = user
                return queue[0]
            del self.queues[user]
        return None

    def pop(self) -> Request:
        queue = self.queues[self._next]
        request = queue.popleft()
        if not queue:
            del self.queues[self._next]
        return request

    def order(self, running: list[Request]) -> None:
        running.sort(key=lambda request: (self.counters[request.user], request.arrival_time))

    def charge(self, request: Request, num_tokens: int) -> None:
        self.counters[request.user] += num_tokens

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self.queues.values() for request in queue if not request.is_finished)


class LongestPrefixMatch(FCFS):
    """The longest cached prefix first, so that what is cached is used before it is evicted (SGLang's `lpm`).

    `cached_tokens` says how much of a request the cache holds now. Only the `window` oldest requests compete, and
    each earns `ageing` tokens a second, so no request is overtaken for ever.
    """

    def __init__(self, cached_tokens: Callable[[Request], int], ageing: float = AGEING, window: int = LPM_WINDOW):
        super().__init__()
        self.cached_tokens, self.ageing, self.window = cached_tokens, ageing, window

    def peek(self) -> Request | None:
        if super().peek() is None:
            return None
        head = [request for request in itertools.islice(self.queue, self.window) if not request.is_finished]
        best = max(head, key=lambda request: self.cached_tokens(request) - self.ageing * request.arrival_time)
        self.queue.remove(best)
        self.queue.appendleft(best)
        return best


POLICIES: dict[str, Callable[..., Policy]] = {
    "fcfs": FCFS,
    "priority": priority,
    "preemptive_priority": priority,  # the same queue; `minillm.engine.preemptive` preempts for its head
    "sjf": sjf,
    "fair": Fair,
}


def make_policy(name: str, cached_tokens: Callable[[Request], int]) -> Policy:
    """The policy called `name`. Raises ValueError for an unknown one."""
    if name == "lpm":
        return LongestPrefixMatch(cached_tokens)
    if name not in POLICIES:
        raise ValueError(f"scheduling_policy={name!r} is unknown; choose one of {', '.join([*POLICIES, 'lpm'])}")
    return POLICIES[name]()


def cached_tokens_of(kv_cache: KVCache) -> Callable[[Request], int]:
    """A function that tells how many tokens of a request the cache holds now.

    Our own cache leaves out the blocks that are on their way from disk. A cache of your own need not take `wait`.
    """
    try:
        inspect.signature(kv_cache.get_computed_blocks).bind(None, wait=False)
    except TypeError:
        return lambda request: kv_cache.get_computed_blocks(request).num_tokens
    return lambda request: kv_cache.get_computed_blocks(request, wait=False).num_tokens
