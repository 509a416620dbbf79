"""Speculation in the engine changes the number of steps and nothing else."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency
from tiny import VOCAB_SIZE, save_tiny_llama

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.speculative.draft_model import ModelDrafter
from minillm.speculative.drafter import Draft

PROMPTS = [[5, 6, 7, 8, 5, 6], [20, 21, 22], [9] * 12, [40, 41, 42, 43, 40, 41, 42]]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    target = save_tiny_llama(path / "target")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    save_tiny_llama(path / "noisy")
    target.save_pretrained(path / "noisy")
    save_tiny_llama(path / "other", vocab_size=VOCAB_SIZE + 1)
    return path


def make(folder, speculation: str | None, **settings) -> LLM:
    methods = {
        None: None,
        "ngram": NGRAM,
        "noisy": {"method": "draft_model", "model": folder / "noisy", "num_speculative_tokens": 3},
        "perfect": {"method": "draft_model", "model": folder / "target"},
        "adaptive": {"method": "draft_model", "model": folder / "noisy", "adaptive": True},
        "adaptive ngram": NGRAM | {"adaptive": True},
    }
    return LLM(folder / "target", device="cpu", dtype="float32", speculative_config=methods[speculation], **settings)


def say(llm: LLM, params, prompts=PROMPTS) -> list:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return outputs


def tokens(outputs) -> list:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


SETTINGS = {
    "greedy": dict(temperature=0.0),
    "seeded": dict(temperature=1.1, top_k=40, top_p=0.95, seed=7),
    "samples": dict(temperature=1.0, seed=3, n=3),
    "penalties": dict(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    "greedy penalties": dict(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3),
    "minimum": dict(temperature=0.0, min_tokens=9, stop_token_ids=list(range(2, 290, 3))),
    "seeded minimum": dict(temperature=1.0, seed=2, min_tokens=7, stop_token_ids=list(range(2, 290, 3))),
    "bias": dict(temperature=0.0, logit_bias={17: 3.0, 18: 2.9}),
}


@pytest.mark.parametrize("speculation", ["ngram", "noisy", "perfect", "adaptive", "adaptive ngram"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_without_speculation(folder, speculation, settings):
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **SETTINGS[settings])
    plain, guessing = (say(make(folder, one), params) for one in (None, speculation))
    assert tokens(plain) == tokens(guessing)
    for output, other in zip(plain, guessing):
        for sample, twin in zip(output.outputs, other.outputs):
            assert (sample.finish_reason, sample.stop_reason, sample.text) == (twin.finish_reason, twin.stop_reason, twin.text)
            assert sample.cumulative_logprob == pytest.approx(twin.cumulative_logprob, abs=1e-3)
            assert [list(row) for row in sample.logprobs] == [list(row) for row in twin.logprobs]


def test_right_guesses_save_steps_and_are_counted(folder):
    params = SamplingParams(max_tokens=25, ignore_eos=True, temperature=0.0)
    plain, perfect = make(folder, None), make(folder, "perfect")
    assert tokens(say(plain, params)) == tokens(outputs := say(perfect, params))
    assert plain.engine.num_steps == 25 and perfect.engine.num_steps == 1 + 5  # 24 tokens after the first, 5 a step, the last 4
    metrics = perfect.engine.speculation.metrics
    assert metrics.acceptance_rate == 1 and metrics.accepted_per_position == [20, 20, 20, 16]
    assert [output.metrics.num_accepted_tokens for output in outputs] == [19] * 4
    assert [output.metrics.num_drafted_tokens for output in outputs] == [19] * 4


def test_an_accepted_run_at_the_end_enters_the_prefix_cache(folder):
    params = SamplingParams(max_tokens=23, ignore_eos=True, temperature=0.0)
    cached = []
    for speculation in (None, "perfect"):
        llm = make(folder, speculation, block_size=4)
        said = tokens(say(llm, params))
        again = say(llm, SamplingParams(max_tokens=1), [prompt + one[0] for prompt, one in zip(PROMPTS, said)])
        cached.append([output.metrics.num_cached_tokens for output in again])
    assert cached[0] == cached[1] and min(cached[0]) >= 24


def test_a_stop_in_the_middle_of_an_accepted_run(folder):
    [output] = say(make(folder, None), SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0), PROMPTS[:1])
    said = output.outputs[0].token_ids
    for place in range(1, 12):
        for params in (
            SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=[said[place]]),
            SamplingParams(max_tokens=place + 1, temperature=0.0, ignore_eos=True),
        ):
            [plain], [guessing] = (say(make(folder, one), params, PROMPTS[:1]) for one in (None, "perfect"))
            assert guessing.outputs[0].token_ids == plain.outputs[0].token_ids
            assert guessing.outputs[0].finish_reason == plain.outputs[0].finish_reason
            assert guessing.outputs[0].stop_reason == plain.outputs[0].stop_reason


def test_a_stop_string_ends_the_text_where_it_ends_without(folder):
    llms = [make(folder, one) for one in (None, "perfect")]
    for prompt in PROMPTS:
        [output] = say(llms[0], SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0), [prompt])
        text = output.outputs[0].text
        for start in range(0, len(text) - 2, 3):
            params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, stop=text[start : start + 2])
            plain, guessing = (say(llm, params, [prompt])[0].outputs[0] for llm in llms)
            assert (plain.text, plain.token_ids, plain.stop_reason) == (guessing.text, guessing.token_ids, guessing.stop_reason)
            streams = ["".join(delta.text for delta in llm.stream({"prompt_token_ids": prompt}, params)) for llm in llms]
            assert streams == [plain.text] * 2
        assert all(not llm.engine.has_unfinished for llm in llms)


class BadDrafter:
    """Guesses of any length, of nothing in particular."""

    def __init__(self, vocab_size=VOCAB_SIZE):
        self.rng, self.vocab_size, self.forgotten = random.Random(0), vocab_size, []

    def propose(self, requests, counts):
        return [Draft([self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(0, 9))]) for _ in requests]

    def forget(self, request_id):
        self.forgotten.append(request_id)


@pytest.mark.parametrize("settings", [dict(), dict(num_kv_blocks=9, block_size=4), dict(max_num_batched_tokens=5), dict(num_kv_blocks=9, block_size=4, preemption_mode="swap", host_kv_bytes=10**6)])
def test_bad_guesses_change_nothing(folder, settings):
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(PROMPTS))]
    expected = tokens(say(make(folder, None), params))
    llm = make(folder, None, **settings)
    engine = Engine(llm.model, config=llm.config, drafter=BadDrafter(), trace=llm.trace, num_speculative_tokens=6)
    llm.engine, llm.trace.enabled = engine, True
    for _ in range(2):
        outputs = say(llm, params)
        assert tokens(outputs) == expected
    if "num_kv_blocks" in settings:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if "max_num_batched_tokens" in settings:
        assert max(llm.trace.totals("tokens").values()) <= 5
    assert engine.speculation.metrics.num_draft_tokens > 10
    assert settings or len(engine.speculation.metrics.drafted_per_position) == 6
    say(llm, params[:1], PROMPTS[:1])
    assert len(engine.speculation.drafter.forgotten) >= 8


def test_guesses_do_not_preempt_anybody(folder):
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0) for count in (2, 7, 7)]
    prompts = [[5 + i, 6, 7, 8, 9] for i in range(3)]
    llm = make(folder, None, num_kv_blocks=7, block_size=4)  # the others' third blocks are there when the first has ended
    llm.engine = Engine(llm.model, config=llm.config, drafter=Always())
    outputs = say(llm, params, prompts)
    assert sum(output.metrics.num_preemptions for output in outputs) == 0
    assert llm.engine.speculation.metrics.num_draft_tokens > 0


class Always(BadDrafter):
    def propose(self, requests, counts):
        return [Draft([1] * count) for count in counts]


def test_a_drafter_that_breaks_the_rules_is_named(folder):
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    llm = make(folder, None)
    llm.engine = Engine(llm.model, config=llm.config, drafter=BadDrafter(10**6))
    with pytest.raises(ValueError, match="BadDrafter drafted token id .* the vocabulary has 300 tokens"):
        say(llm, params)
    assert not llm.engine.has_unfinished
    drafter = llm.engine.speculation.drafter
    for given, error, says in (
        (lambda requests: [], ValueError, r"BadDrafter.propose returned \[\] for"),
        (lambda requests: None, ValueError, "BadDrafter.propose returned None for"),
        (lambda requests: [[1, 2]] * len(requests), TypeError, r"BadDrafter drafted \[1, 2\]; allowed: a Draft"),
        (lambda requests: [Draft([1.0])] * len(requests), TypeError, "BadDrafter drafted token id 1.0; allowed: whole numbers"),
        (lambda requests: [Draft([1, 2], torch.ones(1, 300))] * len(requests), ValueError, r"shape \(1, 300\) for 2 tokens; allowed: \(2, 300\)"),
    ):
        drafter.propose = lambda requests, counts, given=given: given(requests)
        with pytest.raises(error, match=says):
            say(llm, params)
        assert not llm.engine.has_unfinished
    llm.engine.speculation.drafter.propose = lambda requests, counts: [Draft() for _ in requests]
    assert tokens(say(llm, params)) == tokens(say(make(folder, None), params))


class Uniform(BadDrafter):
    """Draws by chance of its own, for every request, and says so."""

    def propose(self, requests, counts):
        draws = [[self.rng.randrange(VOCAB_SIZE) for _ in range(count)] for count in counts]
        return [Draft(draw, torch.full((len(draw), VOCAB_SIZE), 1 / VOCAB_SIZE)) for draw in draws]


def test_probs_of_a_draft_count_for_unseeded_requests_only(folder):
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=i % 2, seed=i) for i in range(3)]
    mixed = [*params, SamplingParams(max_tokens=12, ignore_eos=True)]
    llm = make(folder, None)
    expected = tokens(say(llm, params, PROMPTS[:3]))
    llm.engine = Engine(llm.model, config=llm.config, drafter=Uniform())
    assert tokens(say(llm, mixed))[:3] == expected
    assert tokens(say(llm, params, PROMPTS[:3])) == expected
    forbidden = SamplingParams(max_tokens=12, structured_outputs={"regex": "x[abc]+"})
    with pytest.raises(ValueError, match="Uniform gives probs for token .* which the request's grammar forbids"):
        say(llm, forbidden)


def test_a_drafter_that_fails_or_an_id_used_again_leaves_nothing_behind(folder):
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    llm = make(folder, "perfect")
    drafter = llm.engine.speculation.drafter
    forward = drafter.forward
    drafter.forward = lambda rows: 1 / 0
    with pytest.raises(ZeroDivisionError):
        say(llm, params)
    drafter.forward = forward
    llm.engine.speculation.propose(llm.engine.scheduler)
    assert not drafter.states and drafter.manager.pool.num_free == drafter.manager.pool.num_blocks
    for speculation in ("ngram", "perfect"):
        engine = make(folder, speculation).engine
        for prompt in ([5, 6, 7, 8] * 6, [5, 6]):
            request = Request("a", prompt, params, 8, arrival_time=0.0)
            engine.add_request(request)
            while engine.has_unfinished:
                engine.step()
            assert request.output_token_ids == say(make(folder, None), params, [prompt])[0].outputs[0].token_ids


def test_a_draft_model_without_room_drafts_for_whom_it_can(folder):
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    llm = make(folder, "perfect", block_size=4, num_kv_blocks=60)
    drafter = llm.engine.speculation.drafter
    assert isinstance(drafter, ModelDrafter)
    taken = drafter.manager.pool.allocate(45)
    assert tokens(say(llm, params)) == tokens(say(make(folder, None), params))
    assert 0 < llm.engine.speculation.metrics.num_draft_tokens < 4 * 29
    drafter.manager.pool.free(taken)
    say(llm, params)
    llm.engine.speculation.propose(llm.engine.scheduler)  # whoever has finished is forgotten before the next step
    assert not drafter.states and drafter.manager.pool.num_free == 60


def test_a_draft_model_reads_long_prompts_in_pieces_and_stops_where_it_was_not_trained(folder, tmp_path):
    save_tiny_llama(tmp_path / "short", max_position_embeddings=40)
    prompts = [[5 + i % 7 for i in range(30)], [60 + i % 11 for i in range(25)]]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    spec = {"method": "draft_model", "model": tmp_path / "short"}
    llm = LLM(folder / "target", device="cpu", dtype="float32", max_num_batched_tokens=11, speculative_config=spec)
    assert tokens(say(llm, params, prompts)) == tokens(say(make(folder, None), params, prompts))
    metrics = llm.engine.speculation.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 10  # the same weights
    assert metrics.num_draft_tokens < 2 * 29 * 4 // 5


def test_a_draft_model_with_other_tokens_is_refused(folder):
    with pytest.raises(ValueError, match="has a vocabulary of 301 tokens, the model has 300"):
        LLM(folder / "target", device="cpu", speculative_config={"method": "draft_model", "model": folder / "other"})
    with pytest.raises(ValueError, match="kv_retention does not"):
        LLM(folder / "target", kv_retention={"sinks": 1, "window": 8}, speculative_config={"method": "draft_model", "model": folder / "noisy"})


def test_ngrams_and_retention(folder):
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    keep = dict(kv_retention={"sinks": 2, "window": 12}, block_size=4)
    plain, guessing = make(folder, None, **keep), make(folder, "ngram", **keep)
    assert tokens(say(plain, params)) == tokens(say(guessing, params))
    assert guessing.engine.speculation.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("settings", [dict(), dict(max_num_batched_tokens=9), dict(num_kv_blocks=14, block_size=4)])
def test_a_draft_is_what_the_draft_model_says_from_scratch(folder, settings):
    """After rejections, full acceptances, preemptions and steps in which a request was left out."""
    llm, alone = make(folder, "noisy", **settings), LLM(folder / "noisy", device="cpu", dtype="float32")
    drafter, lengths = llm.engine.speculation.drafter, []
    propose = drafter.propose

    def compared(requests, counts):
        drafts = propose(requests, counts)
        for request, draft in zip(requests, drafts):
            if draft.token_ids:
                params = SamplingParams(temperature=0.0, max_tokens=len(draft.token_ids), ignore_eos=True)
                [output] = alone.generate({"prompt_token_ids": request.token_ids}, params, use_tqdm=False)
                assert draft.token_ids == output.outputs[0].token_ids
                lengths.append(len(draft.token_ids))
        return drafts

    drafter.propose = compared
    say(llm, SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0))
    metrics = llm.engine.speculation.metrics
    assert len(lengths) > 15 and 0 < metrics.num_misses < metrics.num_drafts


def test_beam_search_takes_no_guesses(folder):
    plain, guessing = (make(folder, one).beam_search([{"prompt_token_ids": PROMPTS[0]}], 3, 8) for one in (None, "perfect"))
    assert tokens(plain) == tokens(guessing)


def test_aborted_requests_leave_nothing_behind(folder):
    llm = make(folder, "perfect", max_model_len=60)
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(7):
        next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.engine.kv_cache.pool.num_free == llm.engine.kv_cache.pool.num_blocks


def test_unseeded_requests_are_distributed_as_without(folder):
    """Two tokens of many unseeded requests, with a draft model that is often wrong and without one: one distribution."""
    params = SamplingParams(max_tokens=4, temperature=0.4, top_k=5, ignore_eos=True)
    found = []
    for speculation, names in ((None, count(0)), ("noisy", count(10**6))):
        llm = make(folder, speculation)
        llm.inputs._counter = names  # other seeds: two independent samples
        said = [tuple(one[0][1:3]) for _ in range(4) for one in tokens(say(llm, params, [PROMPTS[0]] * 500))]
        found.append(said)
    assert 0.3 < llm.engine.speculation.metrics.alpha < 0.95
    kinds = sorted(set(found[0]) | set(found[1]))
    table = np.array([[said.count(kind) for kind in kinds] for said in found])
    rare = table.sum(0) < 20
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)]) if rare.any() else table
    assert table.shape[1] > 5 and chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-3
