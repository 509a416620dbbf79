"""The engine: forks, aborts, refusals, failures, what it is made with, injected parts."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import RequestStatus
from minillm.engine.scheduler import Scheduler
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.small_engine import ask, engine_of, serve
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder, eos_token_id=VOCAB_SIZE - 1)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, device="cpu")


# Forks, aborts, refusals, failures


def test_samples_of_one_prompt_share_its_blocks_and_compute_it_once():
    engine = engine_of(num_blocks=40, max_num_seqs=8)
    steps = serve(engine, ask("a", list(range(14)), 6, n=5))
    assert steps[0] == [("a", 0, 14)] and all(count == 1 for step in steps[1:] for _, _, count in step)
    assert {name for step in steps for name, _, _ in step} == {"a", "a_1", "a_2", "a_3", "a_4"}
    sharing = engine_of(num_blocks=40, max_num_seqs=8)
    sharing.add_request(ask("a", list(range(14)), 6, n=5))
    sharing.step(), sharing.step()
    # 14 tokens: three full blocks and half of one, shared; each sample writes into a copy of the fourth,
    # the last in place.
    assert sharing.kv_cache.pool.num_blocks - sharing.kv_cache.pool.num_free == 3 + 5


def test_samples_that_find_no_room_wait_and_are_said_all_the_same():
    steps = serve(engine_of(max_num_seqs=2), ask("a", list(range(9)), 5, n=4))
    assert max(map(len, steps)) == 2
    assert {name for step in steps for name, _, _ in step} == {"a", "a_1", "a_2", "a_3"}


def test_an_abort_frees_the_blocks_at_once_and_disturbs_nobody():
    engine = engine_of()
    waiting, running, other = ask("waiting", [1] * 5), ask("running", [2] * 9, 9, n=2), ask("other", [3] * 6, 5)
    for request in (running, other):
        engine.add_request(request)
    engine.step()
    engine.add_request(waiting)
    used = engine.kv_cache.pool.num_free
    engine.abort(running.request_id)
    engine.abort(waiting.request_id)
    assert engine.kv_cache.pool.num_free > used and set(engine.scheduler.requests) == {"other"}
    assert running.finish_reason == waiting.finish_reason == "abort" and waiting.status is RequestStatus.FINISHED
    engine.abort(running.request_id)  # a second time changes nothing
    serve(engine)
    assert other.finish_reason == "length" and engine.kv_cache.pool.num_free == 20


def test_an_abort_of_many_does_not_look_through_the_requests_for_each(llm, monkeypatch):
    """Ten thousand aborted requests must not cost ten thousand times ten thousand."""
    looks = []

    class Watched(dict):
        def values(self):
            looks.append(len(self))
            return super().values()

    def interrupted():
        looks.clear()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.scheduler, "requests", Watched())
    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the cat"] * 50, SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    assert len(looks) <= 3 and not llm.engine.has_unfinished  # for what failed, and for what is withdrawn


def test_a_stream_that_nobody_reads_any_more_frees_its_blocks(llm):
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    stream = llm.stream("the cat", params)
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert not llm.engine.has_unfinished
    pool = llm.engine.kv_cache.pool
    assert pool.num_free == pool.num_blocks


def test_a_failing_step_aborts_what_was_in_flight_and_the_engine_serves_on(llm, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    healthy = llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("日本", params)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", lambda *args: (_ for _ in ()).throw(MemoryError("no more")))
        with pytest.raises(MemoryError, match="no more"):
            llm.generate(["the cat", "the mat"], params, use_tqdm=False)
    assert [delta.finish_reason for delta in stream] == ["abort"]
    assert not llm.engine.has_unfinished
    assert llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids == healthy
    llm.engine.scheduler.check_integrity()


def test_a_failing_step_ends_the_requests_in_it_and_no_other(folder):
    """One that waits, one that is preempted, one whose turn did not come: all go on, on the blocks they have."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + i, *range(20, 32)]} for i in range(5)]
    settings = dict(device="cpu", dtype="float32", block_size=4, max_num_seqs=3, max_num_batched_tokens=16)
    expected = [out.outputs[0].token_ids for out in LLM(folder, **settings).generate(prompts, params, use_tqdm=False)]
    for fails_at in range(2, 14):
        for ahead in (False, True):
            swap = dict(preemption_mode="swap", host_kv_bytes=2**16) if fails_at % 2 else {}
            llm = LLM(folder, num_kv_blocks=12, async_scheduling=ahead, **settings, **swap)
            forward, steps = llm.model.forward, count()

            def failing(*args, forward=forward, steps=steps, fails_at=fails_at):
                if next(steps) == fails_at:
                    raise MemoryError("no more")
                return forward(*args)

            llm.model.forward = failing
            submissions = [llm.submit(prompt, params) for prompt in prompts]
            errors = 0
            while llm.engine.has_unfinished:
                try:
                    llm.step()
                except MemoryError:
                    errors += 1
                llm.engine.scheduler.check_integrity()
            finished = [one for one in submissions if one.error is None]
            assert errors == 1 and 1 <= len(finished) < 5
            for one, tokens in zip(submissions, expected):
                assert one.error is not None or one.output().outputs[0].token_ids == tokens


def test_the_error_of_a_failing_step_reaches_the_caller_whatever_else_breaks():
    engine = engine_of()
    first, second = ask("a", [1] * 9), ask("b", [2] * 9)
    engine.add_request(first), engine.add_request(second)
    engine.step()
    engine.kv_cache.free = engine.kv_cache.distrust = lambda _: 1 / 0

    def fails(output):
        raise MemoryError("the first error")

    engine.runner.execute = fails
    with pytest.raises(MemoryError, match="the first error") as raised:
        engine.step()
    assert len(raised.value.__notes__) == 3 and all("ZeroDivisionError" in note for note in raised.value.__notes__)
    assert first.finish_reason == second.finish_reason == "abort"


def test_each_step_has_its_statistics_and_each_request_the_time_of_its_first():
    engine = engine_of(max_num_seqs=2, budget=12)
    requests = [ask(name, [1] * 9) for name in "abc"]
    for request in requests:
        engine.add_request(request)
    engine.clock.advance(2.0)
    engine.step()
    assert engine.stats[:4] == (12, 2, 1, 0) and engine.stats.kv_cache_usage == pytest.approx(
        4 / 20
    )  # 9 tokens and 3, blocks of 4
    assert [request.scheduled_time for request in requests] == [2.0, 2.0, None]
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.num_running == engine.stats.num_waiting == 0 or engine.stats.num_tokens > 0
    assert requests[2].scheduled_time is not None


def test_a_failing_scheduler_ends_all():
    engine = engine_of(max_num_seqs=1)
    first, second = ask("a", [1] * 9), ask("b", [2] * 9)
    engine.add_request(first), engine.add_request(second)
    engine.step()
    schedule, engine.scheduler.schedule = engine.scheduler.schedule, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert first.finish_reason == second.finish_reason == "abort" and not engine.kv_cache.pool.cached
    engine.scheduler.schedule = schedule
    serve(engine, ask("a", [1] * 9))


def test_a_broken_pool_is_found():
    engine = engine_of()
    engine.add_request(ask("a", [1] * 9))
    engine.step()
    engine.kv_cache.pool.ref_cnt[engine.kv_cache.tables["a"][0]] += 1
    with pytest.raises(RuntimeError, match="ref_cnt=2, but 1 tables hold it"):
        engine.scheduler.check_integrity()


def test_requests_that_want_prompt_logprobs_compute_their_prompt(llm):
    prompt = "the cat sat on the mat, then the naïve cat ate 10 crêpes"
    params = dict(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    [scored] = llm.generate(prompt, SamplingParams(prompt_logprobs=0, **params), use_tqdm=False)
    assert scored.metrics.num_cached_tokens == 0 and len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    assert all(len(row) == 1 for row in scored.prompt_logprobs[1:])
    [plain] = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    assert plain.metrics.num_cached_tokens > 0 and plain.outputs[0].token_ids == scored.outputs[0].token_ids


def test_prompt_logprobs_survive_preemption(folder):
    roomy, tight = (
        LLM(folder, device="cpu", block_size=4, num_kv_blocks=count, max_num_batched_tokens=7) for count in (100, 14)
    )
    prompts = [{"prompt_token_ids": [5 + i, *range(10, 28)]} for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    calm, pressed = (one.generate(prompts, params, use_tqdm=False) for one in (roomy, tight))
    assert sum(output.metrics.num_preemptions for output in pressed) > 0
    for a, b in zip(calm, pressed):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert x.keys() == y.keys()
            assert [e.logprob for e in x.values()] == pytest.approx([e.logprob for e in y.values()], abs=1e-4)


def test_salted_requests_share_nothing_with_others(llm):
    prompt = llm.get_tokenizer().encode("the mat, the mat, the mat, the mat, the mat, the mat, the mat")
    params = SamplingParams(temperature=0.0, max_tokens=2)

    def cached(**salt) -> int:
        return llm.generate({"prompt_token_ids": prompt, **salt}, params, use_tqdm=False)[0].metrics.num_cached_tokens

    assert cached() == 0 and cached() > 0
    assert cached(cache_salt="ann") == 0 and cached(cache_salt="ann") > 0 and cached(cache_salt="bob") == 0
    with pytest.raises(TypeError, match=r"prompts\[0\]: cache_salt=''"):
        cached(cache_salt="")


# What an LLM is made with


def test_a_cache_too_small_for_the_model_shortens_it_or_is_refused(folder):
    small = LLM(folder, device="cpu", block_size=4, num_kv_blocks=6)
    assert small.max_model_len == 24
    [output] = small.generate(
        {"prompt_token_ids": [5] * 20}, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="max_model_len=100 needs 25 blocks of 4 tokens, the cache has 6"):
        LLM(folder, device="cpu", block_size=4, num_kv_blocks=6, max_model_len=100)
    with pytest.raises(ValueError, match="max_num_batched_tokens=64 is less than max_model_len=128"):
        LLM(folder, device="cpu", enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match=r"preemption_mode='swap'.*host_kv_bytes=0"):
        LLM(folder, device="cpu", preemption_mode="swap")
    with pytest.raises(ValueError, match="host_kv_bytes=5 holds no block; a block has"):
        LLM(folder, device="cpu", preemption_mode="swap", host_kv_bytes=5)
    with pytest.raises(ValueError, match="num_kv_blocks=1 of block_size=1"):
        LLM(folder, device="cpu", block_size=1, num_kv_blocks=1)


def test_one_priority_or_user_for_all_or_one_each(folder):
    llm = LLM(folder, device="cpu", scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["the cat", "the mat", "日本"], params, priority=[2, 0, 1], user="ann", use_tqdm=False)
    finished = [output.metrics.finished_time for output in outputs]
    assert finished[1] < finished[2] < finished[0]
    with pytest.raises(ValueError, match="priority has 2 entries for 1 prompts"):
        llm.generate("a", params, priority=[1, 2], use_tqdm=False)
    with pytest.raises(TypeError, match="user=5 is not allowed; allowed: str"):
        llm.generate("a", params, user=5, use_tqdm=False)


def test_parts_of_ones_own_are_used(llm):
    """An engine over a scheduler, a cache manager and a sampler that were handed in."""
    seen = []

    class Last:
        """Always the last token of the vocabulary but one."""

        def sample(self, logits, metadata):
            seen.append(len(logits))
            from minillm.sampling.sampler import SamplerOutput

            return SamplerOutput(torch.full((len(logits),), VOCAB_SIZE - 2), None)

    kv_cache = KVCacheManager(10, 4)
    engine = Engine(llm.model, kv_cache=kv_cache, sampler=Last())
    request = ask("a", [5, 6, 7], 4)
    engine.add_request(request)
    while engine.has_unfinished:
        engine.step()
    assert request.output_token_ids == [VOCAB_SIZE - 2] * 4 and seen == [1] * 4 and engine.kv_cache is kv_cache
    scheduler = Scheduler(KVCacheManager(10, 4), max_num_seqs=1)
    assert Engine(llm.model, scheduler=scheduler).scheduler is scheduler
    with pytest.raises(ValueError, match="model=None needs a runner"):
        Engine()
