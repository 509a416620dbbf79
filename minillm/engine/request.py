"""A request: a prompt, how to continue it, and how far it has come. Built in chapter 05.

token_ids            [p p p p p p | o o o]     prompt, then what was generated
num_computed_tokens   --------->               keys and values of these are in the cache
num_tokens            ------------------>      all there are, draft tokens too (chapter 18)
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from minillm.engine.lora_request import AdapterRef, LoRARequest
from minillm.sampling.logprobs import Logprob
from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams
from minillm.sampling.rules import check_rules


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue, owns no block
    RUNNING = "running"  # in the batch
    PREEMPTED = "preempted"  # was running, back in the queue, its blocks taken
    FINISHED = "finished"


# The life of a request: from each state to the states that may follow. `Request.move` refuses every other transition.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    # A sample that is split off where the batch is full waits with its parent's tokens: as if it had been preempted.
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What the engine is asked to do. `max_tokens` is what both the parameters and the limits allow."""

    request_id: str
    prompt_token_ids: Sequence[int]  # kept as a list of its own
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    arrival_time: float | None = None  # seconds; None is now
    priority: int = 0  # lower goes first
    user: str = ""
    cache_salt: str | None = None  # requests with different salts share no cached block
    index: int = 0  # which of the n samples
    group_id: str | None = None  # the request that this is a sample of; None is itself
    logprob_start_len: int = 1  # where prompt log-probabilities begin; no token precedes token 0
    lora_request: LoRARequest | None = None  # what was asked for,
    adapter: AdapterRef | None = None  # and the adapter that this is: chapter 23
    taken_back: tuple[int, ...] = ()  # tokens that ended the prompt and are generated anew: chapter 19

    def __post_init__(self):
        settled = {
            "prompt_token_ids": list(self.prompt_token_ids),
            "arrival_time": time.monotonic() if self.arrival_time is None else self.arrival_time,
            "group_id": self.request_id if self.group_id is None else self.group_id,
            "logprob_start_len": max(1, self.logprob_start_len),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)


def _asked(name: str) -> property:
    return property(attrgetter(f"spec.{name}"), doc=f"`RequestSpec.{name}`.")


class Request:
    """A request on its way: what was asked (`spec`), and its state. Made from the fields of `RequestSpec`."""

    # Slots keep the state of hundreds of requests, which a step passes through twice, close together in memory.
    __slots__ = (
        "adapter", "arrival_time", "cached_tokens", "error", "finish_reason", "max_computed_tokens", "max_tokens",
        "needs_host", "num_accepted_tokens", "num_cached_tokens", "num_computed_tokens", "num_drafted_tokens",
        "num_forks", "num_in_flight", "num_preemptions", "output_token_ids", "prompt_logprobs", "request_id",
        "scheduled_time", "spec", "spec_token_ids", "status", "steps_in_flight", "stop_reason", "stop_token_ids",
        "takes_drafts", "token_ids", "token_times",
    )  # fmt: skip

    group_id, index, prompt, prompt_token_ids = map(_asked, ("group_id", "index", "prompt", "prompt_token_ids"))
    params, seed, logprob_start_len, cache_salt = map(_asked, ("params", "seed", "logprob_start_len", "cache_salt"))
    priority, user = map(_asked, ("priority", "user"))

    def __init__(self, *args: Any, **fields: Any):
        self._begin(RequestSpec(*args, **fields))

    @classmethod
    def of(cls, spec: RequestSpec) -> Request:
        """A request that waits, with nothing generated yet."""
        request = cls.__new__(cls)
        request._begin(spec)
        return request

    def _begin(self, spec: RequestSpec) -> None:
        params = spec.params
        self.spec = spec
        self.request_id, self.max_tokens, self.adapter = spec.request_id, spec.max_tokens, spec.adapter  # for each step
        ends = frozenset() if params.ignore_eos else spec.eos_token_ids
        self.stop_token_ids = ends.union(params.stop_token_ids) if params.stop_token_ids else ends  # each ends it
        # Whether a step can be scheduled only when the tokens of the step before are known: their draw depends on them.
        self.needs_host = (
            params.has_penalties
            or params.reports_logprobs
            or params.reads_outputs
            or params.prompt_logprobs is not None
            or params.structured_outputs is not None
        )
        if params.has_rules:
            check_rules(params, self.stop_token_ids)
        self.arrival_time = spec.arrival_time  # seconds; a simulation may move it
        self.takes_drafts = True
        self.token_ids = list(spec.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.max_computed_tokens = 0  # the most it ever had computed: what lies under it was paid for once
        self.spec_token_ids: list[int] = []  # draft tokens, not yet verified (chapter 18)
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0  # of those
        self.num_in_flight = 0  # tokens that launched steps will sample, not known on the host yet (chapter 14)
        self.steps_in_flight = 0  # launched steps that process tokens of it
        self.status = RequestStatus.WAITING
        self.scheduled_time: float | None = None  # when it first got tokens of a step, seconds on the engine's clock
        self.token_times: list[float] = []  # when each output token came, seconds on the engine's clock
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None  # why it could not go on, where it ended with "error"
        self.num_forks = params.n - 1 if spec.index == 0 else 0  # samples to be split off when the prompt is computed
        self.num_cached_tokens = 0  # prompt tokens that were not computed, since a cache had them
        self.cached_tokens: dict[str, int] = {}  # the same by tier: device, host, disk (chapter 17)
        self.num_preemptions = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * spec.logprob_start_len

    @property
    def adapter_key(self) -> str | None:
        """The hash of its adapter: requests with different ones share no cached block."""
        return None if self.adapter is None else self.adapter.key

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.spec_token_ids) + self.num_in_flight

    @property
    def ends_in_flight(self) -> bool:
        """Whether a token on its way is sure to be the last, so that nothing after it need be computed."""
        return self.num_in_flight > 0 and len(self.output_token_ids) + self.num_in_flight >= self.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def prefix_cache_limit(self) -> int:
        """How many of its first tokens may come from a cache. The logits of the last are always wanted;
        those of the prompt from one token before where its log-probabilities begin.
        """
        known = len(self.token_ids)
        return (known if self.prompt_logprobs is None else min(known, self.logprob_start_len)) - 1

    def sample_seed(self, index: int | None = None) -> int:
        """The seed of sample `index`, or of this one. The first keeps the request's, so it is the same for any n."""
        index = self.index if index is None else index
        return derive_seed(self.seed, index) if index else self.seed

    @property
    def fork_ids(self) -> tuple[str, ...]:
        """The ids of the samples that are still to be split off."""
        return tuple(f"{self.group_id}_{index}" for index in range(1, 1 + self.num_forks))

    def move(self, status: RequestStatus) -> None:
        """Change its state. Raises RuntimeError for a transition that the table does not have."""
        if status not in TRANSITIONS[self.status]:
            allowed = ", ".join(sorted(one.value for one in TRANSITIONS[self.status])) or "none"
            raise RuntimeError(
                f"request {self.request_id} cannot go from {self.status.value} to {status.value}; allowed: {allowed}"
            )
        self.status = status

    def append(self, token_id: int, at_end: bool = False) -> None:
        """Take the next token, and finish if it is the last: `stop` for a stop token, or `at_end` of a grammar;
        `length` at the limit."""
        self.token_ids.append(token_id)
        outputs = self.output_token_ids
        outputs.append(token_id)
        if at_end or (token_id in self.stop_token_ids and len(outputs) >= self.params.min_tokens):
            self.finish_reason = "stop"
            if token_id in self.params.stop_token_ids:
                self.stop_reason = token_id
        elif len(outputs) >= self.max_tokens:
            self.finish_reason = "length"

    def take(self, token_ids: list[int], ended: bool = False, error: str | None = None) -> list[int]:
        """Take what a step generated, as far as the text goes on; `ended` and `error` hold behind the last token.
        Returns the tokens that were taken."""
        for count, token_id in enumerate(token_ids, 1):
            self.append(token_id, ended and count == len(token_ids))
            if self.finish_reason is not None:
                return token_ids[:count]
        if error is not None:
            self.finish_reason, self.error = "error", error
        return token_ids

    def fork(self, index: int) -> Request:
        """Sample `index` of the same prompt, exactly as far as this one has come, output included."""
        child = Request.of(replace(self.spec, request_id=f"{self.group_id}_{index}", index=index))
        child.token_ids += self.output_token_ids
        child.output_token_ids += self.output_token_ids
        child.num_forks, child.takes_drafts = 0, self.takes_drafts
        child.num_cached_tokens, child.cached_tokens = self.num_cached_tokens, self.cached_tokens
        child.arrival_time, child.scheduled_time = self.arrival_time, self.scheduled_time
        child.num_computed_tokens = child.max_computed_tokens = self.num_computed_tokens
        return child

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt {self.num_prompt_tokens}, "
            f"output {len(self.output_token_ids)}/{self.max_tokens}, computed {self.num_computed_tokens})"
        )
