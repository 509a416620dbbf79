"""`minillm bench lora` at toy size: tokens checked first, every figure there, limits that follow from the counts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from minillm import LoRARequest, SamplingParams
from minillm.bench import lora
from minillm.model.checkpoint import load_config, resolve_model
from tests.bench.test_bench import TOY

WORKLOAD = lora.Workload("toy", adapters=3, rank=4, requests=5, prompt_tokens=6, output_tokens=4)


def test_a_mixed_batch_is_checked_and_timed_against_one_adapter_at_a_time():
    done = []
    measured = lora.run(WORKLOAD, "cpu", shapes={"toy": TOY}, on_run=done.append)
    assert json.loads(json.dumps(measured)).keys() == measured.keys() and measured["name"] == "lora-toy"
    assert len(done) == lora.num_runs(WORKLOAD)
    f = measured["figures"]
    assert f["agreeing_tokens"] == 5 * 4
    assert f["speedup"] == pytest.approx(f["tokens_per_second"]["mixed"] / f["tokens_per_second"]["one at a time"])
    limit = f["limit_tokens_per_second"]
    assert limit["none"] >= limit["one adapter"] >= limit["mixed"] >= limit["one at a time"]  # equal if compute-bound
    assert {len(seconds) for seconds in measured["samples_seconds"].values()} == {5}
    assert lora.tables(measured)


def test_requests_that_differ_in_company_are_not_timed(monkeypatch):
    real = lora.Served.run
    said = {"mixed": {0: [1, 2, 3, 4]}, "one at a time": {0: [1, 2, 3, 5]}}
    monkeypatch.setattr(lora.Served, "run", lambda self, case: said[case] if case in said else real(self, case))
    with pytest.raises(RuntimeError, match="differ between a mixed batch"):
        lora.run(WORKLOAD, "cpu", shapes={"toy": TOY})


def test_the_batches_of_every_case_hold_every_request_once():
    class Parts(lora.Served):
        def __init__(self):
            self.prompts, self.requests = [[0]] * 5, ["a", "b", "c"]

    served = Parts()
    for case in lora.CASES:
        assert sorted(index for batch in served.batches(case) for index, _ in batch) == [0, 1, 2, 3, 4]
    assert [[adapter for _, adapter in batch] for batch in served.batches("one at a time")] == [
        ["a"] * 2,
        ["b"] * 2,
        ["c"],
    ]
    assert [adapter for _, adapter in served.batches("mixed")[0]] == ["a", "b", "c", "a", "b"]
    assert {adapter for _, adapter in served.batches("one adapter")[0]} == {"a"}


def test_the_limit_of_one_adapter_at_a_time_reads_the_weights_once_for_each():
    """Where memory is the bottleneck: in each decode step the weights, and the adapters of those that run."""
    served = lora.Served.__new__(lora.Served)
    served.llm = SimpleNamespace(model=SimpleNamespace(config=load_config(resolve_model("tinyworld"))))
    served.prompts, served.params, served.adapter_bytes = [[1]] * 4, SamplingParams(max_tokens=2), 10**6
    served.requests = [LoRARequest(str(number), number, "x") for number in (1, 2)]
    ceilings = lora.measure.Ceilings(1e9, 2e9, {"float32": 1e18})
    taken = {case: served.limit_seconds(case, torch.float32, ceilings) for case in lora.CASES}
    assert taken["one adapter"] - taken["none"] == pytest.approx(1e6 / 2e9)
    assert taken["mixed"] - taken["none"] == pytest.approx(2e6 / 2e9)
    weights = served.llm.model.config.num_parameters()
    assert taken["one at a time"] - taken["mixed"] == pytest.approx(4 * weights / 2e9)
