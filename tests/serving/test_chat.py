"""/v1/chat/completions, asked by the openai client: what `chat` gives."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest

from minillm import SamplingParams

from .conftest import CONVERSATION, MODEL


def test_an_answer_is_chats_text(llm, client):
    [expected] = llm.chat(CONVERSATION, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    answer = client.chat.completions.create(model=MODEL, messages=CONVERSATION, temperature=0)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_limits_of_length(client, name):
    answer = client.chat.completions.create(model=MODEL, messages=CONVERSATION, **{name: 2})
    assert answer.usage.completion_tokens == 2 and answer.choices[0].finish_reason == "length"


def test_a_stream_joins_to_the_answer(client):
    options = dict(
        model=MODEL, messages=CONVERSATION, n=3, seed=5, max_tokens=12, logprobs=True, top_logprobs=2, stop=["m"]
    )
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert own[0].delta.role == "assistant" and all(one.delta.role is None for one in own[1:])
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        rows = [row for one in own if one.logprobs for row in one.logprobs.content]
        assert rows == choice.logprobs.content and all(len(row.top_logprobs) == 2 for row in rows)


def test_usage_in_every_chunk_grows(http):
    body = dict(model=MODEL, messages=CONVERSATION, max_tokens=5, stream=True, ignore_eos=True)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 5 and lines[-2] == "data: [DONE]"


def test_a_pydantic_model_is_parsed(client):
    class Animal(pydantic.BaseModel):
        size: Literal["big", "small"]
        legs: Literal[2, 4]

    answer = client.chat.completions.parse(
        model=MODEL, messages=CONVERSATION, response_format=Animal, max_tokens=200, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_an_assistants_last_message_may_be_continued(llm, client):
    messages = [*CONVERSATION, {"role": "assistant", "content": "It says"}]
    [expected] = llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=4),
        add_generation_prompt=False,
        continue_final_message=True,
        use_tqdm=False,
    )
    more = {"continue_final_message": True, "return_token_ids": True}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=4, extra_body=more
    )
    assert answer.choices[0].token_ids == expected.outputs[0].token_ids


def test_parameters_without_a_value_are_the_models_own(llm, client, monkeypatch):
    monkeypatch.setattr(llm.inputs, "default_params", SamplingParams(temperature=0.0))
    [expected] = llm.chat(CONVERSATION, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    answer = client.chat.completions.create(model=MODEL, messages=CONVERSATION)
    assert answer.choices[0].message.content == expected.outputs[0].text


def test_the_async_client_and_many_at_once(llm, server):
    questions = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a in range(4) for b in range(4)]
    expected = llm.chat(questions, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)

    async def ask(client, messages):
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=10, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, messages) for messages in questions))

    assert asyncio.run(ask_all()) == [output.outputs[0].text for output in expected]
