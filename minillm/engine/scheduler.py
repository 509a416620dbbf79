"""The scheduler: which request gets how many tokens in the next step. Built in chapter 05.

One rule: every request is given tokens until `num_computed_tokens` catches `num_tokens`, inside a budget. A prompt
has many to catch up on, a decoding request one, a preempted one all that it lost, a prefix hit fewer than its prompt
is long. There is no other case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

from minillm.engine.policies import FCFS, Policy
from minillm.engine.request import Request, RequestStatus, SampledToken
from minillm.kv_cache.block_pool import BlockPool
from minillm.kv_cache.manager import BlockMoves, ComputedBlocks
from minillm.trace import Trace

PROMPT_LOGPROBS_CHUNK = 256  # tokens a step of a request that wants the logits of all of them


class KVCache(Protocol):
    """What the scheduler asks of a `KVCacheManager`."""

    pool: BlockPool
    tables: dict[str, list[int]]

    def get_computed_blocks(self, request: Request) -> ComputedBlocks: ...
    def allocate_slots(self, request: Request, num_new_tokens: int, computed: ComputedBlocks | None = None) -> bool: ...
    def cache_blocks(self, request: Request) -> None: ...
    def free(self, request: Request) -> None: ...
    def fork(self, parent: Request, child: Request) -> None: ...
    def swap_out(self, request: Request) -> bool: ...
    def take_moves(self) -> BlockMoves: ...
    def blocks_needed(self, num_tokens: int, max_new_tokens: int) -> int: ...
    def check_integrity(self) -> None: ...


class ScheduledRequest(NamedTuple):
    """One row of a step: `num_tokens` tokens of `request`, from `start` on. `samples` of its next token are wanted."""

    request: Request
    start: int
    num_tokens: int
    block_ids: list[int]  # its table, this step's blocks included
    samples: int  # 0 inside a prompt, 1 at the end of the tokens there are, n when the prompt is about to fork
    draft: tuple[int, ...] = ()  # the last of these tokens are guesses, to be checked in this step (chapter 18)

    @property
    def position(self) -> int:
        """Which of the request's outputs this step draws first."""
        return self.start + self.num_tokens - len(self.draft) - self.request.num_prompt_tokens

    @property
    def needs_host(self) -> bool:
        """Whether the next step cannot be planned before this one's tokens are known."""
        params = self.request.params
        if self.draft or self.request.grammar is not None:
            return True
        asked = params.logprobs is not None or params.prompt_logprobs is not None
        return self.samples > 1 or params.has_penalties or asked


@dataclass
class SchedulerOutput:
    """What one step does."""

    rows: list[ScheduledRequest] = field(default_factory=list)  # those with one token first
    moves: BlockMoves = field(default_factory=BlockMoves)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def summary(self) -> tuple:
        """Plain values that two engines can be compared by."""
        rows = tuple((row.request.request_id, row.start, row.num_tokens, tuple(row.block_ids)) for row in self.rows)
        preempted = tuple(request.request_id for request in self.preempted)
        return rows, preempted, tuple(self.moves.swap_out), tuple(self.moves.copies), tuple(self.moves.swap_in)


class Scheduler:
    """Keeps `waiting` and `running`, and knows nothing of tensors."""

    def __init__(
        self,
        kv_cache: KVCache,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        policy: Policy | None = None,
        enable_chunked_prefill: bool = True,
        preemption_mode: str = "recompute",
        trace: Trace | None = None,
    ):
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = FCFS() if policy is None else policy
        self.enable_chunked_prefill = enable_chunked_prefill
        self.preemption_mode = preemption_mode
        self.trace = trace or Trace(enabled=False)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}  # all that have not finished
        self.leaving: dict[str, Request] = {}  # finished, but a step in flight still writes to their blocks

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises ValueError if its id is taken, or if it could never be served."""
        if request.request_id in self.requests or request.request_id in self.leaving:
            raise ValueError(f"request_id={request.request_id!r} is in use; every request needs its own")
        most = request.num_prompt_tokens + request.max_tokens
        needed = self.kv_cache.blocks_needed(most, min(most, self.max_num_batched_tokens))
        if needed > (available := self.kv_cache.pool.num_blocks):
            raise ValueError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and "
                f"max_tokens={request.max_tokens} need {needed} blocks, the cache has {available}; "
                "raise num_kv_blocks, or ask for fewer tokens"
            )
        if not self.enable_chunked_prefill and most > self.max_num_batched_tokens:
            raise ValueError(
                f"request {request.request_id}: up to {most} tokens exceed max_num_batched_tokens="
                f"{self.max_num_batched_tokens}, and a prompt may not be cut; set enable_chunked_prefill=True"
            )
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Running requests go first; while anything is preempted, nothing waiting is admitted."""
        output = SchedulerOutput()
        budget = self.max_num_batched_tokens
        self.waiting.order(self.running)
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if request.spec_token_ids and not self.kv_cache.allocate_slots(request, count):
                request.spec_token_ids = []  # guesses are not worth a preemption
                count = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if count and not self._make_room(request, count, output):
                break  # it was the last in order, and gave its own blocks back
            budget -= self._schedule(output, request, count)
            index += 1
        if not output.preempted:
            self._admit(output, budget)
        output.rows.sort(key=lambda row: row.num_tokens > 1)  # stable: decoding rows stand first
        output.moves = self.kv_cache.take_moves()
        return output

    def advance(self, output: SchedulerOutput) -> None:
        """Take a launched step for computed, so that the next one can be scheduled before its tokens are known."""
        for row in output.rows:
            row.request.num_computed_tokens = row.start + row.num_tokens
            row.request.num_in_flight += row.samples

    def update(
        self, output: SchedulerOutput, sampled: list[list[SampledToken]]
    ) -> list[tuple[Request, SampledToken | None]]:
        """Take what the step computed: for each row its sampled tokens, as many as it wanted samples; of a row with a
        draft the guesses that were right, and the token after them.

        Returns the new tokens, each with the request (perhaps a fork of the row's) that it continues;
        None where its grammar failed.
        """
        added: list[tuple[Request, SampledToken | None]] = []
        for row, tokens in zip(output.rows, sampled):
            request = row.request
            request.num_in_flight = max(0, request.num_in_flight - row.samples)
            request.spec_token_ids = []
            num_computed = row.start + row.num_tokens - len(row.draft)
            if request.is_finished:
                self._leave(request)  # it ended while the step ran, and what the step made of it is dropped
                continue
            request.max_computed_tokens = max(request.max_computed_tokens, num_computed)
            if request.status is RequestStatus.RUNNING:  # else it was preempted while the step ran
                # The next step may have been launched already, but never behind guesses that may be wrong.
                request.num_computed_tokens = (
                    num_computed if row.draft else max(request.num_computed_tokens, num_computed)
                )
                self.kv_cache.cache_blocks(request)
            if not tokens:
                continue
            owners = [request, *(self.fork(request, index) for index in range(1, row.samples))]
            request.num_forks = 0
            for one, drawn in zip(owners, [tokens] if row.samples == 1 else [[token] for token in tokens]):
                added += one.take(drawn)
            if row.draft:
                self._keep_right_guesses(row)
            for one in owners:
                if one.finish_reason:
                    self.finish(one, one.finish_reason)
        return added

    def finish(self, request: Request, reason: str) -> None:
        """End a request at any moment; nothing happens if it has ended. Its blocks are free at once, or when the step
        in flight that writes to them is done."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        del self.requests[request.request_id]
        self.waiting.leave(request)
        self.leaving[request.request_id] = request
        self._leave(request)

    def drop_in_flight(self) -> None:
        """Nothing that was launched will be taken in any more."""
        for request in (*self.requests.values(), *self.leaving.values()):
            request.num_in_flight = 0
        for request in list(self.leaving.values()):
            self._leave(request)

    def fork(self, parent: Request, index: int) -> Request:
        """Split sample `index` off an unfinished request, as far as it has come. The two share their blocks.

        It runs on at once if the batch has room for it; else it waits, and its tokens are computed again.
        """
        child = parent.fork(index)
        self.requests[child.request_id] = child
        self.waiting.join(child)
        if parent.status is RequestStatus.RUNNING and len(self.running) < self.max_num_seqs:
            self.kv_cache.fork(parent, child)
            child.status = RequestStatus.RUNNING
            self.running.append(child)
        else:
            child.status, child.num_computed_tokens = RequestStatus.PREEMPTED, 0
            self.waiting.put_back(child)
        return child

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue: its blocks go to host memory, or are dropped and computed again."""
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.spec_token_ids = []
        if self.preemption_mode != "swap" or not self.kv_cache.swap_out(request):
            self.kv_cache.free(request)
            request.num_computed_tokens = 0
        self.waiting.put_back(request)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is accounted for and every request is where its status says."""
        self.kv_cache.check_integrity()
        running = {request.request_id for request in self.running}
        waiting = [request.request_id for request in self.waiting]
        if len(set(waiting)) != len(waiting) or running & set(waiting) or running | set(waiting) != set(self.requests):
            raise RuntimeError(
                f"running {sorted(running)} and waiting {sorted(waiting)} are not {sorted(self.requests)}"
            )
        if set(self.kv_cache.tables) != (owners := running | set(self.leaving)):
            raise RuntimeError(f"blocks are owned by {sorted(self.kv_cache.tables)}, running are {sorted(owners)}")

    def _keep_right_guesses(self, row: ScheduledRequest) -> None:
        """Those that the text now goes on with are computed; the slots of the others are written again."""
        request, start = row.request, row.request.num_computed_tokens
        # The last token is computed again, whoever guessed it: its logits are wanted.
        pairs = zip(row.draft, request.token_ids[start:-1])
        request.num_computed_tokens += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
        self.kv_cache.cache_blocks(request)

    def _leave(self, request: Request) -> None:
        if not request.num_in_flight and self.leaving.pop(request.request_id, None):
            self.kv_cache.free(request)

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        while budget and len(self.running) < self.max_num_seqs and (request := self.waiting.peek()) is not None:
            computed = self.kv_cache.get_computed_blocks(request)
            count = self._num_new_tokens(request, computed.num_tokens, budget)
            if not count and computed.num_tokens < request.num_tokens:
                return  # the budget is too small for its prompt, which may not be cut
            if not self.kv_cache.allocate_slots(request, count, computed):
                return
            self.waiting.pop()
            if request.status is RequestStatus.WAITING:
                self._count_found(request, computed)
            request.num_computed_tokens = computed.num_tokens
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            budget -= self._schedule(output, request, count)

    def _count_found(self, request: Request, computed: ComputedBlocks) -> None:
        request.num_cached_tokens = computed.num_tokens
        request.cached_tokens = getattr(computed, "found", {})  # by tier; a cache of your own need not tell
        for tier, count in request.cached_tokens.items():
            if count:
                self.trace.count(f"found on {tier}", count, request=request.request_id)

    def _num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        count = 0 if request.ends_in_flight else request.num_tokens - num_computed
        if request.params.prompt_logprobs is not None:
            count = min(count, PROMPT_LOGPROBS_CHUNK)
        if count <= budget:
            return count
        return budget if self.enable_chunked_prefill else 0

    def _make_room(self, request: Request, count: int, output: SchedulerOutput) -> bool:
        """Allocate, preempting from the end of the running requests; False if `request` itself had to go."""
        while not self.kv_cache.allocate_slots(request, count):
            victim = self.running[-1]
            self.preempt(victim)
            output.preempted.append(victim)
            self.trace.count("preempted", request=victim.request_id)
            if victim is request:
                return False
        return True

    def _schedule(self, output: SchedulerOutput, request: Request, count: int) -> int:
        if not count:
            return 0
        start = request.num_computed_tokens
        num_known = request.num_tokens - len(request.spec_token_ids)
        samples = 0 if start + count < num_known else 1 + request.num_forks
        draft = tuple(request.spec_token_ids[: start + count - num_known]) if samples else ()
        table = self.kv_cache.tables[request.request_id]
        output.rows.append(ScheduledRequest(request, start, count, table, samples, draft))
        if start + count > request.max_computed_tokens:
            self.waiting.charge(request, start + count - max(start, request.max_computed_tokens))
        return count
