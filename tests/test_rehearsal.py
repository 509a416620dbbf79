"""The engine on a pretended GPU, in a process of its own: `tests/rehearsal` says what is real of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.rehearsal import device
from tests.rehearsal.expected import FACTS, LAUNCHES, VARIANTS, drawn, expected, played

PLAYED = [(gpu, name) for gpu in device.GPUS for name in played(gpu)]
reason = device.missing() or (None if importlib.util.find_spec("triton") else "Triton is not installed here")
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope="module")
def reports(root) -> dict[tuple[str, str], dict]:
    """What every scenario came to."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal", "--json", "--toys", "--gpu", *device.GPUS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    return {(report["gpu"], report["name"]): report | {"stderr": done.stderr} for report in found}


@pytest.mark.parametrize("gpu, name", PLAYED)
def test_a_scenario_ends_and_the_host_waits_for_nothing_else(reports, gpu, name):
    assert (gpu, name) in reports, "its process ended before"
    report = reports[gpu, name]
    assert report["error"] is None
    assert report["faults"] == []
    assert report["facts"].get("made up", True), "a token was read before it had arrived"
    allowed = expected(gpu, name)
    off = {
        figure
        for figure in {*report["figures"], *allowed}
        if report["figures"].get(figure, 0) != allowed.get(figure, 0)
    }
    seen = "\n".join(line for figure in sorted(off) for line in report["waits"].get(figure, ()))
    assert report["figures"] == allowed, (
        f"adjust tests/rehearsal/expected.py if this is better, mend the engine if not:\n{seen}"
    )


@pytest.mark.parametrize("gpu, name", [(gpu, name) for gpu in device.GPUS for name in drawn(gpu)])
def test_knobs_drawn_by_chance_raise_nothing_wait_for_nothing_and_compile_nothing(reports, gpu, name):
    """`python -m tests.rehearsal --random 300` draws more."""
    report = reports[gpu, name]
    assert report["error"] is None
    assert report["faults"] == []
    assert report["facts"]["made up"], "a token was read before it had arrived"
    assert set(report["figures"]) <= {"between"}, report["waits"]  # drafts, and the disk


@pytest.mark.parametrize("name", FACTS)
def test_memory_is_what_was_counted(reports, name):
    facts = reports["H200", name]["facts"]
    assert {fact: facts.get(fact) for fact in FACTS[name]} == FACTS[name]


def test_what_a_recorded_step_launches(reports):
    """Whatever its size."""
    graphs = reports["H200", "Qwen3-0.6B"]["graphs"]
    steps = [graph for graph in graphs if graph.get("triton paged_decode_kernel") == 28]
    assert len(steps) > 15
    assert [step for step in steps if step != LAUNCHES] == []


def test_few_variants_of_a_kernel_are_compiled(reports):
    found: dict[str, int] = {}
    for (_, name), report in reports.items():
        for kernel, count in report["variants"].items() if not name.startswith(("toy", "random")) else ():
            found[kernel] = max(found.get(kernel, 0), count)
    assert found == VARIANTS


def test_the_rehearsal_sees_what_is_wrong(reports):
    toys = {name: report["facts"] for (_, name), report in reports.items() if name.startswith("toy")}
    assert len(toys) == 17
    assert {name: facts["said"] for name, facts in toys.items() if not facts["seen"]} == {}
