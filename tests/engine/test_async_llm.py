"""AsyncLLM: coroutines get what `generate` gives, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from minillm import AsyncLLM, EngineArgs, SamplingParams
from minillm.engine.llm import LLM
from minillm.sampling.params import RequestOutputKind

PROMPTS = ["Once upon a time", "One rainy day", "A dog", "The sun"]
PATIENCE = 60  # seconds after which a wait counts as a hang


def params(**more) -> SamplingParams:
    return SamplingParams(**dict(temperature=1.0, seed=3, max_tokens=12) | more)


@pytest.fixture(scope="module")
def llm():
    return LLM("tinyworld-draft", dtype="float32", device="cpu", num_kv_blocks=200, max_num_seqs=8)


@pytest.fixture
def engine(llm):
    engine = AsyncLLM(llm)
    yield engine
    engine.thread.close()
    assert not llm.engine.has_unfinished
    llm.engine.scheduler.check_integrity()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


async def read(engine, prompt, one, name=None) -> list:
    return [output async for output in engine.generate(prompt, one, name)]


def test_coroutines_side_by_side_get_what_generate_gives(llm, engine):
    wanted = [params(n=1 + at % 2, logprobs=0, prompt_logprobs=at or None) for at in range(len(PROMPTS))]

    async def all_of_them():
        return await asyncio.gather(*(read(engine, *one) for one in zip(PROMPTS, wanted)))

    expected = llm.generate(PROMPTS, wanted, use_tqdm=False)
    for outputs, output in zip(run(all_of_them()), expected):
        last = outputs[-1]
        assert last.finished and not any(one.finished for one in outputs[:-1])
        assert last.outputs == output.outputs and last.prompt_logprobs == output.prompt_logprobs
        assert (last.prompt, last.prompt_token_ids) == (output.prompt, output.prompt_token_ids)
        texts = [one.outputs[0].text for one in outputs]
        assert all(after.startswith(before) for before, after in pairwise(texts))


@pytest.mark.parametrize("stop", [None, "a"])
def test_what_is_new_joins_to_the_text(llm, engine, stop):
    one = params(n=2, logprobs=1, stop=stop)
    [expected] = llm.generate(PROMPTS[0], one, use_tqdm=False)
    one.output_kind = RequestOutputKind.DELTA
    outputs = run(read(engine, PROMPTS[0], one))
    for at, sample in enumerate(expected.outputs):
        parts = [part for output in outputs for part in output.outputs if part.index == at]
        assert "".join(part.text for part in parts) == sample.text
        assert [token_id for part in parts for token_id in part.token_ids] == sample.token_ids
        assert [row for part in parts for row in part.logprobs or ()] == sample.logprobs
        assert parts[-1].finish_reason == sample.finish_reason and parts[-1].stop_reason == sample.stop_reason


def test_only_the_end_is_told_where_it_is_asked_for(engine):
    one = params(output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = run(read(engine, PROMPTS[0], one))
    assert output.finished and len(output.outputs[0].token_ids) == 12


@pytest.mark.parametrize("how", ["break", "cancel", "cancel at once"])
def test_a_reader_that_leaves_aborts_its_request(llm, engine, how, monkeypatch):
    """The engine takes no step meanwhile, so that the request cannot come to an end of its own."""
    one, begun, may_go_on, one_request = params(max_tokens=400), threading.Event(), threading.Event(), llm.one_request
    one.ignore_eos = True

    def slow(*args):
        begun.set()
        assert may_go_on.wait(PATIENCE)
        return one_request(*args)

    monkeypatch.setattr(llm, "one_request", slow)
    if how != "cancel at once":
        may_go_on.set()

    async def listen(paused):
        async for _ in engine.generate(PROMPTS[0], one, "x"):
            await asyncio.to_thread(engine.thread.pause)
            paused.set()
            if how == "break":
                return

    async def leave():
        paused = asyncio.Event()
        if how == "cancel at once":
            await asyncio.to_thread(engine.thread.pause)
            paused.set()
        task = asyncio.create_task(listen(paused))
        await asyncio.to_thread(begun.wait, PATIENCE)
        await paused.wait()
        if how != "break":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        may_go_on.set()

    run(leave())
    pool, deadline = llm.engine.kv_cache.pool, time.monotonic() + PATIENCE
    while engine.thread.streams or pool.num_free < pool.num_blocks:
        assert time.monotonic() < deadline, "the request of a reader that left goes on"
        time.sleep(0.01)
    assert engine.thread.drain(PATIENCE)


def test_an_aborted_request_ends_with_what_there_was(engine):
    async def abort():
        outputs = []
        async for output in engine.generate(PROMPTS[0], params(max_tokens=400, ignore_eos=True), "x"):
            outputs.append(output)
            if len(outputs) == 1:
                await engine.abort("x")
        return outputs

    outputs = run(abort())
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"


def test_what_is_wrong_is_raised_where_it_is_read(llm, engine, monkeypatch):
    with pytest.raises(ValueError, match="prompt_token_ids has token id -1"):
        run(read(engine, [-1], params()))
    with pytest.raises(NotImplementedError, match="tokenization_kwargs"):
        run(anext(engine.generate(PROMPTS[0], tokenization_kwargs={"truncation": True})))
    execute, told = llm.engine.executor.execute, threading.Event()

    def fails(output):
        if output.rows and not told.is_set():
            told.set()
            raise OSError("the device is gone")
        return execute(output)

    monkeypatch.setattr(llm.engine.executor, "execute", fails)
    with pytest.raises(OSError, match="the device is gone"):
        run(read(engine, PROMPTS[0], params()))
    assert run(read(engine, PROMPTS[0], params()))[-1].finished
    run(engine.check_health())


def test_upkeep_happens_between_steps(engine):
    async def keep():
        assert await engine.reset_prefix_cache() and not await engine.is_sleeping()
        return await engine.get_tokenizer()

    assert run(keep()) is engine.llm.get_tokenizer()


def test_shutdown_ends_it_all():
    engine = AsyncLLM.from_engine_args(EngineArgs("tinyworld-draft", dtype="float32", num_kv_blocks=64))
    assert run(read(engine, PROMPTS[0], params()))[-1].finished
    engine.shutdown(), engine.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        run(read(engine, PROMPTS[0], params()))
    with pytest.raises(RuntimeError, match="runs nothing between steps"):
        run(engine.check_health())
