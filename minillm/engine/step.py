"""One step as plain data: what the scheduler decides, and what the runner answers. Built in chapter 05.

    Scheduler.schedule -> SchedulerOutput -> Executor -> ModelRunner -> StepResult -> Scheduler.update

Both hold ids, numbers and lists, and no object that lives on either side, so they can cross to another process. The
scheduler's `Request` and the runner's `RequestState` are two records of the same request: the runner is told of its
arrival, of the tokens to process in each step, and of its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.engine.lora_request import AdapterRef
from minillm.engine.request import Request, RequestStatus
from minillm.kv_cache.manager import BlockMoves
from minillm.sampling.logprobs import Logprob
from minillm.sampling.params import SamplingParams


class ScheduledRequest(NamedTuple):
    """One row of a step: `num_tokens` tokens of a request, from `start` on. `samples` of its next token are wanted."""

    request_id: str
    start: int
    num_tokens: int
    block_ids: Sequence[int]  # its block table from entry `first_block` on, this step's blocks included
    samples: int  # 0 inside a prompt, 1 at the end of the known tokens, n when the prompt is about to fork
    draft: tuple[int, ...] = ()  # the last of these tokens are draft tokens, to be verified in this step (chapter 18)
    first_block: int = 0  # the runner knows the entries before it from earlier steps
    fork_ids: tuple[str, ...] = ()  # the requests that the samples after the first become


class NewRequest(NamedTuple):
    """A request that the runner has not seen, or whose text it has to replace."""

    request_id: str
    token_ids: list[int]  # prompt and output so far
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # of its first sample
    index: int  # which of the n samples
    stop_token_ids: frozenset[int]
    cache_salt: str | None = None
    logprob_start_len: int = 1
    adapter: AdapterRef | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        return cls(
            request.request_id,
            list(request.token_ids),
            request.num_prompt_tokens,
            request.params,
            request.seed,
            request.index,
            request.stop_token_ids,
            request.cache_salt,
            request.logprob_start_len,
            request.adapter,
        )


@dataclass
class SchedulerOutput:
    """What one step does. A scheduler fills in `rows`, `moves` and `preempted`, the engine the rest (`Announcer`)."""

    rows: list[ScheduledRequest] = field(default_factory=list)  # those with one token first
    moves: BlockMoves = field(default_factory=BlockMoves)
    preempted: list[str] = field(default_factory=list)  # request ids
    arrived: list[NewRequest] = field(default_factory=list)  # before the rows are read
    finished: list[str] = field(default_factory=list)  # request ids to forget, before the arrivals
    reset: bool = False  # forget every request first: a step failed, and how far the runner came is unknown
    needs_host: bool = False  # whether the next step can be scheduled only when this one's tokens are known

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass
class StepResult:
    """What a step generated, by request id; a request that samples nothing is missing.

    Several tokens of one request are draft tokens that were accepted, the token after them, and what its grammar
    forced.
    """

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    # One entry a token, where asked for.
    logprobs: dict[str, list[dict[int, Logprob] | None]] = field(default_factory=dict)
    num_accepted: dict[str, int] = field(default_factory=dict)  # of the draft tokens, of each row with a draft
    ended: set[str] = field(default_factory=set)  # the grammar is complete with the last of the tokens
    errors: dict[str, str] = field(default_factory=dict)  # the request cannot go on behind its tokens, and why
    prompt_logprobs: dict[str, tuple[int, list[dict[int, Logprob]]]] = field(default_factory=dict)  # from that token on


class Announcer:
    """Tells the runner which requests came and went. It remembers what was said, and says only what is new."""

    def __init__(self):
        self.known: dict[str, Request] = {}
        self.reset = False

    def complete(self, output: SchedulerOutput, requests: dict[str, Request], tables: dict[str, list[int]]) -> None:
        """Add arrivals and departures to a step. `requests` are all that have not finished."""
        output.reset, self.reset = self.reset, False
        output.finished = [name for name, request in self.known.items() if request.status is RequestStatus.FINISHED]
        for name in output.finished:
            del self.known[name]
        for place, row in enumerate(output.rows):
            if row.request_id not in self.known:
                request = self.known[row.request_id] = requests[row.request_id]
                output.arrived.append(NewRequest.of(request))
                if row.first_block:
                    output.rows[place] = row._replace(first_block=0, block_ids=list(tables[row.request_id]))

    def forget(self, requests: Iterable[Request]) -> None:
        """Their texts have changed in a way that no step said: announce them again."""
        for request in requests:
            self.known.pop(request.request_id, None)

    def forget_all(self) -> None:
        """A step failed: what the runner knows of its requests is uncertain."""
        self.known.clear()
        self.reset = True
