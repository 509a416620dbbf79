"""An engine with keys and values in 8 and 4 bits: the same tokens on every road, against an oracle without pages;
saved caches; memory."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.kv_cache.quantized import KV_DTYPES, dequantize_vectors, quantize_vectors
from minillm.model.attention import causal_attention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama
from tests.kv_cache.test_kv_cache_quantized import KINDS, ROADS, both_kinds

MAX_TOKENS, NEVER = 20, VOCAB_SIZE - 1
SHARED = [3 + i * 7 % 90 for i in range(32)]
PROMPTS = [[*SHARED, 50, 60, 70], SHARED, [5], SHARED[:16] + [9] * 5, list(range(20, 68))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


class WithoutPages:
    """Every sequence brings all of its tokens; keys and values take the way through 8 bits, one vector at a time."""

    def __init__(self, kind: str, windows: tuple):
        self.kind, self.windows = kind, windows

    def attend(self, q, k, v, layer, batch):
        k, v = (torch.stack([self.through(vector) for vector in x.flatten(0, 1)]).view_as(x) for x in (k, v))
        return causal_attention(q, k, v, self.windows[layer])

    def through(self, vector):
        codes, scale = quantize_vectors(vector, KV_DTYPES[self.kind])
        return dequantize_vectors(codes, scale[..., None], torch.float32)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """For a window and a kind: a model's folder, and what it says to each prompt, computed without any cache."""
    found = {}
    for window, kinds in ((None, KINDS), (9, KINDS)):
        folder = tmp_path_factory.mktemp(f"window-{window}")
        settings = {} if window is None else dict(model_type="mistral", sliding_window=window)
        save_tiny_llama(folder, seed=1, eos_token_id=NEVER, head_dim=16, **settings)
        model = load_model(folder, torch.float32, "cpu")
        plain = [says(model, prompt, None) for prompt in PROMPTS[:2]]
        for kind in kinds:
            found[window, kind] = folder, [says(model, prompt, kind) for prompt in PROMPTS]
            if kind != "int8":
                # Codes make a difference, so that a cache that ignores them shows
                assert found[window, kind][1][:2] != plain
    return found


def says(model, prompt, kind):
    tokens = list(prompt)
    windows = model.config.layer_windows
    attention = WithoutPages(kind, windows) if kind else NoCache(windows)
    for _ in range(MAX_TOKENS):
        tokens.append(int(model.forward(ForwardBatch.single(tokens), attention).argmax()))
    return tokens[len(prompt) :]


class NoCache(WithoutPages):
    def __init__(self, windows):
        super().__init__("", windows)

    def through(self, vector):
        return vector


def serve(llm, prompts=PROMPTS, params=GREEDY):
    step = llm.engine.step

    def checked():
        deltas = step()
        llm.engine.scheduler.check_integrity()
        return deltas

    llm.engine.step = checked
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.engine.step = step
    return outputs


CASES = {  # settings, and what must have happened
    "together": (dict(), "nothing"),
    "alone": (dict(max_num_seqs=1), "nothing"),
    "chunked": (dict(max_num_batched_tokens=5, block_size=7), "nothing"),
    "recomputed": (dict(num_kv_blocks=20, block_size=4, max_num_batched_tokens=16), "preempted"),
    "swapped": (
        dict(num_kv_blocks=20, block_size=4, max_num_batched_tokens=16, preemption_mode="swap", host_kv_bytes=10**6),
        "preempted",
    ),
    "prefix hit": (dict(), "cached"),
    "in pieces": (dict(), "not whole layers"),
}


@pytest.mark.parametrize("road", ROADS)
@both_kinds
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_on_every_road(case, window, kind, road, oracle):
    folder, expected = oracle[window, kind]
    settings, meant = CASES[case]
    llm = LLM(folder, device="cpu", dtype="float32", kv_cache_dtype=kind, attention_backend=road, **settings)
    if meant == "not whole layers":
        for layer in llm.model.layers:
            layer.whole = None
    if meant == "cached":
        serve(llm)
    outputs = serve(llm)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    preempted = sum(output.metrics.num_preemptions for output in outputs)
    assert cached > 50 or meant != "cached"
    assert (preempted > 0) == (meant == "preempted") or window is not None  # a window gives its blocks back


@pytest.mark.parametrize("road", ROADS)
@both_kinds
def test_a_prefix_cache_on_disk_keeps_its_scales_and_names_its_dtype(kind, road, oracle, tmp_path):
    folder, expected = oracle[None, kind]
    path, settings = tmp_path / "cache.safetensors", dict(device="cpu", dtype="float32", attention_backend=road)
    first = LLM(folder, kv_cache_dtype=kind, **settings)
    serve(first)
    saved = first.save_prefix_cache(path)
    second = LLM(folder, kv_cache_dtype=kind, **settings)
    assert second.load_prefix_cache(path) == saved
    outputs = serve(second)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 50
    for other in {"auto", *KINDS} - {kind}:
        dtype = KV_DTYPES.get(other, torch.float32)
        with pytest.raises(ValueError, match=f"dtype is '{KV_DTYPES[kind]}', this engine has '{dtype}'"):
            LLM(folder, kv_cache_dtype=other, **settings).load_prefix_cache(path)
    roots = {LLM(folder, kv_cache_dtype=one, **settings).engine.kv_cache.identity for one in ("auto", *KINDS)}
    assert len(roots) == 1 + len(KINDS)  # a block of codes is never taken for one of numbers, wherever it is looked up


def test_other_dtypes_are_refused_by_name(tmp_path):
    save_tiny_llama(tmp_path)
    for wrong in ("int2", "fp8_e5m2", "none"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype={wrong!r}.*auto, int8, fp8, int4"):
            LLM(str(tmp_path), kv_cache_dtype=wrong)


@both_kinds
def test_the_engine_fits_more_blocks_into_the_same_memory(kind, oracle, monkeypatch):
    folder, _ = oracle[None, kind]
    monkeypatch.setattr("minillm.engine.sizing.available_memory", lambda: 4 * 10**5)
    plain, small = (LLM(folder, device="cpu", dtype="float32", kv_cache_dtype=one).engine for one in ("auto", kind))
    bytes_plain, bytes_small = (engine.runner.cache.bytes_per_block for engine in (plain, small))
    assert (bytes_plain, bytes_small) == (2 * 2 * 16 * 2 * 64, 2 * 2 * 16 * 2 * (12 if kind == "int4" else 20))
    assert (
        plain.kv_cache.pool.num_blocks == 10**5 // bytes_plain
        and small.kv_cache.pool.num_blocks == 10**5 // bytes_small
    )
