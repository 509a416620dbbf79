"""The simulator: the real scheduler and cache manager, a cost model and a virtual clock. Built in chapter 09.

    Engine(runner=ModelRunner)       computes a step          clock: the wall's
    Engine(runner=SimulatedRunner)   asks what it would cost  clock: moved on by that much

Everything else is the same object, so a policy that wins here wins there, and a minute of traffic takes a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from minillm.engine.engine import Engine
from minillm.engine.executor import Launched
from minillm.engine.policies import cached_tokens_of, make_policy
from minillm.engine.preemptive import PreemptiveScheduler
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import NewRequest, SchedulerOutput, StepResult
from minillm.kv_cache.manager import KVCacheManager
from minillm.sampling.noise import derive_seed
from minillm.trace import Trace

NEVER_ENDS = 0  # a made-up token is never this one, so it may stand for the end of sequence


class VirtualClock:
    """Seconds that pass only when the program moves them on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class WallClock:
    """Real seconds since it was made."""

    def __init__(self):
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self.start

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step, as a sum of what it does. All in seconds; see `features` for what each multiplies."""

    per_step: float
    per_prefill_token: float
    per_decode: float
    per_decode_context: float = 0.0
    per_prefill_pair: float = 0.0

    def seconds(self, output: SchedulerOutput) -> float:
        weights = (
            self.per_step,
            self.per_prefill_token,
            self.per_decode,
            self.per_decode_context,
            self.per_prefill_pair,
        )
        return sum(weight * feature for weight, feature in zip(weights, features(output)))

    @classmethod
    def fit(cls, outputs: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> CostModel:
        """Least squares over measured steps, no cost below zero. `outputs` holds the `features` of each step.

        Errors are weighed by 1/sqrt(seconds), so that a few long prefills do not drown many short decodes.
        """
        if len(outputs) != len(seconds) or not outputs:
            raise ValueError(f"{len(outputs)} steps and {len(seconds)} times; one time for each step, and at least one")
        scale = 1 / np.sqrt(np.asarray(seconds))
        matrix = np.asarray(outputs, dtype=float)
        size = np.maximum(matrix.max(axis=0), 1e-30)  # columns of one size, for the numerics
        weights, _ = nnls(matrix / size * scale[:, None], np.asarray(seconds) * scale)
        return cls(*(weights / size).tolist())


def features(output: SchedulerOutput) -> tuple[float, ...]:
    """What a step does, counted: 1, prefill tokens, decoding rows, positions that decoding rows read, and pairs of
    query and key in prefills."""
    prefill_tokens = decodes = context = pairs = 0
    for row in output.rows:
        if row.num_tokens == 1:
            decodes += 1
            context += row.start + 1
        else:
            prefill_tokens += row.num_tokens
            pairs += row.num_tokens * (2 * row.start + row.num_tokens + 1) // 2
    return 1, prefill_tokens, decodes, context, pairs


class SimulatedRunner:
    """Takes a runner's place: moves the clock on and makes up tokens, the same ones for the same request."""

    def __init__(self, cost: CostModel, clock: VirtualClock, vocab_size: int = 1024):
        self.cost, self.clock, self.vocab_size = cost, clock, vocab_size

        self.requests: dict[str, NewRequest] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        for request_id in (*output.finished, *(self.requests if output.reset else ())):
            self.requests.pop(request_id, None)
        self.requests |= {new.request_id: new for new in output.arrived}
        self.clock.advance(self.cost.seconds(output))
        result = StepResult()
        for row in output.rows:
            if row.samples:
                new = self.requests[row.request_id]
                position = row.start + row.num_tokens - new.num_prompt_tokens
                for index, request_id in enumerate((row.request_id, *row.fork_ids), new.index):
                    result.token_ids[request_id] = [self._token(new.seed, index, position)]
        return result

    def _token(self, seed: int, index: int, position: int) -> int:
        """What sample `index` says at a position of its output; never NEVER_ENDS."""
        return (
            NEVER_ENDS + 1 + derive_seed(derive_seed(seed, index) if index else seed, position) % (self.vocab_size - 1)
        )


class StepRecorder:
    """A runner around a runner that keeps what every step was: its output's summary, and its features."""

    def __init__(self, runner):
        self.runner = runner
        self.summaries: list[tuple] = []
        self.features: list[tuple[float, ...]] = []
        self.seconds: list[float] = []  # filled by `replay`, the whole step

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._record(output)
        return self.runner.execute(output)

    def launch(self, output: SchedulerOutput) -> Launched:
        self._record(output)
        return self.runner.launch(output)

    def _record(self, output: SchedulerOutput) -> None:
        self.summaries.append(summary_of(output))
        self.features.append(features(output))


def summary_of(output: SchedulerOutput) -> tuple:
    """Values that two engines can be compared by."""
    rows = tuple((row.request_id, row.start, row.num_tokens, tuple(row.block_ids)) for row in output.rows)
    return (
        rows,
        tuple(output.preempted),
        tuple(output.moves.swap_out),
        tuple(output.moves.copies),
        tuple(output.moves.swap_in),
    )


def replay(engine: Engine, requests: Iterable[Request]) -> list[Request]:
    """Add each request when its arrival time comes on the engine's clock, and step until all have finished.

    `engine.clock` must know `wait_until`: a `VirtualClock` or a `WallClock`. Returns the requests in order of arrival.
    """
    requests = sorted(requests, key=lambda request: request.arrival_time)
    pending = deque(requests)
    while pending or engine.has_unfinished:
        while pending and pending[0].arrival_time <= engine.clock():
            engine.add_request(pending.popleft())
        if not engine.has_unfinished:
            engine.clock.wait_until(pending[0].arrival_time)
            continue
        start = engine.clock()
        engine.step()
        if isinstance(engine.runner, StepRecorder):
            engine.runner.seconds.append(engine.clock() - start)
    return requests


def simulated_engine(
    cost: CostModel,
    num_blocks: int,
    block_size: int = 16,
    scheduling_policy: str = "fcfs",
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    trace: Trace | None = None,
    policy=None,
    **scheduler_settings,
) -> Engine:
    """An engine without a model. `policy` is one of your own; the rest as for `Scheduler` and `KVCacheManager`."""
    clock = VirtualClock()
    if trace is not None:
        trace.clock = clock
    kv_cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching, num_host_blocks=num_host_blocks)
    if policy is None:
        policy = make_policy(scheduling_policy, cached_tokens_of(kv_cache))
    kind = PreemptiveScheduler if scheduling_policy == "preemptive_priority" else Scheduler
    scheduler = kind(kv_cache, policy=policy, trace=trace, **scheduler_settings)
    return Engine(scheduler=scheduler, runner=SimulatedRunner(cost, clock), trace=trace, clock=clock)
