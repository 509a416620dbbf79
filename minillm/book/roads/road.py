"""What a random road is: every setting of one run, as plain values that fit on a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minillm.book.roads.models import WINDOW
from minillm.kv_cache.manager import KVCacheManager

GREEDY = {"temperature": 0.0}
OF_CHANCE = ("seed", "n", "top_p", "top_k", "min_p")  # what has no meaning for a greedy request


@dataclass(frozen=True)
class Arrival:
    """One request of a road: what is asked, and when."""

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=lambda: dict(GREEDY))  # of SamplingParams
    at: int = 0  # the step before which it arrives
    abort_at: int | None = None  # the step before which it is aborted, unless it has finished
    withdrawn: bool = True  # aborted by its own caller, or else by another one
    streaming: bool = False
    priority: int = 0
    user: str = ""
    salt: str | None = None
    logprob_start: int = 0
    adapter: str | None = None  # one of ADAPTERS, where the road has batch slots for them

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer together, at most."""
        return len(self.prompt) + self.params.get("max_tokens", 16)

    @property
    def is_compared(self) -> bool:
        """Whether its tokens depend on nothing but its parameters: greedy ones and seeded ones do."""
        return self.params.get("temperature", 1.0) == 0 or "seed" in self.params


@dataclass(frozen=True)
class Road:
    """The settings of an engine, and its requests. The defaults are those of the plain engine that it is compared
    with."""

    requests: tuple[Arrival, ...]
    model: str = "llama"
    # "int8"; "int4" in groups of 16, or "rotated", the same of a rotated model; "mxfp4" and "nvfp4", in blocks of 16.
    weights: str | None = None
    kv: str = "auto"
    sinks: int | None = None  # kv_retention, with a window of WINDOW
    block_size: int = 16
    budget: int = 8192  # max_num_batched_tokens
    spare_blocks: int | None = None  # beside those that the longest request needs; None: plenty
    spare_tokens: int = 0  # max_model_len beside the longest request
    max_num_seqs: int = 256
    policy: str = "fcfs"
    chunked: bool = True
    prefix: bool = False
    host_blocks: int = 0
    swap: bool = False
    disk_blocks: int = 0
    speculation: str | None = None  # ngram, eagle, eagle3, or the draft model's weights: noisy, same or another
    num_drafts: int = 4
    adaptive: bool = False
    attention: str = "torch"
    recorded: bool = False  # enforce_eager=False, which only Triton's backend heeds
    ahead: bool = False
    like_a_gpu: str = ""
    rounds: int = 1  # the requests come again: the prefix cache is warm
    restart: bool = False  # a new engine for every round; a disk tier carries the prefixes over
    offload: bool = False  # the last layers' weights are streamed from host memory
    fails_at: int | None = None  # the step that raises, in the first round; all that is under way is aborted
    max_loras: int = 0  # batch slots for adapters; 0: none are served
    together: bool = False  # one call of generate instead of arrivals between the steps
    tensor_parallel: int = 1  # processes that each matrix is cut over
    stages: int = 1  # processes that the layers are cut over
    late: int | None = None  # the rank that sleeps now and then, so that the others and the engine are ahead of it
    spread: bool = False  # whole experts on each rank, not a part of each

    @property
    def max_model_len(self) -> int:
        return max(2, self.spare_tokens + max(request.num_tokens for request in self.requests))

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the pool."""
        if self.spare_blocks is None:
            return sum(
                (request.num_tokens // self.block_size + 2) * request.params.get("n", 1) for request in self.requests
            )
        window = WINDOW if self.model == "mistral" or self.sinks is not None else None
        of_one = KVCacheManager(1, self.block_size, window=window, sinks=self.sinks or 0)
        return of_one.blocks_needed(self.max_model_len, min(self.max_model_len, self.budget)) + self.spare_blocks

    def line(self) -> str:
        """JSON of all that differs from the defaults; `parse` reads it."""
        return json.dumps(_changed(self))

    @staticmethod
    def parse(line: str) -> Road:
        """The road of such a line. Raises ValueError for anything else."""
        try:
            values = json.loads(line)
            arrivals = [Arrival(**arrival | {"prompt": tuple(arrival["prompt"])}) for arrival in values.pop("requests")]
            return Road(tuple(arrivals), **values)
        except (KeyError, TypeError, ValueError) as error:
            what = "a road is a line that `minillm check --roads` printed"
            raise ValueError(f"{line[:80]!r} is no road ({error!r}); {what}") from error


def simpler(road: Road) -> Iterator[Road]:
    """Roads with one thing less, the largest steps first."""
    if len(road.requests) > 1:
        for index in range(len(road.requests)):
            yield replace(road, requests=road.requests[:index] + road.requests[index + 1 :])
    for name in [name for name in _changed(road) if name != "requests"]:
        yield replace(road, **{name: _default(Road, name)})
    for index, request in enumerate(road.requests):
        for other in _simpler_requests(request):
            yield replace(road, requests=(*road.requests[:index], other, *road.requests[index + 1 :]))


def _simpler_requests(request: Arrival) -> Iterator[Arrival]:
    for name in [name for name in _changed(request) if name not in ("prompt", "params")]:
        yield replace(request, **{name: _default(Arrival, name)})
    params = request.params
    if params.get("temperature", 1.0):
        kept = {name: value for name, value in params.items() if name not in OF_CHANCE}
        yield replace(request, params=kept | GREEDY)
    for name in [name for name in params if name not in ("temperature", "seed", "max_tokens")]:
        yield replace(request, params={key: value for key, value in params.items() if key != name})
    if (count := params.get("max_tokens", 16)) > 1:
        for fewer in (count // 2, count - 1):
            least = {"min_tokens": min(params["min_tokens"], fewer)} if "min_tokens" in params else {}
            yield replace(request, params=params | {"max_tokens": fewer} | least)
    length = len(request.prompt)
    for shorter in sorted({length // 2, length - 1} - {0, length}):
        yield replace(request, prompt=request.prompt[:shorter], logprob_start=min(request.logprob_start, shorter - 1))


def _changed(one: Road | Arrival) -> dict[str, Any]:
    found = {}
    for item in fields(one):
        value = getattr(one, item.name)
        if item.name == "requests":
            found["requests"] = [_changed(request) for request in value]
        elif item.name in ("prompt", "params") or value != item.default:
            found[item.name] = value
    return found


def _default(kind: type, name: str) -> Any:
    return next(item.default for item in fields(kind) if item.name == name)
