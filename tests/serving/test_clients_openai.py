"""The openai client, unmodified: streamed tools, parsed schemas, raw answers, retries, timeouts."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Literal

import openai
import pydantic
import pytest

from .conftest import CONVERSATION, MODEL, wait_until

SHORT = {"model": MODEL, "messages": CONVERSATION, "max_tokens": 8, "temperature": 0}


class Animal(pydantic.BaseModel):
    """An animal."""

    size: Literal["big", "small"]
    legs: Literal[2, 4]


def test_its_stream_of_events_gathers_a_parsed_answer(client):
    with client.chat.completions.stream(**SHORT | {"max_tokens": 100}, response_format=Animal) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Animal)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Animal"}}], ids=str)
def test_streamed_tool_calls_are_parsed(client, choice):
    options = SHORT | {"max_tokens": 300, "tool_choice": choice, "parallel_tool_calls": False}
    tool = openai.pydantic_function_tool(Animal)
    with client.chat.completions.stream(**options, tools=[tool]) as stream:
        events = list(stream)
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Animal) and call.id.startswith("call_")
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in pieces) == call.function.arguments
    parsed = client.chat.completions.parse(**options, tools=[tool]).choices[0].message.tool_calls[0]
    assert parsed.function.arguments == call.function.arguments


def test_a_tool_call_and_its_result_go_back_into_the_conversation(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "Animal", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "A cow?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "big"},
    ]
    answer = client.chat.completions.create(**SHORT | {"messages": messages})
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_raw_answers_have_their_headers(client):
    client = client.with_options(organization="org-1", project="proj-1", default_headers={"X-Request-ID": "mine-7"})
    raw = client.chat.completions.with_raw_response.create(**SHORT)
    assert raw.headers["x-request-id"] == "mine-7" and raw.parse().choices[0].message.role == "assistant"
    assert raw.parse()._request_id == "mine-7"
    with client.completions.with_streaming_response.create(model=MODEL, prompt="Once", max_tokens=2) as streamed:
        assert json.loads(b"".join(streamed.iter_bytes()))["object"] == "text_completion"


def test_the_async_client_streams_and_leaves(server):
    async def main() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1/", api_key="x") as client:
            stream = await client.chat.completions.create(**SHORT | {"max_tokens": 400}, stream=True)
            async for _ in stream:
                await stream.close()
                break
            parsed = await client.chat.completions.parse(**SHORT | {"max_tokens": 100}, response_format=Animal)
            models = [model.id async for model in await client.models.list()]
            return [parsed.choices[0].message.parsed.legs, models, (await client.models.retrieve(MODEL)).id]

    legs, models, model = asyncio.run(main())
    assert legs in (2, 4) and models == [MODEL] and model == MODEL


def test_a_refused_request_is_sent_again_when_the_server_says(serve, engine, monkeypatch):
    """429 with Retry-After: the client waits as long, and is answered. The engine is paused, so that nothing ends."""
    server, slept = serve(max_queued_requests=1), []
    wait = openai._base_client.time.sleep
    monkeypatch.setattr(
        openai._base_client, "time", _Clock(openai._base_client.time, lambda s: (slept.append(s), wait(0.01)))
    )
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=1000)
    answers = []

    def ask() -> None:
        answers.append(client.completions.create(model=MODEL, prompt="Once", max_tokens=2))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    engine.thread.pause()
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: server.models.metrics.num_refused[429] >= 2)
    finally:
        engine.thread.resume()
    for thread in threads:
        thread.join()
    assert len(answers) == 2 and set(slept) == {1.0}  # as Retry-After has it, and no backoff of the client's own


class _Clock:
    """The module `time` with another `sleep`."""

    def __init__(self, real, sleep):
        self.real, self.sleep = real, sleep

    def __getattr__(self, name: str):
        return getattr(self.real, name)


def test_its_errors_are_of_their_kinds(serve, engine):
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**SHORT | {"model": "gpt-4o"})
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.NotFoundError, match=r"/v1/embeddings is not served: LLM\.embed"):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
        client.responses.create(model=MODEL, input="x")
    with pytest.raises(openai.BadRequestError, match="service_tier='flex' is not served"):
        client.chat.completions.create(**SHORT, service_tier="flex")
    with pytest.raises(openai.BadRequestError, match="best_of=3"):
        client.completions.create(model=MODEL, prompt="Once", n=2, best_of=3)
    assert len(client.completions.create(model=MODEL, prompt="Once", max_tokens=1, n=2, best_of=2).choices) == 2
    engine.thread.pause()
    try:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).chat.completions.create(**SHORT)
        wait_until(lambda: not server.service.calls)
    finally:
        engine.thread.resume()
    server.service.gate.close()
    with pytest.raises(openai.InternalServerError, match="shutting down") as closed:
        client.chat.completions.create(**SHORT)
    assert closed.value.response.headers["Retry-After"] == "5"
