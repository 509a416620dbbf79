"""Who calls an LLM, and with what: a progress bar of one's own, and a process that a fork has copied."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from minillm import LLM, SamplingParams
from minillm.programs import State
from tests.helpers.tiny import save_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return LLM(folder, device="cpu", num_kv_blocks=32)


class Bar:
    """As little of tqdm as vLLM asks of a progress bar."""

    def __init__(self, *, total: int, desc: str, dynamic_ncols: bool, postfix: str):
        self.total, self.n, self.postfix, self.is_closed = total, 0, postfix, False

    def update(self, count: int = 1) -> None:
        self.n += count

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def test_a_callable_makes_the_progress_bar(llm, capfd):
    bars = []

    def make(kind: type) -> Callable:
        return lambda **arguments: bars.append(kind(**arguments)) or bars[-1]

    llm.generate(["the cat"] * 3, PARAMS, use_tqdm=make(Bar))
    [bar] = bars
    assert (bar.total, bar.n, bar.is_closed) == (3, 3, True) and bar.postfix.endswith("tokens/s")
    assert capfd.readouterr().err == ""
    llm.chat([{"role": "user", "content": "the cat"}], PARAMS, use_tqdm=make(tqdm))
    assert "1/1" in capfd.readouterr().err and bars[1].n == bars[1].total == 1


def in_child(action: Callable[[], object]) -> str:
    """What `action` raises in a forked process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            action()
            text = "nothing was raised"
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error))
        os.write(writer, text.encode())
        os._exit(0)  # without the parent's exit handlers
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("the cat", PARAMS, use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "the cat"}], PARAMS, use_tqdm=False),
    "stream": lambda llm: list(llm.stream("the cat", PARAMS)),
    "submit": lambda llm: llm.submit("the cat", PARAMS),
    "step": lambda llm: llm.step(),
    "State": lambda llm: State(llm, [{"role": "user", "content": "the cat"}]),
    "beam_search": lambda llm: llm.beam_search("the cat", max_tokens=2),
    "save_prefix_cache": lambda llm: llm.save_prefix_cache(Path("nowhere")),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("call", CALLS)
def test_a_forked_child_is_told_to_make_its_own_llm(llm, call, monkeypatch):
    # It might hang.
    monkeypatch.setattr(llm.engine.runner, "execute", lambda output: pytest.fail("a step was computed"))
    said = in_child(lambda: CALLS[call](llm))
    assert (
        said.startswith(f"RuntimeError: this LLM was made in process {os.getpid()}, and this is process")
        and "spawn" in said
    )
    monkeypatch.undo()
    assert len(llm.generate("the cat", PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("call", CALLS)
def test_a_child_forked_during_another_threads_turn_is_told_too(llm, call):
    mine, done = threading.Event(), threading.Event()

    def hold():
        with llm.lock, llm.inputs.lock:
            mine.set()
            done.wait(60)

    (other := threading.Thread(target=hold)).start()
    mine.wait()
    try:
        assert in_child(lambda: (signal.alarm(20), CALLS[call](llm))).startswith(
            "RuntimeError: this LLM was made in process"
        )
    finally:
        done.set()
        other.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_that_ends_leaves_the_parents_disk_alone(tmp_path, llm):
    disk = dict(host_kv_bytes=2**20, disk_kv_path=tmp_path, disk_kv_bytes=2**20)
    with LLM(llm.config.model, device="cpu", num_kv_blocks=32, block_size=4, **disk) as parent:
        parent.generate("the cat sat on the mat", PARAMS, use_tqdm=False)
        before = sorted(tmp_path.rglob("*"))
        assert in_child(parent.close) == "nothing was raised"
        assert sorted(tmp_path.rglob("*")) == before
        parent.generate("the cat", PARAMS, use_tqdm=False)
    assert sorted(tmp_path.rglob("*")) != before
