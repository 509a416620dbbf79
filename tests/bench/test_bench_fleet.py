"""`minillm bench fleet-sim` at toy size: its parts, its file, and the experiments of the papers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from minillm.bench.fleet import papers
from minillm.bench.fleet.run import CHECKS, Workload, check, num_cases, run, tables
from minillm.cli import app


def test_the_command_writes_what_it_simulated(tmp_path):
    command = "bench fleet-sim --only scale --requests 300 --replicas 6 --policy prefix_aware --save".split()
    result = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert result.exit_code == 0, result.output
    [file] = tmp_path.glob("fleet-sim-*.json")
    measured = json.loads(file.read_text())
    [figures] = measured["figures"]["scale"].values()
    assert figures["num_requests"] == 300 and figures["num_events"] > 300 and figures["seconds_to_simulate"] > 0
    assert "complete" not in measured and "300 requests" in result.output
    wrong = CliRunner().invoke(app, ["bench", "fleet-sim", "--only", "size"])
    assert wrong.exit_code == 1 and "parts=size is unknown" in wrong.output


def test_one_replica_in_a_hundred_fails_in_the_large_run():
    workload = Workload(requests=2_000, replicas=200, parts=("scale",), policies=("power_of_two",))
    measured = run(workload)
    figures = measured["figures"]["scale"]["power_of_two"]
    assert 0 < figures["num_failures"] < 10 and figures["num_requests"] == 2_000
    assert num_cases(workload) == 1 and len(tables(measured)) == 1


@pytest.mark.parametrize("name", ["light load", "small memory"])
def test_the_coarse_models_error_is_small(name):
    found = check(name)
    errors = found["errors"]
    assert max(abs(errors[what]) for what in ("tpot P50", "tpot P99", "e2e P50", "e2e P99", "seconds")) < 0.15
    assert found["speedup"] > 3 and name in CHECKS


def test_a_workload_names_what_is_wrong():
    with pytest.raises(ValueError, match="papers=orca is unknown; choose from distserve, llumnix, mooncake, preble"):
        Workload(papers=("orca",))
    with pytest.raises(ValueError, match="rate=0"):
        Workload(rate=0)


def test_the_largest_rate_is_found():
    assert papers.largest_rate(lambda rate: rate <= 3.7, 0, 10, probes=20) == pytest.approx(3.7, abs=1e-4)
    assert papers.largest_rate(lambda rate: False, 0.5, 10) == 0.5


def test_the_experiments_of_the_papers_run_at_toy_size():
    found = papers.llumnix(rates=(18,), count=300)
    assert (
        set(found) >= {"reported", "found", "why", "source"} and found["runs"]["18/s"]["round robin"]["num_moves"] == 0
    )
    prefix = papers.preble(count=200, loads=(0.6,))
    assert prefix["found"]["latency mean"][0] > 0 and len(prefix["runs"]) == 3
    rates = papers.mooncake(num_replicas=5, count=60, kinds=("synthetic",))["found"]["synthetic"]
    assert rates["ratio"] > 0 and len(rates["rates"]) == 6
    spec = papers.roofline(papers.OPT_13B, "A100", 80e9, enable_chunked_prefill=False, max_num_batched_tokens=2560)
    example = papers.distserve(spec)
    assert example["found"]["ratio"] > 1 and example["found"]["colocated"] <= example["found"]["colocated, TPOT"]
