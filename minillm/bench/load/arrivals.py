"""When requests are sent: the arrival processes of an open loop. Built in chapter 24.

    burstiness 0.25    |||    |  ||||          ||  |      bursts
    burstiness 1       | ||  |   |  ||   | |   |  |       Poisson: each moment is as likely as any other
    burstiness inf     |   |   |   |   |   |   |   |      constant gaps

An open loop sends at these times, however slow the answers are: new users do not wait for other users. A closed loop
has a fixed number of clients, each of which waits for its answer before it sends its next request. It has no arrival
times, and it slows down together with the server.
"""

from __future__ import annotations

import math
import random


def arrival_times(num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds at which `num_requests` requests are sent, `rate` of them a second on average; the first is sent at 0.

    The gaps are drawn from a gamma distribution of mean 1 / rate and shape `burstiness`, as in `vllm bench serve`; its
    coefficient of variation is 1 / sqrt(burstiness). An infinite rate sends all requests at once. Raises ValueError for
    a rate or a burstiness that is not above 0.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ValueError(f"{name}={value} is not allowed; allowed: a number above 0, or inf")
    if math.isinf(rate):
        return [0.0] * num_requests
    rng, times, now = random.Random(seed), [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += 1 / rate if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
