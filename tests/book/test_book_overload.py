"""The overload of chapter 23: what is admitted is served, what is not is refused, and the gate is empty at the end."""

from __future__ import annotations

import pytest

from minillm.book.overload import offer
from minillm.engine.simulator import CostModel, simulated_engine
from minillm.engine.workload import poisson_trace, to_requests
from minillm.serving.gate import Gate

COST = CostModel(per_step=0.01, per_prefill_token=0.0002, per_decode=0.001)


def overload(limit, seed=0):
    engine = simulated_engine(COST, num_blocks=1000, max_num_seqs=8)
    gate = None if limit is None else Gate(None, limit, engine.clock)
    trace = poisson_trace(100, rate=25.0, input_length=30, output_length=20, seed=seed)
    return offer(engine, to_requests(trace), gate), gate


@pytest.mark.parametrize("seed", range(3))
def test_every_request_is_served_or_refused(seed):
    offered, gate = overload(400, seed)
    assert len(offered.admitted) + offered.num_refused == 100 and offered.num_refused > 0
    assert all(request.finish_reason == "length" for request in offered.admitted)
    assert gate.num_tokens == gate.num_requests == 0
    assert offered.within(float("inf")) == len(offered.ttft) == len(offered.admitted)


def test_without_a_gate_all_are_served_and_wait_longer():
    offered, _ = overload(None)
    assert len(offered.admitted) == 100 and offered.num_refused == 0
    assert offered.percentile(99) > 2 * overload(400)[0].percentile(99)
