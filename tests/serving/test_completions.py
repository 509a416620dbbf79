"""/v1/completions, asked by the openai client: what `generate` gives."""

from __future__ import annotations

import json

import openai
import pytest

from minillm import SamplingParams

from .conftest import MODEL

PROMPTS = ["Once upon a time", "One rainy day", "A dog"]


def test_an_answer_is_generates_text(llm, client):
    [expected] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=12, temperature=0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.outputs[0].text, "length", 0)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids) and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.model == MODEL and answer.object == "text_completion"


def test_several_prompts_and_samples_are_numbered_prompt_by_prompt(llm, client):
    params = SamplingParams(n=2, seed=4, max_tokens=8)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    answer = client.completions.create(model=MODEL, prompt=PROMPTS, n=2, seed=4, max_tokens=8)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [one.text for output in expected for one in output.outputs]


@pytest.mark.parametrize("of", ["ids", "lists of ids"])
def test_prompts_may_be_token_ids(llm, client, of):
    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS[: 1 if of == "ids" else 3]]
    expected = llm.generate([{"prompt_token_ids": one} for one in ids], SamplingParams(temperature=0), use_tqdm=False)
    answer = client.completions.create(model=MODEL, prompt=ids[0] if of == "ids" else ids, temperature=0)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]


def test_a_stream_joins_to_the_answer_with_its_logprobs(client):
    options = dict(
        model=MODEL, prompt=PROMPTS, n=2, seed=1, max_tokens=9, logprobs=2, echo=True, stop=[" the"], user="ann"
    )
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own][-1] == choice.finish_reason
        assert all(one.finish_reason is None for one in own[:-1])
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            joined = [value for one in own for value in getattr(one.logprobs, name)]
            assert joined == getattr(choice.logprobs, name), name


def test_logprobs_lie_where_they_say(llm, client):
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=6, logprobs=1, echo=True, seed=2)
    [choice] = answer.choices
    found = choice.logprobs
    assert choice.text.startswith(PROMPTS[0]) and found.token_logprobs[0] is None and found.top_logprobs[0] is None
    [output] = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=1, seed=2), use_tqdm=False
    )
    sample = output.outputs[0]
    expected = [row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids)]
    assert found.token_logprobs[-6:] == pytest.approx(expected, abs=1e-5)
    assert len(found.tokens) == len(output.prompt_token_ids) + 6
    assert all(later >= sooner for sooner, later in zip(found.text_offset, found.text_offset[1:]))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_an_answer_scores_the_prompt(client, stream):
    """As evaluation harnesses ask: max_tokens=0 and echo."""
    options = dict(model=MODEL, prompt=PROMPTS[0], max_tokens=0, echo=True, logprobs=0, stream=stream)
    answer = client.completions.create(**options)
    choices = [one for chunk in answer for one in chunk.choices] if stream else answer.choices
    assert "".join(one.text for one in choices) == PROMPTS[0] and choices[-1].finish_reason == "length"
    tokens = [token for one in choices for token in one.logprobs.tokens]
    assert tokens[0] == "<|begin|>" and "".join(tokens[1:]) == PROMPTS[0]
    if not stream:
        assert answer.usage.completion_tokens == 0


def test_vllms_fields_reach_the_engine(llm, client):
    more = dict(top_k=5, min_p=0.01, repetition_penalty=1.2, min_tokens=3, ignore_eos=True, return_token_ids=True)
    params = {name: value for name, value in more.items() if name != "return_token_ids"}
    expected = llm.generate(PROMPTS[0], SamplingParams(seed=9, max_tokens=20, **params), use_tqdm=False)[0]
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[0], seed=9, max_tokens=20, extra_body=more)
    [choice] = answer.choices
    assert choice.text == expected.outputs[0].text
    assert choice.token_ids == expected.outputs[0].token_ids
    assert choice.prompt_token_ids == expected.prompt_token_ids


def test_structured_outputs_hold_the_text(client):
    schema = {"type": "object", "properties": {"size": {"enum": ["big", "small"]}}, "required": ["size"]}
    bodies = [
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "size", "schema": schema}}},
    ]
    for more in bodies:
        answer = client.completions.create(model=MODEL, prompt="A size: ", max_tokens=60, seed=0, extra_body=more)
        assert json.loads(answer.choices[0].text)["size"] in ("big", "small")


def test_cached_tokens_are_reported(client):
    prompt = "the sun and the moon " * 12
    usages = [client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage for _ in range(2)]
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert usages[1].prompt_tokens_details.cached_tokens >= 16


def test_a_grammar_that_cannot_go_on_is_the_clients_fault(llm, client, monkeypatch):
    """Its error is told, in a stream as in an answer; nothing is left over."""
    broken = dict(model=MODEL, prompt="a", max_tokens=4, extra_body={"structured_outputs": {"regex": "(?=a)b"}})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**broken)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**broken, stream=True)
