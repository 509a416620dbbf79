"""The engine: the bugs small engines really had, forks, aborts, refusals, failures, injected parts, the prefix cache on disk."""

from __future__ import annotations

import pytest
import torch
from block_memory import BlockMemory
from tiny import VOCAB_SIZE, save_tiny_llama

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request, RequestStatus
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import VirtualClock
from minillm.kv_cache.manager import KVCacheManager


def engine_of(num_blocks=20, block_size=4, max_num_seqs=4, budget=100, host=0, **scheduler_settings) -> Engine:
    kv_cache = KVCacheManager(num_blocks, block_size, num_host_blocks=host)
    scheduler = Scheduler(kv_cache, max_num_seqs, budget, **scheduler_settings)
    return Engine(scheduler=scheduler, runner=BlockMemory(block_size), clock=VirtualClock())


def ask(name: str, prompt: list[int], max_tokens: int = 4, n: int = 1) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True), max_tokens, arrival_time=0.0)


def serve(engine: Engine, *requests: Request) -> list[list[tuple]]:
    """Run to the end; for every step its rows as (id, start, tokens)."""
    for request in requests:
        engine.add_request(request)
    steps, execute = [], engine.runner.execute

    def recorded(output):
        steps.append([(row.request.request_id, row.start, row.num_tokens) for row in output.rows])
        return execute(output)

    engine.runner.execute = recorded
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    engine.runner.execute = execute
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder, eos_token_id=VOCAB_SIZE - 1)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, device="cpu")


# The bugs that small engines really had


def test_bug_stale_prefix_hash_after_preemption():
    """A preempted request goes on with other tokens in the same places: what was hashed before must not name them."""
    engine = engine_of(num_blocks=8)
    first, second = ask("a", list(range(10)), 14), ask("b", list(range(20, 29)), 14)
    serve(engine, first, second)
    assert first.num_preemptions + second.num_preemptions > 0
    texts = [request.token_ids for request in (first, second)]
    later = [ask(f"again{i}", text[:-1]) for i, text in enumerate(texts)]  # BlockMemory checks every page that is hit
    serve(engine, *later)
    assert sum(request.num_cached_tokens for request in later) > 0


def test_bug_zero_length_prefill_on_a_full_hit():
    engine, prompt = engine_of(), list(range(12))  # exactly three blocks
    serve(engine, ask("cold", prompt))
    warm = ask("warm", prompt)
    steps = serve(engine, warm)
    assert steps[0] == [("warm", 8, 4)] and warm.num_cached_tokens == 8  # the last block is computed again, not nothing


def test_bug_only_one_request_may_be_cut_into_chunks():
    engine = engine_of(budget=10)
    steps = serve(engine, ask("a", list(range(14)), 2), ask("b", list(range(30, 44)), 2), ask("c", list(range(50, 62)), 2))
    assert steps[:4] == [[("a", 0, 10)], [("a", 10, 4), ("b", 0, 6)], [("a", 14, 1), ("c", 0, 1), ("b", 6, 8)], [("b", 14, 1), ("c", 1, 9)]]


def test_bug_top_k_of_another_row(llm):
    prompts = ["the cat", "日本", "the mat, the mat"] * 2
    params = [SamplingParams(temperature=1.5, top_k=k, seed=i, max_tokens=12, ignore_eos=True) for i, k in enumerate((1, 300, 3, 2, 0, 50))]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together):
        assert llm.generate(prompt, one, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_bug_a_request_longer_than_all_blocks_hangs():
    engine = engine_of(num_blocks=5)
    good = ask("good", [1, 2, 3], 5)
    engine.add_request(good)
    with pytest.raises(ValueError, match="30 prompt tokens and max_tokens=6 need 9 blocks, the cache has 5"):
        engine.add_request(ask("too long", list(range(30)), 6))
    with pytest.raises(ValueError, match="'good' is in use"):
        engine.add_request(ask("good", [1]))
    serve(engine)
    assert good.finish_reason == "length" and good.num_preemptions == 0


def test_bug_a_prefix_hit_read_from_the_wrong_pages(llm, folder):
    """The hit blocks are not where a fresh request's would be, and another request owns those."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = ["the cat sat on the mat, then the naïve cat ate " + tail for tail in ("10 crêpes", "the mat", "日本")]
    fresh = [LLM(folder, device="cpu").generate(text, params, use_tqdm=False)[0].outputs[0].token_ids for text in texts]
    llm.generate([texts[0], "something else entirely, long enough to own blocks " * 2], params, use_tqdm=False)
    again = llm.generate(texts[::-1], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == fresh[::-1]
    assert all(output.metrics.num_cached_tokens >= 16 for output in again)


# Forks, aborts, refusals, failures


def test_samples_of_one_prompt_share_its_blocks_and_compute_it_once():
    engine = engine_of(num_blocks=40, max_num_seqs=8)
    steps = serve(engine, ask("a", list(range(14)), 6, n=5))
    assert steps[0] == [("a", 0, 14)] and all(count == 1 for step in steps[1:] for _, _, count in step)
    assert {name for step in steps for name, _, _ in step} == {"a", "a_1", "a_2", "a_3", "a_4"}
    sharing = engine_of(num_blocks=40, max_num_seqs=8)
    sharing.add_request(ask("a", list(range(14)), 6, n=5))
    sharing.step(), sharing.step()
    # 14 tokens: three full blocks and half of one, shared; each sample writes into a copy of the fourth, the last in place.
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
    engine.abort(running)
    engine.abort(waiting)
    assert engine.kv_cache.pool.num_free > used and set(engine.scheduler.requests) == {"other"}
    assert running.finish_reason == waiting.finish_reason == "abort" and waiting.status is RequestStatus.FINISHED
    engine.abort(running)  # a second time changes nothing
    serve(engine)
    assert other.finish_reason == "length" and engine.kv_cache.pool.num_free == 20


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
    assert not llm.engine.has_unfinished and not llm.engine.kv_cache.pool.cached
    assert llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids == healthy
    llm.engine.scheduler.check_integrity()


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
    roomy, tight = (LLM(folder, device="cpu", block_size=4, num_kv_blocks=count, max_num_batched_tokens=7) for count in (100, 14))
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


def test_beams_share_blocks_and_copy_what_they_write(llm):
    llm.trace.enabled = True
    llm.trace.clear()
    llm.engine.kv_cache.pool.evict_all()
    prompt = {"prompt_token_ids": [7 + i % 40 for i in range(100)]}
    llm.beam_search(prompt, beam_width=4, max_tokens=10, ignore_eos=True)
    llm.trace.enabled = False
    assert sum(llm.trace.totals("tokens").values()) <= 100 + 4 * 10 + 10  # the prompt once, not for every beam
    assert sum(llm.trace.totals("copies").values()) > 0
    assert max(llm.trace.totals("blocks used").values()) <= 6 + 4 * 2  # 100 tokens in blocks of 16, and the beams' own ends
    assert not llm.engine.has_unfinished


def test_beams_say_the_same_when_memory_is_short(folder, llm):
    prompt = {"prompt_token_ids": list(range(10, 30))}
    roomy = llm.beam_search(prompt, beam_width=4, max_tokens=12, ignore_eos=True)[0].outputs
    for mode, host in (("recompute", 0), ("swap", 10**6)):
        tight = LLM(folder, device="cpu", block_size=4, num_kv_blocks=12, preemption_mode=mode, host_kv_bytes=host)
        short = tight.beam_search(prompt, beam_width=4, max_tokens=12, ignore_eos=True)[0].outputs
        assert [beam.token_ids for beam in short] == [beam.token_ids for beam in roomy]


# What an LLM is made with


def test_a_cache_too_small_for_the_model_shortens_it_or_is_refused(folder):
    small = LLM(folder, device="cpu", block_size=4, num_kv_blocks=6)
    assert small.max_model_len == 24
    [output] = small.generate({"prompt_token_ids": [5] * 20}, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="max_model_len=100 needs 25 blocks of 4 tokens, the cache has 6"):
        LLM(folder, device="cpu", block_size=4, num_kv_blocks=6, max_model_len=100)
    with pytest.raises(ValueError, match="max_num_batched_tokens=64 is less than max_model_len=128"):
        LLM(folder, device="cpu", enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match="preemption_mode='swap'.*host_kv_bytes=0"):
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
    with pytest.raises(NotImplementedError, match="chapter 18"):
        Engine(llm.model, drafter=object())
    with pytest.raises(ValueError, match="model=None needs a runner"):
        Engine()


# The prefix cache on disk


def test_the_prefix_cache_survives_a_restart(folder, tmp_path):
    prompt = "the cat sat on the mat, then the naïve cat ate 10 crêpes " * 2
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first, second = LLM(folder, device="cpu"), LLM(folder, device="cpu")
    path = tmp_path / "cache.safetensors"
    with pytest.raises(ValueError, match="empty: nothing to save"):
        first.save_prefix_cache(path)
    said = first.generate(prompt, params, use_tqdm=False)[0]
    saved = first.save_prefix_cache(path)
    assert saved == len(first.engine.kv_cache.pool.cached) > 2
    assert second.load_prefix_cache(path) == saved and second.load_prefix_cache(path) == 0  # known already
    second.engine.scheduler.check_integrity()
    [warm] = second.generate(prompt, params, use_tqdm=False)
    assert warm.metrics.num_cached_tokens >= 16 * (saved - 1) and warm.outputs[0].token_ids == said.outputs[0].token_ids
    tiny = LLM(folder, device="cpu", num_kv_blocks=2)
    assert tiny.load_prefix_cache(path) == 2  # as many as it holds


def test_a_cache_of_another_model_or_layout_or_a_broken_file_is_refused(folder, tmp_path):
    llm = LLM(folder, device="cpu")
    llm.generate("the cat sat on the mat, the mat, the mat, the mat", SamplingParams(max_tokens=2), use_tqdm=False)
    path = tmp_path / "cache.safetensors"
    llm.save_prefix_cache(path)
    with pytest.raises(ValueError, match="block_size is '16', this engine has '8'"):
        LLM(folder, device="cpu", block_size=8).load_prefix_cache(path)
    save_tiny_llama(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="model is '"):
        LLM(str(tmp_path / "other"), device="cpu").load_prefix_cache(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        llm.load_prefix_cache(path)
    with pytest.raises(ValueError, match="nowhere"):
        llm.load_prefix_cache(tmp_path / "nowhere")
