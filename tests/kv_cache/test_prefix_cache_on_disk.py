"""The prefix cache on disk: it survives a restart, and is refused where it does not belong."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder, eos_token_id=VOCAB_SIZE - 1)
    return str(folder)


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


@pytest.mark.parametrize("settings", [dict(enable_prefix_caching=False), dict(kv_retention={"sinks": 4, "window": 32})])
def test_an_engine_without_a_prefix_cache_says_so(folder, tmp_path, settings):
    llm = LLM(folder, device="cpu", **settings)
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(ValueError, match="no prefix cache: enable_prefix_caching is False, or kv_retention"):
            call(tmp_path / "cache.safetensors")
