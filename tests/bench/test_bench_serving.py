"""The serving benches at toy size: outputs checked first, every figure there and consistent, limits honest."""

from __future__ import annotations

import json

import pytest
import torch

from minillm.bench import serving, throughput
from minillm.model.checkpoint import load_config, resolve_model
from tests.bench.test_bench import TOY

TOY_WORKLOAD = throughput.Workload("toy", requests=5, longest=20)


def test_throughput_checks_the_outputs_and_writes_every_figure(monkeypatch):
    monkeypatch.setattr(throughput, "BATCH_SIZES", (1, 4))
    done = []
    measured = throughput.run(TOY_WORKLOAD, "cpu", shapes={"toy": TOY}, on_run=done.append)
    assert json.loads(json.dumps(measured)).keys() == measured.keys() and measured["name"] == "throughput-toy"
    assert len(done) == throughput.num_rounds(TOY_WORKLOAD, torch.device("cpu"))
    f = measured["figures"]
    assert f["agreeing_tokens"] == 5 * throughput.CHECKED_TOKENS
    assert set(f["transformers_once"]) == {f"{name}, batch {size}" for name in ("sdpa", "eager") for size in (1, 4)}
    assert f["transformers_best"] == max(f["transformers_once"], key=f["transformers_once"].get)
    assert f["speedup"] == pytest.approx(f["minillm_tokens_per_second"] / f["transformers_tokens_per_second"])
    assert f["share_of_limit"] == pytest.approx(f["minillm_tokens_per_second"] / f["limit_tokens_per_second"])
    assert sum(f["step_shares"].values()) == pytest.approx(1) and min(f["step_shares"].values()) >= 0
    assert {len(seconds) for seconds in measured["samples_seconds"].values()} == {5}
    assert throughput.tables(measured)


def test_throughput_refuses_to_time_engines_that_disagree(monkeypatch):
    monkeypatch.setattr(throughput.Ours, "greedy", lambda self, count: [[0] * count for _ in self.prompts])
    with pytest.raises(RuntimeError, match=r"disagree on .* of 80 greedy tokens"):
        throughput.run(TOY_WORKLOAD, "cpu", shapes={"toy": TOY})
    with pytest.raises(ValueError, match="shape='huge' is unknown; choose one of smollm2-135m"):
        throughput.run(throughput.Workload("huge"), "cpu")


def test_the_workload_is_the_recipes():
    prompts, lengths = throughput.Workload().lengths_and_prompts(1024)
    assert len(prompts) == len(lengths) == 16 and (prompts, lengths) == throughput.Workload().lengths_and_prompts(1024)
    assert all(16 <= n <= 256 for n in [*map(len, prompts), *lengths]) and max(map(max, prompts)) <= 1023
    assert (sum(map(len, prompts)), sum(lengths)) == (2370, 2150)


def test_the_limit_is_what_the_machine_cannot_go_under():
    config = load_config(resolve_model("tinyworld"))
    ceilings = throughput.measure.Ceilings(1e9, 2e9, {"float32": 1e12})
    # One request, one prompt token, three output tokens: two decode steps read the weights and 2 and 3 positions.
    weights, kv = config.num_parameters(), config.kv_bytes_per_token(torch.float32)
    seconds = throughput.limit_seconds(config, torch.float32, [[1]], [3], ceilings)
    assert seconds == pytest.approx(2 * weights / 1e12 + (2 * 4 * weights + (2 + 3) * kv) / 2e9)
    slow = throughput.measure.Ceilings(1e12, 1e12, {"float32": 1e6})
    assert throughput.limit_seconds(config, torch.float32, [[1]], [3], slow) == pytest.approx(3 * 2 * weights / 1e6)


def test_prefix_bench_checks_that_a_hit_changes_nothing(monkeypatch):
    measured = serving.run_prefix("tinyworld", 64, device="cpu")
    assert measured["figures"]["cached_tokens"] == 64 and measured["figures"]["outputs_checked"]
    assert measured["figures"]["speedup"] == pytest.approx(
        measured["figures"]["cold_ttft_seconds"] / measured["figures"]["warm_ttft_seconds"]
    )
    assert serving.prefix_table(measured).row_count == 2


def test_scheduler_and_simulator_benches_run(monkeypatch):
    monkeypatch.setattr(serving, "QUEUES", {"none": (0, 0), "30 waiting": (30, 0), "30 finished": (0, 30)})
    measured = serving.run_scheduler(steps=5)
    assert (
        set(measured["figures"]["step_seconds"]) == set(serving.QUEUES)
        and serving.scheduler_table(measured).row_count == 3
    )
    monkeypatch.setattr(serving, "poisson_trace", lambda n, **how: poisson(6, **how | {"output_length": 5}))
    measured = serving.run_simulator("tinyworld", device="cpu")
    assert measured["figures"]["same_steps"] and measured["figures"]["steps"] > 4
    assert serving.simulator_table(measured).row_count == 3


poisson = serving.poisson_trace
