"""How long prompts and answers are: distributions of lengths, and named profiles. Built in chapter 24.

ISL and OSL, the input and output sequence lengths, decide what a server spends its time on: long prompts are work for
the matrix units, long answers read the weights and the KV cache again and again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...engine.workload import TRACE_BLOCK, TraceRequest

FORMS = "N, uniform:LOW-HIGH or lognormal:MEDIAN,SPREAD"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens. `Lengths.parse` makes one from its text."""

    kind: str  # fixed, uniform or lognormal
    first: float  # the length; the shortest; the median
    second: float = 0.0  # nothing; the longest; the standard deviation of the logarithm

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "128", "uniform:64-192" or "lognormal:128,0.6". Raises ValueError for anything else."""
        kind, colon, rest = text.partition(":")
        try:
            if not colon:
                made = cls("fixed", int(text))
            elif kind == "uniform":
                low, high = rest.split("-")
                made = cls("uniform", int(low), int(high))
            elif kind == "lognormal":
                median, spread = rest.split(",")
                made = cls("lognormal", float(median), float(spread))
            else:
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} is no distribution of lengths; allowed: {FORMS}") from None
        if made.first < 1 or (kind == "uniform" and made.second < made.first) or made.second < 0:
            raise ValueError(f"{text!r} has no lengths from 1 on; allowed: {FORMS}, from 1 on")
        if not math.isfinite(made.first) or not math.isfinite(made.second):
            raise ValueError(f"{text!r} is not finite; allowed: {FORMS}")
        return made

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        if self.kind == "lognormal":
            return max(1, round(self.first * rng.lognormvariate(0, self.second)))
        return int(self.first)

    def __str__(self) -> str:
        if self.kind == "uniform":
            return f"uniform:{self.first:g}-{self.second:g}"
        return f"lognormal:{self.first:g},{self.second:g}" if self.kind == "lognormal" else f"{self.first:g}"


@dataclass(frozen=True)
class Profile:
    """What the users of one application send."""

    input: Lengths  # of the prompt without its shared prefix
    output: Lengths
    prefix_length: int = 0  # tokens that a prompt shares with others, such as a system prompt
    num_prefixes: int = 1  # different ones

    def __post_init__(self):
        if self.prefix_length < 0 or self.num_prefixes < 1:
            raise ValueError(
                f"prefix_length={self.prefix_length} and num_prefixes={self.num_prefixes} are not allowed; "
                "allowed: 0 or more tokens, and 1 or more prefixes"
            )


PROFILES = {
    "chat": Profile(Lengths("lognormal", 100, 0.8), Lengths("lognormal", 80, 0.6), prefix_length=64, num_prefixes=4),
    "summarize": Profile(Lengths("lognormal", 320, 0.3), Lengths("lognormal", 40, 0.4)),
    "generate": Profile(Lengths("lognormal", 32, 0.5), Lengths("lognormal", 256, 0.3)),
    "fixed": Profile(Lengths("fixed", 64), Lengths("fixed", 64)),
}


def profile_of(name: str, **changed: object) -> Profile:
    """A named profile, with the fields that are not None put in place. Raises ValueError for an unknown name."""
    if name not in PROFILES:
        raise ValueError(f"profile={name!r} is unknown; choose one of {', '.join(PROFILES)}")
    return replace(PROFILES[name], **{field: value for field, value in changed.items() if value is not None})


def trace_of(
    profile: Profile, times: Sequence[float], seed: int = 0, max_length: int | None = None
) -> list[TraceRequest]:
    """A request for each of `times`. Prefixes are whole blocks of 16 tokens; no other block is in two prompts.

    Where a prompt and its answer are longer than `max_length` together, both are shortened in proportion. Another seed
    gives other blocks, so that a second run finds nothing of the first in a prefix cache. Raises ValueError for a
    prefix that leaves no room.
    """
    prefix_blocks = -(-profile.prefix_length // TRACE_BLOCK)
    shared = prefix_blocks * TRACE_BLOCK
    if max_length is not None and shared + 2 > max_length:
        raise ValueError(f"prefix_length={profile.prefix_length} leaves no room in max_model_len={max_length}")
    rng, next_id = random.Random(seed), seed * 10**9 + profile.num_prefixes * prefix_blocks
    trace = []
    for timestamp in times:
        own, output_length = profile.input.draw(rng), profile.output.draw(rng)
        if max_length is not None and (total := own + output_length) > (room := max_length - shared):
            output_length = max(1, output_length * room // total)
            own = min(own, room - output_length)
        first = seed * 10**9 + rng.randrange(profile.num_prefixes) * prefix_blocks
        own_blocks = -(-own // TRACE_BLOCK)
        hash_ids = (*range(first, first + prefix_blocks), *range(next_id, next_id + own_blocks))
        next_id += own_blocks
        trace.append(TraceRequest(timestamp, shared + own, output_length, hash_ids))
    return trace


def num_shared_tokens(trace: Sequence[TraceRequest]) -> int:
    """How many tokens of the prompts stand in a block that an earlier prompt of the trace has, too."""
    seen: set[int] = set()
    count = 0
    for request in trace:
        for block, hash_id in enumerate(request.hash_ids):
            if hash_id in seen:
                count += min(TRACE_BLOCK, request.input_length - block * TRACE_BLOCK)
            seen.add(hash_id)
    return count
