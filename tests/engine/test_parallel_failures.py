"""A worker that dies, stops or fails is named by an error within seconds, and nothing of the LLM is left.

MINILLM_KILLS=100 in the environment fails so many workers instead of 10.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.book.roads.models import write_models
from minillm.engine.distributed.group import WorkerError
from tests.engine.test_parallel_llm import is_running

KILLS = int(os.environ.get("MINILLM_KILLS", "10"))
LONG = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
SETTINGS = dict(device="cpu", dtype="float32", kv_retention={"sinks": 2, "window": 60}, max_model_len=5000)
WAYS = ("SIGKILL", "SIGSTOP", "exception", "SIGKILL between steps")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder / "llama"


def fail_soon(worker, rank: int) -> None:
    """Let the forward pass of one rank raise."""
    if worker.layout.rank == rank:
        worker.runner.forward = fail


def fail(*arguments):
    raise MemoryError("no memory for this step")


@pytest.mark.parametrize("number", range(KILLS))
def test_a_worker_that_fails_is_named_and_nothing_is_left(model, number):
    rng = random.Random(number)
    split = rng.choice([(2, 1), (1, 2), (2, 2)])
    way, rank = WAYS[number % len(WAYS)], rng.randrange(split[0] * split[1])
    sizes = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), split))
    llm = LLM(**SETTINGS, model=model, **sizes)
    pids, folder = list(llm.model.workers.pids), llm.model.workers.folder
    failed: list[float] = []

    def strike():
        failed.append(time.monotonic())
        os.kill(pids[rank], getattr(signal, way.split()[0]))

    if way == "exception":
        llm.collective_rpc(fail_soon, args=(rank,))
        failed.append(time.monotonic())
    elif way == "SIGKILL between steps":
        llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)
        strike()
    else:
        threading.Timer(rng.uniform(0.0, 0.3), strike).start()
    with pytest.raises(WorkerError) as raised:
        llm.generate(["the cat", "a"], LONG, use_tqdm=False)
    took, error = time.monotonic() - failed[0], raised.value
    assert (error.rank, error.pid) == (rank, pids[rank])
    assert f"rank {rank} of {len(pids)}" in str(error) and str(error.pid) in str(error)
    assert way.split()[0] in error.cause or ("no memory for this step" in error.cause and "MemoryError" in error.cause)
    assert took < 5 + 10 * ("PYTEST_XDIST_WORKER" in os.environ), f"{way} was told after {took:.1f} s"
    assert not any(map(is_running, pids)) and not Path(folder).exists()
    with pytest.raises(RuntimeError, match=f"rank {rank} of"):
        llm.generate("a", use_tqdm=False)
    llm.close()


def test_requests_of_others_end_with_the_same_error(model):
    llm = LLM(model, device="cpu", dtype="float32", max_model_len=200, tensor_parallel_size=2, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    sinks = [llm.submit(prompt, params) for prompt in ("a", "the cat")]
    llm.step()
    os.kill(llm.model.workers.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError):
        for _ in range(100):
            llm.step()
    assert all(sink.is_finished and isinstance(sink.error, WorkerError) for sink in sinks)


@pytest.fixture
def interruptible():
    """Programs that a shell starts in the background ignore SIGINT, and so do their tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_step_ends_the_call_and_the_llm_serves_on(model, monkeypatch, interruptible):
    dropped, told = threading.Event(), sys.unraisablehook

    def hear(what) -> None:
        if what.exc_type is not KeyboardInterrupt:
            return told(what)
        dropped.set()

    monkeypatch.setattr(sys, "unraisablehook", hear)
    with LLM(**SETTINGS, model=model, tensor_parallel_size=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        expected = llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids
        for delay in (0.02, 0.05, 0.1):
            raised = threading.Event()

            def press(delay: float = delay, raised: threading.Event = raised) -> None:
                """Again where Python drops the interrupt, because it arrives while an object's finalizer runs."""
                time.sleep(delay)
                dropped.set()
                while not raised.wait(0.01):
                    if dropped.is_set():
                        dropped.clear()
                        os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=press, daemon=True).start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(["the cat", "a"], LONG, use_tqdm=False)
            finally:
                raised.set()
            assert llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_a_worker_that_cannot_start_ends_all_and_says_why(model, monkeypatch):
    from minillm.engine.distributed import model as remote

    monkeypatch.setattr(remote, "check_model", lambda *_: None)  # so that the workers find out
    monkeypatch.setattr(remote, "check_supported", lambda *_: None)
    with pytest.raises(Exception, match="do not fit"):
        LLM(model, device="cpu", dtype="float32", tensor_parallel_size=3)
