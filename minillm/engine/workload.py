"""Workloads: traces of requests, read, written and made up. Built in chapter 09.

A trace file has one JSON object per line, with the fields of Mooncake's public traces (Qin et al. 2024):

    {"timestamp": 1.25, "input_length": 96, "output_length": 40, "hash_ids": [3, 4, 17, 18, 19, 20]}

`hash_ids` names each block of the prompt, `TRACE_BLOCK` tokens long, the last one perhaps shorter. Two prompts that
begin with the same ids begin with the same tokens; no text is needed for that, and none is in the file. Times are in
seconds; Mooncake writes milliseconds and blocks of 512 tokens, so its files have to be converted first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

from minillm.engine.request import Request
from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams

TRACE_BLOCK = 16  # tokens that one hash id stands for


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace; `timestamp` in seconds from its start, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    user: str = ""
    priority: int = 0

    def __post_init__(self):
        if self.timestamp < 0 or self.input_length < 1 or self.output_length < 1:
            raise ValueError(f"{self} is not allowed: a timestamp from 0 on, and lengths from 1 on")
        if len(self.hash_ids) != -(-self.input_length // TRACE_BLOCK):
            raise ValueError(
                f"{self}: {self.input_length} tokens are {-(-self.input_length // TRACE_BLOCK)} blocks of {TRACE_BLOCK}"
            )

    def prompt(self, vocabulary: Sequence[int]) -> list[int]:
        """Its tokens, drawn from `vocabulary` by the hash ids."""
        blocks = ((hash_id, place) for hash_id in self.hash_ids for place in range(TRACE_BLOCK))
        return [vocabulary[derive_seed(*at) % len(vocabulary)] for at in islice(blocks, self.input_length)]

    def to_request(self, request_id: str, vocab_size: int = 1024, time_scale: float = 1.0) -> Request:
        """A request of exactly these lengths, its tokens drawn from the hash ids. Token 0 is never drawn."""
        prompt = self.prompt(range(1, vocab_size))
        params = SamplingParams(temperature=0.0, max_tokens=self.output_length, ignore_eos=True)
        return Request(
            request_id,
            prompt,
            params,
            self.output_length,
            seed=derive_seed(len(self.hash_ids) * TRACE_BLOCK, int(request_id) if request_id.isdigit() else 0),
            arrival_time=self.timestamp * time_scale,
            user=self.user,
            priority=self.priority,
        )


def to_requests(trace: Sequence[TraceRequest], vocab_size: int = 1024, time_scale: float = 1.0) -> list[Request]:
    """Requests with the ids "0", "1", ...; `time_scale` 0.5 lets them arrive twice as fast."""
    return [one.to_request(str(index), vocab_size, time_scale) for index, one in enumerate(trace)]


def write_trace(path: str | Path, trace: Iterable[TraceRequest]) -> None:
    Path(path).write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace))


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Raises ValueError naming file and line for a line that is no request."""
    requests = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            requests.append(TraceRequest(**fields | {"hash_ids": tuple(fields["hash_ids"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return requests


def poisson_trace(
    num_requests: int,
    rate: float,
    input_length: float = 100,
    output_length: float = 60,
    spread: float = 0.6,
    max_length: int = 900,
    seed: int = 0,
    users: Sequence[str] = ("",),
) -> list[TraceRequest]:
    """Poisson arrivals, `rate` a second, with lognormal lengths whose medians are given; no two prompts share a block.

    `spread` is the standard deviation of the logarithm: 0 makes all lengths equal.
    """
    rng = random.Random(seed)
    names = count(1)
    timestamp, trace = 0.0, []
    for _ in range(num_requests):
        timestamp += rng.expovariate(rate)
        lengths = [
            min(max_length, max(1, round(median * rng.lognormvariate(0, spread))))
            for median in (input_length, output_length)
        ]
        hash_ids = tuple(next(names) for _ in range(-(-lengths[0] // TRACE_BLOCK)))
        trace.append(TraceRequest(timestamp, *lengths, hash_ids, rng.choice(users)))
    return trace


def shared_prefix_trace(
    num_requests: int = 64,
    num_prefixes: int = 4,
    prefix_length: int = 512,
    input_length: int = 64,
    output_length: int = 32,
    rate: float = float("inf"),
    seed: int = 0,
) -> list[TraceRequest]:
    """Requests that begin with one of a few system prompts; `input_length` tokens of their own follow."""
    rng = random.Random(seed)
    names = count(1)
    blocks = -(-prefix_length // TRACE_BLOCK)
    prefixes = [tuple(next(names) for _ in range(blocks)) for _ in range(num_prefixes)]
    timestamp, trace = 0.0, []
    for _ in range(num_requests):
        timestamp += rng.expovariate(rate) if rate != float("inf") else 0.0
        own = tuple(next(names) for _ in range(-(-input_length // TRACE_BLOCK)))
        total = blocks * TRACE_BLOCK + input_length
        trace.append(TraceRequest(timestamp, total, output_length, rng.choice(prefixes) + own))
    return trace
