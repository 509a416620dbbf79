"""Project 1, beat the scheduler: a trace, the engine's own simulator, your plan of each step. Built in chapter 25.

    StepView   what a scheduler knows before a step: the time, the budget, the free blocks, who runs and who waits
    Plan       what it decides: how many tokens each request gets, and who is preempted
    score      serves a trace with the real block pool and counts the promises that were kept

A submission is a class without arguments that has `plan(view) -> Plan`. It sees copies of plain numbers: the requests
that have arrived, not those that will; the largest length of an answer, not the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minillm.book.projects.promises import CHAT, DOCUMENT, Asked, make_trace
from minillm.book.projects.scoring import Project, Refused, Score, called, is_int
from minillm.engine.engine import Engine
from minillm.engine.metrics import RequestRecord
from minillm.engine.policies import KeepsNoAccount
from minillm.engine.request import Request, RequestStatus
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import CostModel, SimulatedRunner, VirtualClock, replay
from minillm.engine.step import SchedulerOutput
from minillm.kv_cache.manager import KVCacheManager
from minillm.rounding import ceil_div
from minillm.sampling.params import SamplingParams

__all__ = ["CHAT", "DOCUMENT", "PROJECT", "Asked", "Baseline", "Plan", "RequestView", "StepView", "make_trace", "score"]

COST = CostModel(6.8e-3, 31e-6, 12e-6, 44e-9, 1.2e-9)  # seconds: an 8B model on one H100, as in chapter 22
BUDGET, MAX_NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE = 1024, 48, 1000, 16  # tokens, requests, blocks, tokens
STEPS = 20  # times the steps of the baseline: a run that takes more is stopped


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a scheduler may know of a request. Times in seconds on the virtual clock."""

    request_id: str
    kind: str  # "chat" or "document"
    arrival: float
    prompt_tokens: int
    max_tokens: int  # the answer has at most so many tokens; most end earlier
    ttft_target: float
    tpot_target: float  # seconds per token after the first, as a mean over the answer
    num_tokens: int  # prompt and answer so far
    num_computed: int  # of these, the tokens whose keys and values are in the cache
    first_token: float | None  # when its first token came
    num_blocks: int  # blocks that it owns; 0 while it waits
    num_preemptions: int

    @property
    def missing(self) -> int:
        """The most tokens that a step can process of it."""
        return self.num_tokens - self.num_computed

    def blocks_for(self, count: int) -> int:
        """How many more blocks it needs for `count` more tokens."""
        return ceil_div(self.num_computed + count, BLOCK_SIZE) - self.num_blocks


@dataclass(frozen=True, slots=True)
class StepView:
    """What a scheduler knows before a step. `running` is in the order of admission, `waiting` in the order of arrival,
    preempted requests in front."""

    now: float
    budget: int  # the most tokens of a step
    max_num_seqs: int  # the most running requests
    free_blocks: int
    running: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]


@dataclass(frozen=True)
class Plan:
    """What a step does. `tokens`: request id -> number of tokens, at least 1; a waiting request that is in it is
    admitted. `preempt`: ids of running requests that give their blocks back first and compute all tokens again."""

    tokens: dict[str, int] = field(default_factory=dict)
    preempt: tuple[str, ...] = ()


class Baseline:
    """vLLM's rule: running requests first, in order, the last one preempted when memory is short; then waiting ones in
    the order of arrival, if nothing was preempted."""

    def plan(self, view: StepView) -> Plan:
        tokens: dict[str, int] = {}
        preempt: list[str] = []
        running, budget, free = list(view.running), view.budget, view.free_blocks
        index = 0
        while index < len(running) and budget:
            request = running[index]
            count = min(request.missing, budget)
            while request.blocks_for(count) > free:
                victim = running.pop()
                preempt.append(victim.request_id)
                free += victim.num_blocks
                if victim is request:
                    return Plan(tokens, tuple(preempt))
            tokens[request.request_id] = count
            budget, free, index = budget - count, free - request.blocks_for(count), index + 1
        for request in () if preempt else view.waiting:
            count = min(request.missing, budget)
            if not count or len(running) == view.max_num_seqs or request.blocks_for(count) > free:
                break
            running.append(request)
            tokens[request.request_id] = count
            budget, free = budget - count, free - request.blocks_for(count)
        return Plan(tokens, tuple(preempt))


def score(submission: type, seed: int = 0, trace: list[Asked] | None = None) -> Score:
    """Serve the trace of `seed` to its end; the value is the points of the promises that were kept.

    Raises Refused where a plan breaks a rule, or the run takes more than 20 times the steps of the baseline.
    """
    trace = make_trace(seed) if trace is None else trace
    limit = None if submission is Baseline else STEPS * int(score(Baseline, seed, trace).figures["steps"])
    requests, engine = serve(submission, trace, limit)
    kept = {"chat": 0, "document": 0}
    points = 0
    for one, request in zip(trace, requests):
        if one.kind.targets.met_by(RequestRecord.of(request)):
            kept[one.kind.name] += 1
            points += one.kind.points
    figures = {
        "chats kept": kept["chat"],
        "documents kept": kept["document"],
        "chats": sum(one.kind.name == "chat" for one in trace),
        "documents": sum(one.kind.name == "document" for one in trace),
        "steps": engine.num_steps,
        "tokens": engine.scheduler.num_tokens,
        "preemptions": sum(request.num_preemptions for request in requests),
        "seconds": round(engine.clock(), 3),
    }
    return Score(points, figures)


def serve(
    submission: type, trace: list[Asked], limit: int | None = None, wrap: Callable = lambda runner: runner
) -> tuple[list[Request], Engine]:
    """The trace on the simulator, with the submission in the scheduler's place: the finished requests, the engine.

    `wrap` may put a `StepRecorder` around the runner.
    """
    clock = VirtualClock()
    asked = {str(index): one for index, one in enumerate(trace)}
    kv_cache = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    planner = called(f"{getattr(submission, '__name__', submission)}()", submission)
    scheduler = Planned(kv_cache, planner, asked, clock, limit)
    engine = Engine(scheduler=scheduler, runner=wrap(SimulatedRunner(COST, clock)), clock=clock)
    return replay(engine, [to_request(name, one) for name, one in asked.items()]), engine


def to_request(name: str, asked: Asked) -> Request:
    """For the engine, which ends the answer at its true length."""
    params = SamplingParams(temperature=0.0, max_tokens=asked.answer_tokens, ignore_eos=True)
    prompt = [1] * asked.prompt_tokens
    return Request(name, prompt, params, asked.answer_tokens, arrival_time=asked.arrival)


class Queue(KeepsNoAccount):
    """The waiting requests, of which any may be taken: preempted ones in front, the others in order of arrival."""

    def __init__(self):
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self.requests = {request.request_id: request, **self.requests}

    def take(self, request: Request) -> None:
        del self.requests[request.request_id]

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())


class Planned(Scheduler):
    """The engine's scheduler, whose decision is the submission's. All accounts, blocks and the clock stay here."""

    def __init__(self, kv_cache: KVCacheManager, planner, asked: dict[str, Asked], clock: VirtualClock, limit=None):
        super().__init__(kv_cache, MAX_NUM_SEQS, BUDGET, policy=Queue())
        self.planner, self.asked, self.clock, self.limit = planner, asked, clock, limit
        self.num_steps = self.num_tokens = 0

    def schedule(self) -> SchedulerOutput:
        self.num_steps += 1
        if self.limit is not None and self.num_steps > self.limit:
            raise Refused(f"{self._step}: the run takes more than {STEPS} times as many steps as the baseline")
        tokens, preempt = self._read(called(f"{self._step}: plan", self.planner.plan, self.view()))
        output = SchedulerOutput()
        for name in preempt:
            self._preempt(name, name in tokens, output)
        for name, count in tokens.items():
            self._process(name, count, output)
        if not output.rows and self.requests:
            raise Refused(f"{self._step}: the plan has no token, and {len(self.requests)} requests are not finished")
        self.num_tokens += sum(row.num_tokens for row in output.rows)
        output.rows.sort(key=lambda row: row.num_tokens > 1)
        output.moves = self.kv_cache.take_moves()
        return output

    def view(self) -> StepView:
        """Plain copies: nothing that is done to them reaches the engine."""
        free = self.kv_cache.pool.num_free
        running, waiting = (tuple(map(self._seen, queue)) for queue in (self.running, self.waiting))
        return StepView(self.clock(), self.max_num_batched_tokens, self.max_num_seqs, free, running, waiting)

    @property
    def _step(self) -> str:
        return f"step {self.num_steps}, at {self.clock():.3f} s"

    def _seen(self, request: Request) -> RequestView:
        asked = self.asked[request.request_id]
        return RequestView(
            request.request_id,
            asked.kind.name,
            asked.arrival,
            asked.prompt_tokens,
            asked.kind.answer[1],
            asked.kind.targets.ttft,
            asked.kind.targets.tpot,
            request.num_tokens,
            request.num_computed_tokens,
            request.token_times[0] if request.token_times else None,
            len(self.kv_cache.tables[request.request_id]) if request.status is RequestStatus.RUNNING else 0,
            request.num_preemptions,
        )

    def _read(self, plan: object) -> tuple[dict[str, int], tuple[str, ...]]:
        """A plan's two fields, read once and copied: what is checked is what is done."""
        tokens, preempt = (plan.tokens, plan.preempt) if type(plan) is Plan else (None, None)
        if type(tokens) is not dict or type(preempt) not in (tuple, list):
            raise Refused(f"{self._step}: plan returned {plan!r}; return Plan(tokens={{id: count}}, preempt=(id, ...))")
        tokens, preempt = dict(tokens), tuple(preempt)
        for name in (*tokens, *preempt):
            if type(name) is not str:
                raise Refused(f"{self._step}: {name!r} is no request's id; ids are strings")
        for name, count in tokens.items():
            if not is_int(count) or count < 1:
                raise Refused(f"{self._step}: {count!r} tokens for request {name!r}; a whole number from 1 on")
        if (total := sum(tokens.values())) > self.max_num_batched_tokens:
            raise Refused(f"{self._step}: {total} tokens in all; the budget is {self.max_num_batched_tokens}")
        return tokens, preempt

    def _preempt(self, name: str, is_served: bool, output: SchedulerOutput) -> None:
        request = self.requests.get(name)
        if request is None or request.status is not RequestStatus.RUNNING or is_served:
            raise Refused(f"{self._step}: request {name!r} cannot be preempted: it must run, and get no token")
        self.preempt(request)
        output.preempted.append(name)

    def _process(self, name: str, count: int, output: SchedulerOutput) -> None:
        request = self.requests.get(name)
        if request is None:
            raise Refused(f"{self._step}: there is no request {name!r} that runs or waits")
        if count > (missing := request.num_tokens - request.num_computed_tokens):
            raise Refused(f"{self._step}: {count} tokens for request {name}, of which {missing} are missing")
        runs = request.status is RequestStatus.RUNNING
        if not runs and len(self.running) >= self.max_num_seqs:
            raise Refused(f"{self._step}: request {name} would be number {len(self.running) + 1} of those that run")
        computed = None if runs else self.kv_cache.get_computed_blocks(request)
        if not self.kv_cache.allocate_slots(request, count, computed):
            free = self.kv_cache.pool.num_free
            raise Refused(f"{self._step}: no room for {count} tokens of request {name}: {free} blocks are free")
        if not runs:
            self.waiting.take(request)
            request.move(RequestStatus.RUNNING)
            self.running.append(request)
        self._schedule(output, request, count)


PROJECT = Project(
    name="scheduler",
    defines="MyScheduler",
    value="points: 1 for a chat, 3 for a document whose promise was kept",
    more=True,
    seeds=(1, 2, 3),
    score=score,
    baseline=Baseline,
    imports={"minillm.book.projects.scheduler": ("Plan", "RequestView", "StepView")},
)
