"""AdapterGate: which waiting requests find a batch slot for their adapter. Built in chapter 23.

    running    a a b        max_loras 2
    waiting    c a b - c    c has to wait; a, b and the request without an adapter may pass it, but not for ever

The running requests have at most max_loras different adapters, so every step finds room for all of its own. A request
whose adapter finds none is set aside for this step. Those behind it go on, for the batch would else run empty; but each
one with an adapter keeps a batch slot taken, so that after `patience` of them no other passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from minillm.engine.lora_request import AdapterRef
from minillm.engine.policies import Policy
from minillm.engine.request import Request

MOST_ASIDE = 64  # requests set aside in one step: looking further would cost every step


class AdapterGate:
    """`prepare(ref, in_use)` has an adapter ready on the host before its request is admitted; what it raises ends that
    request alone (`failed`)."""

    def __init__(
        self, max_loras: int, patience: int, prepare: Callable[[AdapterRef, Collection[str]], object] | None = None
    ):
        self.max_loras, self.patience, self.prepare = max_loras, patience, prepare
        self.pinned: set[str] = set()  # adapters that keep their batch slots, from when they have one
        self.failed: list[tuple[Request, Exception]] = []  # since the last step, with what was raised
        self._running: set[str] = set()  # adapters of running requests
        self._aside: list[Request] = []  # of this step, in their order
        self._passed: dict[str, int] = {}  # how many with adapters have passed a request that waits

    def begin(self, running: Iterable[Request]) -> None:
        """The waiting requests are looked at for the next step."""
        self._running = {request.adapter.key for request in running if request.adapter is not None}

    def admits(self, request: Request) -> bool:
        """Whether the adapter of a waiting request has a batch slot, or gets one."""
        ref = request.adapter
        if ref is None:
            return True
        if self._aside and self._is_patient_no_more():
            return False
        if ref.key in self._running:
            return True
        if len(self._running | self.pinned | {ref.key}) > self.max_loras:
            return False
        try:
            if self.prepare is not None:
                self.prepare(ref, self._running)
        except Exception as error:
            self.failed.append((request, error))
            return False
        return True

    def admitted(self, request: Request) -> None:
        """It runs from now on."""
        self._passed.pop(request.request_id, None)
        if request.adapter is not None:
            self._running.add(request.adapter.key)
            for one in self._aside:
                self._passed[one.request_id] = self._passed.get(one.request_id, 0) + 1

    def set_aside(self, request: Request) -> bool:
        """It waits on. Whether others behind it may be looked at."""
        self._aside.append(request)
        return len(self._aside) < MOST_ASIDE

    def end(self, waiting: Policy) -> None:
        """Put back what was set aside, in its order."""
        for request in reversed(self._aside):
            waiting.put_back(request)
        self._aside = []
        if len(self._passed) > MOST_ASIDE * 4:  # some were aborted
            alive = {request.request_id for request in waiting}
            self._passed = {name: count for name, count in self._passed.items() if name in alive}

    def take_failed(self) -> list[tuple[Request, Exception]]:
        failed, self.failed = self.failed, []
        return failed

    def _is_patient_no_more(self) -> bool:
        return any(self._passed.get(one.request_id, 0) >= self.patience for one in self._aside)
