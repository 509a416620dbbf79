"""The simulator takes the engine's own steps; traces survive their files; latencies are what their definitions say."""

from __future__ import annotations

import json

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.metrics import Percentiles, RequestRecord, Targets, goodput, percentile, report
from minillm.engine.policies import make_policy
from minillm.engine.scheduler import Scheduler, SchedulerOutput
from minillm.engine.simulator import (
    CostModel,
    SimulatedRunner,
    StepRecorder,
    VirtualClock,
    replay,
    simulated_engine,
    summary_of,
)
from minillm.engine.workload import (
    TRACE_BLOCK,
    TraceRequest,
    poisson_trace,
    read_trace,
    shared_prefix_trace,
    to_requests,
    write_trace,
)
from minillm.kv_cache.manager import BlockMoves, KVCacheManager

COST = CostModel(per_step=2e-3, per_prefill_token=1e-4, per_decode=2e-4)


class UnderVirtualTime:
    """The real runner, on a clock that moves on by what the cost model says."""

    def __init__(self, runner, cost: CostModel, clock: VirtualClock):
        self.runner, self.cost, self.clock = runner, cost, clock

    def execute(self, output):
        self.clock.advance(self.cost.seconds(output))
        return self.runner.execute(output)


def traces():
    chat = shared_prefix_trace(24, num_prefixes=2, prefix_length=48, input_length=20, output_length=12, rate=60)
    mixed = poisson_trace(24, rate=60, input_length=40, output_length=20, max_length=150, users=("a", "b"))
    return chat + mixed


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair", "lpm"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_simulator_takes_the_engines_own_steps(policy, mode):
    """The same trace, with preemption, prefix hits and chunks: the real model and the simulator, step by step."""
    settings = dict(max_num_seqs=8, max_num_batched_tokens=64, preemption_mode=mode)
    llm = LLM("tinyworld", device="cpu")

    def run(real: bool):
        clock = VirtualClock()
        kv_cache = KVCacheManager(30, 16, num_host_blocks=8)
        chosen = make_policy(policy, lambda request: kv_cache.get_computed_blocks(request).num_tokens)
        scheduler = Scheduler(kv_cache, policy=chosen, **settings)
        if real:
            engine = Engine(llm.model, scheduler=scheduler, clock=clock)
            engine.runner = UnderVirtualTime(engine.runner, COST, clock)
        else:
            engine = Engine(scheduler=scheduler, runner=SimulatedRunner(COST, clock), clock=clock)
        engine.runner = StepRecorder(engine.runner)
        finished = replay(engine, to_requests(traces()))
        return engine.runner, [request.token_times for request in finished], finished

    (engine, engine_times, finished), (simulator, simulator_times, _) = run(real=True), run(real=False)
    assert engine.summaries == simulator.summaries and engine.features == simulator.features
    assert engine_times == simulator_times
    assert len(engine.summaries) > 100
    assert (
        sum(request.num_preemptions for request in finished) > 0
        and sum(request.num_cached_tokens for request in finished) > 0
    )


@pytest.mark.parametrize("kind", ["swap_out", "copies", "swap_in"])
def test_steps_that_move_other_blocks_are_not_the_same(kind):
    still, moving, elsewhere = (
        SchedulerOutput(moves=BlockMoves(**{kind: moves})) for moves in ([], [(1, 2)], [(1, 3)])
    )
    assert len({summary_of(one) for one in (still, moving, elsewhere)}) == 3


def test_the_cost_model_finds_the_costs_that_made_the_times():
    engine = simulated_engine(COST, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=64)
    engine.runner = StepRecorder(engine.runner)
    replay(engine, to_requests(traces()))
    fitted = CostModel.fit(engine.runner.features, engine.runner.seconds)
    assert fitted.per_step == pytest.approx(COST.per_step, rel=1e-3)
    assert fitted.per_prefill_token == pytest.approx(COST.per_prefill_token, rel=1e-2)
    assert fitted.per_decode == pytest.approx(COST.per_decode, rel=1e-2)
    with pytest.raises(ValueError, match="0 steps"):
        CostModel.fit([], [])


def test_requests_arrive_when_the_trace_says_and_an_idle_clock_jumps():
    trace = [TraceRequest(moment, 16, 2, (index,)) for index, moment in enumerate((0.0, 5.0, 5.0))]
    engine = simulated_engine(CostModel(1.0, 0.0, 0.0), num_blocks=10)
    finished = replay(engine, to_requests(trace))
    assert [request.token_times for request in finished] == [[1.0, 2.0], [6.0, 7.0], [6.0, 7.0]]
    faster = replay(simulated_engine(CostModel(1.0, 0.0, 0.0), num_blocks=10), to_requests(trace, time_scale=0.1))
    assert [request.token_times for request in faster] == [[1.0, 2.0], [2.0, 3.0], [2.0, 3.0]]


def test_a_trace_survives_its_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, traces())
    assert read_trace(path) == traces()
    record = json.loads(path.read_text().splitlines()[0])
    assert {"timestamp", "input_length", "output_length", "hash_ids"} <= record.keys()
    path.write_text('{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2"):
        read_trace(path)
    with pytest.raises(ValueError, match="17 tokens are 2 blocks of 16"):
        TraceRequest(0.0, 17, 1, (1,))
    with pytest.raises(ValueError, match="lengths from 1 on"):
        TraceRequest(0.0, 0, 1, ())


def test_prompts_share_tokens_exactly_where_they_share_hash_ids():
    a, b = (TraceRequest(0.0, 40, 1, ids).to_request(name) for name, ids in (("0", (1, 2, 3)), ("1", (1, 2, 9))))
    assert a.prompt_token_ids[: 2 * TRACE_BLOCK] == b.prompt_token_ids[: 2 * TRACE_BLOCK]
    assert (
        a.prompt_token_ids[2 * TRACE_BLOCK :] != b.prompt_token_ids[2 * TRACE_BLOCK :] and len(a.prompt_token_ids) == 40
    )


def test_a_poisson_trace_has_its_rate_and_its_medians():
    trace = poisson_trace(4000, rate=20, input_length=100, output_length=50, max_length=5000)
    assert trace[-1].timestamp == pytest.approx(200, rel=0.05)
    assert sorted(request.input_length for request in trace)[2000] == pytest.approx(100, rel=0.05)
    assert sorted(request.output_length for request in trace)[2000] == pytest.approx(50, rel=0.05)
    assert len({name for request in trace for name in request.hash_ids}) == sum(
        len(request.hash_ids) for request in trace
    )


RECORDS = [
    RequestRecord(0.0, (1.0, 1.5, 2.0), num_prompt_tokens=10, num_cached_tokens=4),
    RequestRecord(1.0, (5.0,), num_prompt_tokens=10),
    RequestRecord(2.0, (2.5, 2.6, 4.6), num_prompt_tokens=20, num_preemptions=2),
]


def test_latencies_by_hand():
    assert [record.ttft for record in RECORDS] == [1.0, 4.0, 0.5]
    assert [record.e2e_latency for record in RECORDS] == pytest.approx([2.0, 4.0, 2.6])
    assert [record.tpot for record in RECORDS] == pytest.approx([0.5, 0.0, 1.05])
    assert RECORDS[2].inter_token_latencies == pytest.approx([0.1, 2.0])
    summed = report(RECORDS)
    assert (summed.num_requests, summed.seconds, summed.num_output_tokens, summed.num_preemptions) == (3, 5.0, 7, 2)
    assert summed.hit_rate == pytest.approx(0.1) and summed.output_tokens_per_second == pytest.approx(1.4)
    assert summed.itl.max == pytest.approx(2.0) and summed.ttft.mean == pytest.approx(5.5 / 3)
    assert report(RECORDS[1:2]).itl is None
    with pytest.raises(ValueError, match="0 finished requests"):
        report([])


def test_goodput_counts_who_got_all_that_was_promised():
    assert goodput(RECORDS, Targets(), seconds=5) == pytest.approx(0.6)
    assert goodput(RECORDS, Targets(ttft=1.0), seconds=5) == pytest.approx(0.4)
    assert goodput(RECORDS, Targets(ttft=1.0, itl=0.5), seconds=5) == pytest.approx(0.2)
    assert goodput(RECORDS, Targets(e2e=0.1), seconds=5) == 0


def test_percentiles_lie_on_the_line_between_neighbours():
    assert (
        percentile([1, 2, 3, 4], 50) == 2.5
        and percentile([5], 99) == 5
        and percentile([0, 10], 99) == pytest.approx(9.9)
    )
    assert Percentiles.of([3, 1, 2]).p50 == 2
    with pytest.raises(ValueError, match="q=101"):
        percentile([1], 101)
    with pytest.raises(ValueError, match="no value"):
        Percentiles.of([])


def test_records_of_an_llm_and_of_an_engine():
    [output] = LLM("tinyworld", device="cpu").generate("Once", use_tqdm=False)
    record = RequestRecord.of(output)
    assert len(record.token_times) == len(output.outputs[0].token_ids) and record.ttft == output.metrics.ttft
    assert record.tpot == pytest.approx(output.metrics.tpot) and record.num_prompt_tokens == len(
        output.prompt_token_ids
    )


@pytest.mark.parametrize("launches", [True, False])
def test_a_runner_around_an_engine_that_schedules_ahead_is_served(launches):
    """A recorder launches as its runner does; a wrapper that knows only `execute` is called in turn."""
    llm = LLM("tinyworld", device="cpu", async_scheduling=True, max_model_len=256)
    expected = llm.generate(["Once upon a time", "Tom"], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    clock = VirtualClock()
    llm.engine.runner = (
        StepRecorder(llm.engine.runner) if launches else UnderVirtualTime(llm.engine.runner, COST, clock)
    )
    found = llm.generate(["Once upon a time", "Tom"], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]
    if launches:
        assert len(llm.engine.runner.summaries) == len(llm.engine.runner.features) >= 12
    else:
        assert clock() > 12 * COST.per_step
