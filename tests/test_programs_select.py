"""Select: choices by their log-probabilities, which begin where a choice does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.programs import State, select
from minillm.sampling.selection import Selection
from tests.helpers.prompt_programs import BLOCK, TEXT, is_clean, make_llm, prefill_of, rows_of, say
from tests.helpers.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny-llama")


@pytest.fixture(scope="module")
def oracle(folder):
    return save_tiny_llama(folder)


@pytest.fixture
def llm(folder, oracle) -> LLM:
    return make_llm(folder)


def reference(oracle, tokens: list[int], start: int) -> list[float]:
    """Log-probabilities of tokens[start:] by transformers."""
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)  # [num_tokens, vocab_size]
    return [logprobs[at - 1, tokens[at]].item() for at in range(start, len(tokens))]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("text, choices, num_shared", [
    (TEXT, [" the mat", " 日本語", "😀"], None),
    (TEXT + " the c", ["at", "rêpes", "10"], -1),  # " c" and "at" are one token together: scores begin before " c"
])  # fmt: skip
def test_the_scores_of_a_select_are_transformers_logprobs(llm, oracle, normalize, text, choices, num_shared):
    encode = llm.get_tokenizer().encode
    start = len(encode(text)) + (num_shared or 0)
    assert all(encode(text + choice)[:start] == encode(text)[:start] for choice in choices)
    state = State(llm, text)
    state += select("choice", choices, normalize)
    found = state.output("choice")
    expected = [reference(oracle, encode(text + choice), start) for choice in choices]
    for row, other in zip(found.logprobs, expected, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    scores = [sum(row) / (len(row) if normalize else 1) for row in expected]
    assert found.scores == pytest.approx(scores, abs=1e-4)
    best = choices[scores.index(max(scores))]
    assert state["choice"] == best and state.text == text + best and state.token_ids == encode(text + best)
    assert is_clean(llm)


def test_choices_are_scored_in_one_batch_that_shares_the_text_before(llm):
    state = State(llm, TEXT)
    state += select("choice", [" the mat", " 日本語", "😀"])
    assert state["choice"]
    num_before = len(llm.get_tokenizer().encode(TEXT))
    # The last token before the choices has to be computed: its logits are wanted.
    whole = (num_before - 1) // BLOCK * BLOCK
    sizes = [len(row) for row in state.output("choice").logprobs]
    assert rows_of(llm) == [1, 3]
    assert prefill_of(llm) == whole + sum(num_before - whole + size for size in sizes)
    llm.trace.clear()
    again = State(llm, TEXT)
    again += select("choice", [" the mat", " 日本語", "😀"])
    assert again["choice"] == state["choice"] and rows_of(llm) == [3]  # nothing to compute before


def test_which_choice_wins_by_sum_and_by_mean():
    logprobs = [[-1.2], [-1.6, -0.2, -0.1], [-1.2]]
    assert Selection("abc", logprobs).choice == "a" and Selection("abc", logprobs, normalize=True).choice == "b"


def scored(llm: LLM, tokens: list[int], start: int, params: SamplingParams) -> list:
    prompt = {"prompt_token_ids": tokens, "logprob_start_len": start}
    return llm.generate(prompt, params, use_tqdm=False)[0]


@pytest.mark.parametrize("chunk", [100, 5])
@pytest.mark.parametrize("start", [0, 1, 4, 5, 9, 18])
def test_prompt_logprobs_from_a_position_on_are_those_of_all(folder, oracle, start, chunk):
    llm = make_llm(folder, max_num_batched_tokens=chunk)
    tokens = list(range(10, 29))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    for expect_cached in (0, max(0, start - 1) // BLOCK * BLOCK):
        output = scored(llm, tokens, start, params)
        assert output.metrics.num_cached_tokens == expect_cached
        assert output.prompt_logprobs[: max(1, start)] == [None] * max(1, start) and len(output.prompt_logprobs) == 19
        found = [
            row[token].logprob for token, row in zip(tokens[max(1, start) :], output.prompt_logprobs[max(1, start) :])
        ]
        assert found == pytest.approx(reference(oracle, tokens, max(1, start)), abs=1e-4)
        assert all(len(row) in (2, 3) for row in output.prompt_logprobs[max(1, start) :])
    assert (
        output.outputs[0].token_ids
        == say(llm, {"prompt_token_ids": tokens}, temperature=0.0, max_tokens=3, ignore_eos=True).token_ids
    )


@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "host_kv_bytes": 1 << 20}])
def test_prompt_logprobs_from_a_position_on_survive_preemption_and_samples(folder, oracle, settings):
    llm = make_llm(folder, num_kv_blocks=16, max_num_batched_tokens=7, **settings)
    texts = [[5 + i, *range(10, 28)] for i in range(3)]
    say(llm, {"prompt_token_ids": texts[0]}, max_tokens=1)
    params = SamplingParams(seed=0, max_tokens=20, ignore_eos=True, prompt_logprobs=0, n=2)
    prompts = [{"prompt_token_ids": text, "logprob_start_len": 10 + i} for i, text in enumerate(texts)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0 and outputs[0].metrics.num_cached_tokens == 8
    for i, (text, output) in enumerate(zip(texts, outputs)):
        rows = output.prompt_logprobs
        assert rows[: 10 + i] == [None] * (10 + i) and len(rows) == len(text)
        found = [rows[at][text[at]].logprob for at in range(10 + i, len(text))]
        assert found == pytest.approx(reference(oracle, text, 10 + i), abs=1e-4)


@pytest.mark.parametrize("start, params, error, said", [
    (3, {}, ValueError, "set SamplingParams.prompt_logprobs=0."),
    (-1, {"prompt_logprobs": 0}, ValueError,
     "logprob_start_len=-1 is not allowed; allowed: a whole number from 0 to 4"),
    (5, {"prompt_logprobs": 0}, ValueError, "logprob_start_len=5"),
    (1.0, {"prompt_logprobs": 0}, TypeError, "prompts.0.: logprob_start_len=1.0"),
])  # fmt: skip
def test_a_start_that_cannot_be_is_refused(llm, start, params, error, said):
    with pytest.raises(error, match=said):
        scored(llm, [5, 6, 7, 8, 9], start, SamplingParams(**params))
