"""What goes wrong in one caller's hands does not touch the others, and nothing is left behind."""

from __future__ import annotations

import pytest
from tiny import save_tiny_llama

from minillm import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PROMPT, OTHER = {"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 8]}


@pytest.fixture
def llm(tmp_path) -> LLM:
    save_tiny_llama(tmp_path)
    return LLM(tmp_path, device="cpu", dtype="float32")


def test_a_callback_that_raises_ends_its_own_request_only(llm):
    expected = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    heard = []

    def bad(submission, delta):
        heard.append(delta)
        if len(heard) == 4:
            raise KeyError("the caller's own")

    first = llm.submit(OTHER, PARAMS, on_delta=bad)
    stream, said = llm.stream(PROMPT, PARAMS), []
    second = llm.submit(PROMPT, PARAMS)
    with pytest.raises(KeyError, match="the caller's own"):
        for delta in stream:
            said += delta.token_ids
    while not second.is_finished:
        llm.step()
    assert first.is_finished and len(heard) == 4
    assert second.output().outputs[0].token_ids == expected
    assert said == expected[:3] and not llm.engine.has_unfinished  # whoever asked for the step that failed has been told
    assert not (llm._collectors or llm._submissions or llm._waiting_deltas)


def test_all_hear_of_a_failed_step_although_one_of_them_fails(llm):
    heard = []

    def bad(submission, delta):
        raise KeyError("the caller's own")

    llm.submit(OTHER, PARAMS, on_delta=bad)
    llm.submit(PROMPT, PARAMS, on_delta=lambda submission, delta: heard.append(delta.finish_reason))
    llm.engine.runner.execute = lambda output: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        llm.step()
    assert heard == ["abort"] and "the caller's own" in caught.value.__notes__[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_that_a_stop_string_ends_leaves_nothing(tmp_path, ahead):
    save_tiny_llama(tmp_path)
    llm = LLM(tmp_path, device="cpu", dtype="float32", async_scheduling=ahead)
    text = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].text
    stop = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, stop=text[3:5])
    assert "".join(delta.text for delta in llm.stream(PROMPT, stop)) == text[: text.index(text[3:5])]
    submission = llm.submit(PROMPT, stop)
    while not submission.is_finished:
        llm.step()
    pool = llm.engine.kv_cache.pool
    assert not llm.engine.has_unfinished and pool.num_free == pool.num_blocks


def test_a_stream_whose_request_is_aborted_ends(llm):
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    [request] = llm.engine.scheduler.requests.values()
    llm.engine.abort(request)
    assert [delta.finish_reason for delta in stream] == ["abort"]
    assert not (llm._collectors or llm._submissions)
