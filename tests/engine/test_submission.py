"""What goes wrong in one caller's hands does not touch the others, and nothing is left behind."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from tests.helpers.tiny import save_tiny_llama

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
    for delta in stream:
        said += delta.token_ids
    while not second.is_finished:
        llm.step()
    assert first.is_finished and len(heard) == 4 and isinstance(first.error, KeyError)
    with pytest.raises(RuntimeError, match=r"ended by KeyError.*the caller's own"):
        first.output()
    assert second.output().outputs[0].token_ids == expected
    assert said == expected and not llm.engine.has_unfinished
    heard[:] = heard[:3]
    third = llm.submit(PROMPT, PARAMS, on_delta=bad)
    with pytest.raises(KeyError, match="the caller's own"):  # of a step that no other call asked for
        llm.step()
    assert third.is_finished
    assert not (llm.outputs.sinks or llm.outputs.raw)


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
    llm.engine.abort(request.request_id)
    assert [delta.finish_reason for delta in stream] == ["abort"]
    assert not (llm.outputs.sinks)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_whoever_is_aborted_hears_of_it_at_once(llm, num_steps):
    heard = []
    first = llm.submit(
        PROMPT,
        SamplingParams(max_tokens=9, ignore_eos=True, n=2),
        on_delta=lambda _, delta: heard.append(delta.finish_reason),
    )
    other = llm.submit(OTHER, PARAMS)
    for _ in range(num_steps):
        llm.step()
    llm.engine.abort(first.request.request_id, first.request.request_id)
    assert first.is_finished and heard == [None] * 2 * num_steps + ["abort"]
    assert [*llm.outputs.sinks] == [other.request.group_id]
    with pytest.raises(RuntimeError, match="it was withdrawn or aborted"):
        first.output()
    other.withdraw()
    assert not (llm.engine.has_unfinished or llm.outputs.sinks) and other.error is None


def test_a_prompt_of_generate_that_somebody_aborts_does_not_keep_the_others_waiting(llm):
    expected = llm.generate(OTHER, PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    def abort(submission, delta):
        request = next(one for one in llm.engine.scheduler.requests.values() if one.prompt_token_ids == [5, 6, 7])
        llm.engine.abort(request.request_id)

    llm.submit("a", SamplingParams(max_tokens=1), on_delta=abort)
    aborted, whole = llm.generate([PROMPT, OTHER], PARAMS, use_tqdm=False)
    assert aborted.outputs[0].finish_reason == "abort" and len(aborted.outputs[0].token_ids) <= 1
    assert whole.outputs[0].token_ids == expected and not llm.outputs.sinks
