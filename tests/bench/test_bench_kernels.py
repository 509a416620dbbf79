"""`bench step`, `bench kernels` and `bench gpu` at toy size: what they check, count and write;
never how long it takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from minillm.bench import gpu, kernel_cases, kernels, step, switches
from minillm.kernels import native
from minillm.kernels.language import MODE
from minillm.model import layers
from tests.bench.test_bench import TOY

CPU = torch.device("cpu")
WIDE = replace(TOY, head_dim=16)  # the smallest heads that the Triton kernels take
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
interpreted = pytest.mark.skipif(MODE != "interpreted", reason="this machine compiles the kernels")


@needs_compiler
def test_every_rung_of_the_step_says_the_same_and_asks_torch_for_less():
    rungs = tuple(rung for rung in step.CPU_RUNGS if not rung.compiled)
    workload, done = step.Workload("toy", prompt_tokens=5, output_tokens=6), []
    measured = step.run(workload, "cpu", shapes={"toy": TOY}, rungs=rungs, on_run=done.append)
    found = measured["figures"]["rungs"]
    assert list(found) == [rung.name for rung in rungs] and len(done) == 5 * (1 + 6)
    assert all(figures["agreeing_tokens"] == 6 for figures in found.values())
    plain, _packed, ours, whole, joined = (figures["torch_operations_a_step"] for figures in found.values())
    assert plain > 2 * whole and ours > whole > joined and whole < 30
    assert next(iter(found.values()))["times_first"] == 1.0
    assert all(len(seconds) == 5 for seconds in measured["samples_seconds"].values())
    assert measured["name"] == "step-toy-float32-batch-1" and json.dumps(measured) and step.tables(measured)


def test_the_switches_are_back_afterwards():
    with switches.switched_off(("C kernels", "packed weights", "whole layers")):
        assert native.library() is None
    assert native.library() is native.library() and layers.can_pack is not switches.SWITCHES["packed weights"][2]


def test_a_compiled_rung_computes_the_same(tmp_path):
    from minillm import LLM, SamplingParams
    from minillm.bench import decode

    path = decode.write_random_checkpoint(TOY, tmp_path / "toy")
    params, said = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), []
    for compiled in (False, True):
        with switches.switched_off(("C kernels",)):
            llm = LLM(str(path), attention_backend="torch", num_kv_blocks=8)
            if compiled:
                step.compile_parts(llm)
            said.append(llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert said[0] == said[1]


@interpreted
def test_the_gpu_rungs_say_the_same_interpreted():
    rungs = tuple(replace(rung, name=rung.name) for rung in step.GPU_RUNGS)
    measured = step.run(
        step.Workload("toy", prompt_tokens=3, output_tokens=3), "cpu", shapes={"toy": WIDE}, rungs=rungs
    )
    assert list(measured["figures"]["rungs"]) == ["torch", "+ Triton kernels", "+ CUDA graphs", "+ scheduled ahead"]


@interpreted
def test_every_triton_case_is_right_at_toy_size():
    """Each case of each family once; the timing itself is `measure.interleave`, tested elsewhere."""
    cases = kernel_cases.cases_of(kernel_cases.FAMILIES["cuda"], 64, CPU, torch.float32)
    assert {case.name.split()[0] for case in cases} == {
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "matmul",
        "causal",
        "paged",
        "W4A16",
        "W8A8",
        "latent",
    }
    for case in cases:
        kernels.check(case, CPU)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpus_kernels_are_measured(dtype):
    measured = kernels.run(kernels.Workload(dtype=dtype, scale=64), "cpu")
    assert measured["name"] == f"kernels-{dtype}" and len(measured["figures"]) == 14
    for figures in measured["figures"].values():
        ours = next(iter(figures["candidates"].values()))
        assert ours["minillm_speedup"] == 1.0 and figures["limit_seconds"] > 0
    assert kernels.tables(measured)


def test_a_candidate_that_is_wrong_is_not_timed():
    case = kernels.Case(
        "doubling", lambda: (torch.ones(3),), {"minillm": lambda x: x * 2.1, "torch": lambda x: x * 2}, 24
    )
    with pytest.raises(RuntimeError, match=r"doubling: minillm is 5.0e-02 from the reference"):
        kernels.check(case, CPU)


@pytest.mark.parametrize(
    "families, message", [(("nothing",), "are unknown"), (("prefill",), "need a GPU, or the interpreter")]
)
def test_families_that_cannot_be_run_are_refused(families, message):
    with pytest.raises(ValueError, match=message):
        kernel_cases.cases_of(families, 1, CPU, torch.float32)


@interpreted
def test_the_gpu_command_at_toy_size(tmp_path):
    summary = gpu.run(tmp_path, toy=True, device="cpu", only=("describe", "kernels"))
    assert {part["ended"] for part in summary["parts"].values()} == {"passed"}, summary
    assert len(list(tmp_path.glob("kernels-float32-*.json"))) == 1
