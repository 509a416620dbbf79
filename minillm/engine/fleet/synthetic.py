"""Synthetic traces with published statistics: lengths, arrivals, shared prefixes. Built in chapter 22."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minillm.engine.fleet.traces import HASH_BLOCK, FleetRequest
from minillm.rounding import ceil_div


@dataclass(frozen=True)
class Published:
    """What is published of one of Mooncake's traces: means in tokens, and the share of a prompt that is cached
    (Qin et al., FAST 2025, table 2). The spreads are ours: those of the released conversation trace.
    """

    num_requests: int
    input_length: float
    output_length: float
    cache_ratio: float
    input_spread: float  # standard deviation of the logarithm
    output_spread: float


# Conversation and tool-and-agent traces cover one hour each.
MOONCAKE = {
    "conversation": Published(12_031, 12_035, 343, 0.40, 1.2, 1.3),
    "toolagent": Published(23_608, 8_596, 182, 0.59, 1.2, 1.3),
    "synthetic": Published(3_993, 15_325, 149, 0.66, 1.2, 1.3),
}


class Sessions:
    """Prompts that share prefixes as conversations do: a request opens a session, or continues a recent one.

    A continued session repeats its last prompt's full blocks and adds new ones. Every session begins with one of a few
    system prompts of one block. `reuse` is the chance that a request continues a session, if one is short enough.
    """

    RECENT = 256  # sessions that may go on

    def __init__(self, rng: random.Random, reuse: float, num_system_prompts: int = 4):
        self.rng, self.reuse = rng, reuse
        self.num_system_prompts = num_system_prompts
        self.next_id = num_system_prompts  # ids below it are the system prompts
        self.sessions: list[tuple[int, ...]] = []

    def hash_ids(self, input_length: int) -> tuple[int, ...]:
        """The ids of a prompt of this length."""
        rng, sessions = self.rng, self.sessions
        count = ceil_div(input_length, HASH_BLOCK)
        place = None
        if sessions and rng.random() < self.reuse:
            tries = (rng.randrange(len(sessions)) for _ in range(8))
            fitting = [at for at in tries if len(sessions[at]) < count]
            place = max(fitting, key=lambda at: len(sessions[at]), default=None)
        head = (rng.randrange(self.num_system_prompts),) if place is None else sessions[place]
        fresh = count - len(head)
        ids = (*head, *range(self.next_id, self.next_id + fresh)) if fresh > 0 else head[:count]
        self.next_id += max(0, fresh)
        whole = ids[: input_length // HASH_BLOCK]
        if not whole:
            return ids
        if place is not None:
            sessions[place] = whole
        elif len(sessions) < self.RECENT:
            sessions.append(whole)
        else:
            sessions[rng.randrange(len(sessions))] = whole
        return ids


def mooncake_like(
    kind: str = "conversation", num_requests: int = 1000, rate: float | None = None, seed: int = 0, scale: float = 1.0
) -> Iterator[FleetRequest]:
    """A synthetic trace with the published means and cache ratio of `kind`; Poisson arrivals, `rate` a second.

    The default rate is the published one. `scale` shortens every length: 0.1 makes prompts a tenth as long.
    """
    if kind not in MOONCAKE:
        raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(MOONCAKE)}")
    told = MOONCAKE[kind]
    rng = random.Random(seed)
    sessions = Sessions(rng, REUSE[kind])
    inputs = _lognormal(rng, told.input_length * scale, told.input_spread, LONGEST * scale)
    outputs = _lognormal(rng, told.output_length * scale, told.output_spread, LONGEST * scale)
    for moment in poisson_times(num_requests, rate or told.num_requests / 3600, rng):
        length = next(inputs)
        yield FleetRequest(moment, length, next(outputs), sessions.hash_ids(length))


LONGEST = 128_000  # tokens; the context of the model that the traces were recorded with
REUSE = {"conversation": 0.68, "toolagent": 0.88, "synthetic": 0.97}  # fitted to the cache ratios above


def plain_trace(
    num_requests: int,
    rate: float,
    input_length: float,
    output_length: float,
    spread: float = 0.0,
    seed: int = 0,
    longest: int = LONGEST,
) -> Iterator[FleetRequest]:
    """Poisson arrivals and lognormal lengths with the given means; nothing is shared. `spread` 0: equal lengths."""
    rng = random.Random(seed)
    inputs = _lognormal(rng, input_length, spread, longest)
    outputs = _lognormal(rng, output_length, spread, longest)
    for moment in poisson_times(num_requests, rate, rng):
        yield FleetRequest(moment, next(inputs), next(outputs))


def shared_prefix_trace(
    num_requests: int,
    rate: float,
    num_prefixes: int,
    prefix_blocks: int,
    own_length: int,
    output_length: int,
    skew: float = 0.0,
    seed: int = 0,
) -> Iterator[FleetRequest]:
    """Prompts that begin with one of `num_prefixes` long prefixes, as a tool's description or a document is.

    Prefix k is asked for with weight 1 / (k + 1) ** skew; a question of `own_length` tokens follows it.
    """
    rng = random.Random(seed)
    weights = [1 / (place + 1) ** skew for place in range(num_prefixes)]
    length = prefix_blocks * HASH_BLOCK + own_length
    own = ceil_div(own_length, HASH_BLOCK)
    names = num_prefixes * prefix_blocks
    for index, moment in enumerate(poisson_times(num_requests, rate, rng)):
        [prefix] = rng.choices(range(num_prefixes), weights)
        first = prefix * prefix_blocks
        ids = (*range(first, first + prefix_blocks), *range(names + index * own, names + (index + 1) * own))
        yield FleetRequest(moment, length, output_length, ids)


def poisson_times(count: int, rate: float, rng: random.Random) -> Iterator[float]:
    """`count` arrival times in seconds. Raises ValueError for a rate that is not positive."""
    if not rate > 0:
        raise ValueError(f"rate={rate} is not allowed; it must be above 0 requests a second")
    moment = 0.0
    for _ in range(count):
        moment += rng.expovariate(rate)
        yield moment


def day_times(rates: Sequence[float], seconds: float, rng: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process whose rate follows `rates` (requests a second), each valid for `seconds`."""
    peak = max(rates)
    for moment in poisson_times(10**18, peak, rng):
        place = int(moment // seconds)
        if place >= len(rates):
            return
        if rng.random() * peak < rates[place]:
            yield moment


def _lognormal(rng: random.Random, mean: float, spread: float, longest: float) -> Iterator[int]:
    """Whole numbers from 1 on with this mean. Cutting off at `longest` lowers the mean, so the median is raised."""
    median = _median(mean, spread, longest)
    while True:
        yield min(int(longest), max(1, round(median * math.exp(spread * rng.gauss(0.0, 1.0)))))


def _median(mean: float, spread: float, longest: float) -> float:
    """The median at which min(lognormal, longest) has the mean, by bisection."""
    if spread == 0 or mean >= longest:
        return min(mean, longest)

    def mean_of(median: float) -> float:
        cut = math.log(longest / median) / spread
        whole = median * math.exp(spread**2 / 2) * _normal(cut - spread)
        return whole + longest * (1 - _normal(cut))

    low, high = 0.0, mean
    while mean_of(high) < mean:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle and mean_of(middle) < mean else (low, middle) if middle else (low, high)
    return high


def _normal(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))
