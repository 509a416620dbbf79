"""A simulated replica: continuous batching with one event for many steps. Built in chapter 22.

The rules are the scheduler's (chapters 05 and 08): running requests first, chunks of prompts in what is left of the
token budget, the last request preempted when memory is full. What makes it fast is that steps which only decode are not
simulated one by one. While no request joins or leaves, n requests with `context` tokens together take

    k steps  =  k (per_step + n per_decode) + per_decode_context (k context + n k (k - 1) / 2)

so a run of steps up to the next end of a request is one event, and an arrival cuts the run at the next step's boundary.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

from minillm.engine.fleet.costs import ReplicaSpec
from minillm.engine.fleet.job import Job
from minillm.engine.fleet.pool import TokenPool
from minillm.engine.fleet.traces import HASH_BLOCK


class SimulatedReplica:
    """One replica on the fleet's clock. `ends` is when its current run of steps ends, None while it is idle.

    `version` changes with `ends`, so that an event which was scheduled for an earlier `ends` can be told.
    `hands_over` makes it a prefill replica: a request leaves after its first token.
    """

    def __init__(self, name: str, spec: ReplicaSpec, block_size: int = HASH_BLOCK, hands_over: bool = False):
        self.name, self.spec, self.hands_over = name, spec, hands_over
        self.pool = TokenPool(spec.num_kv_tokens, block_size, spec.enable_prefix_caching)
        self.waiting: deque[Job] = deque()
        self.partial: Job | None = None  # its prompt has been computed in part
        self.decoding: dict[Job, None] = {}  # in order of admission
        self.context = 0  # tokens of all decoding requests
        self.step = 0  # decode steps so far
        self.ends: float | None = None
        self.version = 0
        self.leaving: list[tuple] = []  # migrations that take a request out at the end of the run
        self.moving: set[Job] = set()  # requests that are being copied elsewhere
        self.scheduled = -1  # the version that the fleet knows of
        self.link_free = 0.0  # when its link to other replicas has sent everything
        self.busy_seconds = 0.0
        self.num_events = self.num_steps = 0
        self._finishes: list[tuple[int, int, Job]] = []
        self._start, self._steps, self._rows = 0.0, 0, 0
        self._chunks: list[tuple[Job, int]] = []
        self._count = itertools.count()  # breaks ties in `_finishes`
        self._rounding = spec.kv_block // 2

    @property
    def num_requests(self) -> int:
        new = sum(job is not self.partial for job, _ in self._chunks)
        return len(self.waiting) + len(self.decoding) + (self.partial is not None) + new

    @property
    def run_started(self) -> float:
        """When its current run of steps began."""
        return self._start

    @property
    def is_idle(self) -> bool:
        return self.ends is None and not self.waiting

    def generated_of(self, job: Job) -> int:
        """Output tokens of a decoding request at the last boundary."""
        return job.output_length - (job.finish_step - self.step)

    def submit(self, job: Job, now: float, front: bool = False) -> None:
        """A request arrives."""
        job.replica = self.name
        was_empty = not self.waiting
        if front:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)
        if self.ends is None:
            self.begin(now)
        elif (was_empty or front) and len(self.decoding) < self.spec.max_num_seqs:
            self.cut(now)

    def cut(self, now: float) -> None:
        """End a run of decode steps at the first boundary from `now` on."""
        if self._chunks or self._steps <= 1 or self.ends <= now:
            return
        steps = min(max(1, self._steps_by(now, math.ceil)), self._steps)
        if steps < self._steps:
            self._steps = steps
            self.ends = self._start + self.spec.decode_seconds(self._rows, self.context, steps)
            self.version += 1

    def begin(self, now: float) -> None:
        """Choose the next run of steps, at a boundary."""
        self.version += 1
        self._start, self._chunks, self._rows = now, [], 0
        if self.spec.enable_chunked_prefill:
            preempted = self._make_room()
            budget = self.spec.max_num_batched_tokens - len(self.decoding)
            if self.partial is not None and budget > 0:
                budget, preempted = self._continue_partial(budget, preempted)
            if not preempted:
                self._admit(budget)
            self._rows = len(self.decoding)
        else:
            self._admit(self.spec.max_num_batched_tokens)
            if not self._chunks:
                self._make_room()
                self._rows = len(self.decoding)
        self._set_end(now)

    def _set_end(self, now: float) -> None:
        rows, cost = self._rows, self.spec.cost
        if not rows and not self._chunks:
            self.ends, self._steps = None, 0
            return
        if not self._chunks:
            self._drop_stale()
            self._steps = min(self._finishes[0][0] - self.step, max(1, self.pool.free // rows))
            self.ends = now + self.spec.decode_seconds(rows, self.context, self._steps)
            return
        self._steps = 1
        seconds = cost.per_step + rows * cost.per_decode + self.context * cost.per_decode_context * (rows > 0)
        for job, count in self._chunks:
            pairs = count * (2 * job.computed + count + 1) // 2
            seconds += count * cost.per_prefill_token + pairs * cost.per_prefill_pair
        self.ends = now + seconds

    def finish_run(self) -> tuple[list[Job], list[Job], int]:
        """The run is over. Returns (finished requests, requests to hand over, number of new tokens)."""
        now, rows, steps = self.ends, self._rows, self._steps
        self.num_events, self.num_steps = self.num_events + 1, self.num_steps + steps
        self.busy_seconds += now - self._start
        new_tokens = rows * steps
        finished: list[Job] = []
        if rows:
            self._progress(steps, rows)
            self._drop_stale()
            while self._finishes and self._finishes[0][0] <= self.step:
                job = self._finishes[0][2]
                self._leave(job)
                job.finished = now
                finished.append(job)
                self._drop_stale()
        handed_over: list[Job] = []
        chunks, self._chunks = self._chunks, []
        for job, count in chunks:
            if job is self.partial:
                self.partial = None
            self._computed(job, count)
            if job.computed < job.num_tokens:
                self.partial = job
                continue
            job.generated += 1
            new_tokens += 1
            job.resume(now)
            if job.first_token is None:
                job.first_token = now
            if job.generated >= job.output_length:
                self._give_back(job)
                job.finished = now
                finished.append(job)
            elif self.hands_over:
                handed_over.append(job)  # its blocks stay until `release`
            else:
                self._join(job)
        return finished, handed_over, new_tokens

    def release(self, job: Job, now: float) -> None:
        """The keys and values of a request that was handed over have arrived elsewhere."""
        self._give_back(job)
        if self.ends is None and self.waiting:
            self.begin(now)

    def take_out(self, job: Job) -> bool:
        """Take a decoding request away at a boundary, with its keys and values; False if it has ended or gone."""
        if job not in self.decoding:
            return False
        self._leave(job)
        job.has_kv = True
        return True

    def fail(self, now: float) -> list[Job]:
        """It dies. Returns its unfinished requests, without keys and values; their clients have the tokens of the steps
        that were complete at `now`."""
        if self.ends is not None and not self._chunks:
            steps = min(self._steps_by(now, math.floor), self._steps - 1)
            self._progress(steps, self._rows)
        jobs = [job for job, _ in self._chunks if job is not self.partial]
        for job in jobs + ([self.partial] if self.partial is not None else []):
            self._give_back(job)
            job.computed = 0
        jobs += [self.partial] if self.partial is not None else []
        for job in list(self.decoding):
            self._leave(job)
            jobs.append(job)
        jobs += self.waiting
        for job in jobs:
            job.has_kv = False
        self.waiting.clear()
        self.partial, self._chunks, self.ends, self._steps, self._rows = None, [], None, 0, 0
        self.version += 1
        return jobs

    def _steps_by(self, now: float, rounding) -> int:
        """Steps of the run that fit between its start and `now`."""
        cost, seconds = self.spec.cost, now - self._start
        half = cost.per_decode_context * self._rows / 2
        first = cost.per_step + self._rows * cost.per_decode + cost.per_decode_context * self.context - half
        steps = seconds / first if half <= 0 else (math.sqrt(first * first + 4 * half * seconds) - first) / (2 * half)
        return rounding(round(steps, 9))

    def _progress(self, steps: int, rows: int) -> None:
        self.step += steps
        self.context += rows * steps
        self.pool.take(rows * steps)

    def _admit(self, budget: int) -> None:
        pool, chunked = self.pool, self.spec.enable_chunked_prefill
        reserve = len(self.decoding)  # a token for each decoding request
        seats = self.spec.max_num_seqs - len(self.decoding) - (self.partial is not None)
        while self.waiting and budget > 0 and seats > 0:
            job = self.waiting[0]
            if job.has_kv:
                if pool.free - reserve < job.num_tokens + self._rounding:
                    return
                pool.take(job.num_tokens - 1 + self._rounding)
                job.private = job.num_tokens - 1 + self._rounding
                job.resume(self._start)
                self._join(self.waiting.popleft())
                seats, budget, reserve = seats - 1, budget - 1, reserve + 1
                continue
            hits = pool.hits(job.blocks[: (job.num_tokens - 1) // pool.block_size]) if pool.caching else 0
            start, found = hits * pool.block_size, job.blocks[:hits]
            count = job.num_tokens - start
            if count > budget and not chunked and self._chunks:
                return
            count = min(count, budget) if chunked else count
            if pool.free - reserve < count + self._rounding + pool.to_pin(found):
                return
            self.waiting.popleft()
            pool.pin(found)
            pool.take(count + self._rounding)
            job.pinned, job.stored = list(found), hits
            job.private, job.computed = count + self._rounding, start
            if job.first_token is None and not job.num_preemptions:
                job.cached = start
            self._chunks.append((job, count))
            seats, budget = seats - 1, budget - count

    def _continue_partial(self, budget: int, preempted: bool) -> tuple[int, bool]:
        job = self.partial
        count = min(job.num_tokens - job.computed, budget)
        if self.pool.free - len(self.decoding) < count:
            self._preempt(job)
            return budget, True
        self.pool.take(count)
        job.private += count
        self._chunks.append((job, count))
        return budget - count, preempted

    def _make_room(self) -> bool:
        """Preempt the last requests until each decoding one can have one more token."""
        preempted = False
        while self.pool.free < len(self.decoding):
            self._preempt(self.partial if self.partial is not None else next(reversed(self.decoding)))
            preempted = True
        return preempted

    def _preempt(self, job: Job) -> None:
        if job is self.partial:
            self.partial = None
            self._give_back(job)
        else:
            self._leave(job)
        job.computed = 0
        job.num_preemptions += 1
        if job.generated and job.pause_started is None:
            job.pause_started = self._start
        self.waiting.appendleft(job)

    def _computed(self, job: Job, count: int) -> None:
        """The keys and values of `count` more tokens are in the cache; full blocks of the prompt can be shared."""
        job.computed += count
        blocks = job.blocks[job.stored : job.computed // self.pool.block_size]
        fresh = self.pool.store(blocks)
        job.stored += len(blocks)
        job.pinned += fresh
        job.private -= len(fresh) * self.pool.block_size

    def _join(self, job: Job) -> None:
        self.decoding[job] = None
        job.has_kv = False
        job.joined, job.finish_step = self.step, self.step + job.output_length - job.generated
        self.context += job.num_tokens
        heapq.heappush(self._finishes, (job.finish_step, next(self._count), job))

    def _leave(self, job: Job) -> None:
        """Out of the decoding requests, with its tokens counted."""
        del self.decoding[job]
        job.generated = self.generated_of(job)
        self.context -= job.num_tokens
        job.private += self.step - job.joined
        self._give_back(job)

    def _give_back(self, job: Job) -> None:
        self.pool.release(job.pinned, job.private)
        job.pinned, job.private = [], 0

    def _drop_stale(self) -> None:
        heap = self._finishes
        while heap and (heap[0][2] not in self.decoding or heap[0][2].finish_step != heap[0][0]):
            heapq.heappop(heap)
