"""`bench gpu`: parts in order, cut off at their limits with their children, what they wrote kept,
predictions compared."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tarfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from minillm import device
from minillm.bench import gpu, gpu_parts, kernel_times, measure, predictions, rehearsal, shard
from minillm.bench.case import Case
from minillm.bench.kernels import check
from minillm.bench.record import Record
from minillm.cli import app

CPU = torch.device("cpu")


@pytest.fixture
def parts(monkeypatch):
    """Puts other parts in the place of the real ones: (name, program, limit in seconds[, group])."""

    def put(*made):
        monkeypatch.setattr(
            gpu,
            "parts_of",
            lambda *args: [gpu.Part(name, ("-c", program), limit, *group) for name, program, limit, *group in made],
        )

    return put


def test_every_part_is_run_in_order_and_says_how_it_ended(tmp_path, parts):
    parts(
        ("fine", "print('well')", 30),
        ("broken", "raise SystemExit('no such thing')", 30),
        ("endless", "while True: pass", 1),
    )
    done = []
    summary = gpu.run(tmp_path, device="cpu", on_run=done.append)
    assert done == ["fine", "broken", "endless"] and summary == json.loads((tmp_path / "summary.json").read_text())
    assert [part["ended"] for part in summary["parts"].values()] == [
        "passed",
        "failed with status 1",
        "stopped after 1 s",
    ]
    assert [part["last_line"] for part in summary["parts"].values()][:2] == ["well", "no such thing"] and gpu.tables(
        summary
    )
    again = gpu.run(tmp_path, device="cpu", only=("fi",))["parts"]
    assert {name: part["ended"] for name, part in again.items()}[
        "broken"
    ] == "failed with status 1"  # what an earlier run said stays
    with pytest.raises(ValueError, match="--part huh names no part; the parts are fine, broken, endless"):
        gpu.run(tmp_path, device="cpu", only=("huh",))


HANGS = """
import subprocess, sys, time
from pathlib import Path
from minillm.bench.measure import save
from minillm.bench.record import Record
import torch
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
keep = lambda measured: save(measured, Path(FOLDER))
record = Record("hanging", "minillm bench hanging", torch.device("cpu"), {}, keep)
with record.case("first"):
    record.figures["first"] = {"seconds": 1.0}
with record.case("second"):
    print(child.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_part_that_hangs_is_ended_with_its_children_and_its_first_case_is_kept(tmp_path, parts, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.3)
    parts(("hangs", f"FOLDER = {str(tmp_path)!r}\n{HANGS}", 60), ("next", "print('went on')", 30))

    def shorten():  # the limit comes as soon as the second case has begun, however slow this machine is
        log = tmp_path / "hangs.log"
        while not (log.exists() and log.read_text().strip().isdigit()):
            time.sleep(0.05)
        clock = time.monotonic
        monkeypatch.setattr(gpu.time, "monotonic", lambda: clock() + 60)

    threading.Thread(target=shorten, daemon=True).start()
    summary = gpu.run(tmp_path, device="cpu")
    assert summary["parts"]["hangs"]["ended"] == "stopped after 60 s" and summary["parts"]["next"]["ended"] == "passed"
    assert not alive(int((tmp_path / "hangs.log").read_text()))
    [kept] = measure.load("hanging-*", tmp_path)
    assert kept["figures"] == {"first": {"seconds": 1.0}} and kept["complete"] is False
    assert kept["reason"] == summary["incomplete"]["hanging"] == "cut off during 'second'"


def test_ctrl_c_and_a_signal_to_end_leave_a_whole_summary(tmp_path, parts):
    parts(
        ("fine", "print('well')", 30), ("endless", "import time; print('on'); time.sleep(600)", 60), ("never", "", 30)
    )

    def stop_when_under_way():
        log = tmp_path / "endless.log"
        while not (log.exists() and log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_under_way, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        gpu.run(tmp_path, device="cpu", archive=tmp_path / "all.tar.gz")
    ended = {name: part["ended"] for name, part in json.loads((tmp_path / "summary.json").read_text())["parts"].items()}
    assert ended == {"fine": "passed", "endless": "interrupted", "never": "not run"}
    with tarfile.open(tmp_path / "all.tar.gz") as tar:
        assert {"summary.json", "fine.log", "endless.log"} <= set(tar.getnames())


def test_parts_of_a_group_run_at_once_and_none_beyond_the_minutes(tmp_path, parts, monkeypatch):
    meet = (
        f"import time; from pathlib import Path; here = Path({str(tmp_path)!r}); (here / '%s.here').touch()\n"
        "while not (here / '%s.here').exists(): time.sleep(0.02)"
    )
    parts(("one", meet % ("one", "two"), 60, "tests"), ("two", meet % ("two", "one"), 60, "tests"))
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 2)
    assert {part["ended"] for part in gpu.run(tmp_path, device="cpu")["parts"].values()} == {"passed"}
    late = gpu.run(tmp_path / "late", device="cpu", minutes=gpu.LEAST / 120)
    assert {part["ended"] for part in late["parts"].values()} == {"not run: no time left"}


# a record that grows


def test_a_case_that_fails_costs_only_itself_where_results_are_kept():
    kept = []
    record = Record("toy", "minillm bench toy", CPU, {}, lambda measured: kept.append(json.loads(json.dumps(measured))))
    for name in ("good", "bad", "last"):
        with record.case(name):
            if name == "bad":
                raise RuntimeError("no\n  room")
            record.figures[name] = {"seconds": 1.0}
    finished = record.finish()
    assert finished["figures"].keys() == {"good", "last"} and finished["errors"] == {"bad": "RuntimeError: no room"}
    assert finished["reason"] == "1 failed: bad" and kept[-1] == finished
    assert [one["reason"] for one in kept][:2] == ["cut off during 'good'", "cut off after 'good'"]
    with pytest.raises(RuntimeError, match="no"), Record("toy", "minillm bench toy", CPU, {}).case("bad"):
        raise RuntimeError("no room")


def test_samples_are_kept_as_they_are_taken_and_a_whole_result_has_no_reason(monkeypatch):
    kept = []
    record = Record("toy", "minillm bench toy", CPU, {}, lambda measured: kept.append(json.loads(json.dumps(measured))))
    monkeypatch.setattr("minillm.bench.record.SECONDS_BETWEEN", -1.0)
    with record.case("turns"):
        record.interleave({"a": lambda: 1.0, "b": lambda: 2.0}, 5, "turns/")
    assert [len(one["samples_seconds"].get("turns/a", [])) for one in kept] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        5,
    ]
    assert "complete" not in record.finish() and kept[-1]["samples_seconds"] == {
        "turns/a": [1.0] * 5,
        "turns/b": [2.0] * 5,
    }


def test_a_peer_that_does_not_run_here_is_named_and_ours_has_to():
    def fails(x):
        raise NotImplementedError("not on this device")

    case = Case(
        "doubling", lambda: (torch.ones(3),), {"minillm": lambda x: x * 2, "cuDNN": fails, "torch": lambda x: x + x}, 24
    )
    assert check(case, CPU) == {"cuDNN": "NotImplementedError: not on this device"}
    case.candidates["minillm"] = fails
    with pytest.raises(NotImplementedError):
        check(case, CPU)


# predictions


def test_the_committed_predictions_are_those_the_command_computes():
    committed = predictions.committed("NVIDIA H200")
    assert committed == [
        predictions.Prediction(**json.loads(json.dumps(one.__dict__)) | {"figure": one.figure})
        for one in predictions.predict(predictions.gpu_of("H200"))
    ]
    assert all(0 <= one.low < one.high < math.inf and one.formula and one.why for one in committed)
    results = {f"kernels-bfloat16-{family}" for family in gpu_parts.FAMILIES} | {
        f"step-{shape}-bfloat16-batch-{batch}" for shape, batch in gpu_parts.STEPS
    }
    assert results <= {one.result for one in committed}


def test_a_decode_step_is_predicted_from_its_bytes_and_launches():
    """Qwen3-0.6B: 596 M weights and 96 tokens of 114,688 bytes, at 4.8 TB/s;
    265 launches were counted without a GPU."""
    from minillm.bench import predicted

    low, high, inputs = predicted.step_seconds(predictions.gpu_of("H200"), "qwen3-0.6b", 1)
    assert inputs["bytes"] == 2 * 596_049_920 + 96 * 114_688 and inputs["launches"][0] < 265 < inputs["launches"][1]
    assert low == pytest.approx(inputs["bytes"] / 4.8e12 / 0.92 + inputs["launches"][0] * 0.8e-6)
    assert low < 0.25e-3 / 0.35 < high  # the goal, 35% of the bandwidth


def test_measured_figures_are_set_beside_the_predicted():
    one = predictions.Prediction(
        "step-toy", ("figures", "rungs", "+ scheduled*", "step_seconds"), "s", 1.0, 4.0, "f", {}, "w"
    )
    absent = predictions.Prediction("step-toy", ("figures", "nothing"), "s", 1.0, 4.0, "f", {}, "w")
    results = [{"name": "step-toy", "figures": {"rungs": {"+ scheduled ahead": {"step_seconds": 6.0}}}}]
    [found] = predictions.compare([one, absent], results)
    assert found["ratio"] == 3.0 and not found["inside"] and found["measured"] == 6.0 and predictions.tables([found])
    assert predictions.compare([one], []) == [] == predictions.tables([])


@pytest.mark.parametrize(
    "name, message",
    [("RTX 4090", "'RTX 4090' is not among.*T4, A100, L4, H100, H200"), ("Tesla T4", "'T4' has no bfloat16")],
)
def test_a_gpu_without_a_data_sheet_is_refused_by_name(name, message):
    with pytest.raises(ValueError, match=message):
        predictions.result(name, "minillm bench predict")
    assert predictions.committed(name) == []


# what is measured on a GPU, without one


def test_kernels_are_sorted_into_the_parts_of_a_step():
    event = lambda name, us, kind="DeviceType.CUDA": SimpleNamespace(
        name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: us)
    )
    events = [
        event("paged_decode_kernel", 30.0),
        event("merge_kernel", 10.0),
        event("nvjet_tst_64x8", 200.0),
        event("add_rms_norm_kernel", 20.0),
        event("silu_mul_kernel", 20.0),
        event("rotate_and_store_kernel", 10.0),
        event("nvjet_tst_64x8", 100.0),
        event("Memcpy HtoD", 5.0),
        event("draw_kernel", 5.0),
        event("aten::mm", 999.0, "DeviceType.CPU"),
        event("puzzling", 100.0),
    ]
    wall, kernels = kernel_times.wall_and_kernels(lambda: None, profile=lambda run: kernel_times.kernels_of(events))
    assert next(kernel.count for kernel in kernels if kernel.name == "nvjet_tst_64x8") == 2 and wall > 0
    spent = kernel_times.by_part(kernels, 1e-3, num_tokens=10)
    assert {part: round(1e6 * seconds, 3) for part, seconds in spent.items()} == {
        "attention": 4.0,
        "matrix products": 30.0,
        "norms": 2.0,
        "element-wise": 2.0,
        "rotation, writing of keys and values": 1.0,
        "copies": 0.5,
        "sampling": 0.5,
        "other kernels": 10.0,
        "gaps and the host": 50.0,
    }


def test_a_ceiling_of_a_gpu_is_timed_over_twenty_milliseconds_of_its_own_clock(monkeypatch):
    now, most_calls = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)

    def copy():  # 125 µs on the device
        now[0] += 125e-6
        most_calls.append(1)

    taken = device.seconds_on_gpu(copy, repeats=5)
    assert taken == [pytest.approx(125e-6)] * 5
    assert len(most_calls) >= 5 * 160  # of 20 ms each
    assert measure.megabytes_to_read(2**20, torch.device("cuda")) >= 1024


def test_what_a_step_costs_speculation_is_measured_on_the_steps_that_the_engine_replays():
    """On a clock of our own: a replay takes 0.1 s a row, an eager step 5 s whatever it does,
    as where launches decide."""
    from minillm.engine.drafting import measure_steps

    now, filled = [0.0], []

    def passes(seconds: float) -> None:
        now[0] += seconds

    graphs = SimpleNamespace(
        sizes=[1, 2, 4, 16],
        block_size=16,
        batches={size: size for size in (1, 2, 4, 16)},
        inputs=SimpleNamespace(pad=filled.append),
        run=lambda size: passes(0.1 * size),
    )
    runner = SimpleNamespace(
        graphs=graphs, attention=None, model=SimpleNamespace(device=CPU, forward=lambda batch, attention: passes(5.0))
    )
    cost = measure_steps(runner, 32, clock=lambda: now[0])
    assert {size: round(float(cost(size)), 6) for size in (1, 2, 4, 8, 16, 32)} == {
        1: 0.1,
        2: 0.2,
        4: 0.4,
        8: 1.6,
        16: 1.6,
        32: 5.0,
    }
    assert set(filled) == {1, 2, 4, 16}  # all of it padding
    runner.graphs = None
    assert float(measure_steps(runner, 4, clock=lambda: now[0])(1)) == 5.0


def test_the_rehearsal_counts_what_a_step_asks_for():
    measured = rehearsal.run("cpu", scenarios={"n-gram": rehearsal.SCENARIOS["n-gram"]})
    found = measured["figures"]["n-gram"]
    assert (
        found["steps"] >= 4
        and found["operations_a_step"] > 0
        and found["waits_a_step"] == 0
        and rehearsal.tables(measured)
    )


def test_every_scenario_of_the_rehearsal_is_one_that_the_engine_takes():
    from minillm import SamplingParams
    from minillm.engine.config import EngineConfig

    for settings, wishes in rehearsal.SCENARIOS.values():
        EngineConfig("tinyworld", **settings)
        SamplingParams(**wishes)


# the real parts


def test_shards_hold_every_test_once():
    items = [SimpleNamespace(nodeid=f"tests/test_x.py::test_{i}") for i in range(100)]
    held = []
    for index in range(1, 5):
        mine, dropped = list(items), []
        config = SimpleNamespace(
            getoption=lambda name, index=index: f"{index}/4",
            hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)),
        )
        shard.pytest_collection_modifyitems(config, mine)
        assert len(mine) + len(dropped) == 100 and 10 < len(mine) < 40
        held += [item.nodeid for item in mine]
    assert sorted(held) == sorted(item.nodeid for item in items)
    with pytest.raises(ValueError, match="'5/4' is not K/N"):
        shard.parse("5/4")


def test_every_part_of_the_real_run_exists(tmp_path):
    """The commands of the real run, with an option too many: one that was renamed would only be found on a GPU."""
    made = gpu.parts_of(tmp_path)
    names = [part.name for part in made]
    assert (
        names[:3] == ["describe", "rehearsal", "tests-kernels-1"]
        and names[-1] == "notebooks-5"
        and len(set(names)) == len(names)
    )
    assert (
        names.index("kernels-prefill")
        < names.index("throughput-qwen3-0.6b")
        < names.index("decode")
        < names.index("bits")
        < names.index("structured")
    )
    assert all(part.seconds <= 480 for part in made)
    for part in made:
        if "bench" in part.command:
            arguments = list(part.command[part.command.index("bench") :])
            result = CliRunner().invoke(app, [*arguments, "--no-such-option"])
            assert "No such option: --no-such-option" in " ".join(result.output.split()), (part.name, result.output)
        for argument in part.command:
            if argument.endswith(".py"):
                assert gpu_parts.Path(argument).is_file(), argument
    listed = CliRunner().invoke(
        app, ["bench", "gpu", "--out", str(tmp_path), "--list", "--part", "kernels", "--part", "kv"]
    )
    assert (
        listed.exit_code == 0
        and "kernels-kv8" in listed.output
        and "decode" not in listed.output.replace("kernels-decode", "")
    )
