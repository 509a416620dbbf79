"""More requests than a server can serve, on the virtual clock: with the server's own gate, and without.
Built in chapter 23."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.serving.errors import ApiError
from minillm.serving.gate import Gate


@dataclass(frozen=True)
class Offered:
    """What became of requests that were offered: the admitted ones, in order of arrival, and how many were refused."""

    admitted: Sequence[Request]
    num_refused: int

    @property
    def ttft(self) -> list[float]:
        """Seconds from arrival to the first token, of each admitted request."""
        return [request.token_times[0] - request.arrival_time for request in self.admitted]

    def percentile(self, share: float) -> float:
        """Of the TTFT, in seconds."""
        return float(np.percentile(self.ttft, share))

    def within(self, seconds: float) -> int:
        """Requests whose first token came in time."""
        return sum(one <= seconds for one in self.ttft)


def offer(engine: Engine, requests: Iterable[Request], gate: Gate | None = None) -> Offered:
    """Let requests arrive on the engine's virtual clock; each passes the gate, or is refused, before it is queued."""
    pending = deque(sorted(requests, key=lambda request: request.arrival_time))
    admitted: list[Request] = []
    inside: list[Request] = []  # counted by the gate
    num_refused = 0
    while pending or engine.has_unfinished:
        while pending and pending[0].arrival_time <= engine.clock():
            request = pending.popleft()
            if gate is not None:
                try:
                    gate.take_tokens(_claim(request))
                except ApiError:
                    num_refused += 1
                    continue
                gate.enter(1)
                inside.append(request)
            engine.add_request(request)
            admitted.append(request)
        if not engine.has_unfinished:
            engine.clock.wait_until(pending[0].arrival_time)
            continue
        engine.step()
        for request in [one for one in inside if one.finish_reason is not None]:
            inside.remove(request)
            gate.leave(1, _claim(request))
    return Offered(admitted, num_refused)


def _claim(request: Request) -> int:
    return request.num_prompt_tokens + request.max_tokens
