"""The engine thread: messages from many threads, one thread that steps, text beside the steps."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.thread import EngineThread
from tests.helpers.tiny import save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i, 7, *range(20, 22 + i % 5)]} for i in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def llm(folder, request):
    llm = LLM(
        folder,
        device="cpu",
        dtype="float32",
        num_kv_blocks=60,
        block_size=4,
        max_num_seqs=6,
        async_scheduling=request.param,
    )
    yield llm
    assert not (llm.engine.has_unfinished or llm.outputs.raw or llm.outputs.sinks)
    llm.engine.scheduler.check_integrity()


def expected_of(llm, params=GREEDY, prompts=PROMPTS) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def test_streams_of_many_threads_have_the_texts_of_generate(llm):
    expected = expected_of(llm)
    with EngineThread(llm) as thread, ThreadPoolExecutor(8) as pool:

        def read(index: int) -> str:
            stream = thread.submit(PROMPTS[index], GREEDY, request_id=f"mine {index}")
            deltas = list(stream)
            assert {delta.request_id for delta in deltas} == {f"mine {index}"} and deltas[-1].finish_reason == "length"
            assert stream.output(timeout=0).request_id == f"mine {index}"
            return "".join(delta.text for delta in deltas)

        assert list(pool.map(read, range(len(PROMPTS)))) == expected
        assert not thread.streams and thread.error is None


def test_deltas_say_which_sample_and_why_it_stopped(llm):
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, logprobs=1, ignore_eos=True)
    [whole] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    with EngineThread(llm) as thread:
        deltas = list(thread.submit(PROMPTS[0], params))
    for sample in whole.outputs:
        own = [delta for delta in deltas if delta.index == sample.index]
        assert "".join(delta.text for delta in own) == sample.text
        assert [row for delta in own for row in delta.logprobs] == sample.logprobs
    text = expected_of(llm)[0]
    stop = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=text[3:5])
    [output] = llm.generate(PROMPTS[:1], stop, use_tqdm=False)
    with EngineThread(llm) as thread:
        *_, last = deltas = list(thread.submit(PROMPTS[0], stop))
    assert (last.finish_reason, last.stop_reason) == ("stop", text[3:5])
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text


def test_ids_are_the_callers_own(llm):
    with EngineThread(llm) as thread:
        thread.pause()
        stream = thread.submit(PROMPTS[0], GREEDY, request_id="a")
        with pytest.raises(ValueError, match="request_id='a' is under way"):
            thread.submit(PROMPTS[1], GREEDY, request_id="a")
        other = thread.submit(
            PROMPTS[1], SamplingParams(n=2, max_tokens=4), request_id="a_1"
        )  # as a sample of a would be called
        thread.resume()
        assert len(stream.output(30).outputs) == 1 and len(other.output(30).outputs) == 2
        assert thread.submit(PROMPTS[0], GREEDY, request_id="a").output(30).request_id == "a"


def test_what_is_refused_is_raised_where_it_is_asked_for_or_read(llm):
    with pytest.raises(RuntimeError, match="was not started"):
        EngineThread(llm).submit(PROMPTS[0], GREEDY)
    with EngineThread(llm) as thread:
        with pytest.raises(ValueError, match="empty"):
            thread.submit("", GREEDY)
        with pytest.raises(TypeError, match=r"lora_request='mine'.*LoRARequest"):
            thread.submit(PROMPTS[0], GREEDY, lora_request="mine")
        llm.engine.scheduler.kv_cache.blocks_needed, needed = (
            lambda *_: 10**9,
            llm.engine.scheduler.kv_cache.blocks_needed,
        )
        refused = thread.submit(PROMPTS[0], GREEDY)
        with pytest.raises(ValueError, match="the cache has 60"):
            list(refused)
        llm.engine.scheduler.kv_cache.blocks_needed = needed
        assert thread.submit(PROMPTS[0], GREEDY).output(30).outputs[0].finish_reason == "length" and not thread.streams


def test_pause_call_and_drain(llm):
    with EngineThread(llm) as thread:
        streams = [thread.submit(prompt, GREEDY) for prompt in PROMPTS]
        thread.pause()
        before = llm.engine.num_steps
        assert thread.call(lambda: threading.current_thread().name).result(10) == "engine"
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 / 0).result(10)
        time.sleep(0.02)
        assert llm.engine.num_steps == before and not thread.drain(timeout=0.01)
        thread.resume()
        assert thread.drain(timeout=60)
        assert all(stream.output(0).outputs[0].finish_reason == "length" for stream in streams)
        with pytest.raises(RuntimeError, match="drains"):
            thread.submit(PROMPTS[0], GREEDY)


def test_aborts_and_failing_steps_end_what_they_hit_and_nothing_else(llm):
    expected, rng, forward = expected_of(llm), random.Random(5), llm.model.forward
    with EngineThread(llm) as thread:
        for _ in range(6):
            thread.pause()
            streams = [thread.submit(prompt, GREEDY) for prompt in PROMPTS]
            fails_at, steps = rng.randint(2, 20), iter(range(10**6))

            def failing(*args, fails_at=fails_at, steps=steps):
                if next(steps) == fails_at:
                    raise MemoryError("no more")
                return forward(*args)

            llm.model.forward = failing
            thread.resume()
            for stream in rng.sample(streams, 4):
                stream.abort()
            ended = {"length": 0, "abort": 0, "failed": 0}
            for stream, text in zip(streams, expected):
                try:
                    [sample] = stream.output(60).outputs
                except MemoryError:
                    ended["failed"] += 1
                    continue
                ended[sample.finish_reason] += 1
                assert sample.text == text if sample.finish_reason == "length" else text.startswith(sample.text)
            assert ended["length"] > 0 and ended["failed"] <= 2 * 6 and ended["abort"] <= 4
        assert thread.num_failed_steps >= 5 and isinstance(thread.error, MemoryError)


def test_a_callback_that_raises_ends_its_own_request(llm):
    def bad(delta):
        raise KeyError("the caller's own")

    with EngineThread(llm) as thread:
        first, second = thread.submit(PROMPTS[0], GREEDY, on_delta=bad), thread.submit(PROMPTS[1], GREEDY)
        with pytest.raises(KeyError, match="the caller's own"):
            first.output(30)
        assert second.output(30).outputs[0].finish_reason == "length"


def test_close_aborts_what_is_under_way_and_leaves_the_llm_open(llm):
    thread = EngineThread(llm).start()
    thread.pause()
    streams = [thread.submit(prompt, GREEDY) for prompt in PROMPTS]
    thread.resume()
    thread.close()
    thread.close()
    assert {stream.output(0).outputs[0].finish_reason for stream in streams} <= {"abort", "length"}
    assert len(expected_of(llm)) == len(PROMPTS)


def test_the_llms_own_calls_take_turns_with_the_thread(llm):
    expected = expected_of(llm)
    with EngineThread(llm) as thread:
        streams = [thread.submit(prompt, GREEDY) for prompt in PROMPTS[:12]]
        assert expected_of(llm, prompts=PROMPTS[12:]) == expected[12:]
        assert ["".join(delta.text for delta in stream) for stream in streams] == expected[:12]
