"""Speculation in the engine changes the number of steps and nothing else."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from minillm import LLM, SamplingParams
from tests.helpers.speculating import PROMPTS, make, say, tokens, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


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
            assert (sample.finish_reason, sample.stop_reason, sample.text) == (
                twin.finish_reason,
                twin.stop_reason,
                twin.text,
            )
            assert sample.cumulative_logprob == pytest.approx(twin.cumulative_logprob, abs=1e-3)
            assert [list(row) for row in sample.logprobs] == [list(row) for row in twin.logprobs]


def test_right_guesses_save_steps_and_are_counted(folder):
    params = SamplingParams(max_tokens=25, ignore_eos=True, temperature=0.0)
    plain, perfect = make(folder, None), make(folder, "perfect")
    assert tokens(say(plain, params)) == tokens(outputs := say(perfect, params))
    # 24 tokens after the first, 5 a step, the last 4
    assert plain.engine.num_steps == 25 and perfect.engine.num_steps == 1 + 5
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
            assert (plain.text, plain.token_ids, plain.stop_reason) == (
                guessing.text,
                guessing.token_ids,
                guessing.stop_reason,
            )
            streams = [
                "".join(delta.text for delta in llm.stream({"prompt_token_ids": prompt}, params)) for llm in llms
            ]
            assert streams == [plain.text] * 2
        assert all(not llm.engine.has_unfinished for llm in llms)


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
    drafter, lengths = llm.engine.runner.drafter, []
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
    plain, guessing = (
        make(folder, one).beam_search([{"prompt_token_ids": PROMPTS[0]}], beam_width=3, max_tokens=8)
        for one in (None, "perfect")
    )
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
    """Two tokens of many unseeded requests, with a draft model that is often wrong and without one:
    one distribution."""
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
