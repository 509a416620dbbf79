"""The throughput workload beside busy processes: they are there while it runs, and never afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.bench import beside, throughput

WORKLOAD = throughput.Workload(requests=3, shortest=4, longest=16)


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """Every process that was started, in order."""
    processes, popen = [], subprocess.Popen

    def start(*args, **settings):
        processes.append(popen(*args, **settings))
        return processes[-1]

    monkeypatch.setattr(beside.subprocess, "Popen", start)
    monkeypatch.setattr(beside, "SETTLE", 0.0)
    yield processes
    for process in processes:
        process.kill(), process.wait()


@pytest.fixture
def workload_of(monkeypatch, started):
    """Puts a workload in minillm's place that notes how many busy processes there are in each run."""

    def replace(fail: BaseException | None = None) -> list[int]:
        seen: list[int] = []

        class Ours:
            def __init__(self, path, workload, device, prompts, lengths):
                assert len(prompts) == len(lengths) == workload.requests

            def run(self):
                seen.append(sum(process.poll() is None for process in started))
                if fail is not None and seen[-1]:
                    raise fail

        monkeypatch.setattr(throughput, "Ours", Ours)
        return seen

    return replace


def all_gone(started: list[subprocess.Popen]) -> bool:
    return all(process.returncode is not None for process in started)


def test_busy_processes_are_there_in_every_second_run_and_gone_afterwards(workload_of, started):
    seen, done = workload_of(), []
    measured = beside.run(WORKLOAD, 2, "cpu", on_run=done.append)
    assert seen == [0, 2] * (WORKLOAD.repeats + 1) and len(started) == 2 * (WORKLOAD.repeats + 1)
    assert all_gone(started) and done == ["alone", "beside"] * (WORKLOAD.repeats + 1)
    assert len(done) == beside.num_rounds(WORKLOAD)
    assert json.loads(json.dumps(measured)) == measured and measured["name"] == "throughput-tinyworld-beside-2"
    assert measured["workload"]["beside"] == 2 and "goal_met" not in measured["figures"]
    assert {name: len(times) for name, times in measured["samples_seconds"].items()} == {"alone": 5, "beside": 5}


@pytest.mark.parametrize("error", [RuntimeError("the engine failed"), KeyboardInterrupt()], ids=repr)
def test_no_busy_process_outlives_a_run_that_fails(workload_of, started, error):
    seen = workload_of(error)
    with pytest.raises(type(error)):
        beside.run(WORKLOAD, 3, "cpu")
    assert seen == [0, 3] and len(started) == 3 and all_gone(started)


def test_a_process_that_cannot_start_ends_those_before_it(monkeypatch, started):
    recorded = beside.subprocess.Popen

    def start(*args, **settings):
        if len(started) == 2:
            raise OSError("no more processes")
        return recorded(*args, **settings)

    monkeypatch.setattr(beside.subprocess, "Popen", start)
    with pytest.raises(OSError, match="no more processes"), beside.busy_processes(3):
        pytest.fail("not all of them are busy")
    assert len(started) == 2 and all_gone(started)


def test_a_process_that_ends_at_once_is_named(monkeypatch, started):
    monkeypatch.setattr(beside, "SPIN", "raise SystemExit(7)")
    with pytest.raises(RuntimeError, match="ended before its work began, with status 7"), beside.busy_processes(1):
        pytest.fail("none of them is busy")
    assert all_gone(started)


def test_a_busy_process_ends_by_itself_where_its_parent_was_killed():
    """It holds the other end of stderr, which is read to its end here."""
    killed = (
        "import os, signal\nfrom minillm.bench.beside import busy_processes\n"
        "with busy_processes(1):\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", killed], stderr=subprocess.PIPE, timeout=300)
    assert ended.returncode == -9 and not ended.stderr


@pytest.mark.parametrize("slower, met", [(2.5, True), (2.6, False)])
def test_the_goal_is_for_one_process(workload_of, monkeypatch, slower, met):
    """A clock that only the workload moves."""
    seen, now = workload_of(), [0.0]
    run = throughput.Ours.run

    def spend(self):
        run(self)
        now[0] += slower if seen[-1] else 1.0

    monkeypatch.setattr(throughput.Ours, "run", spend)
    monkeypatch.setattr(beside.time, "perf_counter", lambda: now[0])
    measured = beside.run(WORKLOAD, 1, "cpu")
    f = measured["figures"]
    assert f["goal_met"] is met and f["times_slower"] == pytest.approx(slower)
    assert f["alone_tokens_per_second"] == f["output_tokens"]
    assert f["beside_tokens_per_second"] == pytest.approx(f["output_tokens"] / slower)
    [table] = beside.tables(measured)
    assert ("is met" in table.caption) is met


def test_less_than_one_process_is_refused():
    with pytest.raises(ValueError, match="beside=0 is no busy process; take 1 at least"):
        beside.run(WORKLOAD, 0, "cpu")


def test_the_command_saves_the_result(workload_of, tmp_path):
    workload_of()
    command = "bench throughput --beside 1 --requests 3 --shortest 4 --longest 16 --device cpu --save"
    result = CliRunner().invoke(cli.app, [*command.split(), str(tmp_path)])
    assert result.exit_code == 0, result.output
    [path] = tmp_path.glob("throughput-tinyworld-beside-1-*.json")
    assert json.loads(path.read_text())["figures"]["goal_times_slower"] == beside.GOAL
