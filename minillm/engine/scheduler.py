"""The scheduler: which request gets how many tokens in the next step. Built in chapter 05.

One rule: every request is given tokens until `num_computed_tokens` catches `num_tokens`, inside a budget. A prompt
has many to catch up on, a decoding request one, a preempted one all that it lost, a prefix hit fewer than its prompt
is long. There is no other case.
"""

from __future__ import annotations

from itertools import takewhile

from minillm.engine.admission import check_servable
from minillm.engine.lora_gate import AdapterGate
from minillm.engine.policies import FCFS, Policy
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import ScheduledRequest, SchedulerOutput, StepResult
from minillm.kv_cache.protocol import KVCache
from minillm.kv_cache.records import ComputedBlocks
from minillm.trace import Trace

PROMPT_LOGPROBS_CHUNK = 256  # tokens a step of a request that wants the logits of all of them


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
        gate: AdapterGate | None = None,
    ):
        self.kv_cache, self.gate = kv_cache, gate
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = FCFS() if policy is None else policy
        self.enable_chunked_prefill = enable_chunked_prefill
        self.preemption_mode = preemption_mode
        self.trace = trace or Trace(enabled=False)
        self.block_size: int = getattr(kv_cache, "block_size", 1)  # a cache of your own need not say
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}  # all that have not finished
        self.samples: dict[str, dict[str, Request]] = {}  # of those, the samples split off a request, by its id
        self.leaving: dict[str, Request] = {}  # finished, but a step in flight still writes to their blocks

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises ValueError if its id is taken, or if it could never be served."""
        for name in (request.request_id, *request.fork_ids):
            if self._is_taken(name):
                raise ValueError(
                    f"request_id={name!r} is in use; every request, and every sample of one, needs its own"
                )
        check_servable(request, self.kv_cache, self.max_num_batched_tokens, self.enable_chunked_prefill)
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
                request.spec_token_ids = []  # a draft is not worth a preemption
                count = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if count and not (self.kv_cache.allocate_slots(request, count) or self._make_room(request, count, output)):
                break  # it was the last in order, and gave its own blocks back
            budget -= self._schedule(output, request, count)
            index += 1
        if not output.preempted and self.gate is not None:
            self.gate.begin(self.running)
            self._admit(output, budget)
            self.gate.end(self.waiting)
        elif not output.preempted:
            self._admit(output, budget)
        output.rows.sort(key=lambda row: row.num_tokens > 1)  # stable: decoding rows stand first
        output.moves = self.kv_cache.take_moves()
        return output

    def advance(self, output: SchedulerOutput) -> None:
        """Take a launched step for computed, so that the next one can be scheduled before its tokens are known."""
        for row in output.rows:
            request = self.requests[row.request_id]
            request.num_computed_tokens = row.start + row.num_tokens
            request.num_in_flight += row.samples
            request.steps_in_flight += 1

    def update(self, output: SchedulerOutput, result: StepResult) -> list[tuple[Request, int | None]]:
        """Take what the step computed. Returns the new tokens, each with the request (perhaps a sample that was split
        off the row's) that it continues; None where a request failed before it had one.
        """
        added: list[tuple[Request, int | None]] = []
        for row in output.rows:
            name, samples = row.request_id, row.samples
            request = self.requests.get(name)
            if (request is None or request.steps_in_flight) and (request := self._landed(row)) is None:
                continue  # it ended while the step ran: what the step made of it is dropped
            self._catch_up(request, row)
            if samples == 1 and len(tokens := result.token_ids[name]) == 1 and not row.draft:  # as in most steps
                request.take(tokens, name in result.ended, result.errors.get(name))
                added.append((request, tokens[0]))
                if request.finish_reason is not None:
                    self.finish(request, request.finish_reason)
            elif samples:
                added += self._take(request, row, result)
            if result.prompt_logprobs and name in result.prompt_logprobs:
                first, scores = result.prompt_logprobs[name]
                request.prompt_logprobs[first : first + len(scores)] = scores  # after a preemption: the same again
        return added

    def finish(self, request: Request, reason: str) -> None:
        """End a request at any moment; nothing happens if it has ended. Its blocks are free at once, or when the step
        in flight that writes to them is done."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        request.move(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self.requests[request.request_id]
        if samples := self.samples.get(request.group_id):
            samples.pop(request.request_id, None)
            if not samples:
                del self.samples[request.group_id]
        self.waiting.leave(request)
        self.leaving[request.request_id] = request
        self._leave(request)

    def drop_in_flight(self) -> None:
        """Nothing that was launched will be taken in any more."""
        for request in (*self.requests.values(), *self.leaving.values()):
            request.num_in_flight = request.steps_in_flight = 0
        for request in list(self.leaving.values()):
            self._leave(request)

    def fork(self, parent: Request, index: int) -> Request:
        """Split sample `index` off an unfinished request, as far as it has come. The two share their blocks.

        It runs on at once if the batch has room for it; else it waits, and its tokens are computed again.
        """
        child = parent.fork(index)
        self.requests[child.request_id] = child
        self.samples.setdefault(child.group_id, {})[child.request_id] = child
        self.waiting.join(child)
        if parent.status is RequestStatus.RUNNING and len(self.running) < self.max_num_seqs:
            self.kv_cache.fork(parent, child)
            child.move(RequestStatus.RUNNING)
            self.running.append(child)
        else:
            child.move(RequestStatus.PREEMPTED)
            child.num_computed_tokens = 0
            self.waiting.put_back(child)
        return child

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue: its blocks go to host memory, or are dropped and computed again."""
        self.running.remove(request)
        request.move(RequestStatus.PREEMPTED)
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
            raise RuntimeError(f"running {sorted(running)}, waiting {sorted(waiting)} are not {sorted(self.requests)}")
        if set(self.kv_cache.tables) != (owners := running | set(self.leaving)):
            raise RuntimeError(f"blocks are owned by {sorted(self.kv_cache.tables)}, running are {sorted(owners)}")

    def _is_taken(self, name: str) -> bool:
        """Whether a request has this id, or samples of its own under way, or is going to split off a sample with it."""
        if name in self.requests or name in self.leaving or name in self.samples:
            return True
        parent = self.requests.get(name.rpartition("_")[0])
        return parent is not None and name in parent.fork_ids

    def _landed(self, row: ScheduledRequest) -> Request | None:
        """The row's request, one step less of it in flight; None if it has ended."""
        request = self.requests.get(row.request_id)
        known = request or self.leaving.get(row.request_id)
        if known is not None and known.steps_in_flight:
            known.num_in_flight -= row.samples
            known.steps_in_flight -= 1
            if request is None:
                self._leave(known)
        return request

    def _catch_up(self, request: Request, row: ScheduledRequest) -> None:
        """Keys and values of the row's tokens are in the cache, but for those of the draft, which may be rejected."""
        start, draft = row.start, row.draft
        num_computed = start + row.num_tokens - len(draft)
        request.spec_token_ids = []
        if num_computed > request.max_computed_tokens:
            request.max_computed_tokens = num_computed
        if request.status is not RequestStatus.RUNNING:
            return  # it was preempted while the step ran
        if draft or num_computed > request.num_computed_tokens:  # else the next step has been launched already
            request.num_computed_tokens = num_computed
        # It may have filled a block, or brought back full ones from host memory that have no hash.
        if row.block_ids or start // self.block_size != num_computed // self.block_size:
            certain = (num_computed,) if request.steps_in_flight else ()  # a step in flight is further, and may fail
            self.kv_cache.cache_blocks(request, *certain)

    def _take(self, request: Request, row: ScheduledRequest, result: StepResult) -> list[tuple[Request, int | None]]:
        """Give the request its new tokens, and a token to each sample that splits off it here."""
        owners = [request, *(self.fork(request, index) for index in range(1, row.samples))]
        request.num_forks = 0
        added: list[tuple[Request, int | None]] = []
        for one in owners:
            name = one.request_id
            taken = one.take(result.token_ids[name], name in result.ended, result.errors.get(name))
            added += [(one, token_id) for token_id in taken or [None]]
        if row.draft:
            self._keep_accepted(row, request)
        for one in owners:
            if one.finish_reason:
                self.finish(one, one.finish_reason)
        return added

    def _keep_accepted(self, row: ScheduledRequest, request: Request) -> None:
        """The draft tokens that the text goes on with are computed; the KV slots of the others are written again."""
        start = request.num_computed_tokens
        # The last token never counts: the next step reads it for its logits.
        pairs = zip(row.draft, request.token_ids[start:-1])
        request.num_computed_tokens += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
        self.kv_cache.cache_blocks(request)

    def _leave(self, request: Request) -> None:
        if not request.steps_in_flight and self.leaving.pop(request.request_id, None):
            self.kv_cache.free(request)

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        while budget and len(self.running) < self.max_num_seqs and (request := self.waiting.peek()) is not None:
            if self.gate is not None and not self.gate.admits(request):  # its adapter has to wait: chapter 23
                if not self.gate.set_aside(self.waiting.pop()):
                    return
                continue
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
            request.move(RequestStatus.RUNNING)
            self.running.append(request)
            if self.gate is not None:
                self.gate.admitted(request)
            budget -= self._schedule(output, request, count)

    def _count_found(self, request: Request, computed: ComputedBlocks) -> None:
        request.num_cached_tokens = computed.num_tokens
        request.cached_tokens = getattr(computed, "found", {})  # by tier; a cache of your own need not tell
        for tier, count in filter(all, request.cached_tokens.items()):
            self.trace.count(f"found on {tier}", count, request=request.request_id)

    def _num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        count = len(request.token_ids) + len(request.spec_token_ids) + request.num_in_flight - num_computed
        if request.num_in_flight and request.ends_in_flight:
            return 0
        if request.prompt_logprobs is not None:
            count = min(count, PROMPT_LOGPROBS_CHUNK)
        if count <= budget:
            return count
        return budget if self.enable_chunked_prefill else 0

    def _make_room(self, request: Request, count: int, output: SchedulerOutput) -> bool:
        """Allocate, preempting from the end of the running requests; False if `request` itself had to go."""
        while not self.kv_cache.allocate_slots(request, count):
            victim = self.running[-1]
            self.preempt(victim)
            output.preempted.append(victim.request_id)
            self.trace.count("preempted", request=victim.request_id)
            if victim is request:
                return False
        return True

    def _schedule(self, output: SchedulerOutput, request: Request, count: int) -> int:
        if not count:
            return 0
        start, drafted = request.num_computed_tokens, request.spec_token_ids
        num_known = len(request.token_ids) + request.num_in_flight
        samples = 0 if start + count < num_known else 1 + request.num_forks
        draft = tuple(drafted[: start + count - num_known]) if drafted and samples else ()
        # A manager of your own may leave it out.
        first, block_ids = getattr(self.kv_cache, "take_changes", self._whole_table)(request)
        forks = request.fork_ids if samples > 1 else ()
        output.rows.append(ScheduledRequest(request.request_id, start, count, block_ids, samples, draft, first, forks))
        if samples > 1 or draft or request.needs_host:
            output.needs_host = True
        if start + count > request.max_computed_tokens:
            self.waiting.charge(request, start + count - max(start, request.max_computed_tokens))
        return count

    def _whole_table(self, request: Request) -> tuple[int, list[int]]:
        return 0, list(self.kv_cache.tables[request.request_id])
