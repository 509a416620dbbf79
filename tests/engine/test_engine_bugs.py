"""The bugs that small engines really had."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
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
    steps = serve(
        engine, ask("a", list(range(14)), 2), ask("b", list(range(30, 44)), 2), ask("c", list(range(50, 62)), 2)
    )
    assert steps[:4] == [
        [("a", 0, 10)],
        [("a", 10, 4), ("b", 0, 6)],
        [("a", 14, 1), ("c", 0, 1), ("b", 6, 8)],
        [("b", 14, 1), ("c", 1, 9)],
    ]


def test_bug_top_k_of_another_row(llm):
    prompts = ["the cat", "日本", "the mat, the mat"] * 2
    params = [
        SamplingParams(temperature=1.5, top_k=k, seed=i, max_tokens=12, ignore_eos=True)
        for i, k in enumerate((1, 300, 3, 2, 0, 50))
    ]
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
