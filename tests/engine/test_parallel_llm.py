"""An LLM in several processes generates the tokens of an LLM in one, whatever else it is told to do."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm import LLM, LoRARequest, SamplingParams
from minillm.book.roads.check import RoadCheck
from minillm.book.roads.models import adapter_folder, config_of, write_models
from minillm.engine.distributed.board import state_of
from minillm.engine.distributed.group import WorkerError
from minillm.parallel.communicator import Traffic
from minillm.parallel.traffic import step_traffic

SPLITS = [(2, 1), (4, 1), (1, 2), (2, 2)]
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9] * 4, [20, 21], [33] * 9, [40, 41, 42])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=7, min_p=0.02, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
]
REST = [  # what all logits are gathered for
    SamplingParams(temperature=1.0, seed=5, top_p=0.8, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, n=2, repetition_penalty=1.3, logit_bias={9: 2.0}, max_tokens=8),
    SamplingParams(temperature=1.0, seed=7, structured_outputs={"regex": "[ab]{3}c[de]+"}, max_tokens=8),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def settings(models: Path, model: str = "llama", **more) -> dict:
    return dict(model=models / model, device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=60) | more


def tokens(outputs) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return state_of(pid) != "Z"  # one that has ended, and that its parent has not asked about


def add_numbers(worker, first, second=0):
    return worker.layout.rank + first + second


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_same_tokens_and_as_many_bytes_as_the_formula_says(models, split):
    plain = LLM(**settings(models))
    expected = [tokens(plain.generate(PROMPTS, params, use_tqdm=False)) for params in (PARAMS, REST)]
    sizes = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), split))
    with LLM(**settings(models), **sizes) as llm:
        outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (PARAMS, REST)]
        assert [tokens(one) for one in outputs] == expected
        for row, wanted in zip(outputs[1][1].outputs[0].logprobs, expected):
            assert len(row) >= 3 and wanted
        llm.engine.executor.collective("take_traffic")
        for params, draw in ((PARAMS[0], {}), (PARAMS[1], {"draw": "temperature"}), (REST[0], {"draw": "gathered"})):
            count_a_prompt_and_a_step(llm, split, params, draw)
        pids = list(llm.model.workers.pids)
        assert len(pids) == split[0] * split[1] == llm.get_world_size()
        assert llm.collective_rpc(add_numbers, args=(10,), kwargs={"second": 5}) == [15 + r for r in range(len(pids))]
    assert not any(map(is_running, pids))


def count_a_prompt_and_a_step(llm: LLM, split: tuple[int, int], params: SamplingParams, draw: dict) -> None:
    """Every message of a prompt of 7 tokens and of the step behind it, on every rank."""
    llm.reset_prefix_cache()
    params = params.clone()
    params.max_tokens = 2
    llm.generate([{"prompt_token_ids": [50, 51, 52, 53, 54, 55, 56]}], params, use_tqdm=False)
    counted: list[Traffic] = llm.engine.executor.collective("take_traffic")
    for rank, of_rank in enumerate(counted):
        wanted = Traffic()
        for num_tokens in (7, 1):
            step = step_traffic(config_of("llama"), *split, num_tokens, 1, rank=rank, **draw)
            wanted.messages += step.messages
            wanted.bytes += step.bytes
        assert of_rank.as_dict() == wanted.as_dict(), (split, rank)


def test_random_settings_in_several_processes():
    """`minillm check --roads 1000 --parallel` tries more."""
    with RoadCheck() as check:
        report = check.run(8, 7000, parallel=True)
    assert not report.faults, report.faults[0]
    assert report.counts["split over processes"] >= 5


def test_a_step_launched_ahead_and_stages_that_work_at_once(models):
    """`async_scheduling` with tensor parallel; in a pipeline, no request is in two steps under way."""
    plain = tokens(LLM(**settings(models)).generate(PROMPTS, PARAMS, use_tqdm=False))
    with LLM(**settings(models), tensor_parallel_size=2, async_scheduling=True) as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    with LLM(**settings(models), pipeline_parallel_size=2) as llm:
        most, launch = 0, llm.engine.executor.launch

        def watched(output):
            nonlocal most
            under_way = [{row.request_id for row in other.rows if row.samples} for other, _ in llm.engine.flying]
            assert all(ids.isdisjoint(row.request_id for row in output.rows) for ids in under_way)
            most = max(most, 1 + len(under_way))
            return launch(output)

        llm.engine.executor.launch = watched
        assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
        assert most == 2


def test_adapters_beams_embeddings_and_sleep(models):
    where = adapter_folder(models, "llama", "whole")
    asked = [LoRARequest("whole", 1, where), None, LoRARequest("low", 2, where.with_name("low")), None]
    made = []
    for sizes in ({}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
        with LLM(**settings(models), **sizes, enable_lora=True, max_loras=2) as llm:
            made.append([tokens(llm.generate(PROMPTS, PARAMS, lora_request=asked, use_tqdm=False))])
            beams = llm.beam_search(PROMPTS[:1], beam_width=2, max_tokens=4)[0]
            made[-1].append([beam.token_ids for beam in beams.outputs] if hasattr(beams, "outputs") else beams)
            vector = llm.embed([PROMPTS[0]], use_tqdm=False)[0].outputs.embedding
            made[-1].append([round(value, 4) for value in vector])
            llm.sleep(1)
            llm.wake_up()
            llm.sleep(2)
            llm.wake_up()
            made[-1].append(tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)))
    assert made[0] == made[1]


def test_the_same_workers_as_ray_actors(models):
    pytest.importorskip("ray")
    expected = tokens(LLM(**settings(models)).generate(PROMPTS, PARAMS, use_tqdm=False))
    with LLM(**settings(models), tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        pids = llm.model.workers.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=f"rank 1 of 2 .Ray actor, pid {pids[1]}.") as raised:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert raised.value.rank == 1


REFUSED = [
    ({"disk_kv_path": "kv", "disk_kv_bytes": 10**6, "host_kv_bytes": 10**6}, NotImplementedError, "disk_kv_path"),
    ({"quantization": "smoothquant"}, NotImplementedError, "activations rounded to int8"),
    ({"quantization": {"name": "gptq", "act_order": True}}, NotImplementedError, "act_order=True"),
    ({"tensor_parallel_size": 3}, ValueError, "tensor_parallel_size=3 does not divide"),
]


@pytest.mark.parametrize("more, error, said", REFUSED, ids=str)
def test_what_is_not_served_is_refused_when_the_llm_is_made(models, more, error, said):
    with pytest.raises(error, match=said):
        LLM(**settings(models) | {"tensor_parallel_size": 2} | more)


def test_a_function_that_cannot_be_sent_is_refused_and_others_are_served(models):
    with LLM(**settings(models), tensor_parallel_size=2) as llm:
        with pytest.raises(ValueError, match="cannot be sent to the workers"):
            llm.generate(PROMPTS[0], SamplingParams(logits_processors=[lambda ids, logits: logits]), use_tqdm=False)
        with pytest.raises(NotImplementedError, match="2 workers: each has a part of every block"):
            llm.save_prefix_cache("somewhere")
        assert len(llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_an_llm_that_is_let_go_leaves_no_process(models):
    llm = LLM(**settings(models), tensor_parallel_size=2)
    pids, folder = list(llm.model.workers.pids), llm.model.workers.folder
    del llm
    gc.collect()
    assert not any(map(is_running, pids)) and not Path(folder).exists()


PROGRAM = """
import faulthandler, os, signal, sys, threading, time
faulthandler.dump_traceback_later(100, exit=True)  # where it stands, should it hang
from minillm import LLM, SamplingParams
llm = LLM({model!r}, device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=60, tensor_parallel_size=2)
print(*llm.model.workers.pids, llm.model.workers._zygote.process.pid, flush=True)
{then}
"""
ENDS = {
    "by SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "by Ctrl-C in a step": (
        "def interrupt():\\n"
        "    for pause in (0.3, 30.0, 30.0):\\n"  # an interrupt that falls into a callback of the collector is lost
        "        time.sleep(pause), os.kill(os.getpid(), signal.SIGINT)\\n"
        "threading.Thread(target=interrupt, daemon=True).start()\\n"
        "while True:\\n    llm.generate('a', SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)"
    ).replace("\\n", chr(10)),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_leaves_no_process(models, end):
    """And a script needs no `if __name__ == "__main__"`: the workers do not run it."""
    program = PROGRAM.format(model=str(models / "llama"), then=ENDS[end])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))
