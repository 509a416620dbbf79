"""Traces in Mooncake's public format, and synthetic ones with its published statistics. Built in chapter 22.

A trace is a JSON Lines file with one request on each line (Qin et al. 2025, `FAST25-release/README.md` of Mooncake):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds from the start. Each of the `hash_ids` names a block of 512 tokens together with all
blocks before it, so two prompts share a prefix exactly as far as their ids agree. The last block may be shorter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from minillm.engine.request import Request
from minillm.rounding import ceil_div
from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams

HASH_BLOCK = 512  # tokens that one hash id stands for


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request of a trace: its arrival in seconds from the start, its lengths in tokens, the hashes of its blocks.

    `hash_ids` may be empty: such a prompt shares nothing.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    block_size: int = HASH_BLOCK

    def __post_init__(self):
        if not self.timestamp >= 0 or self.input_length < 1 or self.output_length < 1:
            raise ValueError(f"{self} is not allowed: timestamp must be at least 0, both lengths at least 1")
        if self.hash_ids and len(self.hash_ids) != (count := ceil_div(self.input_length, self.block_size)):
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} entries for input_length={self.input_length}; allowed: none, "
                f"or {count}, one for each block of {self.block_size} tokens"
            )

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The ids of the blocks that the prompt fills: only full blocks are cached."""
        return self.hash_ids[: self.input_length // self.block_size]

    def to_request(self, index: int, vocab_size: int = 1024) -> Request:
        """The same request for an engine, with the id str(index). Equal hash ids give equal tokens."""
        count = ceil_div(self.input_length, self.block_size)
        blocks = self.hash_ids or [derive_seed(index, place) for place in range(count)]
        places = ((block, place) for block in blocks for place in range(self.block_size))
        prompt = [1 + derive_seed(*at) % (vocab_size - 1) for at in islice(places, self.input_length)]
        params = SamplingParams(temperature=0.0, max_tokens=self.output_length, ignore_eos=True)
        return Request(str(index), prompt, params, self.output_length, arrival_time=self.timestamp)


def read_trace(path: str | Path, time_scale: float = 1.0) -> Iterator[FleetRequest]:
    """The requests of a file in Mooncake's format, one at a time, so a file may be larger than memory.

    `time_scale` 0.5 lets them arrive twice as fast. Raises ValueError naming file, line and cause.
    """
    before = 0.0
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                request = FleetRequest(
                    float(fields["timestamp"]) / 1000 * time_scale,
                    int(fields["input_length"]),
                    int(fields["output_length"]),
                    tuple(map(int, fields.get("hash_ids", ()))),
                )
                if request.timestamp < before:
                    raise ValueError(f"timestamp {fields['timestamp']} is earlier than that of the line before")
            except KeyError as error:
                raise ValueError(f"{path}, line {number}: the field {error} is missing") from error
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            before = request.timestamp
            yield request


def write_trace(path: str | Path, trace: Iterable[FleetRequest]) -> int:
    """Write a file in Mooncake's format; times are rounded to milliseconds. Returns the number of requests."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for count, one in enumerate(trace, start=1):  # noqa: B007
            if one.block_size != HASH_BLOCK:
                raise ValueError(f"block_size={one.block_size}: the format has blocks of {HASH_BLOCK} tokens only")
            fields = {
                "timestamp": round(one.timestamp * 1000),
                "input_length": one.input_length,
                "output_length": one.output_length,
                "hash_ids": list(one.hash_ids),
            }
            file.write(json.dumps(fields) + "\n")
    return count


@dataclass(frozen=True)
class TraceStatistics:
    """A trace in numbers; `cache_ratio` is the share of the prompts' tokens in blocks that some earlier request had,
    that is the hit rate of one cache that never evicts."""

    num_requests: int
    seconds: float
    input_length: float
    output_length: float
    cache_ratio: float

    @classmethod
    def of(cls, trace: Iterable[FleetRequest]) -> TraceStatistics:
        """Raises ValueError for a trace without requests."""
        count = inputs = outputs = hits = 0
        known: set[int] = set()
        last = 0.0
        for one in trace:
            count, inputs, outputs = count + 1, inputs + one.input_length, outputs + one.output_length
            last = one.timestamp
            ids = one.full_blocks
            shared = next((index for index, block in enumerate(ids) if block not in known), len(ids))
            hits += shared * one.block_size
            known.update(ids[shared:])
        if not count:
            raise ValueError("the trace has no request")
        return cls(count, last, inputs / count, outputs / count, hits / inputs)
