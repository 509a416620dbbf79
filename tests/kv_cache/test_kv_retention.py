"""Sinks and a window: against an oracle written from the StreamingLLM paper, on every road, with bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import VirtualClock
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.quantized import KV_DTYPES
from tests.helpers.block_memory import BlockMemory
from tests.helpers.model_zoo import LLAMA3, YARN
from tests.helpers.small_engine import ask
from tests.helpers.tiny import save_tiny_llama, seeded
from tests.kv_cache.test_kv_cache_quantized import ROADS
from tests.kv_cache.test_kv_cache_quantized_engine import NEVER, PROMPTS, serve

MAX_TOKENS = 30
FAMILIES = {
    "llama": {},
    "llama3-rope": dict(rope_parameters=LLAMA3),
    "qwen2-yarn": dict(model_type="qwen2", rope_parameters=YARN),
}


class Streaming:
    """A cache of raw keys for each layer, of which the oldest that is no sink is thrown out when there are more than
    sinks + window, and all of them rotated at every step by where they stand in the cache."""

    def __init__(self, model, sinks: int, window: int):
        self.model, self.sinks, self.window = model, sinks, window
        self.caches = [([], []) for _ in model.model.layers]

    def step(self, token: int) -> torch.Tensor:
        """Log-probabilities of what follows."""
        model, heads, kv_heads = (
            self.model,
            self.model.config.num_attention_heads,
            self.model.config.num_key_value_heads,
        )
        hidden = model.model.embed_tokens(torch.tensor([token]))
        for layer, (keys, values) in zip(model.model.layers, self.caches):
            attn, x = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                linear(x).view(count, -1)
                for linear, count in ((attn.q_proj, heads), (attn.k_proj, kv_heads), (attn.v_proj, kv_heads))
            )
            keys.append(k), values.append(v)
            if len(keys) > self.sinks + self.window:
                del keys[self.sinks], values[self.sinks]
            here = self.rotated(q[None], [len(keys) - 1])[0]
            past = self.rotated(torch.stack(keys), range(len(keys))).repeat_interleave(heads // kv_heads, 1)
            weights = (torch.einsum("hd,khd->hk", here, past) / math.sqrt(q.shape[1])).softmax(-1)
            out = torch.einsum(
                "hk,khd->hd", weights, torch.stack(values).double().repeat_interleave(heads // kv_heads, 1)
            )
            hidden = hidden + attn.o_proj(out.flatten()[None].float())
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.lm_head(model.model.norm(hidden))[0].log_softmax(-1)

    def rotated(self, x, places):  # [positions, heads, head_dim]
        rope = self.model.model.rotary_emb
        angles = torch.as_tensor(places)[:, None].double() * rope.inv_freq.double()
        cos, sin = (part[:, None] * rope.attention_scaling for part in (angles.cos(), angles.sin()))
        first, second = x.double().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def streaming(model, tokens: list[int], sinks: int, window: int) -> torch.Tensor:
    """What the paper's cache says after each token: [len(tokens), vocab_size]."""
    cache = Streaming(model, sinks, window)
    return torch.stack([cache.step(token) for token in tokens])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}
    for name, settings in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny_llama(folder, seed=3, eos_token_id=NEVER, head_dim=16, **settings).requires_grad_(False)
        found[name] = folder, model
    return found


@pytest.fixture(scope="module")
def oracle(models):
    """What streaming says, by policy: greedy tokens of each prompt, computed once."""
    said = {}

    def tokens(sinks: int, window: int) -> list[list[int]]:
        if (sinks, window) not in said:
            said[sinks, window] = [greedy(models["llama"][1], prompt, sinks, window) for prompt in PROMPTS]
        return said[sinks, window]

    return tokens


def greedy(model, prompt, sinks, window):
    cache, said = Streaming(model, sinks, window), []
    for token in prompt:
        logprobs = cache.step(token)
    for _ in range(MAX_TOKENS):
        said.append(int(logprobs.argmax()))
        logprobs = cache.step(said[-1])
    return said


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("policy", [(4, 20), (1, 7), (0, 16), (5, 3), (19, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_equal_those_of_the_paper(family, policy, road, models):
    """Of every token of a text twice as long as the model was made for."""
    folder, model = models[family]
    text = [3 + i * i * 7 % 290 for i in range(250)]
    expected = streaming(model, text, *policy)
    llm = LLM(
        folder, device="cpu", dtype="float32", attention_backend=road, block_size=8, max_model_len=300,
        max_num_batched_tokens=64, kv_retention={"sinks": policy[0], "window": policy[1]},
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    [output] = serve(llm, [text], params)
    for position, (found, token) in enumerate(zip(output.prompt_logprobs[1:], text[1:])):
        assert found[token].logprob == pytest.approx(float(expected[position, token]), abs=2e-3), position
    whole = LLM(folder, device="cpu", dtype="float32", attention_backend=road, kv_retention={"sinks": 4, "window": 124})
    plain = LLM(folder, device="cpu", dtype="float32", attention_backend=road)
    ours, theirs = (serve(one, [text[:90]], params)[0].prompt_logprobs[1:] for one in (whole, plain))
    assert [next(iter(d.values())).logprob for d in ours] == pytest.approx(
        [next(iter(d.values())).logprob for d in theirs], abs=1e-4
    )


GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
CASES = {
    "together": dict(),
    "alone": dict(max_num_seqs=1),
    "chunked": dict(max_num_batched_tokens=5, block_size=7),
    "block of one": dict(block_size=1, max_num_batched_tokens=16),
    "recomputed": dict(num_kv_blocks=20, block_size=4, max_num_batched_tokens=16),
    "swapped": dict(
        num_kv_blocks=20, block_size=4, max_num_batched_tokens=16, preemption_mode="swap", host_kv_bytes=10**6
    ),
    "ahead": dict(async_scheduling=True),
    "in pieces": dict(block_size=16),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("policy", [(4, 20), (0, 16), (6, 5)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_on_every_road(case, policy, road, models, oracle):
    sinks, window = policy
    llm = LLM(
        models["llama"][0], device="cpu", dtype="float32", attention_backend=road,
        kv_retention={"sinks": sinks, "window": window}, **CASES[case],
    )  # fmt: skip
    if case == "in pieces":
        for layer in llm.model.layers:
            layer.whole = None
    for _ in range(2):  # the second time nothing is a prefix hit either
        outputs = serve(llm, params=GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == oracle(sinks, window)
        assert not any(output.metrics.num_cached_tokens for output in outputs) and not llm.engine.kv_cache.pool.cached
    preempted = sum(output.metrics.num_preemptions for output in outputs)
    assert (preempted > 0) == (case in ("recomputed", "swapped"))


@pytest.mark.parametrize("steps", ["eager", "recorded"])
def test_triton_turns_its_queries_too(steps, models, oracle):
    """A prompt longer than what is kept, cut once, and some tokens: interpreted kernels take their time."""
    llm = LLM(
        models["llama"][0], device="cpu", dtype="float32", attention_backend="triton", max_num_batched_tokens=48,
        kv_retention={"sinks": 4, "window": 20}, enforce_eager=steps == "eager",
    )  # fmt: skip
    prompt = max(PROMPTS, key=len)
    assert len(prompt) > 24
    out = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), use_tqdm=False
    )
    assert out[0].outputs[0].token_ids == oracle(4, 20)[PROMPTS.index(prompt)][:5]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_sinks_of_codes_and_samples_that_fork(kind, road, models):
    """8-bit pages and retention together, whatever the step;
    and n samples, which share their blocks until they write."""
    said = []
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=MAX_TOKENS, n=3, ignore_eos=True)
    for settings in (
        dict(),
        dict(max_num_batched_tokens=5, block_size=7),
        dict(num_kv_blocks=24, block_size=4, max_num_batched_tokens=16),
    ):
        llm = LLM(
            models["llama"][0], device="cpu", dtype="float32", kv_cache_dtype=kind, attention_backend=road,
            kv_retention={"sinks": 3, "window": 13}, **settings,
        )  # fmt: skip
        said.append([[sample.token_ids for sample in output.outputs] for output in serve(llm, params=params)])
    assert said[0] == said[1] == said[2]
    assert all(len({tuple(sample) for sample in samples}) == 3 for samples in said[0])


@pytest.mark.parametrize("road", ROADS)
def test_a_text_without_end_owns_few_blocks(road, models):
    folder, model = models["llama"]
    llm = LLM(
        folder, device="cpu", dtype="float32", attention_backend=road, block_size=8, num_kv_blocks=20,
        max_model_len=720, max_num_batched_tokens=32, kv_retention={"sinks": 4, "window": 64},
    )  # fmt: skip
    manager, scheduler = llm.engine.kv_cache, llm.engine.scheduler
    owned, step = [], llm.engine.step

    def counted():
        deltas = step()
        scheduler.check_integrity()
        owned.append(manager.pool.num_blocks - manager.pool.num_free)
        assert owned[-1] <= manager.blocks_needed(720, 32) == 1 + (64 + 32 + 8) // 8
        if deltas and scheduler.running and scheduler.running[0].num_computed_tokens > len(text):
            [request] = scheduler.running
            assert owned[-1] <= 1 + 64 // 8 + 2  # the sinks' block, and what the window and one new token touch
            first = max(0, request.num_computed_tokens - 64) // 8
            assert [bool(block) for block in manager.tables[request.request_id][: first + 1]][1:first] == [False] * (
                first - 1
            )
        return deltas

    llm.engine.step = counted
    text = PROMPTS[4] * 2
    [output] = llm.generate(
        {"prompt_token_ids": text}, SamplingParams(temperature=0.0, max_tokens=620, ignore_eos=True), use_tqdm=False
    )
    said = output.outputs[0].token_ids
    assert len(said) == 620 and len(owned) > 620 and max(owned) >= 1 + 64 // 8
    expected = streaming(model, text + said[:-1], 4, 64)[len(text) - 1 :]
    # Of two tokens as good as equal either may be said; further off nothing may be.
    assert (expected.max(-1).values - expected[torch.arange(620), said] < 1e-3).all()


@seeded
@given(
    st.integers(0, 10**6),
    st.sampled_from([(3, 6, 4), (1, 5, 1), (4, 9, 3), (0, 4, 4)]),
    st.sampled_from(["recompute", "swap"]),
)
def test_random_schedules_keep_the_sinks_and_the_window(seed, shape, mode):
    """Preempted, forked, chunked: whatever a row may look at is there, and no more is owned than was promised."""
    sinks, window, block_size = shape
    rng = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    kv_cache = KVCacheManager(number(14, 30), block_size, False, window, 40 if mode == "swap" else 0, sinks=sinks)
    budget = number(2, 12)
    scheduler = Scheduler(kv_cache, number(1, 5), budget, preemption_mode=mode)
    engine = Engine(scheduler=scheduler, runner=SinkMemory(sinks, block_size, window), clock=VirtualClock())
    for name in range(number(2, 6)):
        request = ask(str(name), [number(0, 9) for _ in range(number(1, 40))], number(1, 30), number(1, 3))
        try:
            engine.add_request(request)
        except ValueError as error:
            assert "blocks, the cache has" in str(error)
    while engine.has_unfinished:
        engine.step()
        scheduler.check_integrity()
        for table in kv_cache.tables.values():
            assert sum(map(bool, table)) <= kv_cache.blocks_needed(10**6, budget)


class SinkMemory(BlockMemory):
    def __init__(self, sinks, *settings):
        super().__init__(*settings)
        self.sinks = sinks

    def _read_and_write(self, row):
        super()._read_and_write(row)
        for position in range(min(self.sinks, row.start)):
            request = self.requests[row.request_id]
            assert self.slots.get(self._slot(row.request_id, position)) == self._text(request, position), (
                "a sink is gone"
            )


def test_bad_policies_are_named(models, tmp_path):
    folder, _ = models["llama"]
    for wrong, error, said in [
        ([4, 60], TypeError, r"kv_retention=\[4, 60\]"),
        ({"sinks": 4}, ValueError, r"keys \['sinks'\].*'window'"),
        ({"sinks": 4, "window": 60, "recent": 1}, ValueError, "'recent'"),
        ({"sinks": -1, "window": 60}, ValueError, "sinks=-1"),
        ({"sinks": 4, "window": 0}, ValueError, "window=0"),
        ({"sinks": 4.0, "window": 60}, TypeError, "sinks=4.0"),
        ({"sinks": True, "window": 60}, TypeError, "sinks=True"),
        (
            {"sinks": 4, "window": 125},
            ValueError,
            "4 sinks.*window of 125 = 129 tokens.*max_position_embeddings=128; lower the window",
        ),
    ]:
        with pytest.raises(error, match=said):
            LLM(folder, device="cpu", kv_retention=wrong)
    with pytest.raises(ValueError, match=r"max_model_len=129.*kv_retention"):
        LLM(folder, device="cpu", max_model_len=129)
    save_tiny_llama(tmp_path, model_type="mistral", sliding_window=9)
    with pytest.raises(ValueError, match=r"layers have windows of their own \(9 tokens\)"):
        LLM(str(tmp_path), device="cpu", kv_retention={"sinks": 4, "window": 60})
    with pytest.raises(ValueError, match=r"disk_kv_path.*kv_retention"):
        LLM(
            folder,
            kv_retention={"sinks": 4, "window": 60},
            disk_kv_path=tmp_path,
            disk_kv_bytes=10**6,
            host_kv_bytes=10**6,
        )


def test_a_long_request_asks_for_what_it_will_keep_and_no_more(models):
    folder, _ = models["llama"]
    llm = LLM(
        folder, device="cpu", kv_retention={"sinks": 4, "window": 60}, max_model_len=10**6, max_num_batched_tokens=64
    )
    assert llm.max_model_len == 10**6
    assert llm.engine.kv_cache.pool.num_blocks <= 256 * llm.engine.kv_cache.blocks_needed(10**6, 64) == 256 * (1 + 9)
    with pytest.raises(ValueError, match="max_model_len=1000000 needs 10 blocks of 16 tokens, the cache has 9"):
        LLM(
            folder,
            device="cpu",
            kv_retention={"sinks": 4, "window": 60},
            max_model_len=10**6,
            max_num_batched_tokens=64,
            num_kv_blocks=9,
        )
