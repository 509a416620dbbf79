"""Programs that fail or are abandoned leave nothing in the engine, and whoever waits is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.programs import State, gen, select
from tests.helpers.prompt_programs import TEXT, is_clean, make_llm, say
from tests.helpers.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny-llama")


@pytest.fixture(scope="module")
def oracle(folder):
    return save_tiny_llama(folder)


@pytest.fixture
def llm(folder, oracle) -> LLM:
    return make_llm(folder)


def test_a_failed_step_raises_for_all_that_wait(llm, monkeypatch):
    states = [State(llm, TEXT) for _ in range(3)]
    for state in states[:2]:
        state += gen("one", max_tokens=2, ignore_eos=True)
        state["one"]
        state += gen("two", max_tokens=9)
    branches = states[0].fork(2)
    branches[0] += gen("three")
    states[0].join(branches)
    states[2] += gen("four", max_tokens=9)
    execute = llm.engine.runner.execute
    monkeypatch.setattr(llm.engine.runner, "execute", lambda output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        states[1]["two"]
    monkeypatch.setattr(llm.engine.runner, "execute", execute)
    for state, name in [
        (states[0], "two"),
        (states[1], "two"),
        (states[2], "four"),
        (branches[0], "three"),
        (states[0], "three"),
    ]:
        with pytest.raises(RuntimeError, match=r"the program failed: .*ZeroDivisionError") as caught:
            state[name]
        assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)
    assert states[0]["one"] and is_clean(llm)
    again = State(llm, TEXT)
    again += gen("one", max_tokens=2, ignore_eos=True)
    assert again["one"] and is_clean(llm)


def test_an_abandoned_program_leaves_nothing_in_the_engine(llm):
    with pytest.raises(ZeroDivisionError), State(llm, TEXT) as state:
        state += gen("one", max_tokens=3, ignore_eos=True)
        branches = state.fork(3)
        for branch in branches:
            branch += gen("two", max_tokens=50, ignore_eos=True)
            branch += select("three", ["a", "b"])
        assert state["one"]
        for _ in range(4):
            llm.step()
        assert len(llm.engine.scheduler.requests) == 3
        raise ZeroDivisionError
    assert is_clean(llm) and state["one"]
    with pytest.raises(RuntimeError, match="was closed before this was said"):
        branches[0]["two"]
    with pytest.raises(RuntimeError, match="was closed and takes nothing more"):
        state += "more"

    state = State(llm, TEXT)
    one, two = state.fork(2)
    for branch in (one, two):
        branch += gen("x", max_tokens=50, ignore_eos=True)
    state.join([one, two])
    two.close()
    with pytest.raises(RuntimeError, match="a branch was closed before it could be joined"):
        state["x"]
    assert len(one["x"]) and is_clean(llm)
    state = State(llm, TEXT)
    state += gen("x", max_tokens=5)
    llm.engine.abort(state._submissions[0].request.request_id)
    with pytest.raises(RuntimeError, match=r"the program failed: .*it was withdrawn or aborted"):
        state["x"]


def test_a_submission_is_served_by_whoever_steps(llm):
    heard = []
    submission = llm.submit(
        TEXT,
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        lambda one, delta: heard.append((one, delta)),
        streaming=True,
    )
    silent = llm.submit("the cat", SamplingParams(max_tokens=60, ignore_eos=True))
    with pytest.raises(RuntimeError, match="still under way"):
        submission.output()
    expected = say(llm, TEXT, temperature=0.0, max_tokens=6, ignore_eos=True)
    assert submission.is_finished and submission.output().outputs[0] == expected
    assert "".join(delta.text for _, delta in heard) == expected.text and {one for one, _ in heard} == {submission}
    assert [delta.finish_reason for _, delta in heard] == [None] * 5 + ["length"]
    assert llm.step() and not silent.is_finished
    silent.withdraw()
    assert silent.is_finished and is_clean(llm) and not llm.step()
    with pytest.raises(RuntimeError, match="it was withdrawn"):
        silent.output()
    with pytest.raises(ValueError, match=r"submit\(\) takes 1 prompt, not 2"):
        llm.submit(["a", "b"])
