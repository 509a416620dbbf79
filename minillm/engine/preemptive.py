"""A scheduler in which an urgent request does not wait for the batch: it takes the place of one that can wait.
Built in chapter 09.

    running   [1] [2] [2]       priorities, the lowest number first; the batch is full
    waiting   [0] [1] [2]       0 preempts the last running 2 and runs in this step, 1 preempts the other one in the
                                next step; 2 waits, for equal priorities do not preempt each other
"""

from __future__ import annotations

from collections import Counter

from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import SchedulerOutput
from minillm.kv_cache.block_pool import NULL_BLOCK


class PreemptiveScheduler(Scheduler):
    """`scheduling_policy="preemptive_priority"`: the queue of `priority`, which preempts.

    Under `priority` a running request keeps its batch slot and its blocks until it ends or memory is short, so an
    urgent request waits for the batch. Here it waits for one step. A preempted request is recomputed or swapped in
    again, as after any preemption; that is the price. Low priorities may wait for ever, as under `priority`.
    """

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`, after running requests have made way for the head of the queue."""
        self.waiting.order(self.running)
        displaced = self._victims(request) if (request := self.waiting.peek()) is not None else []
        for victim in displaced:
            self.preempt(victim)
            self.trace.count("preempted", request=victim.request_id)
        output = super().schedule()
        output.preempted[:0] = [victim.request_id for victim in displaced]
        return output

    def _victims(self, request: Request) -> list[Request]:
        """Running requests that `request` outranks, the least important first: as few as it needs for a batch slot and
        for the blocks of its first step. None, if all of them would not suffice or its adapter would have to wait."""
        if not self.running or request.priority >= self.running[-1].priority:
            return []
        pool, tables, budget = self.kv_cache.pool, self.kv_cache.tables, self.max_num_batched_tokens
        computed = self.kv_cache.get_computed_blocks(request)
        num_tokens = min(request.num_tokens, computed.num_tokens + budget)
        stay = {NULL_BLOCK, *computed.block_ids}  # no gain if a victim owns them: the request itself needs them
        shared = sum(block != NULL_BLOCK and pool.ref_cnt[block] > 0 for block in computed.block_ids)
        missing = self.kv_cache.blocks_needed(num_tokens, budget) - shared - pool.num_free
        victims: list[Request] = []
        owners: Counter[int] = Counter()  # of each block, among the victims
        for victim in reversed(self.running):
            if missing <= 0 and len(self.running) - len(victims) < self.max_num_seqs:
                break
            if request.priority >= victim.priority:
                return []
            victims.append(victim)
            for block in tables[victim.request_id]:
                owners[block] += 1
                missing -= block not in stay and owners[block] == pool.ref_cnt[block]
        return victims if missing <= 0 and self._may_run(request) else []

    def _may_run(self, request: Request) -> bool:
        """Whether there is a batch slot for the adapter of `request`: else it waits, and preempting gains nothing."""
        if self.gate is None:
            return True
        self.gate.begin(self.running)
        return self.gate.admits(request)
