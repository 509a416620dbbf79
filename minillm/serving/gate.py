"""Admission: how much the server takes on before it says "later". Built in chapter 23.

A queue that is never full answers everything late. Beyond a limit a request is refused at once with 429 and the
seconds after which it is worth another try: those that were admitted keep their latency.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from minillm.serving.errors import ApiError

REMEMBERED = 64  # ends of requests from which the rate is estimated
SHUTTING_DOWN = "the server is shutting down; ask another one"
WORTH_SECONDS = 60.0  # ends before that say nothing about now


class Gate:
    """Counts what is under way. All methods belong to the event loop."""

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_requests, self.max_tokens, self.clock = max_requests, max_tokens, clock
        self.num_requests = self.num_tokens = 0
        self.is_closed = False  # the service drains
        self._why = SHUTTING_DOWN
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def close(self, why: str = SHUTTING_DOWN) -> None:
        """Let no more requests in; they are told `why`."""
        self.is_closed, self._why = True, why

    def check_open(self) -> None:
        """Raise ApiError 503 once it is closed."""
        if self.is_closed:
            raise ApiError(503, self._why, code="draining", retry_after=5)

    def enter(self, num_requests: int) -> None:
        """Take a place for prompts before they are tokenized. Raises ApiError 429 when there is none."""
        self.check_open()
        if self.max_requests is not None and self.num_requests + num_requests > self.max_requests:
            self._refuse(f"{self.num_requests} requests are under way, and max_queued_requests={self.max_requests}")
        self.num_requests += num_requests

    def take_tokens(self, num_tokens: int) -> None:
        """The same for what the prompts and their answers may come to. Something is always admitted to an empty
        server."""
        if self.max_tokens is not None and self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            self._refuse(
                f"what is under way may come to {self.num_tokens} tokens, this request to {num_tokens}, "
                f"and max_queued_tokens={self.max_tokens}"
            )
        self.num_tokens += num_tokens

    def leave(self, num_requests: int, num_tokens: int) -> None:
        """They have ended, however they did."""
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        self._ends.extend([self.clock()] * min(num_requests, REMEMBERED))

    def seconds_to_wait(self) -> float:
        """Until another request will have ended, at the rate of the last ones; 1 where there were none."""
        now = self.clock()
        recent = [end for end in self._ends if now - end < WORTH_SECONDS]
        return max(1.0, (now - recent[0]) / len(recent)) if recent else 1.0

    def _refuse(self, why: str) -> None:
        raise ApiError(429, f"{why}; try again later", code="overloaded", retry_after=self.seconds_to_wait())
